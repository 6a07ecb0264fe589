"""Latency-aware: the fastest batch by a cost model, as long as reordering pays for the requests it delays.

It minimises predicted time, so it mixes dissimilar requests where the slowest rank sets a step's time, and groups
similar ones where streaming the experts' weights does. Unlike the published strategies it also decides *whether* to
reorder:

* Choosing can save at most the share of a batch's time that depends on its requests: the cost of unevenness across
  ranks, or of streaming the chosen requests' experts. `trust` is the part of that share which choosing really saves.
* A batch that is faster by that much shortens the wait of every request behind the next two batches: by
  `trust x share x behind` batches in sum, for `behind` such requests. Being passed over costs one request one batch.
* So a request may be passed over `trust x share x behind` times, and no more: with a shallow queue, or where it hardly
  matters which requests run together, the order stays first come, first served.

It is wrong where predictions are wrong: it then reorders without a gain, though within the same limit of skips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from coterie._numba import njit
from coterie.batching._by_step import by_step, step_avoidable, step_us
from coterie.batching.base import BatchCost, Loads, Selection, Window, strategies
from coterie.batching.greedy import DOT, pick_greedily
from coterie.batching.picking import NEVER, Indices, Skipping, allowed_skips, check_snapshot, due, in_order, total_of
from coterie.costs.lines import StepCost
from coterie.errors import check, check_share
from coterie.registry import needs

SOON = 2
"""Number of batches at the head of the queue that start soon in any order; a queue of at most these is shallow."""

SPREAD_TRUST, STEP_TRUST = 0.4, 0.1
"""Default `trust` with SpreadCost, for CAPS's traffic patterns, and with StepCost, about the most measured on recorded
requests in any order."""


@strategies.register("latency_aware")
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyAware(Skipping):
    """The fastest batch by a cost model, if reordering pays for the requests it delays."""

    cost: BatchCost = needs(
        "what a batch costs: StepCost.for_phase(step_model, …), or SpreadCost(), which evens the load out"
    )
    """Cost model to minimise."""
    trust: float | None = None
    """Part of the avoidable time that choosing really saves; :func:`measure_trust` measures it for a predictor and a
    kind of traffic. None takes the default for the kind of cost."""

    def __post_init__(self) -> None:
        Skipping.__post_init__(self)
        check_share(trust=self.trust)

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
    """Return the share of avoidable time that choosing avoids; `predicted` and `truth` are [request, layer, expert].

    `stream` lists requests in a typical order of arrival. They are served twice, by prediction and in order, always
    with `window` waiting and `running` others under way, and both runs are timed with the true loads. That includes two
    effects that a single choice does not show: predictions are wrong, and a request passed over is served later. Do not
    use requests that the strategy is evaluated on.
    """
    same = predicted.shape == truth.shape
    check(same, f"predicted {predicted.shape} and truth {truth.shape} must be of the same requests")
    batches = (len(stream) - running - window) // size
    check(batches >= 1, f"the stream has {len(stream)} requests; it must have {running + window + size} or more")
    rng = np.random.default_rng(0)  # unused by this strategy, but `select` takes a generator
    everyone = LatencyAware(max_skips=None, cost=cost, trust=1.0)
    skipped = np.zeros(window, np.int64)
    totals = np.zeros((2, 2))  # [in order or by prediction, time or avoidable share]
    under_way = [list(stream[:running]), list(stream[:running])]
    waiting = list(stream[running:])
    for batch in range(batches):
        arrived = list(stream[running + batch * size :][:size])
        rows = waiting[:window]
        loads, load = np.ascontiguousarray(predicted[rows]), predicted[under_way[1]].sum(axis=0)
        order = everyone.select(Window(loads, skipped, NEVER), load, size, rng).order.tolist()
        waiting = [row for index, row in enumerate(rows) if index not in order] + waiting[window:]
        for way, taken in enumerate((arrived, [rows[index] for index in order])):
            totals[way] += _time_of(cost, truth[taken], truth[under_way[way]].sum(axis=0))
            under_way[way] = (under_way[way] + taken)[len(taken) :] if running else []
    (in_order_us, avoidable), (chosen_us, _) = totals.tolist()
    saved = 1.0 - chosen_us / in_order_us
    return float(min(1.0, max(0.0, saved * batches / avoidable))) if avoidable > 0 else 0.0


def _time_of(cost: BatchCost, loads: Loads, running: Loads) -> tuple[float, float]:
    """Return the time of a batch, all these requests added to the `running` load, and its avoidable share.

    That share depends on which requests are in the batch.
    """
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running, prices = cost.slot_loads(loads), cost.slot_loads(running), cost.numbers()
        time = step_us(loads, running, everyone, prices, cost.num_ranks)
        return time, step_avoidable(loads, running, everyone, time, prices, cost.num_ranks)
    rows, load = loads.reshape(len(loads), -1), running.ravel()
    time = spread(rows, load, everyone, cost.sensitivity)
    return time, spread_avoidable(rows, load, everyone, time)


# Compiled loops that minimise a SpreadCost, ``1 + sensitivity x CV`` of the load.

BY_DOT = np.int64(DOT)
"""`DOT` as a NumPy integer: Numba would compile `pick_greedily` again for a Python integer."""


@njit()
def by_spread(
    loads: Loads, running: Loads, skipped: Indices, expected_gain: float, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    arrived = in_order(skipped, size, max_skips)
    if len(arrived) == len(loads):
        return arrived, 0, 0.0
    rows, load = loads.reshape(len(loads), loads.shape[1] * loads.shape[2]), running.ravel()
    time = spread(rows, load, arrived, sensitivity)
    budget = allowed_skips(spread_avoidable(rows, load, arrived, time), expected_gain, max_skips)
    if budget == 0:
        return arrived, 0, 0.0
    order, forced = due(skipped, size, max_skips, budget)
    if forced < len(order):
        # Dot product, not the least CV of this batch: over many batches it passes the same requests over least often.
        order = pick_greedily(loads, running, skipped, size, budget, BY_DOT)[0]
    gain = 1.0 - spread(rows, load, order, sensitivity) / time
    return (order, budget, gain) if gain > 0.0 else (arrived, 0, 0.0)


@njit()
def spread_avoidable(rows: Loads, load: Loads, arrived: Indices, time: float) -> float:
    """Return the share of `time` that unevenness costs, divided by the share of the load that `arrived` brings."""
    brought = 0.0
    for request in arrived:
        brought += total_of(rows[request])
    if brought <= 0.0:
        return 0.0
    share = brought / (brought + total_of(load))
    return (1.0 - 1.0 / time) / share


@njit(fastmath=True)
def spread(rows: Loads, load: Loads, order: Indices, sensitivity: float) -> float:
    """Return 1 + sensitivity x CV of the load with the requests in `order`."""
    batch = load.copy()
    for request in order:
        row = rows[request]
        for column in range(len(batch)):
            batch[column] += row[column]
    square, total = 0.0, 0.0
    for column in range(len(batch)):
        square += batch[column] * batch[column]
        total += batch[column]
    if total <= 0.0:
        return 1.0
    return float(1.0 + sensitivity * np.sqrt(max(0.0, len(batch) * square / (total * total) - 1.0)))
