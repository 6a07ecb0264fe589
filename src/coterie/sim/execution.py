"""Execution models of a batch: the model of CAPS, and the calibrated step time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.batching.base import Loads
from coterie.costs.step import Batch, PlacedStepModel, StepModel
from coterie.errors import check, check_at_least, check_not_negative, check_positive
from coterie.types import Placement


class Execution(NamedTuple):
    """Result of one batch or step."""

    seconds: float
    imbalance: float
    """Imbalance by the model that timed the batch: the factor of CAPS, or the load of the busiest rank ÷ the mean."""
    distinct: float
    """Experts touched, mean over layers."""


def check_seconds(ran: Execution, requests: int) -> None:
    """Raise ConfigError if an execution model returns a time that is negative or not finite."""
    check(
        0.0 <= ran.seconds < math.inf,
        f"execution model: seconds={ran.seconds} of a batch of {requests} must be a finite number of at least 0",
    )


@dataclass(frozen=True, slots=True)
class SpreadExecution:
    """Model of CAPS: a base time, multiplied by ``1 + sensitivity x CV`` of the batch's true load.

    The factor models a straggler for which all others wait. The form is right across ranks; inside one GPU imbalance is
    nearly free in prefill, and in decode an even load is slower (docs/results/regimes.md).
    """

    loads: Loads
    """[request, layer, expert] tokens that each request brings."""
    base_s: float
    """Time of prefill and decode of one batch with an even load."""
    sensitivity: float

    def __post_init__(self) -> None:
        check_positive(base_s=self.base_s)
        check_not_negative(sensitivity=self.sensitivity)
        check(self.loads.ndim == 3, f"loads has shape {self.loads.shape}; expected [request, layer, expert]")

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        cv, distinct = _spread(self.loads, requests)
        factor = 1.0 + self.sensitivity * cv
        return Execution(self.base_s * factor, factor, distinct)


@njit(fastmath=True)
def _spread(loads: Loads, requests: NDArray[np.int64]) -> tuple[float, float]:
    """Return the coefficient of variation over all experts of all layers, and the experts touched per layer."""
    layers, experts = loads.shape[1], loads.shape[2]
    batch = np.zeros((layers, experts))
    for request in requests:
        if not 0 <= request < len(loads):
            raise IndexError("a request has no load")  # compiled code would read past the end
        batch += loads[request]
    mean = batch.mean()
    return (batch.std() / mean if mean > 0 else 0.0), (batch > 0).sum() / layers


class StepTimer:
    """Exact step times of the calibrated model on a placement."""

    def __init__(self, model: StepModel, placement: Placement | None = None) -> None:
        self.model = model
        self._placed = PlacedStepModel(model, placement)

    def __call__(self, load: NDArray[np.integer], batch: Batch) -> Execution:
        """Time a step in which every rank runs `batch`, and the tokens of all ranks activate `load` [layer, expert]."""
        seconds, ranks = self._placed.step(load, batch).total_s, self._placed.num_ranks
        arrived = self._placed.slot_rows(load).reshape(len(load), ranks, -1).sum(axis=2)  # [layer, rank]
        total = arrived.sum(axis=1)
        imbalance = np.where(total > 0, arrived.max(axis=1) * ranks / np.maximum(total, 1), 1.0)
        return Execution(seconds, float(imbalance.mean()), np.count_nonzero(load) / len(load))


@dataclass(slots=True)
class PrefillExecution:
    """Prompts of a batch computed whole in one step of the calibrated model."""

    timer: StepTimer
    loads: NDArray[np.int64]
    """[request, layer, expert] tokens of each prompt."""
    prompt_tokens: NDArray[np.int64]
    """[request] prompt length."""
    ranks: int = 1
    """Ranks that share a batch's prompts evenly for attention and projections."""

    def __post_init__(self) -> None:
        check(
            len(self.loads) == len(self.prompt_tokens),
            f"{len(self.loads)} loads must be as many as prompt_tokens ({len(self.prompt_tokens)})",
        )
        check_at_least(1, ranks=self.ranks)

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        tokens = int(self.prompt_tokens[requests].sum())
        return self.timer(
            self.loads[requests].sum(axis=0),
            Batch(prefill_tokens=-(-tokens // self.ranks), prefill_requests=-(-len(requests) // self.ranks)),
        )
