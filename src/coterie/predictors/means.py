"""Predict a request's load as a mean over other requests (all of them, or its domain's), or as it was recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_given
from coterie.footprints import footprint
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


@predictors.register("domain")
@dataclass(slots=True, eq=False)
class DomainPredictor(Calibrated):
    """The mean distribution of the calibration requests of the same domain; popularity for an unknown domain.

    A reference for comparisons: it needs each request's domain label. Wrong for a domain with few calibration
    requests, because their mean is mostly noise.
    """

    name: ClassVar[str] = "domain"
    domains_: dict[str, ActivationRates] = field(default_factory=dict, init=False, repr=False)

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> DomainPredictor:
        labels = check_given(trace.requests.domains, f"the trace of {trace.meta.model!r} has no domains")
        chosen = check_request_rows(trace, requests)
        self.popularity_ = mean_rates(trace, chosen, phase)
        groups: dict[str, list[int]] = {}
        for index, ids in chosen_requests(trace, chosen, phase):
            if len(ids):
                groups.setdefault(labels[index], []).append(index)
        self.domains_ = {name: mean_rates(trace, np.array(rows), phase) for name, rows in groups.items()}
        return self

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        return self.domains_.get(request.domain or "", self.popularity).scaled(request)


@predictors.register("recorded")
@dataclass(slots=True, eq=False)
class RecordedLoads(Calibrated):
    """The footprint given with a request, else the footprint recorded under its id, else popularity.

    Exact for a replayed request, so use it in simulations. For a live request, the footprint of its prefill predicts
    its decode: good as long as the request does not change its subject.
    """

    name: ClassVar[str] = "recorded"
    footprints_: dict[str, NDArray[np.uint32]] = field(default_factory=dict, init=False, repr=False)
    """Request id → [layer, expert] tokens. If the trace has no ids, the id is the request's index as text."""

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> RecordedLoads:
        """Store the footprints of these requests."""
        popularity = mean_rates(trace, requests, phase)
        names = trace.requests.ids
        footprints: dict[str, NDArray[np.uint32]] = {}
        for index, ids in chosen_requests(trace, requests, phase):
            name = str(index) if names is None else names[index]
            check(name not in footprints, f"request id {name!r} is in the trace twice: its footprint is ambiguous")
            if len(ids):
                footprints[name] = footprint(ids, trace.meta.num_experts)
        self.popularity_, self.footprints_ = popularity, footprints
        return self

    def predict(self, request: PredictRequest) -> Load:
        """Return the request's own footprint, scaled only if `num_tokens` is given."""
        self.popularity.check(request)
        known = request.footprint if request.footprint is not None else self.footprints_.get(request.id or "")
        if known is None or not known.any():
            return self.popularity.scaled(request)
        load = np.array(known, np.float64)
        if request.num_tokens is not None:
            load *= request.num_tokens * self.num_layers * self.popularity.top_k / load.sum()
        return load
