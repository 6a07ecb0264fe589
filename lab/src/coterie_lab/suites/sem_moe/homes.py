"""Reference schedules for measuring local activations: ranks of test items, with equal shares of every rank.

An item's score on a rank is the activations expected there.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

FEW_PAIRS = 8


def aligned(scores: Array, num_batches: int) -> NDArray[np.int64]:
    """Choose ranks [token] by scores [token, rank], batch by batch: the tokens with the most to lose choose first, and
    every rank gets an equal number of a batch's tokens (one more or less if they do not divide)."""
    tokens, ranks = scores.shape
    homes = np.empty(tokens, np.int64)
    size = tokens // num_batches
    ordered = np.sort(scores, axis=1)
    regret = ordered[:, -1] - ordered[:, -2] if ranks > 1 else np.zeros(tokens)
    batch = np.minimum(np.arange(tokens) // max(size, 1), num_batches - 1)
    order = np.lexsort((-regret, batch))
    _choose(np.ascontiguousarray(scores, np.float64), order, batch, -(-size // ranks), homes)
    return homes


def after_ranks(fitted: Array, tested: Array, layer: int) -> NDArray[np.float64]:
    """Expect activations in a layer from the ranks with most activations in the two layers before: [token, rank].

    Learned from activations [token, layer, rank] of fitted tokens; a pair of ranks seen FEW_PAIRS times counts half,
    the average token the rest.
    """
    ranks = fitted.shape[2]
    before, after = (_pairs(side, layer) for side in (fitted, tested))
    own = fitted[:, layer]
    seen = np.bincount(before, minlength=ranks * ranks)
    sums = np.stack([np.bincount(before, own[:, rank], ranks * ranks) for rank in range(ranks)], axis=1)
    table = (sums + FEW_PAIRS * own.mean(axis=0)) / (seen + FEW_PAIRS)[:, None]
    return np.asarray(table[after], np.float64)


def _pairs(activations: Array, layer: int) -> NDArray[np.int64]:
    ranks = activations.shape[2]
    last, second = activations[:, layer - 1].argmax(axis=1), activations[:, max(layer - 2, 0)].argmax(axis=1)
    return np.asarray(second * ranks + last, np.int64)


def surer(one: Array, other: Array) -> NDArray[np.float64]:
    """Take for each token the expectation [token, rank] with the higher peak."""
    return np.where((one.max(axis=1) >= other.max(axis=1))[:, None], one, other)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _choose(
    scores: NDArray[np.float64],
    order: NDArray[np.int64],
    batch: NDArray[np.int64],
    share: int,
    homes: NDArray[np.int64],
) -> None:
    ranks = scores.shape[1]
    taken = np.zeros(ranks, np.int64)
    now = -1
    for item in order:
        if batch[item] != now:
            now = batch[item]
            taken[:] = 0
        best = -1
        for rank in range(ranks):
            if taken[rank] < share and (best < 0 or scores[item, rank] > scores[item, best]):
                best = rank
        homes[item] = best
        taken[best] += 1
