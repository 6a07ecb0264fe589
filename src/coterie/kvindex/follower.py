"""Follow the numbered messages of each worker, so that a lost message never causes a false hit.

A gap in the numbers means lost messages, possibly removals: they are fetched from the engine's replay endpoint if it
still has them, else the worker's blocks are forgotten. A number that falls, or that jumps farther than any stream can
have lost, means that the worker restarted, with an empty cache: one wrong number never silences a worker. A restart
without a gap cannot be seen in the numbers: call :meth:`Follower.drop_worker` when a worker is known to be gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from coterie.errors import CoterieError, InputError
from coterie.kvindex.directory import KVDirectory
from coterie.wire.framing import REPLAY_END, Frame
from coterie.wire.kv_events import decode_kv_events

Replay = Callable[[int, int], Iterable[Frame]]
"""(worker, first number wanted) → the messages from there on that the engine still has, in order, with or without the
end marker; may raise CoterieError or OSError."""
MOST_GAP = 1 << 20
"""Most messages that a gap is believed to be: hours of an engine's steps. No replay endpoint keeps as many."""


class Follower:
    """Feeds a directory; `replay` fetches lost messages.

    A caller that must not block leaves `replay` out, calls :meth:`missing` before each message, and hands the
    fetched frames to :meth:`apply_payload` as `replayed`. One thread may feed while others ask the directory: they
    hold `lock` for that. Messages are decoded without it.
    """

    def __init__(self, directory: KVDirectory, replay: Replay | None = None) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self._replay = replay
        self._next: list[int | None] = [None] * directory.num_workers

    def missing(self, worker: int, seq: int) -> range:
        """Numbers to fetch before this message can be applied; all up to it for a first message or after a restart."""
        self._check(worker, seq)
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
        """Apply a message, after the lost ones before it.

        If it cannot be decoded, the worker's blocks are forgotten, and it is counted. Once `wanted` is false nothing
        more is applied: another thread may drop the worker meanwhile.
        """
        missing, counters = self.missing(worker, seq), self.directory.counters
        expected, self._next[worker] = self._next[worker], seq + 1
        restarted = expected is not None and missing.start != expected
        with self.lock:
            if restarted and wanted():
                counters.restarts += 1
                self.directory.drop_worker(worker)
        if missing:
            run = self._fetch(worker, missing, replayed)
            counters.replayed += len(run)
            if expected is not None and not restarted:
                lost = len(missing) - len(run)
                counters.gaps += 1
                counters.lost += lost
                with self.lock:
                    if lost and wanted():
                        self.directory.forget(worker)
            for frame in run:
                self._apply(worker, frame.payload, wanted)
        self._apply(worker, payload, wanted)

    def grow(self, num_workers: int) -> None:
        """Make room for more workers, in the directory too."""
        with self.lock:
            self.directory.grow(num_workers)
        self._next += [None] * (num_workers - len(self._next))

    def drop_worker(self, worker: int) -> None:
        """Forget the blocks of a worker that is gone; the next message under its number counts as a first one."""
        with self.lock:
            self.directory.drop_worker(worker)
        self._next[worker] = None

    def _fetch(self, worker: int, missing: range, replayed: Iterable[Frame] | None) -> list[Frame]:
        """Unbroken run of messages that ends just before this one."""
        try:
            if replayed is None:
                replayed = () if self._replay is None else self._replay(worker, missing.start)
            frames = {frame.seq: frame for frame in replayed if frame.seq in missing}
        except (CoterieError, OSError):
            return []
        except BaseException:
            self.directory.forget(worker)
            raise
        run: list[Frame] = []
        for seq in reversed(missing):
            if seq not in frames:
                break
            run.append(frames[seq])
        return run[::-1]

    def _apply(self, worker: int, payload: bytes, wanted: Callable[[], bool]) -> None:
        try:
            events = decode_kv_events(payload).events
        except InputError as error:
            self.directory.counters.undecodable += 1
            self.directory.counters.last_error = str(error)
            with self.lock:
                if wanted():
                    self.directory.forget(worker)
            return
        for event in events:  # a lock for each: whoever asks waits for one event, not for a message
            with self.lock:
                if wanted():
                    self.directory.apply(worker, event)

    def _check(self, worker: int, seq: int) -> None:
        if not 0 <= worker < self.directory.num_workers:
            raise InputError(f"worker={worker} must be at least 0 and below num_workers={self.directory.num_workers}")
        if not 0 <= seq < REPLAY_END:
            raise InputError(f"seq={seq} must be at least 0 and below {REPLAY_END}")
