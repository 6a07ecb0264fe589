"""What a run comes to: goodput, latency, balance, moved bytes, time to recover after a change, the minority's tail."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.sim.fleet.metrics import LatencyLimits

WARM_UP = 0.05
"""Share of the requests, the first to arrive, that are served and not measured."""
WINDOWS = 20
"""Windows of a run, of as many requests each, in which TPOT is kept to see when it recovers after a change."""
LIGHT = 0.5
"""Load at which the limits are set, as a share of what the fleet can serve."""
TTFT_ROOM, TPOT_ROOM = 3.0, 1.25
"""Limits, as multiples of the medians of the shortest queue at half the load that the fleet can serve."""


class Served(NamedTuple):
    """Latencies of a run; arrays are [request] in order of arrival, NaN if the request did not come so far."""

    arrival_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]


class Outcome(NamedTuple):
    """Metrics of a run, over its requests without the first that arrive."""

    goodput: float
    """Requests within both limits, a second of arrivals."""
    within_pct: float
    """Requests within both limits, percent."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    minority_tpot_p99_ms: float
    experts: float
    """Distinct experts of a layer in a step, steps weighted by their tokens."""
    balancedness: float
    """Mean ÷ largest rank's rows of a layer, mean over layers and steps, weighted by tokens; 1 without ranks."""
    moved_gb: float
    tpot_windows_ms: tuple[float, ...]
    """Mean TPOT in windows of the run, from its first request to its last."""
    window_s: float
    """Length of a window, mean."""


def outcome_of(
    served: Served,
    minority: NDArray[np.bool_],
    limits: LatencyLimits,
    experts: float,
    balancedness: float = 1.0,
    moved_bytes: float = 0.0,
) -> Outcome:
    counted = np.arange(len(served.arrival_s)) >= WARM_UP * len(served.arrival_s)
    ttft, tpot = served.ttft_s[counted], served.tpot_s[counted]
    done = np.isfinite(ttft)  # of requests of one token there is no TPOT
    within = (ttft <= limits.ttft_s) & ~(tpot > limits.tpot_s)
    arrival_s = served.arrival_s[counted]
    small = tpot[minority[counted]]
    ttft_ms, tpot_ms, small_ms = (_percentiles(values) for values in (ttft[done], tpot, small))
    return Outcome(
        goodput=float(within.sum() / (arrival_s[-1] - arrival_s[0])),
        within_pct=100.0 * float(within.mean()),
        ttft_p50_ms=ttft_ms[0],
        ttft_p95_ms=ttft_ms[1],
        ttft_p99_ms=ttft_ms[2],
        tpot_p50_ms=tpot_ms[0],
        tpot_p95_ms=tpot_ms[1],
        tpot_p99_ms=tpot_ms[2],
        minority_tpot_p99_ms=small_ms[2],
        experts=experts,
        balancedness=balancedness,
        moved_gb=moved_bytes / 1e9,
        tpot_windows_ms=tuple(1e3 * _mean(part) for part in np.array_split(served.tpot_s, WINDOWS)),
        window_s=float(np.ptp(served.arrival_s)) / WINDOWS,
    )


def _mean(seconds: NDArray[np.float64]) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(known.mean()) if len(known) else math.nan


def _percentiles(seconds: NDArray[np.float64]) -> list[float]:
    """Return the median and the 95th and 99th percentiles in milliseconds; NaN without values."""
    known = seconds[np.isfinite(seconds)]
    percents = np.percentile(known, (50, 95, 99)) if len(known) else np.full(3, math.nan)
    return [1e3 * float(value) for value in percents]


def limits_of(light: Served) -> LatencyLimits:
    """Return the limits from a run of the shortest queue at half the load."""
    ttft, tpot = (values[np.isfinite(values)] for values in (light.ttft_s, light.tpot_s))
    return LatencyLimits(TTFT_ROOM * float(np.median(ttft)), TPOT_ROOM * float(np.median(tpot)))


def capacity(finish_s: NDArray[np.float64]) -> float:
    """Return the requests a second that a fleet serves if all arrive at once, without the first and last fifth."""
    ends = np.sort(finish_s[np.isfinite(finish_s)])
    first, last = len(ends) // 5, 4 * len(ends) // 5
    return (last - first) / float(ends[last] - ends[first])
