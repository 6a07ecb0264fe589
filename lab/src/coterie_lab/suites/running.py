"""Run many simulations in parallel, and print what they come to."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

from coterie.errors import UnavailableError
from coterie.types import Interval

A = TypeVar("A")
B = TypeVar("B")
TRIES = 3
"""Processes that an item may cost before it is given up."""


def in_parallel(work: Callable[[A], B], items: Sequence[A]) -> Iterator[tuple[A, B]]:
    """Yield each item with its result as it completes, one process per core. Stopping early ends the processes.

    An item whose process is killed (out of memory, kill -9) runs again in a fresh process, after the items that have
    not run yet. Items that are given up are named in the error that follows the results of all others.
    """
    workers = min(os.cpu_count() or 1, len(items))
    if workers < 2:
        for item in items:
            yield item, work(item)
        return
    waiting = deque((item, 0) for item in items)
    given_up: list[A] = []
    died: BaseException | None = None
    running: dict[Future[B], tuple[_OneProcess, A, int]] = {}
    processes = [_OneProcess() for _ in range(workers)]
    idle = [*processes]
    try:
        while waiting or running:
            while idle and waiting:
                process, (item, deaths) = idle.pop(), waiting.popleft()
                running[process.start(work, item)] = process, item, deaths
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                process, item, deaths = running.pop(future)
                idle.append(process)
                if not isinstance(future.exception(), BrokenProcessPool):
                    yield item, future.result()
                elif deaths + 1 < TRIES:
                    waiting.append((item, deaths + 1))
                else:
                    given_up.append(item)
                    died = future.exception()
    finally:
        for process in processes:
            process.end()
    if given_up:
        names = ", ".join(map(repr, given_up))
        message = f"the process of {len(given_up)} of {len(items)} runs died {TRIES} times (out of memory?): {names}"
        raise UnavailableError(message) from died


class _OneProcess:
    """A process that runs one item at a time, and is replaced when it dies: its death says which item it had."""

    def __init__(self) -> None:
        self._pool = self._fresh()

    @staticmethod
    def _fresh() -> ProcessPoolExecutor:
        # Spawn, do not fork: a progress bar runs in a thread of this process, and forking with threads can deadlock.
        return ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent)

    def start(self, work: Callable[[A], B], item: A) -> Future[B]:
        try:
            return self._pool.submit(work, item)
        except BrokenProcessPool:
            self._pool = self._fresh()
            return self._pool.submit(work, item)

    def end(self) -> None:
        """Terminate the process, so that an interrupted command ends at once: only Ctrl-C reaches it by itself."""
        for process in list(self._pool._processes.values()):
            process.terminate()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone: kill -9 leaves it no chance to end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def with_half(value: Interval, digits: int = 1) -> str:
    """Format the signed mean ± half of the interval; the mean alone if there is no interval."""
    half = "" if value.low is None or value.high is None else f" ± {(value.high - value.low) / 2:.{digits}f}"
    return f"{value.mean:+.{digits}f}{half}"
