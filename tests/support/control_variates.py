"""A mean from a simulation, with most of what chance did to it taken out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    mean: float
    error: float
    """Standard error."""


def controlled_mean(values: np.ndarray, controls: list[np.ndarray], batches: int = 100) -> Estimate:
    """Mean of [sample] values, given [sample] controls whose true means are 0.

    Samples of a queue depend on each other, so a regression over means of long batches finds how much of the values'
    scatter each control explains; that much of it goes.
    """
    used = len(values) // batches * batches
    mean = values[:used].reshape(batches, -1).mean(axis=1)
    control = np.stack([one[:used].reshape(batches, -1).mean(axis=1) for one in controls], axis=1)
    slopes = np.linalg.lstsq(control - control.mean(axis=0), mean - mean.mean(), rcond=None)[0]
    residual = mean - control @ slopes
    return Estimate(float(residual.mean()), float(residual.std(ddof=1 + len(slopes)) / np.sqrt(batches)))
