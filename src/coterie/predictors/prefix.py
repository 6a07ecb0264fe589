"""Prefix: predict the rest of a request from the footprint of its beginning.

The tokens after a prefix use other experts than the prefix: every prompt of a service may open with the same
instructions, and answers use other experts than prompts. So the request's prefix is compared with the average prefix,
and only the difference is added to the popularity of the tokens after a prefix:

    per token = popularity after prefixes + n / (n + smoothing) x (the request's prefix - popularity of prefixes)

for a prefix of n tokens. If both popularities are equal, the prediction is the prefix itself, pulled towards
popularity; the shorter the prefix, the stronger the pull. Wrong where a request changes its subject.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_not_negative, require_fitted
from coterie.predictors.base import (
    ActivationRates,
    Calibrated,
    Load,
    PredictRequest,
    StartKind,
    check_request_rows,
    mean_rates,
    predictors,
)
from coterie.traces.activations import ActivationTrace
from coterie.types import DECODE, PREFILL


@predictors.register("prefix")
@dataclass(slots=True, eq=False)
class Prefix(Calibrated):
    """Prediction from the footprint of a request's prefill; popularity if the request has no footprint."""

    name: ClassVar[str] = "prefix"
    needs_start: ClassVar[StartKind] = StartKind.FOOTPRINT
    smoothing: float = 32.0
    """Number of tokens at which a prefix has the same weight as popularity; 0 fully trusts a single token."""
    before_: ActivationRates | None = field(default=None, init=False, repr=False)
    """Popularity of prefixes; `popularity_` is that of the tokens to predict, those after a prefix."""

    def __post_init__(self) -> None:
        check_not_negative(smoothing=self.smoothing)

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> Prefix:
        """Learn to predict tokens of `phase` (None: decode); tokens of the other phase are the prefixes.

        If the requests have tokens of one phase only, these serve as both.
        """
        held = {int(p) for r in check_request_rows(trace, requests) for p in np.unique(trace.request(int(r)).phase)}
        if len(held) < 2:
            self.before_ = self.popularity_ = mean_rates(trace, requests, phase)
            return self
        wanted = DECODE if phase is None else phase
        self.popularity_ = mean_rates(trace, requests, wanted)
        self.before_ = mean_rates(trace, requests, PREFILL if wanted == DECODE else DECODE)
        return self

    def predict(self, request: PredictRequest) -> Load:
        """Predict the load, scaled to `num_tokens`; by default to the number of tokens in the prefix."""
        after, before = self.popularity, require_fitted(self.before_, "predictor 'prefix'")
        after.check(request)
        if request.footprint is None or not request.footprint.any():
            return after.scaled(request)
        own = np.asarray(request.footprint, np.float64)
        tokens = own.sum() / (after.num_layers * after.top_k)
        trust = tokens / (tokens + self.smoothing)
        shares = np.maximum(after.per_token + trust * (own / tokens - before.per_token), 0.0)
        shares *= after.top_k / shares.sum(axis=1, keepdims=True)
        return np.asarray(shares * (tokens if request.num_tokens is None else request.num_tokens), np.float64)
