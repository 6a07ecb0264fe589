"""TTFT and TPOT of the last minutes, in a ring of time bins, for the dashboard's charts.

A bin counts its values in a histogram with steps of 5%, so that medians and 95th percentiles are accurate to 2.5% and
the memory of a bin does not grow with its requests. The time is passed in, in seconds since 1970.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from coterie.errors import check_at_least, check_positive

CLIENT_GONE = 499
"""Status of a request whose client disconnected."""
STEP = math.log(1.05)
SHORTEST_S, LONGEST_S = 1e-6, 1e5
"""Shortest and longest time in seconds; times outside are clipped to them."""


class Times:
    """A histogram of times with logarithmic steps of 5%."""

    __slots__ = ("_counts", "_quantiles")

    def __init__(self, parts: Iterable[Times] = ()) -> None:
        """Make a histogram of all values of `parts`."""
        self._counts: Counter[int] = Counter()
        for part in parts:
            self._counts.update(part._counts)
        self._quantiles: tuple[int, dict[str, float | None]] = (-1, {})
        """Cache of the quantiles, with the number of values they were computed from: most bins no longer change."""

    def add(self, seconds: float) -> None:
        if seconds == seconds:
            self._counts[round(math.log(min(max(seconds, SHORTEST_S), LONGEST_S)) / STEP)] += 1

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

    def quantiles(self) -> dict[str, float | None]:
        """Return the median and 95th percentile in milliseconds; None without values."""
        if self._quantiles[0] != len(self):
            seconds = {"p50": self.quantile(0.5), "p95": self.quantile(0.95)}
            rounded = {name: None if value is None else float(f"{1e3 * value:.4g}") for name, value in seconds.items()}
            self._quantiles = (len(self), rounded)
        return self._quantiles[1]


class Bin:
    """Counts and times of the requests that ended within one time bin."""

    __slots__ = ("ended", "failed", "number", "output_tokens", "refused", "tpot", "ttft")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = self.failed = self.refused = self.output_tokens = 0
        self.ttft, self.tpot = Times(), Times()


class Recent:
    """Ring of the last time bins; adding a request takes a microsecond."""

    def __init__(self, bins: int = 60, bin_s: float = 5.0) -> None:
        check_at_least(2, bins=bins)
        check_positive(bin_s=bin_s)
        self.bins, self.bin_s = bins, bin_s
        self._ring: deque[Bin] = deque(maxlen=bins)

    def add(
        self,
        now_s: float,
        status: int,
        cut: bool = False,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        output_tokens: int = 0,
    ) -> None:
        """Record the end of a request. If the clock went back, it counts in the newest bin.

        It failed with a 5xx, or if its answer was `cut`. A 4xx is refused: its sender, not the fleet, is at fault.
        A client that left counts as neither.
        """
        number = int(now_s // self.bin_s)
        if not self._ring or number > self._ring[-1].number:
            self._ring.append(Bin(number))
        newest = self._ring[-1]
        newest.ended += 1
        newest.failed += cut or status >= 500
        newest.refused += not cut and 400 <= status < CLIENT_GONE
        newest.output_tokens += output_tokens
        if ttft_s is not None:
            newest.ttft.add(ttft_s)
        if tpot_s is not None:
            newest.tpot.add(tpot_s)

    def series(self, now_s: float) -> dict[str, Any]:
        """Return lists [bin], oldest first, current bin last: requests ended, failed and refused, and times in ms.

        Times are None in bins without values.
        """
        last = int(now_s // self.bin_s)
        known = {bin.number: bin for bin in self._ring}
        bins = [known.get(number) or Bin(number) for number in range(last - self.bins + 1, last + 1)]
        return {
            "bin_s": self.bin_s,
            "ended": [bin.ended for bin in bins],
            "failed": [bin.failed for bin in bins],
            "refused": [bin.refused for bin in bins],
            "ttft_ms": _columns([bin.ttft for bin in bins]),
            "tpot_ms": _columns([bin.tpot for bin in bins]),
        }

    def over(self, now_s: float, seconds: float) -> dict[str, Any]:
        """Return totals and quantiles of the requests that ended in the last `seconds`, including the current bin."""
        last = int(now_s // self.bin_s)
        bins = [bin for bin in self._ring if last - seconds / self.bin_s < bin.number <= last]
        return {
            "seconds": seconds,
            "ended": sum(bin.ended for bin in bins),
            "failed": sum(bin.failed for bin in bins),
            "refused": sum(bin.refused for bin in bins),
            "output_tokens": sum(bin.output_tokens for bin in bins),
            "ttft_ms": Times(bin.ttft for bin in bins).quantiles(),
            "tpot_ms": Times(bin.tpot for bin in bins).quantiles(),
        }


def _columns(times: Sequence[Times]) -> dict[str, list[float | None]]:
    rows = [bin_times.quantiles() for bin_times in times]
    return {name: [row[name] for row in rows] for name in ("p50", "p95")}
