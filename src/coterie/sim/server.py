"""A server that runs one batch after another, each to completion: the setting of CAPS, and of prefill.

A batch starts when the server is free and the scheduler has a batch due; its requests end together. For decode, where
requests join and leave between steps, see :mod:`coterie.sim.decode`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import Loads, Strategy
from coterie.batching.scheduler import Scheduler, SchedulerConfig
from coterie.errors import check
from coterie.sim.execution import Execution, check_seconds
from coterie.sim.kernel import Simulation
from coterie.sim.metrics import Run


class ExecutionModel(Protocol):
    """Function that times a batch. It may know more than the scheduler: the true load instead of the predicted one."""

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        """Return the time of a batch; `requests` are indices into the arrivals of the run."""


def run_batches(
    arrival_s: NDArray[np.float64],
    predicted: Loads,
    execution: ExecutionModel,
    config: SchedulerConfig,
    strategy: Strategy,
    rng: Generator,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Serve all requests and return when each ran.

    `arrival_s` [request] must be in ascending order. The strategy sees the `predicted` [request, layer, expert] loads.
    """
    check_requests(arrival_s, predicted)
    return _BatchServer(arrival_s, predicted, execution, config, strategy, rng, progress).serve()


def check_requests(arrival_s: NDArray[np.float64], predicted: Loads) -> None:
    """Raise ConfigError if arrival times or predicted loads are invalid."""
    check(
        len(arrival_s) != 0 and len(predicted) == len(arrival_s),
        f"{len(arrival_s)} arrivals must be at least 1, with as many loads ({len(predicted)})",
    )
    check(
        arrival_s[0] >= 0 and np.all(arrival_s[1:] >= arrival_s[:-1]) and arrival_s[-1] < math.inf,
        "arrival_s must rise from at least 0, and be finite",
    )
    check(predicted.ndim == 3, f"predicted has shape {predicted.shape}; expected [request, layer, expert]")
    low, high = predicted.min(initial=0.0), predicted.max(initial=0.0)
    check(
        low >= 0 and high < math.inf,
        f"predicted holds {low if not low >= 0 else high}; loads must be finite and at least 0",
    )


class SimulatedServer(ABC):
    """Base of the servers: arrivals, a scheduler, and the times at which each request ran."""

    def __init__(
        self,
        arrival_s: NDArray[np.float64],
        predicted: Loads,
        config: SchedulerConfig,
        strategy: Strategy,
        rng: Generator,
        progress: Callable[[int], None] | None,
    ) -> None:
        count = len(arrival_s)
        self.sim = Simulation()
        self.arrivals: list[float] = arrival_s.tolist()
        self.scheduler = Scheduler(config, strategy, predicted, rng)
        self.progress = progress
        self.next = 0
        self.busy = False
        self.start_s = np.full(count, np.nan)
        self.finish_s = np.full(count, np.nan)
        self.skipped = np.zeros(count, np.int64)
        self.batches: list[tuple[float, int, float, float]] = []

    def serve(self) -> Run:
        self.sim.at(self.arrivals[0], self.arrive)
        self.sim.run()
        arrival_s = np.array(self.arrivals)
        seconds, sizes, imbalance, distinct = (np.array(column) for column in zip(*self.batches, strict=True))
        return Run(arrival_s, self.start_s, self.finish_s, self.skipped, seconds, sizes, imbalance, distinct)

    def arrive(self) -> None:
        """Queue the next request, and schedule the arrival after it: only now, so that the heap stays small."""
        row = self.next
        self.scheduler.push(row, self.sim.now_s)
        self.next = row + 1
        if self.next < len(self.arrivals):
            self.sim.at(self.arrivals[self.next], self.arrive)
        if not self.busy:
            self.start()

    @abstractmethod
    def start(self) -> None:
        """Start the next batch or step if one is due; called when the server is free."""


class _BatchServer(SimulatedServer):
    def __init__(
        self,
        arrival_s: NDArray[np.float64],
        predicted: Loads,
        execution: ExecutionModel,
        config: SchedulerConfig,
        strategy: Strategy,
        rng: Generator,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(arrival_s, predicted, config, strategy, rng, progress)
        self.execution = execution
        self.idle = np.zeros(predicted.shape[1:])  # [layer, expert] running load: none when a batch starts
        self.timer_s = math.inf

    def start(self) -> None:
        now_s, due_s = self.sim.now_s, self.scheduler.due_s()
        if due_s > now_s:
            if due_s < self.timer_s:  # one timer is enough: that of the oldest request is the earliest
                self.timer_s = due_s
                self.sim.at(due_s, self.on_timer)
            return
        batch = self.scheduler.next_batch(self.idle)
        rows = np.array(batch.items, np.int64)
        ran = self.execution(rows)
        check_seconds(ran, len(rows))
        self.start_s[rows] = now_s
        self.finish_s[rows] = now_s + ran.seconds
        self.skipped[rows] = batch.skipped
        self.batches.append((ran.seconds, len(rows), ran.imbalance, ran.distinct))
        self.busy = True
        self.sim.after(ran.seconds, self.finish)
        if self.progress is not None:
            self.progress(len(rows))

    def on_timer(self) -> None:
        self.timer_s = math.inf
        if not self.busy:
            self.start()

    def finish(self) -> None:
        self.busy = False
        self.start()
