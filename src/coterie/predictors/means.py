"""Predict a request as a mean of others: of all requests, the baseline for other predictors, or of its domain's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.predictors.base import (
    ActivationRates,
    Calibrated,
    Load,
    PredictRequest,
    check_request_rows,
    chosen_requests,
    mean_rates,
    predictors,
)
from coterie.traces.activations import ActivationTrace


@predictors.register("popularity")
@dataclass(slots=True, eq=False)
class PopularityPredictor(Calibrated):
    """The mean distribution of the calibration requests, scaled to the request's tokens."""

    name: ClassVar[str] = "popularity"

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> PopularityPredictor:
        self.popularity_ = mean_rates(trace, requests, phase)
        return self

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        return self.popularity.scaled(request)


@predictors.register("domain")
@dataclass(slots=True, eq=False)
class DomainPredictor(Calibrated):
    """The mean distribution of the calibration requests of the same domain; popularity for an unknown one.

    A reference to compare with: it needs a label of each request's subject. Wrong where a domain has few calibration
    requests, whose mean is then mostly noise.
    """

    name: ClassVar[str] = "domain"
    domains_: dict[str, ActivationRates] = field(default_factory=dict, init=False, repr=False)

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> DomainPredictor:
        labels = trace.requests.domains
        if labels is None:
            raise ConfigError(f"the trace of {trace.meta.model!r} has no domains")
        chosen = check_request_rows(trace, requests)
        present = [index for index, ids in chosen_requests(trace, chosen, phase) if len(ids)]
        self.popularity_ = mean_rates(trace, chosen, phase)
        groups: dict[str, list[int]] = {}
        for index in present:
            groups.setdefault(labels[index], []).append(index)
        self.domains_ = {name: mean_rates(trace, np.array(rows), phase) for name, rows in groups.items()}
        return self

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        known = self.domains_.get(request.domain) if request.domain is not None else None
        return (known or self.popularity).scaled(request)
