"""The contract of a predictor: estimate a request's load per expert before it runs.

A predictor is constructed with settings, which does no work, then fitted on the calibration requests of a trace.
Without information on a request (for example, no token ids or an unknown domain) a predictor falls back to popularity:
the mean distribution of the calibration requests, scaled to the request's tokens. So a prediction is never empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, require_fitted
from coterie.footprints import footprint
from coterie.registry import PolicyRegistry
from coterie.traces.activations import ActivationTrace

Load = NDArray[np.float64]
"""[layer, expert] tokens."""


class PredictRequest(NamedTuple):
    """Information on a request to predict; every field is optional."""

    token_ids: NDArray[np.integer] | None = None
    """[token] ids of the prompt, or of the part to predict."""
    footprint: NDArray[np.integer] | NDArray[np.floating] | None = None
    """[layer, expert] activations recorded so far, such as those of the request's prefill."""
    domain: str | None = None
    id: str | None = None
    num_tokens: int | None = None
    """Number of tokens to predict for; None takes it from the ids or the footprint."""


@runtime_checkable
class Predictor(Protocol):
    """Predicts a request's load."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    def predict(self, request: PredictRequest) -> Load:
        """Return the expected tokens [layer, expert], a new array; each layer sums to the request's tokens x top_k.

        If the number of tokens is unknown, it is assumed to be 1.
        """


@runtime_checkable
class FittablePredictor(Predictor, Protocol):
    """A predictor that learns from a trace."""

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> FittablePredictor:
        """Learn from `requests` of the trace (None: all), from tokens of `phase` only (None: both)."""


@runtime_checkable
class PromptPredictor(Protocol):
    """A predictor that compares prompts. Callers can pass the prompts separately from the trace."""

    def fit_prompts(
        self,
        trace: ActivationTrace,
        requests: NDArray[np.integer] | None,
        phase: int | None,
        prompts: Sequence[NDArray[np.integer] | None],
    ) -> FittablePredictor:
        """Like `fit`; `prompts` holds, for each request of the trace, the token ids known before it ran, or None."""


class StartKind(StrEnum):
    """Information on a request's beginning that a predictor needs, named by its class attribute `needs_start`."""

    FOOTPRINT = "footprint"
    TOKENS = "tokens"


def needs_start(predictor: Predictor) -> StartKind | None:
    """Return the information on a request's beginning that the predictor needs; None if it needs none."""
    kind = getattr(predictor, "needs_start", None)
    return None if kind is None else StartKind(kind)


def fit_phase(predictor: Predictor, phase: int | None) -> int | None:
    """Return the phase to fit on in order to predict `phase`; None means both phases.

    A predictor class with ``any_phase = True`` learns from all tokens: it assumes that a token's experts do not depend
    on the phase.
    """
    return None if getattr(predictor, "any_phase", False) else phase


predictors: PolicyRegistry[FittablePredictor] = PolicyRegistry("predictor", group="coterie.predictors")
"""Predictors by name; built-in predictors are registered when :mod:`coterie.predictors` is imported. All their settings
have defaults."""


class ActivationRates(NamedTuple):
    """Mean distribution over experts of a token, averaged over the calibration requests."""

    per_token: Load
    """[layer, expert] activations per token: each layer sums to top_k."""
    top_k: int

    @property
    def num_layers(self) -> int:
        return int(self.per_token.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.per_token.shape[1])

    def scaled(self, request: PredictRequest) -> Load:
        """Predict the load [layer, expert] in tokens of a request of which only the size is known."""
        return self.per_token * self.tokens_of(request)

    def tokens_of(self, request: PredictRequest) -> float:
        """Return the tokens to predict for: `num_tokens`, else the number of ids, else from the footprint, else 1."""
        if request.num_tokens is not None:
            return float(request.num_tokens)
        if request.token_ids is not None:
            return float(len(request.token_ids))
        if request.footprint is not None:
            return float(request.footprint.sum()) / (self.num_layers * self.top_k)
        return 1.0

    def check(self, request: PredictRequest) -> None:
        """Raise ConfigError for a footprint of another shape or a negative number of tokens."""
        check(
            request.num_tokens is None or request.num_tokens >= 0,
            f"request {request.id!r}: num_tokens={request.num_tokens} must not be negative",
        )
        if request.footprint is not None and request.footprint.shape != self.per_token.shape:
            raise ConfigError(
                f"request {request.id!r}: footprint has shape {request.footprint.shape}; "
                f"the predictor was fitted on [layer, expert] = {self.per_token.shape}"
            )


def mean_rates(trace: ActivationTrace, requests: NDArray[np.integer] | None, phase: int | None) -> ActivationRates:
    """Compute popularity over requests of a trace; requests have equal weights, whatever their length."""
    total = np.zeros((trace.meta.num_layers, trace.meta.num_experts))
    count = 0
    for _, ids in chosen_requests(trace, requests, phase):
        if len(ids):
            total += footprint(ids, trace.meta.num_experts) / len(ids)
            count += 1
    check(count, f"no token to fit on: the requests chosen of {trace.num_requests} have none (phase={phase})")
    return ActivationRates(total / count, trace.meta.top_k)


def chosen_requests(
    trace: ActivationTrace, requests: NDArray[np.integer] | None, phase: int | None
) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
    """Yield the index and the expert ids [token, layer, k] of each chosen request, of one phase or both (None)."""
    for index in check_request_rows(trace, requests).tolist():
        yield index, phase_ids(trace, index, phase)


def phase_ids(trace: ActivationTrace, request: int, phase: int | None) -> NDArray[np.unsignedinteger]:
    """Return the expert ids [token, layer, k] of a request's tokens, of one phase or both (None)."""
    tokens = trace.request(request)
    return tokens.expert_ids if phase is None else tokens.only(phase)


def check_request_rows(trace: ActivationTrace, requests: NDArray[np.integer] | None) -> NDArray[np.int64]:
    """Return the chosen request indices, unique and ascending; all requests if None."""
    if requests is None:
        return np.arange(trace.num_requests, dtype=np.int64)
    chosen = np.unique(np.asarray(requests, np.int64))
    for request in chosen[(chosen < 0) | (chosen >= trace.num_requests)]:
        raise ConfigError(f"request {request} must be in 0 … {trace.num_requests - 1}")
    return chosen


class FallsBack:
    """Base class of predictors that fall back to popularity; alone it predicts nothing else."""

    __slots__ = ()

    @property
    def popularity(self) -> ActivationRates:
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        return self.popularity.num_layers

    @property
    def num_experts(self) -> int:
        return self.popularity.num_experts

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        return self.popularity.scaled(request)


@dataclass(slots=True, eq=False)
class Calibrated(FallsBack):
    """Base class of predictors whose popularity is that of the calibration requests."""

    name: ClassVar[str]
    popularity_: ActivationRates | None = field(default=None, init=False, repr=False)

    @property
    def popularity(self) -> ActivationRates:
        return require_fitted(self.popularity_, f"predictor {self.name!r}")


def per_step(load: NDArray[np.floating] | NDArray[np.integer], tokens: float) -> Load:
    """Divide a load over `tokens` tokens: [layer, expert] probability that a token activates the expert in a step."""
    check(tokens > 0, f"tokens={tokens} must be above 0")
    return np.asarray(load, np.float64) / tokens
