"""Follow the KV event streams of a pool's workers: how many leading tokens of a prompt each of them holds.

One ZMQ connection a worker, on the event loop. Messages are numbered; what is missing is asked of the engine's replay
endpoint, and as soon as a connection stands, all that it still has: so a gateway that starts late knows the blocks too.
A connection that ends may be a restart: the worker's blocks are dropped, and learned anew from the next connection.
Whatever a worker sends, nothing is raised: it is counted, and its blocks are forgotten where they may be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from coterie.errors import ConfigError, InputError, check_at_least, check_positive
from coterie.kvindex import Follower, KVDirectory
from coterie.wire.framing import REPLAY_END, Frame, bound_reader, from_frames
from coterie.wire.kv_events import BlockRemoved, BlockStored, KVEvents, decode_kv_events

Secure = Callable[[Any], None]
"""Sets keys on a ZMQ socket before it connects."""

MESSAGE_BYTES = 32 << 20
"""Longest message: a block of 16 tokens takes about 100 bytes. A longer one ends the connection."""
REPLAY_BYTES = 512 << 20
"""Most bytes of a replay; vLLM keeps 10,000 messages."""
MAX_BLOCK_SIZE = 1 << 16
"""Largest block size that is believed."""
AT_ONCE = 16
"""Messages read or applied before other tasks of the event loop run: awaiting what is there already lets none run."""
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses before a connection that ended is made anew, then the last one each time."""
REPLAY_PAUSE_S = 10.0
"""Pause after a replay endpoint that did not answer."""
REPLAY_BURST, REPLAY_RATE = 50_000, 1_000
"""Replayed messages of a worker that are read at once, and per second later on: more is a broken stream, or an attack
on this loop."""
REPLAY_COST = 50
"""A replay counts as so many messages, besides those it brings."""
_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitors = count()


@dataclass(slots=True)
class StreamCounters:
    """Counts over all workers of a pool; the directory's own are in `KvStreams.directory`."""

    messages: int = 0
    malformed: int = 0
    """Messages that are no frames of a KV stream."""
    gaps: int = 0
    """Times that messages were missing."""
    replayed: int = 0
    """Messages applied from a replay."""
    unanswered: int = 0
    """Replays that did not come, or not whole."""
    connections: int = 0
    disconnections: int = 0
    refused: int = 0
    """Handshakes that failed: wrong keys, or no ZMQ."""
    restarts: int = 0
    """Numbers that fell within one connection."""
    overflows: int = 0
    """Times that a worker told of more blocks than it may."""
    failed: int = 0
    """Unexpected errors, each of which ended a connection."""


@dataclass(slots=True, eq=False)
class _Stream:
    worker_id: str
    row: int
    endpoint: str
    replay: str | None
    secure: Secure | None
    task: asyncio.Task[None] | None = None
    connected: bool = False
    closed: bool = False
    next: int | None = None
    """Number expected next; None before the first message."""
    last_live: int = -1
    """Last number that came by itself, not by a replay, in this connection."""
    replay_after: float = 0.0
    """Time of the event loop before which the replay endpoint is not asked again."""
    credit: float = REPLAY_BURST
    """Messages that may be replayed, as of `credit_time`."""
    credit_time: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)

    def may_replay(self, now: float) -> bool:
        self.credit = min(REPLAY_BURST, self.credit + REPLAY_RATE * (now - self.credit_time))
        self.credit_time = now
        return now >= self.replay_after and self.credit >= 0


class KvStreams:
    """Streams of one pool; belongs to one event loop.

    `block_size` None learns it from the first event that names one. `max_blocks` bounds a worker's blocks: one that
    tells of more is forgotten. `topic` is the prefix of the topics to listen to.
    """

    def __init__(
        self,
        *,
        block_size: int | None = None,
        secure: Secure | None = None,
        topic: bytes = b"",
        replay_s: float = 10.0,
        max_blocks: int = 4_000_000,
        queue: int = 100_000,
    ) -> None:
        check_at_least(1, block_size=block_size, max_blocks=max_blocks, queue=queue)
        check_positive(replay_s=replay_s)
        self.counters = StreamCounters()
        self._secure, self._topic, self._replay_s = secure, topic, replay_s
        self._max_blocks, self._queue = max_blocks, queue
        self._streams: dict[str, _Stream] = {}
        self._rows = 1
        self._follower: Follower | None = None
        self._context = zmq.asyncio.Context()
        if block_size is not None:
            self._start_directory(block_size)

    @property
    def directory(self) -> KVDirectory | None:
        """None until the block size is known."""
        return None if self._follower is None else self._follower.directory

    @property
    def workers(self) -> list[str]:
        return list(self._streams)

    def connected(self, worker_id: str) -> bool:
        stream = self._streams.get(worker_id)
        return stream is not None and stream.connected

    def join(
        self, worker_id: str, row: int, endpoint: str, replay: str | None = None, secure: Secure | None = None
    ) -> None:
        """Follow a worker from now on; `replay` is the endpoint of its engine's replays, if it has one."""
        check_at_least(0, row=row)
        for name, address in (("endpoint", endpoint), ("replay", replay)):
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name}={address!r} must begin with tcp:// or ipc://")
        for other in self._streams.values():
            if other.worker_id == worker_id or other.row == row:
                raise ConfigError(f"worker {worker_id!r}, row {row}: {other.worker_id!r} has row {other.row} already")
        if row >= self._rows:
            self._rows = max(row + 1, 2 * self._rows)
            if self._follower is not None:
                self._follower.grow(self._rows)
        stream = _Stream(worker_id, row, endpoint, replay, self._secure if secure is None else secure)
        self._streams[worker_id] = stream
        stream.task = asyncio.get_running_loop().create_task(self._run(stream), name=f"kv events of {worker_id}")

    def leave(self, worker_id: str) -> None:
        """Forget a worker; no harm if it is not there."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            stream.closed = True
            self._drop(stream)
            if stream.task is not None:
                stream.task.cancel()

    def restarted(self, worker_id: str) -> None:
        """Drop the blocks of a worker that is known to have emptied its cache; its stream goes on."""
        if (stream := self._streams.get(worker_id)) is not None:
            self._drop(stream)

    def cached(
        self, ids: NDArray[np.int64], rows: int | None = None, cache_salt: str | None = None, lora: str | None = None
    ) -> NDArray[np.int64]:
        """[row] leading tokens of a prompt whose KV each worker holds and would use; `rows` is the length wanted.

        Whole blocks, and never the last token: an engine computes at least one.
        """
        wanted = self._rows if rows is None else rows
        if self._follower is None or not len(ids):
            return np.zeros(wanted, np.int64)
        directory = self._follower.directory
        salt = cache_salt if isinstance(cache_salt, str) else None
        found = directory.match_tokens(ids, cache_salt=salt, lora=lora)
        np.minimum(found, (len(ids) - 1) // directory.block_size * directory.block_size, out=found)
        if wanted <= len(found):
            return found[:wanted]
        longer = np.zeros(wanted, np.int64)
        longer[: len(found)] = found
        return longer

    async def close(self) -> None:
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for worker_id in list(self._streams):
            self.leave(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------------ connection

    async def _run(self, stream: _Stream) -> None:
        """Connect, follow, and again, until the worker leaves."""
        ended = 0
        while not stream.closed:
            try:
                await self._session(stream)
            except Exception:  # a stream never takes the gateway down
                self.counters.failed += 1
            ended = 0 if stream.connected else ended + 1
            stream.connected = False
            self._drop(stream)
            await asyncio.sleep(PAUSES_S[min(ended, len(PAUSES_S) - 1)])

    async def _session(self, stream: _Stream) -> None:
        """One connection, until it ends: ZMQ's own reconnecting would hide a restart."""
        socket = self._socket(zmq.SUB, stream)
        monitor = None
        tasks: list[asyncio.Task[None]] = []
        try:
            address = f"inproc://coterie-kv-{next(_monitors)}"
            monitor = socket.get_monitor_socket(_MONITORED, address)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            socket.connect(stream.endpoint)
            stream.up, stream.last_live = asyncio.Event(), -1
            tasks = [asyncio.create_task(self._watch(stream, monitor)), asyncio.create_task(self._read(stream, socket))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            if monitor is not None:
                monitor.close(linger=0)
            socket.close(linger=0)

    async def _watch(self, stream: _Stream, monitor: zmq.asyncio.Socket) -> None:
        """Ends when the connection does."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.counters.connections += 1
                stream.connected = True
                stream.up.set()
            elif event == zmq.EVENT_DISCONNECTED:
                if stream.up.is_set():
                    self.counters.disconnections += 1
                    return
            else:
                self.counters.refused += 1

    async def _read(self, stream: _Stream, socket: zmq.asyncio.Socket) -> None:
        await stream.up.wait()
        await self._feed(stream, _run_of(await self._replayed(stream, 0), None))
        while True:
            parts = await socket.recv_multipart()
            self.counters.messages += 1
            if self.counters.messages % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                frame = from_frames(parts)
            except InputError:
                self.counters.malformed += 1
                continue
            if frame.seq >= REPLAY_END:
                self.counters.malformed += 1
                continue
            await self._follow(stream, frame)

    def _socket(self, kind: int, stream: _Stream) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        try:
            bound_reader(socket, self._queue, MESSAGE_BYTES)
            if stream.secure is not None:
                stream.secure(socket)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    # -------------------------------------------------------------------------------------------------------- messages

    async def _follow(self, stream: _Stream, frame: Frame) -> None:
        """Apply a message, after those that are missing before it."""
        seq = frame.seq
        if seq <= stream.last_live:  # the publisher began anew behind this connection
            self.counters.restarts += 1
            self._drop(stream)
        elif stream.next is not None and seq < stream.next:  # a replay brought it already
            stream.last_live = seq
            return
        stream.last_live = seq
        first = stream.next or 0
        if seq > first:
            self.counters.gaps += stream.next is not None
            await self._feed(stream, _run_of(await self._replayed(stream, first), range(first, seq)))
        self._apply(stream, frame)

    async def _feed(self, stream: _Stream, frames: list[Frame]) -> None:
        for number, frame in enumerate(frames, 1):
            self._apply(stream, frame)
            self.counters.replayed += 1
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _replayed(self, stream: _Stream, first: int) -> list[Frame]:
        """Messages from `first` on that the engine still has; none if it does not answer in time."""
        loop = asyncio.get_running_loop()
        if stream.replay is None or not stream.may_replay(loop.time()):
            return []
        frames: list[Frame] = []
        socket = self._socket(zmq.DEALER, stream)
        try:
            socket.connect(stream.replay)
            async with asyncio.timeout(self._replay_s):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                left = REPLAY_BYTES
                while left > 0:
                    parts = await socket.recv_multipart()
                    if len(frames) % AT_ONCE == 0:
                        await asyncio.sleep(0)
                    left -= sum(map(len, parts)) + 64
                    try:  # a REQ socket's reply begins with an empty part
                        frame = from_frames(parts[1:] if len(parts) > 2 and not parts[0] else parts)
                    except InputError:
                        self.counters.malformed += 1
                        continue
                    if frame.seq == REPLAY_END:
                        return frames
                    frames.append(frame)
        except (TimeoutError, zmq.ZMQError):
            stream.replay_after = loop.time() + REPLAY_PAUSE_S
        finally:
            stream.credit -= REPLAY_COST + len(frames)
            socket.close(linger=0)
        self.counters.unanswered += 1
        return frames

    def _apply(self, stream: _Stream, frame: Frame) -> None:
        if stream.closed:
            return
        stream.next = frame.seq + 1
        if self._follower is None:
            try:
                size = _named_block_size(frame.payload)
            except InputError:
                self.counters.malformed += 1
                return
            if size is None:
                return  # there are no blocks yet that it could remove
            self._start_directory(size)
        assert self._follower is not None
        self._follower.apply_payload(stream.row, frame.seq, frame.payload, replayed=())
        held = self._follower.directory.held(stream.row)
        if held.hits + sum(held.apart.values()) > self._max_blocks:
            self.counters.overflows += 1
            self._follower.directory.forget(stream.row)

    def _drop(self, stream: _Stream) -> None:
        stream.next = None
        if self._follower is not None:
            self._follower.drop_worker(stream.row)

    def _start_directory(self, block_size: int) -> None:
        self._follower = Follower(KVDirectory(self._rows, block_size=block_size))


def compile_directory() -> None:
    """Compile the directory's loops ahead, or the first message and the first request wait for them: seconds."""
    follower = Follower(KVDirectory(1, block_size=2))
    store = BlockStored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2)
    child = BlockStored(block_hashes=[b"12345678"], parent_block_hash=2, token_ids=[5, 6], block_size=2)
    for event in (store, child, BlockRemoved(block_hashes=[2])):
        follower.directory.apply(0, KVEvents(0.0, [event]))
    follower.directory.match_tokens(np.arange(8), cache_salt="salt")
    follower.grow(65)
    follower.drop_worker(0)


def _run_of(frames: list[Frame], wanted: range | None) -> list[Frame]:
    """The unbroken run that ends just before the end of `wanted`; without it, the one that ends with the last."""
    by_number = {frame.seq: frame for frame in frames if wanted is None or frame.seq in wanted}
    if not by_number:
        return []
    run, seq = [], max(by_number) if wanted is None else wanted.stop - 1
    while (frame := by_number.get(seq)) is not None:
        run.append(frame)
        seq -= 1
    return run[::-1]


def _named_block_size(payload: bytes) -> int | None:
    events = decode_kv_events(payload).events
    sizes = (event.block_size for event in events if isinstance(event, BlockStored))
    return next((size for size in sizes if 0 < size <= MAX_BLOCK_SIZE), None)
