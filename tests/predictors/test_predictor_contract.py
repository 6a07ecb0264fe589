"""Every built-in predictor keeps the contract that one of others is held to; one that breaks it is told how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.predictors import PopularityPredictor, PredictRequest, predictors
from coterie.testing import check_predictor


@pytest.mark.parametrize("name", predictors.names())
def test_built_in(name: str) -> None:
    check_predictor(lambda: predictors.make(name))


class FitsNothing(PopularityPredictor):
    def fit(self, *asked: Any) -> Any:
        super().fit(*asked)


class FitsWhenMade(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        return np.zeros((2, 6)) if self.popularity_ is None else super().predict(request)


class TooMuch(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        return 1.01 * super().predict(request)


class Same(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        if not hasattr(self, "kept"):
            self.kept: dict[str, Any] = {}
        return self.kept.setdefault(str(request), super().predict(request))


class Changes(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        found = super().predict(request)
        if request.footprint is not None:
            request.footprint[:] = 0
        return found


class Draws(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        return np.random.default_rng().permutation(super().predict(request).T).T.copy()


class ByName(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        found = super().predict(request)
        return found if request.id is None else found[:, ::-1].copy()


class TakesAll(PopularityPredictor):
    def predict(self, request: PredictRequest) -> Any:
        try:
            return super().predict(request)
        except ConfigError:
            if self.popularity_ is None:
                raise
            return np.zeros((2, 6))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (object, "object has no fit"),
        (FitsNothing, "fit must return the predictor itself; it returned None"),
        (FitsWhenMade, "predict before fit.* must raise NotFittedError; it raised nothing"),
        (TooMuch, "layers sum to .* expected tokens=1 x top_k=2"),
        (Same, "a second call gave another load"),
        (Changes, "predict changed footprint"),
        (Draws, "a second call gave another load"),
        (ByName, "an unknown id and domain must be predicted as if they were not given"),
        (TakesAll, "a footprint of another model must be refused; it raised nothing"),
    ],
)
def test_what_is_wrong_is_said(kind: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_predictor(kind)
