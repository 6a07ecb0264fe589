"""Follow the numbered messages of each worker, so that a lost message never causes a false hit.

A gap in the numbers means lost messages, possibly removals: they are fetched from the engine's replay endpoint if it
still has them, else the worker's blocks are forgotten. A number that falls means that the worker restarted, with an
empty cache. A restart without a gap cannot be seen in the numbers: call :meth:`Follower.drop_worker` when a worker is
known to be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coterie.errors import CoterieError, InputError
from coterie.kvindex.directory import KVDirectory
from coterie.wire.framing import REPLAY_END, Frame
from coterie.wire.kv_events import KVEvents, decode_kv_events

Replay = Callable[[int, int], Iterable[Frame]]
"""(worker, first number wanted) → the messages from there on that the engine still has, in order, with or without the
end marker; may raise CoterieError or OSError."""


class Follower:
    """Feeds a directory; `replay` fetches lost messages.

    A caller that must not block leaves `replay` out, calls :meth:`missing` before each message, and hands the
    fetched frames to :meth:`apply_payload` as `replayed`.
    """

    def __init__(self, directory: KVDirectory, replay: Replay | None = None) -> None:
        self.directory = directory
        self._replay = replay
        self._next: list[int | None] = [None] * directory.num_workers

    def missing(self, worker: int, seq: int) -> range:
        """Numbers to fetch before this message can be applied; from 0 for a first message or after a restart."""
        self._check(worker, seq)
        expected = self._next[worker]
        return range(0, seq) if expected is None or seq < expected else range(expected, seq)

    def follow(self, worker: int, seq: int, events: KVEvents, replayed: Iterable[Frame] | None = None) -> None:
        """Apply a message, after the lost ones before it."""
        self._heal(worker, seq, replayed)
        self.directory.apply(worker, events)

    def apply_payload(self, worker: int, seq: int, payload: bytes, replayed: Iterable[Frame] | None = None) -> None:
        """Decode and apply a message; if it cannot be decoded, forget the worker's blocks and count it."""
        self._heal(worker, seq, replayed)
        self._apply(worker, payload)

    def grow(self, num_workers: int) -> None:
        """Make room for more workers, in the directory too."""
        self.directory.grow(num_workers)
        self._next += [None] * (num_workers - len(self._next))

    def drop_worker(self, worker: int) -> None:
        """Forget the blocks of a worker that is gone; the next message under its number counts as a first one."""
        self.directory.drop_worker(worker)
        self._next[worker] = None

    def _heal(self, worker: int, seq: int, replayed: Iterable[Frame] | None) -> None:
        missing, counters, expected = self.missing(worker, seq), self.directory.counters, self._next[worker]
        self._next[worker] = seq + 1
        if expected is not None and seq < expected:
            counters.restarts += 1
            self.directory.drop_worker(worker)
        if not missing:
            return
        found = self._fetch(worker, missing, replayed)
        counters.replayed += len(found)
        if expected is not None:  # before a first message there is nothing to forget
            lost = missing.stop - missing.start - len(found)
            counters.gaps += 1
            counters.lost += lost
            if lost:
                self.directory.forget(worker)
        for frame in found:
            self._apply(worker, frame.payload)

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

    def _apply(self, worker: int, payload: bytes) -> None:
        try:
            events = decode_kv_events(payload)
        except InputError:
            self.directory.counters.undecodable += 1
            self.directory.forget(worker)
        else:
            self.directory.apply(worker, events)

    def _check(self, worker: int, seq: int) -> None:
        if not 0 <= worker < self.directory.num_workers:
            raise InputError(f"worker={worker} must be at least 0 and below num_workers={self.directory.num_workers}")
        if not 0 <= seq < REPLAY_END:
            raise InputError(f"seq={seq} must be at least 0 and below {REPLAY_END}")
