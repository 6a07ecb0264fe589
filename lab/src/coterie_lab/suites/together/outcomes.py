"""What a run comes to: goodput, latency, balance, moved bytes, time to recover after a change, the minority's tail."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.sim.fleet.metrics import LatencyLimits

WARM_UP = 0.05
"""Share of the requests, the first to arrive, that are served and not measured."""
WINDOW = 50
"""Requests in a window of the time to recover."""
RECOVERED = 1.05
"""A window has recovered when its TPOT is at most this many times the TPOT before the change."""
LIGHT = 0.5
"""Load at which the limits are set, as a share of what the fleet can serve."""
TTFT_ROOM, TPOT_ROOM = 2.0, 1.25
"""Limits, as multiples of the 95th percentiles of the shortest queue at half the load that the fleet can serve."""


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
    recovered_s: float
    """Seconds after an abrupt change from which on TPOT is back, beside a run that the change does not touch; NaN
    without one, infinite if it does not come back."""


def outcome_of(
    served: Served,
    minority: NDArray[np.bool_],
    limits: LatencyLimits,
    experts: float,
    balancedness: float = 1.0,
    moved_bytes: float = 0.0,
    recovered_s: float = math.nan,
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
        recovered_s=recovered_s,
    )


def _percentiles(seconds: NDArray[np.float64]) -> list[float]:
    """Return the median and the 95th and 99th percentiles in milliseconds; NaN without values."""
    known = seconds[np.isfinite(seconds)]
    percents = np.percentile(known, (50, 95, 99)) if len(known) else np.full(3, math.nan)
    return [1e3 * float(value) for value in percents]


def limits_of(light: Served) -> LatencyLimits:
    """Return the limits from a run of the shortest queue at half the load."""
    ttft, tpot = (values[np.isfinite(values)] for values in (light.ttft_s, light.tpot_s))
    return LatencyLimits(TTFT_ROOM * float(np.percentile(ttft, 95)), TPOT_ROOM * float(np.percentile(tpot, 95)))


def recovered_s(served: Served, beside: Served, shift: int) -> float:
    """Return the seconds after request `shift` from which on TPOT is within 5% of that before the change.

    TPOT is taken in windows of requests, as a multiple of the same requests' TPOT in the run `beside`: arrivals come in
    waves, which a run alone does not tell from a change. Infinite if the last window has not recovered.
    """
    with np.errstate(invalid="ignore"):
        ratio = served.tpot_s / beside.tpot_s
    first = round(WARM_UP * len(ratio))
    steady = float(np.nanmean(ratio[first:shift]))
    starts = np.arange(shift, len(ratio) - WINDOW + 1, WINDOW)
    late = [float(np.nanmean(ratio[at : at + WINDOW])) > RECOVERED * steady for at in starts]
    if late and late[-1]:
        return math.inf
    back = shift if not any(late) else int(starts[np.flatnonzero(late)[-1]]) + WINDOW
    return float(served.arrival_s[back] - served.arrival_s[shift])


def capacity(finish_s: NDArray[np.float64]) -> float:
    """Return the requests a second that a fleet serves if all arrive at once, without the first and last fifth."""
    ends = np.sort(finish_s[np.isfinite(finish_s)])
    first, last = len(ends) // 5, 4 * len(ends) // 5
    return (last - first) / float(ends[last] - ends[first])
