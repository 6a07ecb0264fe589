"""Statistics of a load (skew, hot experts, imbalance of ranks, similarity of domains) and of a request table.

Statistics of a load describe the load summed over the whole trace. A load that is even in sum can be skewed at every
moment (see :mod:`coterie.answers.inspect.drift`). None of the numbers is a step time: docs/inspect.md says when each
one matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from coterie.traces import RequestTrace
from coterie.types import Placement

RANKS = (2, 4, 8, 16, 32)
HOT_EXPERTS = 8

Load = NDArray[np.integer] | NDArray[np.floating]


def number(value: SupportsFloat) -> float | None:
    """Return a Python float, or None if the value is not finite: JSON has no NaN."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def numbers(values: Iterable[SupportsFloat]) -> list[float | None]:
    return [number(v) for v in values]


@dataclass(frozen=True, slots=True)
class HotExpert:
    expert: int
    share: float
    """Share of the layer's activations."""


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """Load statistics of one MoE layer; None if the layer has no load."""

    layer: int
    """Layer index in the model, dense layers included; the row in the trace if the trace has no layer ids."""
    max_over_mean: float | None
    hot: list[HotExpert]
    """Up to 8 most loaded experts, hottest first."""


@dataclass(frozen=True, slots=True)
class RankImbalance:
    """Imbalance of the rank loads under linear placement: expert e in slot e, equal blocks of slots per rank."""

    ranks: int
    mean: float | None
    """Imbalance (max ÷ mean rank load), mean over layers; 1 is even."""
    median: float | None
    worst: float | None
    """Largest imbalance of a layer; `median` is the median over layers."""
    per_layer: list[float | None]

    @property
    def most_gain(self) -> float | None:
        """Share of the busiest rank's load that a perfectly even placement would remove: 1 - 1 / mean imbalance."""
        return None if self.mean is None else 1.0 - 1.0 / self.mean


@dataclass(frozen=True, slots=True)
class DomainSimilarity:
    domains: list[str]
    """Domains with the most tokens, largest first."""
    tokens: list[float]
    """[domain] tokens, or for a load table without token counts, activations of its first layer."""
    left_out: int
    """Number of domains left out."""
    cosine: list[list[float | None]]
    """[domain, domain] cosine similarity of the domains' loads over all layers."""
    mean: float | None
    """Mean cosine over pairs of different domains; `least` is the smallest."""
    least: float | None


def layer_loads(load: Load, layer_ids: Sequence[int]) -> list[LayerLoad]:
    """Compute the statistics of each layer of a load [layer, expert]."""
    values = np.asarray(load, np.float64)
    peak, total = _ratio(values.max(axis=1), values.mean(axis=1)), values.sum(axis=1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :HOT_EXPERTS]
    return [
        LayerLoad(
            int(layer_ids[i]),
            number(peak[i]),
            [HotExpert(int(e), float(values[i, e] / total[i])) for e in order[i] if values[i, e] > 0],
        )
        for i in range(len(values))
    ]


def rank_imbalances(load: Load) -> list[RankImbalance]:
    """Compute the imbalance for each number in RANKS that divides the number of experts."""
    layers, experts = load.shape
    out = []
    for ranks in (r for r in RANKS if experts % r == 0):
        per_rank = Placement.linear(layers, experts, ranks).rank_load(load)  # [layer, rank]
        skew = _ratio(per_rank.max(axis=1), per_rank.mean(axis=1))
        known = skew[np.isfinite(skew)]
        mean, median, worst = (float(f(known)) if len(known) else None for f in (np.mean, np.median, np.max))
        out.append(RankImbalance(ranks, mean, median, worst, numbers(skew)))
    return out


def domain_similarity(loads: Load, names: Sequence[str], tokens: Sequence[float], left_out: int) -> DomainSimilarity:
    """Compute the cosine similarities of loads [domain, layer, expert]."""
    flat = np.asarray(loads, np.float64).reshape(len(loads), -1)
    length = np.sqrt((flat * flat).sum(axis=1))
    cosine = _ratio(flat @ flat.T, np.outer(length, length))
    apart = cosine[np.triu_indices(len(flat), 1)]
    apart = apart[np.isfinite(apart)]
    return DomainSimilarity(
        domains=list(names),
        tokens=[float(t) for t in tokens],
        left_out=left_out,
        cosine=[numbers(np.minimum(row, 1.0)) for row in cosine],
        mean=number(apart.mean()) if len(apart) else None,
        least=number(apart.min()) if len(apart) else None,
    )


def _ratio(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.full(a.shape, np.nan)
    np.divide(a, b, out=out, where=b > 0)
    return out


# Statistics of the request table: arrival rate, burstiness, lengths and shared prefixes.

MAX_BINS = 60
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)
MIN_DISPERSION_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Dispersion:
    window_s: float
    index: float
    """Variance ÷ mean of the number of arrivals per window: 1 for Poisson arrivals, more for bursts."""


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    duration_s: float
    mean: float
    """Mean rate, requests per second."""
    peak: float
    """Rate in the fullest bin, requests per second."""
    gap_cv: float | None
    """Coefficient of variation of the times between arrivals; 1 for Poisson arrivals."""
    dispersion: list[Dispersion]
    bin_s: float
    rate: list[float]
    """[bin] requests per second."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Distribution of the tokens per prompt, or per output."""

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
    """Share of the prefix blocks that occurred before, in an earlier request or earlier in the same request."""


def arrival_rate(table: RequestTrace) -> ArrivalRate | None:
    """Compute the arrival statistics; None without arrival times, or if all requests arrive at once."""
    if table.arrival_s is None or table.duration_s <= 0:
        return None
    times = np.sort(table.arrival_s) - table.arrival_s.min()
    span, bins = table.duration_s, int(np.clip(len(times) // 5, 1, MAX_BINS))
    per_bin = np.histogram(times, bins, (0.0, span))[0] * bins / span
    gaps = np.diff(times)
    dispersion = []
    for window in DISPERSION_WINDOWS_S:
        whole = int(span // window)  # the last, incomplete window is left out
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
        rate=per_bin.tolist(),
    )


def lengths(tokens: NDArray[np.int64]) -> TokenLengths | None:
    """Compute the distribution of `tokens` [request]; None if all are 0, which means not recorded."""
    if not len(tokens) or not tokens.any():
        return None
    p50, p90, p95, p99 = (float(v) for v in np.percentile(tokens, [50, 90, 95, 99]))
    return TokenLengths(float(tokens.mean()), p50, p90, p95, p99, int(tokens.max()))


def prefix_sharing(table: RequestTrace) -> PrefixSharing | None:
    """Compute how many prefix blocks repeat; None if no prefix blocks were recorded."""
    if table.prefix_blocks is None or table.block_tokens is None:
        return None
    blocks = np.concatenate([np.empty(0, np.int64), *table.prefix_blocks])
    if not len(blocks):
        return None
    return PrefixSharing(len(blocks), table.block_tokens, 1.0 - len(np.unique(blocks)) / len(blocks))
