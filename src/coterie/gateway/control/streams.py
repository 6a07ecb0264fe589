"""Read the expert-event streams of a fleet's workers, in the process of the control loop.

There is one ZMQ socket per worker, replaced when its connection ends. Nothing that a worker sends makes this raise:
unreadable and duplicate messages are counted and dropped, and gaps in the sequence numbers are counted as lost. A
connection never reorders messages, so a smaller number means that the publisher restarted; one wrong number does not
silence a worker. Publishers' clocks are not used. The length of messages is limited to what the model's longest prompt
needs, and queues are bounded in bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from coterie.control import LoopShape
from coterie.errors import ConfigError, InputError, check_given
from coterie.gateway.control.messages import StreamEntry
from coterie.types import narrowest_uint
from coterie.wire.event_security import secure_subscriber
from coterie.wire.expert_events import TOPIC, Event, decode_expert_events
from coterie.wire.framing import bound_reader, from_frames, queue_of

MOST_CONTEXT = 1 << 17
"""Longest prompt whose experts are read, in tokens."""
MOST_MESSAGE = 64 << 20
"""Most bytes of a message if the model is unknown: 128k tokens of 58 layers with 8 experts of 256 take 61 MB."""
SPARE_BYTES = 1 << 20
"""Bytes that a message may hold besides one longest prompt and its load: names, other short requests."""
AT_ONCE = 64
"""Most messages read from one worker before the next worker's are read."""
KINDS = ("messages", "malformed", "lost", "doubled", "restarts", "unreachable")
"""Kinds of counts: messages received; unreadable ones; messages lost; duplicates; restarts of publishers; endpoints
that cannot be used."""
MOST_LOST = 1 << 20
"""Most lost messages counted for one gap: a wrong sequence number must not spoil the counter for good."""


def message_bytes(shape: LoopShape) -> int:
    """Return the most bytes of a message for a model. A longer message ends the connection."""
    ids = shape.num_layers * shape.top_k * narrowest_uint(shape.num_experts - 1).itemsize
    loads = 4 * shape.num_layers * shape.num_experts
    return SPARE_BYTES + loads + MOST_CONTEXT * (ids + 5)  # 5: the token's id, and its bit in the mask of known tokens


class Received(NamedTuple):
    worker: str
    event: Event


@dataclass(slots=True, eq=False)
class _Stream:
    entry: StreamEntry
    most_bytes: int
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Monitor socket: it tells when the connection stands, and when it has ended, since ZMQ does not reconnect after a
    too long message."""
    seq: int = -1
    """Sequence number of the last message; -1 before the first."""
    connected: bool = False

    def ended(self) -> bool:
        """Take the connection's news; return whether it has ended."""
        while self.monitor.poll(0):
            self.connected = recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not self.connected:
                return True
        return False


class ExpertStreams:
    """Streams of several workers. Not thread-safe."""

    def __init__(self, secret: str | None) -> None:
        """`secret` is the fleet secret, for encrypted streams; None if there is none."""
        self.counters: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.last_error = ""
        """Reason why the last message or endpoint was dropped, with its worker."""
        self._secret = secret
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._streams: dict[StreamEntry, _Stream] = {}

    def follow(self, entries: Iterable[StreamEntry], most_bytes: int = MOST_MESSAGE) -> None:
        """Read these streams and no others. A stream whose endpoint cannot be used is counted and skipped.

        `most_bytes` limits the messages of streams that are new.
        """
        wanted = dict.fromkeys(entries)
        for entry in [entry for entry in self._streams if entry not in wanted]:
            self._leave(entry)
        for entry in wanted:
            if entry not in self._streams:
                self._join(entry, most_bytes)

    def watch(self, file: int) -> None:
        """Make :meth:`wait_for` also return when this file descriptor is readable."""
        self._poller.register(file, zmq.POLLIN)

    def wait_for(self, seconds: float) -> set[Any]:
        """Wait at most `seconds` for a message; return the sockets and file descriptors that are readable."""
        return set(dict(self._poller.poll(max(0, math.ceil(seconds * 1000)))))

    @property
    def connected(self) -> set[str]:
        """Workers whose stream has a connection."""
        return {entry.worker for entry, stream in self._streams.items() if stream.connected}

    def last_seq(self, worker: str) -> int:
        """Return the sequence number of a worker's last message; -1 before the first."""
        return max((one.seq for one in self._streams.values() if one.entry.worker == worker), default=-1)

    def read(self) -> Iterator[Received]:
        """Yield the events that have arrived, from at most `AT_ONCE` messages of each worker."""
        for stream in list(self._streams.values()):
            for _ in range(AT_ONCE):
                if stream.socket.closed:  # the consumer may have stopped this stream between two events
                    break
                try:
                    frames = stream.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    if stream.ended():
                        self._leave(stream.entry)
                        self._join(stream.entry, stream.most_bytes, stream.seq)
                    break
                for event in self.events(stream, frames):
                    yield Received(stream.entry.worker, event)

    def events(self, stream: _Stream, frames: list[bytes]) -> list[Event]:
        """Return the events of a message; none if it is unreadable or a duplicate."""
        self.counters["messages"] += 1
        try:
            frame = from_frames(frames)
            batch = decode_expert_events(frame.payload)
        except InputError as error:
            self.refuse(stream.entry.worker, error)
            return []
        if frame.seq == stream.seq:
            self.counters["doubled"] += 1
            return []
        if frame.seq < stream.seq:
            self.counters["restarts"] += 1
        elif stream.seq >= 0:
            self.counters["lost"] += min(frame.seq - stream.seq - 1, MOST_LOST)
        stream.seq = frame.seq
        return batch.events

    def close(self) -> None:
        self.follow(())
        self._context.destroy(linger=0)

    def refuse(self, worker: str, error: Exception, kind: str = "malformed") -> None:
        """Count a message or endpoint that cannot be used, and keep the reason."""
        self.counters[kind] += 1
        self.last_error = f"{worker}: {error}"

    def _join(self, entry: StreamEntry, most_bytes: int, seq: int = -1) -> None:
        socket = self._context.socket(zmq.SUB)
        try:
            bound_reader(socket, queue_of(most_bytes), most_bytes)
            if entry.secure:
                secret = check_given(self._secret, "its events are secure, and there is no fleet secret")
                secure_subscriber(socket, secret)
            socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
            socket.connect(entry.endpoint)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        except (zmq.ZMQError, ConfigError) as error:
            self.refuse(entry.worker, error, "unreachable")
            socket.close(linger=0)
            return
        self._streams[entry] = _Stream(entry, most_bytes, socket, monitor, seq)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _leave(self, entry: StreamEntry) -> None:
        stream = self._streams.pop(entry)
        self._poller.unregister(stream.socket)
        self._poller.unregister(stream.monitor)
        stream.socket.disable_monitor()
        stream.monitor.close(linger=0)
        stream.socket.close(linger=0)
