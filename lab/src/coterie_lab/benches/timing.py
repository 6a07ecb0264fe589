"""Rows of a benchmark, and the time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def median_us(call: Callable[[], object], repeats: int = 31) -> float:
    """Median time of a call, after one that warms up."""
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(samples), 3)
