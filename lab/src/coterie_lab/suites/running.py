"""Run many simulations in parallel, and print what they come to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

from coterie.types import Interval

A = TypeVar("A")
B = TypeVar("B")


def in_parallel(work: Callable[[A], B], items: Sequence[A]) -> Iterator[tuple[A, B]]:
    """Yield each item with its result as it completes, one process per core. Stopping early cancels the rest."""
    workers = min(os.cpu_count() or 1, len(items))
    if workers < 2:
        for item in items:
            yield item, work(item)
        return
    # Spawn, do not fork: a progress bar runs in a thread of this process, and forking with threads can deadlock.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        # Terminate the workers, so that an interrupted command ends at once: only Ctrl-C reaches them by itself.
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def with_half(value: Interval, digits: int = 1) -> str:
    """Format the signed mean ± half of the interval; the mean alone if there is no interval."""
    half = "" if value.low is None or value.high is None else f" ± {(value.high - value.low) / 2:.{digits}f}"
    return f"{value.mean:+.{digits}f}{half}"
