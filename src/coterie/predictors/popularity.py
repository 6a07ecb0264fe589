"""Popularity: predict every request as the mean one. The baseline for other predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.predictors.base import Calibrated, Load, PredictRequest, calibrate, predictors
from coterie.traces.activations import ActivationTrace


@predictors.register("popularity")
@dataclass(slots=True, eq=False)
class PopularityPredictor(Calibrated):
    """The mean distribution of the calibration requests, scaled to the request's tokens."""

    name: ClassVar[str] = "popularity"

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> PopularityPredictor:
        self.popularity_ = calibrate(trace, requests, phase)
        return self

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        return self.popularity.scaled(request)
