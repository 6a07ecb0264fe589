"""Ranks of test items: dealt in turn, or by what is known of them, every rank with its share.

Reference schedules for measuring local activations. An item's score on a rank is the activations expected there.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

FEW_PAIRS = 8


def aligned(scores: Array, num_batches: int) -> NDArray[np.int64]:
    """[token] ranks from scores [token, rank], batch by batch: those with the most to lose choose first, and every
    rank gets an equal number of a batch's tokens (one more or less where they do not divide)."""
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
    """[token, rank] activations expected in a layer after the ranks with most activations in the two layers before.

    From activations [token, layer, rank] of fitted tokens; a pair of ranks seen FEW_PAIRS times counts half, the
    average token the rest.
    """
    ranks = fitted.shape[2]
    before, after = (_pairs(side, layer) for side in (fitted, tested))
    here = fitted[:, layer]
    seen = np.bincount(before, minlength=ranks * ranks)
    sums = np.stack([np.bincount(before, here[:, rank], ranks * ranks) for rank in range(ranks)], axis=1)
    table = (sums + FEW_PAIRS * here.mean(axis=0)) / (seen + FEW_PAIRS)[:, None]
    return np.asarray(table[after], np.float64)


def _pairs(activations: Array, layer: int) -> NDArray[np.int64]:
    ranks = activations.shape[2]
    last, second = activations[:, layer - 1].argmax(axis=1), activations[:, max(layer - 2, 0)].argmax(axis=1)
    return np.asarray(second * ranks + last, np.int64)


def surer(one: Array, other: Array) -> NDArray[np.float64]:
    """[token, rank] of two expectations, for each token the one with the higher peak."""
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
