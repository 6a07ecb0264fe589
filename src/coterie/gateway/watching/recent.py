"""TTFT and TPOT of the last minutes, in a ring of time bins, for the dashboard's charts.

A bin counts its values in a histogram with steps of 5%, so that medians and 95th percentiles are accurate to 2.5% and
the memory of a bin does not grow with its requests. The time is passed in, in seconds since 1970.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from coterie.errors import check_at_least, check_positive

STEP = math.log(1.05)
SHORTEST_S, LONGEST_S = 1e-6, 1e5
"""Shortest and longest time in seconds; times outside are clipped to them."""


class Times:
    """A histogram of times with logarithmic steps of 5%."""

    __slots__ = ("_counts", "_told")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._told: tuple[int, dict[str, float | None]] = (-1, {})
        """Cache of the quantiles, with the number of values they were computed from: most bins no longer change."""

    def add(self, seconds: float) -> None:
        if seconds == seconds:
            self._counts[round(math.log(min(max(seconds, SHORTEST_S), LONGEST_S)) / STEP)] += 1

    def merge(self, other: Times) -> None:
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return self._counts.total()

    def quantile(self, share: float) -> float | None:
        """Return the time in seconds that a `share` of the values does not exceed, to 2.5%; None without values."""
        left = share * len(self)
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0:
                return math.exp(step * STEP)
        return None

    def told(self) -> dict[str, float | None]:
        """Return the median and 95th percentile in milliseconds; None without values."""
        if self._told[0] != len(self):
            found = {"p50": self.quantile(0.5), "p95": self.quantile(0.95)}
            told = {name: None if value is None else float(f"{1e3 * value:.4g}") for name, value in found.items()}
            self._told = (len(self), told)
        return self._told[1]


class Bin:
    """Counts and times of the requests that ended within one time bin."""

    __slots__ = ("failed", "number", "ok", "output_tokens", "tpot", "ttft")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ok = self.failed = self.output_tokens = 0
        self.ttft, self.tpot = Times(), Times()


class Recent:
    """Ring of the last time bins; adding a request takes a microsecond."""

    def __init__(self, bins: int = 60, bin_s: float = 5.0) -> None:
        check_at_least(2, bins=bins)
        check_positive(bin_s=bin_s)
        self.bins, self.bin_s = bins, bin_s
        self._ring: deque[Bin] = deque(maxlen=bins)

    def add(self, now_s: float, ok: bool, ttft_s: float | None, tpot_s: float | None, output_tokens: int = 0) -> None:
        """Record the end of a request. If the clock went back, it counts in the newest bin."""
        number = int(now_s // self.bin_s)
        if not self._ring or number > self._ring[-1].number:
            self._ring.append(Bin(number))
        newest = self._ring[-1]
        if ok:
            newest.ok += 1
        else:
            newest.failed += 1
        newest.output_tokens += output_tokens
        if ttft_s is not None:
            newest.ttft.add(ttft_s)
        if tpot_s is not None:
            newest.tpot.add(tpot_s)

    def series(self, now_s: float) -> dict[str, Any]:
        """Return lists [bin], oldest first, current bin last: requests ended, requests failed, and times in ms.

        Times are None in bins without values.
        """
        last = int(now_s // self.bin_s)
        known = {one.number: one for one in self._ring}
        found = [known.get(number) for number in range(last - self.bins + 1, last + 1)]
        return {
            "bin_s": self.bin_s,
            "ended": [0 if one is None else one.ok + one.failed for one in found],
            "failed": [0 if one is None else one.failed for one in found],
            "ttft_ms": _columns(None if one is None else one.ttft for one in found),
            "tpot_ms": _columns(None if one is None else one.tpot for one in found),
        }

    def over(self, now_s: float, seconds: float) -> dict[str, Any]:
        """Return totals and quantiles of the requests that ended in the last `seconds`, including the current bin."""
        last = int(now_s // self.bin_s)
        bins = [one for one in self._ring if last - seconds / self.bin_s < one.number <= last]
        ttft, tpot = Times(), Times()
        for one in bins:
            ttft.merge(one.ttft)
            tpot.merge(one.tpot)
        return {
            "seconds": seconds,
            "ended": sum(one.ok + one.failed for one in bins),
            "failed": sum(one.failed for one in bins),
            "output_tokens": sum(one.output_tokens for one in bins),
            "ttft_ms": ttft.told(),
            "tpot_ms": tpot.told(),
        }


def _columns(bins: Iterable[Times | None]) -> dict[str, list[float | None]]:
    told = [None if one is None or not len(one) else one.told() for one in bins]
    return {name: [None if one is None else one[name] for one in told] for name in ("p50", "p95")}
