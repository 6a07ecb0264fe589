"""Attention-DP: assign requests to ranks by score, in rounds that keep the ranks' loads even.

Where attention is data parallel, a request has one rank for all layers. It should be the rank that holds most of its
experts, but a rank that many requests prefer would be overloaded. So requests are assigned in rounds, as in Sem-MoE's
algorithm: a rank has one turn a round, and a request takes the best rank whose turn is left.

It is wrong where requests differ so much in work that equal numbers of them are no balance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import check


def schedule_requests(scores: ArrayLike) -> NDArray[np.int64]:
    """Return the rank of each request, in the order given, by `scores` [request, rank]; ties go to the first rank."""
    values = np.array(scores, np.float64)
    check(
        values.ndim == 2 and values.shape[1],
        f"scores has shape {values.shape}; it must be [request, rank] with at least one rank",
    )
    check(np.isfinite(values).all(), "scores must be finite numbers")
    requests, ranks = values.shape
    chosen = np.empty(requests, np.int64)
    for first in range(0, requests, ranks):
        left = np.ones(ranks, np.bool_)
        for request in range(first, min(first + ranks, requests)):
            chosen[request] = np.argmax(np.where(left, values[request], -np.inf))
            left[chosen[request]] = False
    return chosen
