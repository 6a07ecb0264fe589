"""Servers of a what-if run: serve the same requests under any strategy, timed by CAPS's model or a calibrated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.batches.requests import Requests
from coterie.batching import Loads, SpreadCost, Strategy
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.lines import StepCost
from coterie.costs.step import StepModel
from coterie.registry import Offers
from coterie.sim import (
    DecodeRequests,
    Execution,
    ExecutionModel,
    PrefillExecution,
    Run,
    SpreadExecution,
    StepTimer,
    run_batches,
    run_decode,
)
from coterie.types import Placement

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SpreadServer:
    """Server that runs one batch at a time; a batch takes ``base x (1 + sensitivity x CV of its load)``."""

    config: SchedulerConfig
    requests: Requests
    row: NDArray[np.int64]
    """[request of the run] index into `requests`, with repeats."""
    base_ms: float
    cost: SpreadCost

    def settings(self) -> dict[str, Any]:
        return {"base_ms": self.base_ms, "sensitivity": self.cost.sensitivity}

    def run(
        self, strategy: Strategy, arrival_s: NDArray[np.float64], rng: Generator, progress: Progress | None = None
    ) -> Run:
        execution = SpreadExecution(self.requests.counts.astype(np.float64), self.base_ms / 1e3, self.cost.sensitivity)
        timed, shown = partial(_of_rows, execution, self.row), _shown(self.requests, self.row)
        return run_batches(arrival_s, shown, timed, self.config, strategy, rng, progress)


@dataclass(frozen=True, slots=True)
class StepServer:
    """Server timed by a calibrated step model: prompts in batches (prefill), or answers token by token (decode)."""

    config: SchedulerConfig
    requests: Requests
    row: NDArray[np.int64]
    phase: str
    model: StepModel
    placement: Placement | None
    preset: str
    places: int
    """Largest number of requests in a batch."""

    @property
    def ranks(self) -> int:
        return 1 if self.placement is None else self.placement.num_ranks

    @property
    def cost(self) -> StepCost:
        requests = self.requests
        assert requests.context is not None
        mean = (requests.tokens if self.phase == "prefill" else requests.context)[self.row].mean()
        return StepCost.for_phase(self.model, self.phase, self.places, round(float(mean)), self.placement)

    def settings(self) -> dict[str, Any]:
        return {
            "model": self.model.spec.name,
            "preset": self.preset,
            "dtype": self.model.dtype,
            "measured": self.model.measured,
            "ranks": self.ranks,
            "places": self.places,
        }

    def run(
        self, strategy: Strategy, arrival_s: NDArray[np.float64], rng: Generator, progress: Progress | None = None
    ) -> Run:
        row, requests = self.row, self.requests
        timer, shown = StepTimer(self.model, self.placement), _shown(requests, row)
        if self.phase == "prefill":
            execution = PrefillExecution(timer, requests.counts, requests.tokens, self.ranks)
            timed = partial(_of_rows, execution, row)
            return run_batches(arrival_s, shown, timed, self.config, strategy, rng, progress)
        assert requests.context is not None
        assert requests.first is not None
        assert requests.expert_ids is not None
        replayed = DecodeRequests(
            arrival_s, requests.context[row], requests.first[row], requests.tokens[row], requests.expert_ids
        )
        return run_decode(replayed, shown, timer, self.places, self.config, strategy, rng, self.ranks, progress)


def make_strategy(name: str, server: SpreadServer | StepServer) -> Strategy:
    """Make a strategy with the config's limit on skips and this server's cost model."""
    config = msgspec.structs.replace(server.config, strategy=name)
    return config.make(Offers(cost=lambda: server.cost))


def _shown(requests: Requests, row: NDArray[np.int64]) -> Loads:
    return np.ascontiguousarray(requests.predicted[row], np.float64)


def _of_rows(execution: ExecutionModel, row: NDArray[np.int64], requests: NDArray[np.int64]) -> Execution:
    return execution(row[requests])
