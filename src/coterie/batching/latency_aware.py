"""Latency-aware: the batch that a cost model says is fastest, as long as reordering pays for whom it delays.

It minimises predicted time, so it mixes the unlike where the slowest rank decides, and groups the like where streaming
the experts' weights does. Unlike the published strategies it also decides *whether* to reorder:

* What choosing could save at most is the share of a batch's time that depends on who is in it: what unevenness costs
  across ranks, or what the chosen requests' experts cost to stream. Of that, `trust` is what choosing really saves.
* A batch that is faster by that much shortens the wait of everybody behind the next two batches: by `trust x share x
  behind` batches in sum. Being passed over costs one request one batch.
* So a request may be passed over as often as that, and no more: with a shallow queue, or where it hardly matters who
  runs with whom, the order stays first come, first served.

Wrong where predictions are: it then reorders for nothing, though by no more than that many batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.costs import BatchCost, SpreadCost, StepCost
from coterie.batching.greedy import DOT, pick_greedily
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_snapshot,
    drop,
    fill_up,
    first_picks,
    not_in,
    total_of,
)
from coterie.errors import ConfigError

EVEN_OUT = SpreadCost()

BY_DOT = np.int64(DOT)
"""Not a plain number: Numba would compile the picking once more for that one."""

SOON = 2
"""Batches ahead whose requests start at once in any order; a queue no longer than that is shallow."""

SPREAD_TRUST, STEP_TRUST = 0.4, 0.1
"""Where none is given: what CAPS's patterns ask for, and about the most that recorded requests in any order gave."""

ALMOST_NEVER = 1e-3
"""Least chance of a request missing an expert: a product of misses then stays a number above nothing."""


@strategies.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware(Skipping):
    """The fastest batch by a cost model, where that pays."""

    cost: BatchCost = EVEN_OUT
    """What is minimised; the default knows no device, and evens the load out."""
    trust: float | None = None
    """Share of the time that choosing could save at most, which it does save; :func:`measure_trust` finds it for a
    predictor and a kind of traffic. None takes a default by the kind of cost."""

    def __post_init__(self) -> None:
        Skipping.__post_init__(self)
        if self.trust is not None and not 0 <= self.trust <= 1:
            raise ConfigError(f"trust={self.trust} must be in 0 … 1, or None")

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        cost, trust = self.cost, self.trust
        if trust is None:
            trust = STEP_TRUST if isinstance(cost, StepCost) else SPREAD_TRUST
        cap, hope = self.max_skips or NEVER, trust * max(0, window.queued - SOON * size)
        if isinstance(cost, StepCost):
            loads, load = cost.slot_loads(window.loads), cost.slot_loads(running)
            order, budget, gain = _by_step(loads, load, window.skipped, hope, size, cap, _numbers(cost), cost.num_ranks)
        else:
            order, budget, gain = _by_spread(window.loads, running, window.skipped, hope, size, cap, cost.sensitivity)
        if budget == 0:
            return Selection(order, f"in order of arrival of {len(order)}: reordering would not pay")
        return Selection(order, f"predicted {gain:.1%} faster than in order of arrival; up to {budget} skips each")


def _numbers(cost: StepCost) -> NDArray[np.float64]:
    """In the order the loops take them."""
    return np.array([cost.fixed_us, cost.first_us, cost.tile_rows, cost.row_us, cost.arrival_us, float(cost.by_tokens)])


def measure_trust(
    cost: BatchCost, predicted: Loads, truth: Loads, stream: Indices, size: int = 8, window: int = 32, running: int = 0
) -> float:
    """Share of avoidable time that choosing avoids; `predicted` and `truth` [request, …] are of the same requests.

    `stream` names requests in an order of arrival like the one to come. They are served twice, by prediction and in
    order, always with `window` waiting and `running` others under way, and both are timed by the truth. That counts
    what a single choice does not show: predictions are wrong, and whoever is passed over now has to be served later.
    Requests that the strategy is judged on must not be among them.
    """
    if predicted.shape != truth.shape:
        raise ConfigError(f"predicted {predicted.shape} and truth {truth.shape} must be of the same requests")
    batches = (len(stream) - running - window) // size
    if batches < 1:
        raise ConfigError(f"the stream has {len(stream)} requests; it must have {running + window + size} or more")
    rng = np.random.default_rng(0)  # nothing here is random, but a strategy takes one
    everyone = LatencyAware(max_skips=None, cost=cost, trust=1.0)
    skipped = np.zeros(window, np.int64)
    hoped, spent = 0.0, [0.0, 0.0]
    under_way = [list(stream[:running]), list(stream[:running])]
    waiting = list(stream[running:])
    for batch in range(batches):
        come = list(stream[running + batch * size :][:size])
        rows = waiting[:window]
        loads, load = np.ascontiguousarray(predicted[rows]), predicted[under_way[1]].sum(axis=0)
        order = everyone.select(Window(loads, skipped, NEVER), load, size, rng).order.tolist()
        waiting = [row for index, row in enumerate(rows) if index not in order] + waiting[window:]
        for way, taken in enumerate((come, [rows[index] for index in order])):
            here = truth[under_way[way]].sum(axis=0)
            spent[way] += _time_of(cost, truth[taken], here)
            if way == 0:
                hoped += _avoidable(cost, truth[taken], here)
            under_way[way] = (under_way[way] + taken)[len(taken) :] if running else []
    saved = 1.0 - spent[1] / spent[0]
    return float(min(1.0, max(0.0, saved * batches / hoped))) if hoped > 0 else 0.0


def _avoidable(cost: BatchCost, loads: Loads, running: Loads) -> float:
    """Share of a batch's time that depends on who is in it."""
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        time = _step_us(loads, running, everyone, _numbers(cost), cost.num_ranks)
        return float(_step_avoidable(loads, running, everyone, time, _numbers(cost), cost.num_ranks))
    rows, load = loads.reshape(len(loads), -1), running.ravel()
    return float(_spread_avoidable(rows, load, everyone, _spread(rows, load, everyone, cost.sensitivity)))


def _time_of(cost: BatchCost, loads: Loads, running: Loads) -> float:
    """Of all these requests added to `running`."""
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        return float(_step_us(loads, running, everyone, _numbers(cost), cost.num_ranks))
    return float(_spread(loads.reshape(len(loads), -1), running.ravel(), everyone, cost.sensitivity))


@helper()
def _in_order(skipped: Indices, size: int, max_skips: int) -> Indices:
    """The oldest, those that are overdue first."""
    order, forced = first_picks(skipped, size, max_skips)
    fill_up(order, forced, not_in(order[:forced], len(skipped)))
    return order


@helper()
def _due(skipped: Indices, size: int, max_skips: int, budget: int) -> tuple[Indices, int]:
    """The order with those in place who must be in, and their number: the overdue, then whose budget is used up."""
    order, forced = first_picks(skipped, size, max_skips)
    for request in range(1, len(skipped)):
        if forced == len(order):
            break
        if budget <= skipped[request] < max_skips:
            order[forced] = request
            forced += 1
    return order, forced


@helper()
def _budget(avoidable: float, hope: float, max_skips: int) -> int:
    return int(min(float(max_skips), avoidable * hope)) if avoidable > 0.0 else 0


# ------------------------------------------------------------------------------------------------ 1 + CV


@njit()
def _by_spread(
    loads: Loads, running: Loads, skipped: Indices, hope: float, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    come = _in_order(skipped, size, max_skips)
    if len(come) == len(loads):
        return come, 0, 0.0
    rows, load = loads.reshape(len(loads), loads.shape[1] * loads.shape[2]), running.ravel()
    time = _spread(rows, load, come, sensitivity)
    budget = _budget(_spread_avoidable(rows, load, come, time), hope, max_skips)
    if budget == 0:
        return come, 0, 0.0
    order, forced = _due(skipped, size, max_skips, budget)
    if forced < len(order):
        # Not the least CV of this batch: over many batches the dot product passes the same requests over least often.
        order = pick_greedily(loads, running, skipped, size, budget, BY_DOT)[0]
    gain = 1.0 - _spread(rows, load, order, sensitivity) / time
    return (order, budget, gain) if gain > 0.0 else (come, 0, 0.0)


@njit()
def _spread_avoidable(rows: Loads, load: Loads, come: Indices, time: float) -> float:
    """What unevenness costs of a time of 1 + sensitivity x CV, over the share of the work that is chosen here."""
    brought = 0.0
    for request in come:
        brought += total_of(rows[request])
    if brought <= 0.0:
        return 0.0
    share = brought / (brought + total_of(load))
    return (1.0 - 1.0 / time) / share


@njit(fastmath=True)
def _spread(rows: Loads, load: Loads, order: Indices, sensitivity: float) -> float:
    """1 + sensitivity x CV of the load with these requests."""
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


# ------------------------------------------------------------------------------------------------ the step model


@njit()
def _by_step(
    loads: Loads,
    running: Loads,
    skipped: Indices,
    hope: float,
    size: int,
    max_skips: int,
    parameters: NDArray[np.float64],
    ranks: int,
) -> tuple[Indices, int, float]:
    come = _in_order(skipped, size, max_skips)
    if len(come) == len(loads):
        return come, 0, 0.0
    time = _step_us(loads, running, come, parameters, ranks)
    budget = _budget(_step_avoidable(loads, running, come, time, parameters, ranks), hope, max_skips)
    if budget == 0:
        return come, 0, 0.0
    order, forced = _due(skipped, size, max_skips, budget)
    other = _fill_step(loads, running, order, forced, parameters, ranks)
    gain = _step_gain(loads, running, come, time, order, other, parameters, ranks)
    return (order, budget, gain) if gain > 0.0 else (come, 0, 0.0)


@njit()
def _step_avoidable(
    loads: Loads, running: Loads, come: Indices, time: float, parameters: NDArray[np.float64], ranks: int
) -> float:
    """What unevenness costs (prefill) or the experts that are streamed for these alone (decode), over their share."""
    before, brought = _tokens(running), _brought(loads, come)
    if brought <= 0.0:
        return 0.0
    if parameters[5] > 0.0:
        least = _even_us(before + brought, loads, parameters, ranks)
    else:
        least = _step_us(loads, running, come[:0], parameters, ranks)
    return float((1.0 - least / time) * (before + brought) / brought)


@helper()
def _step_gain(
    loads: Loads,
    running: Loads,
    come: Indices,
    time: float,
    order: Indices,
    other: float,
    parameters: NDArray[np.float64],
    ranks: int,
) -> float:
    """Share of the time of `come` that `order`, which takes `other`, saves."""
    if parameters[5] > 0.0:  # what unevenness costs a token: that some batches are larger is nobody's gain
        before = _tokens(running)
        there, here = before + _brought(loads, come), before + _brought(loads, order)
        uneven = (other - _even_us(here, loads, parameters, ranks)) / here
        return float((time - _even_us(there, loads, parameters, ranks) - uneven * there) / time)
    return float(1.0 - other / time)


@helper()
def _tokens(load: Loads) -> float:
    total = 0.0
    for row in range(len(load)):
        for column in range(load.shape[1]):
            total += load[row, column]
    return total


@helper()
def _brought(loads: Loads, requests: Indices) -> float:
    total = 0.0
    for request in requests:
        total += _tokens(loads[request])
    return total


# Arrays here are [layer x rank, …, slot of the rank]: the inner loops then run over whole rows. They become vector code
# only where they do not begin or end inside one. Whole-array statements would compile for seconds.
@njit()
def _step_us(loads: Loads, running: Loads, order: Indices, parameters: NDArray[np.float64], ranks: int) -> float:
    """The time of these requests and the load that runs, in microseconds."""
    brings = loads.reshape(len(loads), loads.shape[1] * ranks, loads.shape[2] // ranks)
    rows, cold = _together(brings, running, order)
    return _time_us(rows, cold, parameters, ranks)


@helper()
def _fill_step(
    loads: Loads, running: Loads, order: Indices, forced: int, parameters: NDArray[np.float64], ranks: int
) -> float:
    """Fill the order up from its forced picks; the time of the whole in microseconds."""
    waiting, layers, slots = loads.shape
    groups, each = layers * ranks, slots // ranks
    fixed_us, first_us, tile, row_us, arrival_us, by_tokens = parameters
    brings = loads.reshape(waiting, groups, each)
    rows, cold = _together(brings, running, order[:forced])
    if forced == len(order):
        return _time_us(rows, cold, parameters, ranks)
    left = not_in(order[:forced], waiting)
    count, total = len(left), _tokens(rows)
    by_group, chance = np.empty((groups, waiting, each)), np.empty((groups, waiting, each))
    own, totals = np.empty((groups, waiting)), np.zeros(waiting)
    for group in range(groups):
        for request in range(waiting):
            own[group, request] = _spread_out(brings[request, group], by_group[group, request], chance[group, request])
            totals[request] += own[group, request]
    warm, past, here = np.empty((groups, waiting)), np.zeros((groups, waiting)), np.empty(groups)
    # Without a slot that could fill a tile there are no rows past one, as in decode.
    tiles = _may_fill(by_group, rows, len(order), tile)
    for place in range(forced, len(order)):
        for group in range(groups):
            _dots(chance[group], left[:count], cold[group], warm[group])
            if tiles:
                _pasts(by_group[group], left[:count], rows[group], tile, past[group])
            touched = each - _total(cold[group])
            for i in range(count):
                warm[group, i] += touched
            here[group] = _total(rows[group])
        best, least = -1, np.inf
        for i in range(count):
            request, found = left[i], fixed_us
            for layer in range(layers):
                slowest, busiest = 0.0, 0.0
                for group in range(layer * ranks, (layer + 1) * ranks):
                    slowest = max(slowest, warm[group, i] * first_us + past[group, i] * row_us)
                    busiest = max(busiest, here[group] + own[group, request])
                found += slowest + busiest * arrival_us
            if by_tokens > 0.0:  # what unevenness costs a token: short prompts are not fast ones
                both = total + totals[request]
                found = (found - _even_us(both, loads, parameters, ranks)) / both
            if found < least:
                best, least = i, found
        order[place] = left[best]
        total += totals[left[best]]
        drop(left, count, best)
        count -= 1
        _add(rows, cold, brings[order[place]])
    return _time_us(rows, cold, parameters, ranks)


@helper()
def _together(brings: Loads, running: Loads, order: Indices) -> tuple[Loads, Loads]:
    """Expected tokens of these requests and the load that runs, and the chance that nobody touches a slot."""
    rows = running.copy().reshape(brings.shape[1], brings.shape[2])
    cold = np.empty(rows.shape)
    for group in range(len(rows)):
        for slot in range(rows.shape[1]):
            # How many requests a running load is of cannot be seen; as independent tokens they miss with exp(-load).
            cold[group, slot] = np.exp(-rows[group, slot])
    for request in order:
        _add(rows, cold, brings[request])
    return rows, cold


@helper()
def _time_us(rows: Loads, cold: Loads, parameters: NDArray[np.float64], ranks: int) -> float:
    fixed_us, first_us, tile, row_us, arrival_us, _ = parameters
    each, time = rows.shape[1], fixed_us
    for layer in range(len(rows) // ranks):
        slowest, busiest = 0.0, 0.0
        for group in range(layer * ranks, (layer + 1) * ranks):
            past = 0.0
            for slot in range(each):
                past += max(0.0, rows[group, slot] - tile)
            slowest = max(slowest, (each - _total(cold[group])) * first_us + past * row_us)
            busiest = max(busiest, _total(rows[group]))
        time += slowest + busiest * arrival_us
    return float(time)


@helper()  # not fastmath, unlike `total_of`: requests that tie must go on tying
def _total(row: Loads) -> float:
    total = 0.0
    for slot in range(len(row)):
        total += row[slot]
    return total


@helper()
def _spread_out(brings: Loads, row: Loads, chance: Loads) -> float:
    """Copies what a request brings to a row, and as chances of touching a slot; its tokens."""
    for slot in range(len(brings)):
        row[slot] = brings[slot]
        chance[slot] = min(brings[slot], 1.0)
    return _total(brings)


@helper(fastmath=True)
def _add(rows: Loads, cold: Loads, brings: Loads) -> None:
    for group in range(len(rows)):
        for slot in range(rows.shape[1]):
            rows[group, slot] += brings[group, slot]
            cold[group, slot] *= max(1.0 - brings[group, slot], ALMOST_NEVER)


@helper(fastmath=True)
def _dots(chance: Loads, left: Indices, cold: Loads, out: Loads) -> None:
    """Slots that each request would touch and nobody does yet."""
    for i in range(len(left)):
        row, dot = chance[left[i]], 0.0
        for slot in range(len(cold)):
            dot += row[slot] * cold[slot]
        out[i] = dot


@helper(fastmath=True)
def _pasts(brings: Loads, left: Indices, rows: Loads, tile: float, out: Loads) -> None:
    """Tokens past a first tile, with each request."""
    for i in range(len(left)):
        row, past = brings[left[i]], 0.0
        for slot in range(len(rows)):
            past += max(0.0, rows[slot] + row[slot] - tile)
        out[i] = past


@helper()
def _even_us(total: float, loads: Loads, parameters: NDArray[np.float64], ranks: int) -> float:
    """The time of a batch that brings `total` tokens to all columns alike."""
    fixed_us, first_us, tile, row_us, arrival_us, _ = parameters
    layers, slots = loads.shape[1], loads.shape[2]
    rows, each = total / (layers * slots), slots // ranks
    touched = 1.0 - np.exp(-rows)
    layer = each * (touched * first_us + max(0.0, rows - tile) * row_us + rows * arrival_us)
    return float(fixed_us + layers * layer)


@helper()
def _may_fill(by_group: Loads, rows: Loads, count: int, tile: float) -> bool:
    for group in range(len(rows)):
        for request in range(by_group.shape[1]):
            for slot in range(rows.shape[1]):
                if rows[group, slot] + count * by_group[group, request, slot] > tile:
                    return True
    return False
