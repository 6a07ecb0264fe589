"""Scores of a predictor against recorded loads.

Cosine compares the distribution of the load, not its size. Recall covers the few experts that matter most: the share of
the k experts that a request used most in a layer that are among the k with the highest prediction. Experts that a
request used equally often are interchangeable, and an expert with a prediction of 0 is never a hit.

Requests that share text (a group) are not independent: intervals come from resampling groups, not requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.predictors import Predictor, PredictRequest
from coterie.predictors.scoring import Loads, cosine
from coterie.types import Interval

RESAMPLES = 1000


class PredictorScore(NamedTuple):
    """All measures of a predictor: means over requests, with the 2.5th and 97.5th percentile over resampled groups."""

    requests: int
    cosine: Interval
    recall_top_k: Interval
    recall_top_2k: Interval
    recall_16: Interval
    """Recall of 16 experts whatever top_k is, as published for a router that uses the 16 highest predictions."""


def score(
    predictor: Predictor,
    requests: Sequence[PredictRequest],
    truth: Loads,
    top_k: int,
    rng: Generator,
    groups: Sequence[Hashable] | None = None,
) -> PredictorScore:
    """Compare predictions with `truth` [request, layer, expert], the recorded footprints."""
    shape = (len(requests), predictor.num_layers, predictor.num_experts)
    if truth.shape != shape or not len(requests):
        raise ConfigError(f"truth has shape {truth.shape}; expected [request, layer, expert] = {shape}, none 0")
    if not 1 <= top_k <= shape[2]:
        raise ConfigError(f"top_k={top_k} must be in 1 … num_experts={shape[2]}")
    if groups is not None and len(groups) != len(requests):
        raise ConfigError(f"groups has {len(groups)} entries; there are {len(requests)} requests")
    for request in np.flatnonzero((truth.sum(axis=2) <= 0).any(axis=1)):
        raise ConfigError(f"request {request} has a layer without tokens, which cannot be scored")
    predicted = np.stack([predictor.predict(request) for request in requests])
    sizes = (top_k, min(2 * top_k, shape[2]), min(16, shape[2]))
    measures = (cosine(predicted, truth), *(recall(predicted, truth, size) for size in sizes))
    draws = _draws(groups if groups is not None else range(len(requests)), rng)
    return PredictorScore(len(requests), *(_interval(values.mean(axis=1), draws) for values in measures))


def recall(predicted: Loads, truth: Loads, k: int) -> NDArray[np.float64]:
    """Compute the share [request, layer] of the k most used experts that are among the k highest predictions.

    If fewer than k experts were used, it is the share of those used. Ties between predictions go to the lower id.
    """
    true, guess = np.asarray(truth, np.float64), np.asarray(predicted, np.float64)
    least = np.partition(true, -k, axis=-1)[..., -k, None]  # load of the k-th expert
    above, tied = true > least, (true == least) & (true > 0)
    order = np.argsort(-guess, axis=-1, kind="stable")[..., :k]
    hits, drawn = (np.take_along_axis(of & (guess > 0), order, axis=-1).sum(axis=-1) for of in (above, tied))
    places = k - above.sum(axis=-1)  # places in the true top k that any of the tied experts may take
    return np.asarray(
        (hits + np.minimum(drawn, places)) / np.maximum(1, np.minimum(k, (true > 0).sum(axis=-1))), np.float64
    )


def _draws(groups: Sequence[Hashable], rng: Generator) -> NDArray[np.float64]:
    """Draw weights [resample, request] of the requests when whole groups are drawn with replacement."""
    numbers: dict[Hashable, int] = {}
    of = np.array([numbers.setdefault(group, len(numbers)) for group in groups])
    times = rng.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), size=RESAMPLES)
    return times[:, of].astype(np.float64)


def _interval(values: NDArray[np.float64], draws: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(draws @ values / draws.sum(axis=1), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))
