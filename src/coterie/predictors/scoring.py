"""Split of requests for fitting and testing a predictor, and the cosine of its predictions with recorded loads.

Requests that share text (a group) are not independent: a split keeps them on one side.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import check

TEST_SHARE = 0.3
"""Share of request groups used for testing; the others are for calibration."""

Loads = NDArray[np.floating] | NDArray[np.integer]


def split_groups(
    groups: Sequence[Hashable], rng: Generator, test_share: float = TEST_SHARE
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split requests into indices for calibration and for testing, by whole groups; `test_share` of them test."""
    names = list(dict.fromkeys(groups))
    check(len(names) >= 2, f"{len(groups)} requests share {len(names)} prompt: there is nothing to calibrate on")
    count = min(len(names) - 1, max(1, round(test_share * len(names))))
    chosen = {names[i] for i in rng.permutation(len(names))[:count]}
    test = np.array([group in chosen for group in groups])
    return np.flatnonzero(~test), np.flatnonzero(test)


def cosine(predicted: Loads, truth: Loads) -> NDArray[np.float64]:
    """Compute the cosine [request, layer] of two loads [request, layer, expert]; 0 where nothing was predicted."""
    one, other = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
    norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    dots = (one * other).sum(axis=-1)
    return np.asarray(np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0))
