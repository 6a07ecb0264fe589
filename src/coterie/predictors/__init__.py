"""Predictors: estimates of a request's load before it runs. See docs/predictors.md."""

from coterie.predictors.base import FittablePredictor, Predictor, PredictRequest, per_step, predictors
from coterie.predictors.means import DomainPredictor, PopularityPredictor, RecordedLoads
from coterie.predictors.prefix import Prefix
from coterie.predictors.recent import RecentPopularity
from coterie.predictors.similar import PrefixIndex, SimilarPrefix
from coterie.predictors.token_table import TokenTable
from coterie.predictors.transitions import RankTransitions
from coterie.registry import import_modules

import_modules(__name__)  # importing a module registers its predictors

__all__ = [
    "DomainPredictor",
    "FittablePredictor",
    "PopularityPredictor",
    "PredictRequest",
    "Predictor",
    "Prefix",
    "PrefixIndex",
    "RankTransitions",
    "RecentPopularity",
    "RecordedLoads",
    "SimilarPrefix",
    "TokenTable",
    "per_step",
    "predictors",
]
