"""Predictors: the load a request will bring, before it runs, and how near they come. See docs/predictors.md."""

from coterie.predictors.base import FittablePredictor, Predictor, PredictRequest, per_step, predictors
from coterie.predictors.domain import DomainPredictor
from coterie.predictors.popularity import PopularityPredictor
from coterie.predictors.prefix import Prefix
from coterie.predictors.recorded import Recorded
from coterie.predictors.scoring import Interval, Measure, Score, score
from coterie.predictors.token_table import TokenTable

__all__ = [
    "DomainPredictor", "FittablePredictor", "Interval", "Measure", "PopularityPredictor", "PredictRequest", "Predictor",
    "Prefix", "Recorded", "Score", "TokenTable", "per_step", "predictors", "score",
]  # fmt: skip
