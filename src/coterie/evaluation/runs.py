"""Many simulated runs: in parallel, compared in pairs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

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
    # Spawned, not forked: a progress bar runs in a thread of this process.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def interval(samples: NDArray[np.float64] | Sequence[float]) -> Interval:
    """Mean and 95% interval by Student's t; a single sample is its own interval."""
    values = np.asarray(samples, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, mean, mean)
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)
