"""Latency-aware: the fastest batch by a cost model, as long as reordering pays for the requests it delays.

It minimises predicted time, so it mixes unlike requests where the slowest rank decides, and groups like ones where
streaming the experts' weights does. Unlike the published strategies it also decides *whether* to reorder:

* Choosing can save at most the share of a batch's time that depends on its requests: the cost of unevenness across
  ranks, or of streaming the chosen requests' experts. Of that share, `trust` is the part that choosing really saves.
* A batch that is faster by that much shortens the wait of every request behind the next two batches: by
  `trust x share x behind` batches in sum. Being passed over costs one request one batch.
* So a request may be passed over that many times, and no more: with a shallow queue, or where it hardly matters which
  requests run together, the order stays first come, first served.

Wrong where predictions are wrong: it then reorders for nothing, though by no more than that many batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from coterie.batching._by_spread import by_spread, spread, spread_avoidable
from coterie.batching._by_step import by_step, step_avoidable, step_us
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.costs import BatchCost
from coterie.batching.picking import NEVER, Indices, Skipping, check_snapshot
from coterie.costs.lines import StepCost
from coterie.errors import ConfigError
from coterie.registry import needs

SOON = 2
"""Batches at the head of the queue that start soon in any order; a queue no longer than these is shallow."""

SPREAD_TRUST, STEP_TRUST = 0.4, 0.1
"""Default trust: for CAPS's traffic patterns, and about the most measured on recorded requests in any order."""


@strategies.register("latency_aware")
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyAware(Skipping):
    """The fastest batch by a cost model, where that pays."""

    cost: BatchCost = needs(
        "what a batch costs: StepCost.for_phase(step_model, …), or SpreadCost(), which evens the load out"
    )
    """Cost model to minimise."""
    trust: float | None = None
    """Part of the avoidable time that choosing really saves; :func:`measure_trust` measures it for a predictor and a
    kind of traffic. None takes a default by the kind of cost."""

    def __post_init__(self) -> None:
        Skipping.__post_init__(self)
        if self.trust is not None and not 0 <= self.trust <= 1:
            raise ConfigError(f"trust={self.trust} must be in 0 … 1, or None")

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        cost, trust = self.cost, self.trust
        if trust is None:
            trust = STEP_TRUST if isinstance(cost, StepCost) else SPREAD_TRUST
        cap, expected_gain = self.max_skips or NEVER, trust * max(0, window.queued - SOON * size)
        if isinstance(cost, StepCost):
            loads, load = cost.slot_loads(window.loads), cost.slot_loads(running)
            order, budget, gain = by_step(
                loads, load, window.skipped, expected_gain, size, cap, cost.numbers(), cost.num_ranks
            )
        else:
            order, budget, gain = by_spread(
                window.loads, running, window.skipped, expected_gain, size, cap, cost.sensitivity
            )
        if budget == 0:
            return Selection(order, f"in order of arrival of {len(order)}: reordering would not pay")
        return Selection(order, f"predicted {gain:.1%} faster than in order of arrival; up to {budget} skips each")


def measure_trust(
    cost: BatchCost, predicted: Loads, truth: Loads, stream: Indices, size: int = 8, window: int = 32, running: int = 0
) -> float:
    """Share of avoidable time that choosing avoids; `predicted` and `truth` [request, …] are of the same requests.

    `stream` lists requests in a typical order of arrival. They are served twice, by prediction and in order, always
    with `window` waiting and `running` others under way, and both runs are timed with the true loads. That includes
    what a single choice does not show: predictions are wrong, and a request passed over now has to be served later.
    Requests that the strategy is evaluated on must not be among them.
    """
    if predicted.shape != truth.shape:
        raise ConfigError(f"predicted {predicted.shape} and truth {truth.shape} must be of the same requests")
    batches = (len(stream) - running - window) // size
    if batches < 1:
        raise ConfigError(f"the stream has {len(stream)} requests; it must have {running + window + size} or more")
    rng = np.random.default_rng(0)  # nothing here is random, but a strategy takes one
    everyone = LatencyAware(max_skips=None, cost=cost, trust=1.0)
    skipped = np.zeros(window, np.int64)
    avoidable, spent = 0.0, [0.0, 0.0]
    under_way = [list(stream[:running]), list(stream[:running])]
    waiting = list(stream[running:])
    for batch in range(batches):
        arrived = list(stream[running + batch * size :][:size])
        rows = waiting[:window]
        loads, load = np.ascontiguousarray(predicted[rows]), predicted[under_way[1]].sum(axis=0)
        order = everyone.select(Window(loads, skipped, NEVER), load, size, rng).order.tolist()
        waiting = [row for index, row in enumerate(rows) if index not in order] + waiting[window:]
        for way, taken in enumerate((arrived, [rows[index] for index in order])):
            here = truth[under_way[way]].sum(axis=0)
            spent[way] += _time_of(cost, truth[taken], here)
            if way == 0:
                avoidable += _avoidable(cost, truth[taken], here)
            under_way[way] = (under_way[way] + taken)[len(taken) :] if running else []
    saved = 1.0 - spent[1] / spent[0]
    return float(min(1.0, max(0.0, saved * batches / avoidable))) if avoidable > 0 else 0.0


def _avoidable(cost: BatchCost, loads: Loads, running: Loads) -> float:
    """Share of a batch's time that depends on which requests are in it."""
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        time = step_us(loads, running, everyone, cost.numbers(), cost.num_ranks)
        return float(step_avoidable(loads, running, everyone, time, cost.numbers(), cost.num_ranks))
    rows, load = loads.reshape(len(loads), -1), running.ravel()
    return float(spread_avoidable(rows, load, everyone, spread(rows, load, everyone, cost.sensitivity)))


def _time_of(cost: BatchCost, loads: Loads, running: Loads) -> float:
    """Time of a batch: all these requests added to the `running` load."""
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        return float(step_us(loads, running, everyone, cost.numbers(), cost.num_ranks))
    return float(spread(loads.reshape(len(loads), -1), running.ravel(), everyone, cost.sensitivity))
