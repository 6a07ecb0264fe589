"""Follow the numbered messages of each worker, so that a lost message never causes a false hit.

A gap in the sequence numbers means lost messages, possibly removals. The lost messages are fetched from the engine's
replay endpoint if it still has them; otherwise the worker's blocks are forgotten. A number that falls, or jumps by more
than MOST_GAP, means that the worker restarted with an empty cache. So the numbering recovers from one wrong number. A
restart without a gap does not show in the numbers: call :meth:`Follower.drop_worker` when a worker is known to be gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import takewhile

from coterie.errors import CoterieError, InputError, check
from coterie.kvindex.directory import KVDirectory
from coterie.wire.framing import REPLAY_END, Frame
from coterie.wire.kv_events import decode_kv_events

Replay = Callable[[int, int], Iterable[Frame]]
"""Function (worker, first sequence number) → the messages from that number on that the engine still has, in order, with
or without the end marker; may raise CoterieError or OSError."""
MOST_GAP = 1 << 20
"""Largest jump, in messages, that counts as a gap and not as a restart: hours of steps, more than any replay keeps."""


class Follower:
    """Applies workers' messages to a directory; `replay` fetches lost messages.

    A caller that must not block leaves `replay` out, calls :meth:`missing` before each message, and passes the
    fetched frames to :meth:`apply_payload` as `replayed`. One thread may apply messages while others query the
    directory; a query must hold `lock`. Messages are decoded outside the lock.
    """

    def __init__(self, directory: KVDirectory, replay: Replay | None = None) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self._replay = replay
        self._next: list[int | None] = [None] * directory.num_workers

    def missing(self, worker: int, seq: int) -> range:
        """Return the sequence numbers to fetch before message `seq` is applied.

        For a first message or after a restart these are all numbers below `seq`, at most MOST_GAP.
        """
        self.directory.check_worker(worker)
        check(0 <= seq < REPLAY_END, f"seq={seq} must be at least 0 and below {REPLAY_END}", InputError)
        expected = self._next[worker]
        if expected is None or not 0 <= seq - expected <= MOST_GAP:
            expected = max(0, seq - MOST_GAP)
        return range(expected, seq)

    def apply_payload(
        self,
        worker: int,
        seq: int,
        payload: bytes,
        replayed: Iterable[Frame] | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Apply a message, after the lost messages before it.

        A message that cannot be decoded is counted, and the worker's blocks are forgotten. Nothing is applied once
        `wanted` returns False: another thread may drop the worker meanwhile.
        """
        missing, counters = self.missing(worker, seq), self.directory.counters
        expected, self._next[worker] = self._next[worker], seq + 1
        restarted = expected is not None and missing.start != expected
        if restarted:
            with self.lock:
                if wanted():
                    counters.restarts += 1
                    self.directory.drop_worker(worker)
        if missing:
            run = self._fetch(worker, missing, replayed)
            counters.replayed += len(run)
            if expected is not None and not restarted:
                lost = len(missing) - len(run)
                counters.gaps += 1
                counters.lost += lost
                if lost:
                    self._forget(worker, wanted)
            for frame in run:
                self._apply(worker, frame.payload, wanted)
        self._apply(worker, payload, wanted)

    def grow(self, num_workers: int) -> None:
        """Make room for more workers, also in the directory."""
        with self.lock:
            self.directory.grow(num_workers)
        self._next += [None] * (num_workers - len(self._next))

    def drop_worker(self, worker: int) -> None:
        """Forget the blocks of a worker that is gone; its next message, if any, counts as its first."""
        with self.lock:
            self.directory.drop_worker(worker)
        self._next[worker] = None

    def _fetch(self, worker: int, missing: range, replayed: Iterable[Frame] | None) -> list[Frame]:
        """Return the unbroken run of fetched messages that ends with the last missing number."""
        try:
            if replayed is None:
                replayed = () if self._replay is None else self._replay(worker, missing.start)
            frames = {frame.seq: frame for frame in replayed if frame.seq in missing}
        except (CoterieError, OSError):
            return []
        except BaseException:
            self.directory.forget(worker)
            raise
        return [frames[seq] for seq in takewhile(frames.__contains__, reversed(missing))][::-1]

    def _apply(self, worker: int, payload: bytes, wanted: Callable[[], bool]) -> None:
        try:
            events = decode_kv_events(payload).events
        except InputError as error:
            self.directory.counters.undecodable += 1
            self.directory.counters.last_error = str(error)
            self._forget(worker, wanted)
            return
        for event in events:  # lock per event: a query waits for one event, not for a whole message
            with self.lock:
                if wanted():
                    self.directory.apply(worker, event)

    def _forget(self, worker: int, wanted: Callable[[], bool]) -> None:
        with self.lock:
            if wanted():
                self.directory.forget(worker)
