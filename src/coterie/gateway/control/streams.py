"""Follow the expert-event streams of a fleet's workers, in the process of the control loop.

One ZMQ socket a worker; ZMQ connects again by itself. Whatever a worker sends, nothing is raised: messages that cannot
be read, that come twice or too late are counted and left out, and so is what the numbers show to be lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from coterie.errors import InputError
from coterie.gateway.control.messages import StreamEntry
from coterie.wire.event_security import secure_subscriber
from coterie.wire.expert_events import TOPIC, ExpertLoad, RequestExperts, decode_expert_events
from coterie.wire.framing import bound_reader, from_frames

MESSAGE_BYTES = 64 << 20
"""Longest message: 128k tokens of 58 layers with 8 experts of 256 take 61 MB. A longer one ends the connection."""
QUEUE = 1000
"""Messages of a worker that wait to be read; more are lost, and counted."""
AT_ONCE = 64
"""Messages of a worker that are read in a row, before the next worker's."""
AHEAD_S = 3600.0
"""Seconds that a worker's clock may be ahead of this one."""
KINDS = ("messages", "malformed", "lost", "doubled", "late", "restarts", "unreachable")
"""What is counted: messages that came, of them those that could not be read, came twice or out of turn; messages that
never came; publishers that began anew; endpoints that cannot be used."""
MOST_LOST = 1 << 20
"""Most messages that one gap counts for: a wrong number must not spoil the counter for good."""


class Received(NamedTuple):
    worker: str
    event: RequestExperts | ExpertLoad


@dataclass(slots=True, eq=False)
class _Stream:
    entry: StreamEntry
    socket: zmq.Socket[bytes]
    seq: int = -1
    """Number of the last message."""
    stamp: float = -math.inf
    """Its publisher's time."""


class ExpertStreams:
    """Streams of several workers; belongs to one thread."""

    def __init__(self, secret: str | None, clock: Callable[[], float] = time.time) -> None:
        """`secret` is the fleet's; `clock` gives seconds since the epoch."""
        self.counters: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._secret, self._clock = secret, clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._streams: dict[StreamEntry, _Stream] = {}

    def follow(self, entries: Iterable[StreamEntry]) -> None:
        """Follow these and no others. One whose endpoint cannot be used is counted and left out."""
        wanted = dict.fromkeys(entries)
        for entry in [one for one in self._streams if one not in wanted]:
            self._leave(entry)
        for entry in wanted:
            if entry not in self._streams:
                self._join(entry)

    def watch(self, file: int) -> None:
        """Let :meth:`wait_for` end when this file is readable too."""
        self._poller.register(file, zmq.POLLIN)

    def wait_for(self, seconds: float) -> set[Any]:
        """Wait for a message; the sockets and files that are readable."""
        return set(dict(self._poller.poll(max(0, math.ceil(seconds * 1000)))))

    def last_seq(self, worker: str) -> int:
        """Number of a worker's last message; -1 before the first."""
        return max((one.seq for one in self._streams.values() if one.entry.worker == worker), default=-1)

    def read(self) -> Iterator[Received]:
        """What has come, at most `AT_ONCE` messages a worker."""
        for stream in list(self._streams.values()):
            for _ in range(AT_ONCE):
                try:
                    frames = stream.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                for event in self.events(stream, frames):
                    yield Received(stream.entry.worker, event)

    def events(self, stream: _Stream, frames: list[bytes]) -> list[RequestExperts | ExpertLoad]:
        """The events of a message; none if it cannot be read, or was there already."""
        self.counters["messages"] += 1
        try:
            frame = from_frames(frames)
            batch = decode_expert_events(frame.payload)
        except InputError:
            self.counters["malformed"] += 1
            return []
        if not 0 <= batch.timestamp <= self._clock() + AHEAD_S:
            self.counters["malformed"] += 1
            return []
        if frame.seq <= stream.seq and batch.timestamp <= stream.stamp:
            self.counters["doubled" if frame.seq == stream.seq else "late"] += 1
            return []
        if frame.seq <= stream.seq:  # newer, with a lower number: the publisher began anew
            self.counters["restarts"] += 1
        elif stream.seq >= 0:
            self.counters["lost"] += min(frame.seq - stream.seq - 1, MOST_LOST)
        stream.seq, stream.stamp = frame.seq, batch.timestamp
        return batch.events

    def close(self) -> None:
        self.follow(())
        self._context.destroy(linger=0)

    def _join(self, entry: StreamEntry) -> None:
        socket = self._context.socket(zmq.SUB)
        try:
            bound_reader(socket, QUEUE, MESSAGE_BYTES)
            if entry.secure and self._secret is not None:
                secure_subscriber(socket, self._secret)
            socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
            socket.connect(entry.endpoint)
        except zmq.ZMQError:
            self.counters["unreachable"] += 1
            socket.close(linger=0)
            return
        self._streams[entry] = _Stream(entry, socket)
        self._poller.register(socket, zmq.POLLIN)

    def _leave(self, entry: StreamEntry) -> None:
        stream = self._streams.pop(entry)
        self._poller.unregister(stream.socket)
        stream.socket.close(linger=0)
