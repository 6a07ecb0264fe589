"""Popularity: every request is the average one. The floor that any other predictor must pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.predictors.base import Load, Popularity, PredictRequest, calibrate, fitted, predictors
from coterie.traces.activations import ActivationTrace


@predictors.register("popularity")
@dataclass(slots=True, eq=False)
class PopularityPredictor:
    """The mean distribution of the calibration requests, scaled to the request's tokens."""

    popularity_: Popularity | None = field(default=None, init=False, repr=False)

    @property
    def popularity(self) -> Popularity:
        return fitted(self.popularity_, "popularity")

    @property
    def num_layers(self) -> int:
        return self.popularity.num_layers

    @property
    def num_experts(self) -> int:
        return self.popularity.num_experts

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> PopularityPredictor:
        self.popularity_ = calibrate(trace, requests, phase)
        return self

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        return self.popularity.scaled(request)
