"""Decode with continuous batching: requests join and leave between steps, and every token's experts are replayed.

A step runs one token of every running request. The calibrated model times it from the recorded experts of exactly
those tokens; nothing is averaged. A request joins at the end of a step if a place is free. Places become free one by
one, and a strategy that selects a single request must take the oldest. So the strategy selects the next
`max_batch_size` requests at once, given the running load, and they join in that order as places become free, even if
others arrive meanwhile; an engine would select again (:mod:`coterie.batching.waiting.queue`). KV memory is not
modelled: `places` limits the running requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import Loads, Strategy
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.step import Batch
from coterie.errors import check, check_at_least
from coterie.footprints.counting import footprint
from coterie.sim.execution import Execution, check_seconds
from coterie.sim.metrics import Run
from coterie.sim.server import SimulatedServer, check_requests

StepTiming = Callable[[NDArray[np.int64], Batch], Execution]
"""Function, such as a StepTimer, that times a step from its load [layer, expert] and its batch."""


class DecodeRequests(NamedTuple):
    """Requests to replay, in order of arrival."""

    arrival_s: NDArray[np.float64]
    context: NDArray[np.int64]
    """[request] prompt tokens, cached when the request arrives."""
    first: NDArray[np.int64]
    """[request] row of the first decoded token in `expert_ids`."""
    tokens: NDArray[np.int64]
    """[request] number of tokens to decode."""
    expert_ids: NDArray[np.integer]
    """[token, layer, k] recorded expert ids."""


def run_decode(
    requests: DecodeRequests,
    predicted: Loads,
    timer: StepTiming,
    places: int,
    config: SchedulerConfig,
    strategy: Strategy,
    rng: Generator,
    ranks: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Decode all requests.

    `predicted` [request, layer, expert] are tokens per step; `places` is the limit over all `ranks` together.
    """
    check_requests(requests.arrival_s, predicted)
    _check_tokens(requests, predicted.shape[1], predicted.shape[2])
    check_at_least(1, places=places, ranks=ranks)
    return _Decoder(requests, predicted, timer, places, config, strategy, rng, ranks, progress).serve()


def _check_tokens(requests: DecodeRequests, layers: int, experts: int) -> None:
    """Raise ConfigError for invalid arrays: the compiled loop does not check and would write past an array's end."""
    count, ids = len(requests.arrival_s), requests.expert_ids
    for name in ("context", "first", "tokens"):
        values = getattr(requests, name)
        check(len(values) == count, f"{name} has {len(values)} requests; arrival_s has {count}")
        least = 1 if name == "tokens" else 0
        check(values.min() >= least, f"{name}={values.min()} must be at least {least} for every request")
    check(ids.ndim == 3 and ids.shape[1] == layers, f"expert_ids has shape {ids.shape}; expected [token, {layers}, k]")
    last = int((requests.first + requests.tokens).max())
    check(last <= len(ids), f"expert_ids has {len(ids)} tokens; requests need {last}")
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    check(low >= 0 and high < experts, f"expert_ids holds {low if low < 0 else high}; ids must be in 0 … {experts - 1}")


class _Decoder(SimulatedServer):
    def __init__(
        self,
        requests: DecodeRequests,
        predicted: Loads,
        timer: StepTiming,
        places: int,
        config: SchedulerConfig,
        strategy: Strategy,
        rng: Generator,
        ranks: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(requests.arrival_s, predicted, config, strategy, rng, progress)
        count, layers, experts = predicted.shape
        self.requests = requests
        self.predicted = predicted
        self.timer = timer
        self.places = places
        self.ranks = ranks
        self.planned: list[int] = []
        self.running = np.zeros(0, np.int64)
        self.running_load = np.zeros((layers, experts))
        self.decoded = np.zeros(count, np.int64)

    def start(self) -> None:
        """Admit requests, then run one token of every running request."""
        self.admit()
        self.busy = len(self.running) > 0
        if not self.busy:
            return
        requests, running = self.requests, self.running
        rows = requests.first[running] + self.decoded[running]
        load = footprint(requests.expert_ids[rows], self.predicted.shape[2]).astype(np.int64)
        context = int((requests.context[running] + self.decoded[running]).sum())
        ran = self.timer(
            load, Batch(decode_requests=-(-len(running) // self.ranks), decode_context=context // self.ranks)
        )
        check_seconds(ran, len(running))
        self.decoded[running] += 1
        self.batches.append((ran.seconds, len(running), ran.imbalance, ran.distinct))
        self.sim.after(ran.seconds, self.end_step)

    def admit(self) -> None:
        joining: list[int] = []
        while len(self.running) + len(joining) < self.places:
            if not self.planned:
                if not len(self.scheduler):
                    break
                batch = self.scheduler.next_batch(self.running_load + self.predicted[joining].sum(axis=0))
                self.planned = batch.items[::-1]
                self.skipped[batch.items] = batch.skipped
            joining.append(self.planned.pop())
        if not joining:
            return
        rows = np.array(joining, np.int64)
        self.start_s[rows] = self.sim.now_s
        self.running = np.concatenate([self.running, rows])
        self.running_load += self.predicted[rows].sum(axis=0)

    def end_step(self) -> None:
        now_s = self.sim.now_s
        done = self.decoded[self.running] == self.requests.tokens[self.running]
        if done.any():
            rows = self.running[done]
            self.finish_s[rows] = now_s
            self.running = self.running[~done]
            # Recomputed: subtraction would leave rounding errors, so a load above 0 when nothing runs.
            self.running_load = self.predicted[self.running].sum(axis=0)
            if self.progress is not None:
                self.progress(len(rows))
        self.start()
