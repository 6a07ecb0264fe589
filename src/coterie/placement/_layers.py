"""Layers side by side. They share nothing, so how many threads work on them does not change a result.

Threads, not Numba's parallel loops: those take three times as long to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
from numpy.typing import NDArray

TURNS = 4
"""Parts of the layers that a thread takes one after the other, since some layers take longer than others."""


def over_layers(work: Callable[[NDArray[np.int64]], None], layers: int) -> None:
    """Call compiled `work` with every layer's index once, some in each call."""
    threads = min(numba.get_num_threads(), layers)
    if threads == 1:
        work(np.arange(layers))
        return
    parts = min(layers, threads * TURNS)
    list(_pool(threads).map(work, [np.arange(first, layers, parts) for first in range(parts)]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="coterie-placement")
