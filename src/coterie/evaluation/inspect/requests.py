"""What the request table says: how fast requests arrive, how evenly, how long they are, what they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.inspect.values import number
from coterie.traces.requests import RequestTrace

MAX_BINS = 60
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)
MIN_DISPERSION_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Dispersion:
    window_s: float
    index: float
    """Variance ÷ mean of the arrivals in a window: 1 for Poisson arrivals, more for bursts."""


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    duration_s: float
    mean: float
    """Requests a second."""
    peak: float
    """Of the fullest bin."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson."""
    dispersion: list[Dispersion]
    bin_s: float
    rate: list[float]
    """[bin] requests a second."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the prompts, or of the outputs, of the requests."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    blocks: int
    block_tokens: int
    seen_before: float
    """Share of the blocks that an earlier request (or the same one, earlier) held already."""


def arrival_rate(table: RequestTrace) -> ArrivalRate | None:
    """None without arrival times, or if all came at once."""
    if table.arrival_s is None or table.duration_s <= 0:
        return None
    times = np.sort(table.arrival_s) - table.arrival_s.min()
    span, bins = table.duration_s, int(np.clip(len(times) // 5, 1, MAX_BINS))
    per_bin = np.histogram(times, bins, (0.0, span))[0] * bins / span
    gaps = np.diff(times)
    dispersion = []
    for window in DISPERSION_WINDOWS_S:
        whole = int(span // window)  # the last, cut window is left out
        if MIN_DISPERSION_WINDOWS <= whole <= 10**8:
            counts = np.bincount((times[times < whole * window] / window).astype(np.int64), minlength=whole)
            dispersion.append(Dispersion(window, float(counts.var() / counts.mean())))
    return ArrivalRate(
        duration_s=span,
        mean=(len(times) - 1) / span,
        peak=float(per_bin.max()),
        gap_cv=number(gaps.std() / gaps.mean()),
        dispersion=dispersion,
        bin_s=span / bins,
        rate=[float(v) for v in per_bin],
    )


def lengths(tokens: NDArray[np.int64]) -> Lengths | None:
    """None if none is above 0: that side was not recorded."""
    if not len(tokens) or not tokens.any():
        return None
    p50, p90, p95, p99 = (float(v) for v in np.percentile(tokens, [50, 90, 95, 99]))
    return Lengths(mean=float(tokens.mean()), p50=p50, p90=p90, p95=p95, p99=p99, longest=int(tokens.max()))


def prefix_sharing(table: RequestTrace) -> PrefixSharing | None:
    """None where no prefix blocks were recorded."""
    if table.prefix_blocks is None or table.block_tokens is None:
        return None
    blocks = np.concatenate([np.empty(0, np.int64), *table.prefix_blocks])
    if not len(blocks):
        return None
    return PrefixSharing(len(blocks), table.block_tokens, 1.0 - len(np.unique(blocks)) / len(blocks))
