"""A load before and after a drift: the workload on which placement planners are compared.

Popularity is Zipf's, in a new random order in each layer. Between two windows every expert's popularity is scaled by
a lognormal factor, and a tenth of the experts, drawn at random, exchange theirs. Unlike real drift,
which moves related experts together: see `coterie evaluate latency-optimal` for real loads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_share


class Drift(NamedTuple):
    """Two windows, [layer, expert] tokens each."""

    before: NDArray[np.float64]
    after: NDArray[np.float64]


def zipf_drift(
    layers: int,
    experts: int,
    rng: Generator,
    *,
    exponent: float = 1.0,
    sigma: float = 0.3,
    shuffled: float = 0.1,
    tokens: float = 1e6,
) -> Drift:
    """`tokens` tokens a layer and window, before and after a drift."""
    if layers < 1 or experts < 1:
        raise ConfigError(f"layers={layers} and experts={experts} must be at least 1")
    check_share(shuffled=shuffled)
    popularity = np.arange(1, experts + 1) ** -exponent
    before = rng.permuted(np.tile(popularity, (layers, 1)), axis=1)
    after = before * rng.lognormal(0.0, sigma, before.shape)
    count = round(shuffled * experts)
    for row in after:
        chosen = rng.choice(experts, count, replace=False)
        row[chosen] = row[rng.permutation(chosen)]
    return Drift(*(window / window.sum(axis=1, keepdims=True) * tokens for window in (before, after)))
