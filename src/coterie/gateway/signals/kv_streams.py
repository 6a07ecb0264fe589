"""Read the KV event streams of a pool's workers, to know how many leading tokens of a prompt each worker holds.

Each worker has one ZMQ connection, all in a separate thread: decoding a message never delays a request. Messages are
numbered; missing ones are requested from the engine's replay endpoint. After connecting, all messages that it still
has are requested, so that a gateway that starts late knows the blocks too. A connection that ends may be a restart:
the worker's blocks are dropped, and learned again from the next connection.

Nothing that a worker sends makes this raise: bad messages are counted, and blocks that may be wrong are forgotten. The
length of messages is limited by the model's context, queues and replays are bounded in bytes, and each worker gets a
share of the thread's time: one that sends more is read more slowly, until its queue is full.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from coterie.errors import InputError, check, check_at_least, check_positive
from coterie.kvindex import MAX_BLOCKS, Follower, KVDirectory
from coterie.wire.framing import REPLAY_END, Frame, bound_reader, from_frames, queue_of
from coterie.wire.kv_events import BlockRemoved, BlockStored

Secure = Callable[[Any], None]
"""Function that sets encryption keys on a ZMQ socket before it connects."""

TOKEN_BYTES = 8
"""Bytes of a message per token of the context: 5 for its id, and 34 for the hash of a block of 16 tokens."""
DEFAULT_CONTEXT = 1 << 18
"""Context length in tokens while no worker has reported its own."""
LEAST_MESSAGE, MOST_MESSAGE = 1 << 20, 8 << 20
"""Smallest and largest limit on the bytes of a message, whatever the context. A longer message ends the connection."""
REPLAY_BYTES, REPLAY_KEPT_BYTES = 256 << 20, 64 << 20
"""Most bytes of a replay that are read, and most that are kept (the newest); vLLM keeps 10,000 messages."""
REPLAY_QUEUE = 10_000
"""Length of the queue for a replay's messages: an engine sends all at once and drops those that do not fit."""
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Seconds before the first, second, … reconnection; later reconnections use the last value."""
REPLAY_PAUSE_S = 10.0
"""Seconds before a replay endpoint that did not answer is asked again."""
SHARE, BURST_S = 0.2, 5.0
"""Share of a core that a worker's messages may take, and the most processor seconds that it can save up: enough for
18,000 messages of 8 blocks at once."""
REPLAY_S, REPLAYED_S = 0.01, 2e-5
"""Processor seconds charged for a replay, and for each of its messages, besides the time of applying them."""
_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitors = count()


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
    last_live: int = -1
    """Last sequence number received live, not by replay, in this connection; -1 before the first."""
    replayed: range = range(0)
    """Sequence numbers of this connection's first replay; cleared by the first live message outside them."""
    replay_after: float = 0.0
    """Event-loop time before which the replay endpoint is not asked again."""
    credit_s: float = BURST_S
    """Processor seconds that the worker has left, as of `credit_time`."""
    credit_time: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)

    def spend(self, seconds: float, now: float) -> float:
        """Take processor seconds from the credit; return the seconds to wait until it is positive again."""
        self.credit_s = min(BURST_S, self.credit_s + SHARE * (now - self.credit_time)) - seconds
        self.credit_time = now
        return max(0.0, -self.credit_s / SHARE)


class KvStreams:
    """KV event streams of one pool. Call its methods from one thread; the streams are read in another.

    `max_blocks` limits the blocks of a worker whose KV cache size is unknown: it is not believed to hold more.
    """

    def __init__(self, *, block_size: int = 16, replay_s: float = 10.0, max_blocks: int = MAX_BLOCKS) -> None:
        check_positive(replay_s=replay_s)
        self.directory = KVDirectory(1, block_size=block_size, max_blocks=max_blocks)
        self.counters: Counter[str] = Counter()
        """Counts over all workers: messages; malformed ones, which are not frames of a stream; connections;
        disconnections, by a restart or a message that is too long; refused handshakes, by wrong keys or a peer that is
        not ZMQ; failed connections, by an unexpected error; unanswered replays. The directory counts gaps, replays and
        blocks."""
        self.last_error = ""
        """Text of the last problem of any kind, with its worker."""
        self.context_tokens = DEFAULT_CONTEXT
        """Longest context of the workers in tokens, which limits the messages of later connections."""
        self._replay_s = replay_s
        self._streams: dict[str, _Stream] = {}
        self._follower = Follower(self.directory)
        self._context = zmq.asyncio.Context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    @property
    def workers(self) -> list[str]:
        return list(self._streams)

    def connected(self, worker_id: str) -> bool:
        stream = self._streams.get(worker_id)
        return stream is not None and stream.connected

    def join(
        self,
        worker_id: str,
        row: int,
        endpoint: str,
        replay: str | None = None,
        secure: Secure | None = None,
        kv_blocks: int | None = None,
    ) -> None:
        """Start reading a worker's stream.

        `replay` is the engine's replay endpoint, `kv_blocks` the size of its KV cache in blocks; None if unknown.
        """
        check_at_least(0, row=row)
        for name, address in (("endpoint", endpoint), ("replay", replay)):
            check(
                address is None or address.startswith(("tcp://", "ipc://")),
                f"{name}={address!r} must begin with tcp:// or ipc://",
            )
        for other in self._streams.values():
            check(
                other.worker_id != worker_id and other.row != row,
                f"worker {worker_id!r}, row {row}: {other.worker_id!r} has row {other.row} already",
            )
        if row >= self.directory.num_workers:
            self._follower.grow(max(row + 1, 2 * self.directory.num_workers))
        self.directory.limits[row] = self.directory.max_blocks if kv_blocks is None else kv_blocks
        stream = self._streams[worker_id] = _Stream(worker_id, row, endpoint, replay, secure)
        if self._loop is None:
            self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="coterie-kv", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, stream)

    def leave(self, worker_id: str) -> None:
        """Stop reading a worker's stream and forget its blocks; do nothing for an unknown worker."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None and self._loop is not None:
            stream.closed = True
            self._follower.drop_worker(stream.row)
            self._loop.call_soon_threadsafe(self._begin, stream)

    def restarted(self, worker_id: str) -> None:
        """Drop the blocks of a worker that may have lost its cache; its stream continues."""
        if (stream := self._streams.get(worker_id)) is not None:
            self._follower.drop_worker(stream.row)

    def cached(
        self, ids: NDArray[np.int64], rows: int | None = None, cache_salt: str | None = None, lora: str | None = None
    ) -> NDArray[np.int64]:
        """Return the leading tokens of a prompt whose KV each worker holds and would use, [row].

        Whole blocks, and never the last token: an engine computes at least one. `rows` is the length of the result.
        """
        tokens = np.zeros(self.directory.num_workers if rows is None else rows, np.int64)
        if len(ids):
            salt, size = cache_salt if isinstance(cache_salt, str) else None, self.directory.block_size
            with self._follower.lock:
                held = self.directory.match_tokens(ids, cache_salt=salt, lora=lora)[: len(tokens)]
            np.minimum(held, (len(ids) - 1) // size * size, out=tokens[: len(held)])
        return tokens

    async def close(self) -> None:
        for worker_id in list(self._streams):
            self.leave(worker_id)
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            await asyncio.to_thread(self._thread.join)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------------- connections, from here on in the thread

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at its end it cancels the remaining streams
            runner.run(self._ended.wait())

    def _begin(self, stream: _Stream) -> None:
        """Start reading a stream, or end it if it is closed."""
        if not stream.closed:
            stream.task = asyncio.get_running_loop().create_task(self._run(stream))
        elif stream.task is not None:
            stream.task.cancel()

    async def _run(self, stream: _Stream) -> None:
        """Connect and read, repeatedly, until the worker leaves."""
        ended = 0
        while not stream.closed:
            try:
                await self._session(stream)
            except Exception as error:  # a stream never takes the gateway down
                self._count("failed", stream, f"{type(error).__name__}: {error}")
            ended = 0 if stream.connected else ended + 1
            stream.connected = False
            self._follower.drop_worker(stream.row)
            await asyncio.sleep(PAUSES_S[min(ended, len(PAUSES_S) - 1)])

    async def _session(self, stream: _Stream) -> None:
        """Read one connection until it ends: ZMQ's own reconnection would hide a restart."""
        socket = self._socket(zmq.SUB, stream)
        monitor = None
        tasks: list[asyncio.Task[None]] = []
        try:
            monitor = socket.get_monitor_socket(_MONITORED, f"inproc://coterie-kv-{next(_monitors)}")
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(stream.endpoint)
            stream.up, stream.last_live, stream.replayed = asyncio.Event(), -1, range(0)
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
        """Count the connection's events; return when it ends."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.counters["connections"] += 1
                stream.connected = True
                stream.up.set()
            elif event == zmq.EVENT_DISCONNECTED:
                if stream.up.is_set():
                    reason = f"the connection ended; messages have at most {self._message_bytes} bytes"
                    return self._count("disconnections", stream, reason)
            else:
                self._count("refused", stream, "the handshake failed: the keys differ, or it is no ZMQ")

    async def _read(self, stream: _Stream, socket: zmq.asyncio.Socket) -> None:
        await stream.up.wait()
        run = _last_run(await self._replayed(stream, 0))
        for frame in run:
            await self._apply(stream, frame, ())
        if run:
            stream.replayed = range(run[0].seq, run[-1].seq + 1)
        while True:
            parts = await socket.recv_multipart()
            self.counters["messages"] += 1
            try:
                await self._follow(stream, from_frames(parts))
            except InputError as error:
                self._count("malformed", stream, str(error))

    def _socket(self, kind: int, stream: _Stream) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        try:
            size = self._message_bytes
            bound_reader(socket, queue_of(size) if kind == zmq.SUB else REPLAY_QUEUE, size)
            if stream.secure is not None:
                stream.secure(socket)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    @property
    def _message_bytes(self) -> int:
        return min(max(LEAST_MESSAGE, TOKEN_BYTES * self.context_tokens), MOST_MESSAGE)

    def _count(self, kind: str, stream: _Stream, reason: str) -> None:
        self.counters[kind] += 1
        self.last_error = f"{stream.worker_id}: {reason}"

    # -------------------------------------------------------------------------------------------------------- messages

    async def _follow(self, stream: _Stream, frame: Frame) -> None:
        """Apply a message, after the missing ones before it. Raises InputError for an impossible sequence number."""
        missing = self._follower.missing(stream.row, frame.seq)
        last, stream.last_live = stream.last_live, frame.seq
        if last < frame.seq and frame.seq in stream.replayed:
            return
        stream.replayed = range(0)
        await self._apply(stream, frame, await self._replayed(stream, missing.start) if missing else ())

    async def _apply(self, stream: _Stream, frame: Frame, replayed: Sequence[Frame]) -> None:
        started = time.thread_time()
        if not stream.closed:
            self._follower.apply_payload(stream.row, frame.seq, frame.payload, replayed, lambda: not stream.closed)
        # Even a sleep of 0 is needed: awaiting messages that have already arrived never lets other streams run.
        await asyncio.sleep(stream.spend(time.thread_time() - started, asyncio.get_running_loop().time()))

    async def _replayed(self, stream: _Stream, first: int) -> Sequence[Frame]:
        """Request the messages from number `first` on that the engine still has; return those received in time."""
        now = asyncio.get_running_loop().time()
        if stream.replay is None or now < stream.replay_after or stream.spend(REPLAY_S, now):
            return ()
        frames: deque[Frame] = deque()
        socket = self._socket(zmq.DEALER, stream)
        kept, read, problem = 0, 0, f"it has more than {REPLAY_BYTES} bytes"
        try:
            socket.connect(stream.replay)
            async with asyncio.timeout(self._replay_s):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while read < REPLAY_BYTES:
                    parts = await socket.recv_multipart()
                    read += sum(map(len, parts)) + 64
                    try:  # a REQ socket's reply begins with an empty part
                        frame = from_frames(parts[1:] if len(parts) > 2 and not parts[0] else parts)
                    except InputError as error:
                        self._count("malformed", stream, str(error))
                        continue
                    if frame.seq == REPLAY_END:
                        return frames
                    frames.append(frame)
                    kept += len(frame.payload)
                    while kept > REPLAY_KEPT_BYTES:
                        kept -= len(frames.popleft().payload)
        except (TimeoutError, zmq.ZMQError) as error:
            stream.replay_after = now + self._replay_s + REPLAY_PAUSE_S
            problem = f"{type(error).__name__} {error}"
        finally:
            stream.spend(REPLAYED_S * len(frames), asyncio.get_running_loop().time())
            socket.close(linger=0)
        self._count("unanswered", stream, f"the replay was not answered: {problem}")
        return frames


def compile_directory() -> None:
    """Compile the directory's loops, so that the first message and the first request do not wait seconds for them."""
    follower = Follower(KVDirectory(1, block_size=2, capacity=100))  # more than its tables begin with: they grow
    store = BlockStored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2)
    child = BlockStored(block_hashes=[b"12345678"], parent_block_hash=2, token_ids=[5, 6], block_size=2)
    for event in (store, child, BlockRemoved(block_hashes=[2])):
        follower.directory.apply(0, event)
    follower.directory.match_tokens(np.arange(8), cache_salt="salt")
    follower.grow(65)
    follower.drop_worker(0)


def _last_run(frames: Sequence[Frame]) -> list[Frame]:
    """Return the messages at the end whose sequence numbers have no gap."""
    run = takewhile(lambda place: place[1].seq == frames[-1].seq - place[0], enumerate(reversed(frames)))
    return [frame for _, frame in run][::-1]
