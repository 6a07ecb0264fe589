"""Statistics of a load: skew, hot experts, imbalance of ranks, similarity of domains.

All of them describe the load summed over the whole trace. A load that is even in sum can be skewed at every moment (see
:mod:`coterie.answers.inspect.drift`). None of the numbers is a step time: docs/inspect.md says when each one matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.answers.inspect.values import number, numbers
from coterie.types import Placement

RANKS = (2, 4, 8, 16, 32)
HOT_EXPERTS = 8

Load = NDArray[np.integer] | NDArray[np.floating]


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
    gini: float | None
    """Gini coefficient over experts: 0 is an even load; near 1, a few experts have nearly all of it."""
    cv: float | None
    """Coefficient of variation: standard deviation ÷ mean over experts."""
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


def gini(load: Load) -> NDArray[np.float64]:
    """Compute the Gini coefficient over experts [layer] of a load [layer, expert]; NaN for a layer without load."""
    ordered = np.sort(np.asarray(load, np.float64), axis=1)
    count, total = ordered.shape[1], ordered.sum(axis=1)
    rank = 2 * np.arange(1, count + 1) - count - 1
    return _ratio(ordered @ rank, count * total)


def layer_loads(load: Load, layer_ids: Sequence[int]) -> list[LayerLoad]:
    """Compute the statistics of each layer of a load [layer, expert]."""
    values = np.asarray(load, np.float64)
    mean, total = values.mean(axis=1), values.sum(axis=1)
    peak, ginis, cv = _ratio(values.max(axis=1), mean), gini(values), _ratio(values.std(axis=1), mean)
    order = np.argsort(-values, axis=1, kind="stable")[:, :HOT_EXPERTS]
    return [
        LayerLoad(
            int(layer_ids[i]),
            number(peak[i]),
            number(ginis[i]),
            number(cv[i]),
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
