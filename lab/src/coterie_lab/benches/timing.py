"""Rows of a benchmark, and the time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def median_us(call: Callable[[], object], repeats: int = 31) -> float:
    """Return the median time of a call, after one that warms up."""
    call()
    return round(1e3 * median_ms([call] * repeats, 6), 3)


def median_ms(calls: Sequence[Callable[[], object]], digits: int = 3) -> float:
    """Return the median time of calls that each do their work anew, such as writing to a folder of their own."""
    samples = []
    for call in calls:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples), digits)
