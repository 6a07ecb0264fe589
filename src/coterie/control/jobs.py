"""A re-fit that runs in the background: all that it needs, and nothing that can change meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.footprints.signatures import Weighting
from coterie.routing import Calibration, RouterFit


@dataclass(frozen=True, slots=True, eq=False)
class FitJob:
    """Fit a router to given requests. Pure and picklable: the same job gives the same fit in any process."""

    calibration: Calibration
    workers: int
    batch: int
    seed: int
    weighting: Weighting = "count_idf"
    like: NDArray[np.float32] | None = None
    """[worker, expert index] profiles of the fit in force. Clusters go to the workers whose profiles they resemble, so
    that a swap moves as little traffic as possible."""

    def run(self) -> RouterFit:
        everywhere = bool((self.calibration.prefill > 0).all())  # count_idf then tells no two requests apart
        fit = RouterFit(self.workers, self.batch, "count" if everywhere else self.weighting)
        fit.fit(self.calibration, np.random.default_rng([self.seed, 17]))
        if self.like is not None and self.like.shape == fit.profiles.shape:
            _reorder(fit, self.like)
        return fit


def _reorder(fit: RouterFit, like: NDArray[np.float32]) -> None:
    """Give each worker the cluster nearest to its old profile, all together."""
    learned = fit.learned
    distance = ((like**2).sum(axis=1)[:, None] + (learned.profiles**2).sum(axis=1)) - 2 * like @ learned.profiles.T
    rows = linear_sum_assignment(distance)[1]
    fit.learned_ = learned.changed(
        centroids=learned.centroids[rows], profiles=learned.profiles[rows], shares=learned.shares[rows]
    )
