"""Latency-aware: the batch that a cost model says is fastest, as long as reordering pays for whom it delays.

It minimises predicted time, so it mixes the unlike where the slowest rank decides, and groups the like where streaming
the experts' weights does. Unlike the published strategies it also decides *whether* to reorder:

* The gain is what the chosen batch saves against the oldest requests as they come, as a share of their time.
* A batch that is faster by the gain shortens the wait of all `queued` requests: by `gain x queued` batches in sum.
  Being passed over costs one request one batch.
* So a request may be passed over as often as that, and no more: with a shallow queue, or where batches would be hardly
  faster, the order stays first come, first served.

Wrong where predictions are: it then reorders for nothing, though by no more than that many batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.costs import BatchCost, SpreadCost, StepCost
from coterie.batching.greedy import VARIATION, pick_greedily
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_snapshot,
    first_picks,
    not_in,
    total_of,
    totals_of,
)  # fmt: skip
from coterie.errors import ConfigError

EVEN_OUT = SpreadCost()

ALMOST_NEVER = 1e-3
"""Least chance of a request missing an expert: a product of misses then stays a number above nothing."""


@strategies.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware(Skipping):
    """The fastest batch by a cost model, where that pays."""

    cost: BatchCost = EVEN_OUT
    """What is minimised; the default knows no device, and evens the load out."""
    trust: float = 1.0
    """Share of a predicted gain that comes true: what is picked for its prediction is rarely as good. 1 where loads are
    known; :func:`measure_trust` finds it for a predictor."""

    def __post_init__(self) -> None:
        Skipping.__post_init__(self)
        if not 0 <= self.trust <= 1:
            raise ConfigError(f"trust={self.trust} must be in 0 … 1")

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        cap, hope = self.max_skips or NEVER, self.trust * window.queued
        cost = self.cost
        if isinstance(cost, StepCost):
            loads, load = cost.slot_loads(window.loads), cost.slot_loads(running)
            order, budget, gain = _by_step(loads, load, window.skipped, hope, size, cap, _numbers(cost), cost.num_ranks)
        else:
            order, budget, gain = _by_spread(window.loads, running, window.skipped, hope, size, cap, cost.sensitivity)
        if budget == 0:
            return Selection(order, f"in order of arrival of {len(order)}: reordering would not pay")
        return Selection(order, f"predicted {gain:.1%} faster than in order of arrival, at most {budget} skips each")


def _numbers(cost: StepCost) -> NDArray[np.float64]:
    """In the order the loops take them."""
    return np.array(
        [cost.fixed_us, cost.first_us, cost.tile_rows, cost.row_us, cost.arrival_us, float(cost.by_tokens)]
    )


def measure_trust(
    cost: BatchCost,
    predicted: Loads,
    truth: Loads,
    stream: Indices,
    size: int = 8,
    window: int = 32,
    running: int = 0,
) -> float:
    """Share of the gains predicted that come true; `predicted` and `truth` [request, layer, expert] of the same requests.

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
    everyone = LatencyAware(max_skips=None, cost=cost)
    skipped = np.zeros(window, np.int64)
    hoped, spent = 0.0, [0.0, 0.0]
    under_way = [list(stream[:running]), list(stream[:running])]
    waiting = list(stream[running:])
    for batch in range(batches):
        come = list(stream[running + batch * size :][:size])
        rows = waiting[:window]
        loads, load = np.ascontiguousarray(predicted[rows]), predicted[under_way[1]].sum(axis=0)
        order = everyone.select(Window(loads, skipped, NEVER), load, size, rng).order
        hoped += gain_of(cost, loads, load, order)
        chosen = [rows[index] for index in order]
        waiting = [row for index, row in enumerate(rows) if index not in set(order.tolist())] + waiting[window:]
        for way, taken in enumerate((come, chosen)):
            spent[way] += _time_of(cost, truth[taken], truth[under_way[way]].sum(axis=0))
            under_way[way] = (under_way[way] + taken)[len(taken) :] if running else []
    saved = 1.0 - spent[1] / spent[0]
    return float(min(1.0, max(0.0, saved * batches / hoped))) if hoped > 0 else 0.0


def gain_of(cost: BatchCost, loads: Loads, running: Loads, order: Indices) -> float:
    """Share of the time of the first requests of `loads` that those in `order` would save, added to `running`."""
    come = np.arange(len(order))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        return float(_step_gain(loads, running, come, order, _numbers(cost), cost.num_ranks))
    rows = loads.reshape(len(loads), -1)
    return float(_spread_gain(rows, running.ravel(), come, order, cost.sensitivity))


def _time_of(cost: BatchCost, loads: Loads, running: Loads) -> float:
    """Of all these requests added to `running`."""
    everyone = np.arange(len(loads))
    if isinstance(cost, StepCost):
        loads, running = cost.slot_loads(loads), cost.slot_loads(running)
        return float(_fill_step(loads, running, everyone, len(everyone), _numbers(cost), cost.num_ranks))
    return float(_spread(loads.reshape(len(loads), -1), running.ravel(), everyone, cost.sensitivity)[0])


@njit()
def _in_order(skipped: Indices, size: int, max_skips: int) -> Indices:
    """The oldest, those that are overdue first."""
    order, forced = first_picks(skipped, size, max_skips)
    order[forced:] = not_in(order[:forced], len(skipped))[: len(order) - forced]
    return order


@njit()
def _overdue(skipped: Indices, order: Indices, budget: int) -> bool:
    """Whether someone was left out who has been passed over that often already."""
    taken = np.zeros(len(skipped), np.bool_)
    for request in order:
        taken[request] = True
    return bool(np.any((skipped >= budget) & ~taken))


@njit()
def _budget(gain: float, hope: float, max_skips: int) -> int:
    return int(min(float(max_skips), gain * hope)) if gain > 0.0 else 0


# ------------------------------------------------------------------------------------------------ 1 + CV


@njit()
def _by_spread(
    loads: Loads, running: Loads, skipped: Indices, hope: float, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    come = _in_order(skipped, size, max_skips)
    if len(come) == len(loads):
        return come, 0, 0.0
    rows, load = loads.reshape(len(loads), loads.shape[1] * loads.shape[2]), running.ravel()
    order, budget, gain = come, max_skips, 0.0
    for _ in range(2):
        order = pick_greedily(loads, running, skipped, size, budget, VARIATION)[0]
        gain = _spread_gain(rows, load, come, order, sensitivity)
        budget = _budget(gain, hope, max_skips)
        if budget == 0:
            return come, 0, 0.0
        if not _overdue(skipped, order, budget):
            break
    return order, budget, gain


@njit()
def _spread_gain(rows: Loads, load: Loads, come: Indices, order: Indices, sensitivity: float) -> float:
    time, total = _spread(rows, load, come, sensitivity)
    if total <= 0.0:
        return 0.0
    share = 1.0 - total_of(load) / total  # of the work that is chosen here
    return (1.0 - _spread(rows, load, order, sensitivity)[0] / time) / share if share > 0.0 else 0.0


@njit(fastmath=True)
def _spread(rows: Loads, load: Loads, order: Indices, sensitivity: float) -> tuple[float, float]:
    """1 + sensitivity x CV of the load with these requests, and its total."""
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
        return 1.0, 0.0
    return 1.0 + sensitivity * np.sqrt(max(0.0, len(batch) * square / (total * total) - 1.0)), total


# ------------------------------------------------------------------------------------------------ the step model


@njit()
def _by_step(
    loads: Loads, running: Loads, skipped: Indices, hope: float, size: int, max_skips: int,
    parameters: NDArray[np.float64], ranks: int,
) -> tuple[Indices, int, float]:  # fmt: skip
    come = _in_order(skipped, size, max_skips)
    if len(come) == len(loads):
        return come, 0, 0.0
    order, budget, gain = come, max_skips, 0.0
    for _ in range(2):
        order, forced = first_picks(skipped, size, budget)
        _fill_step(loads, running, order, forced, parameters, ranks)
        gain = _step_gain(loads, running, come, order, parameters, ranks)
        budget = _budget(gain, hope, max_skips)
        if budget == 0:
            return come, 0, 0.0
        if not _overdue(skipped, order, budget):
            break
    return order, budget, gain


@njit()
def _step_gain(
    loads: Loads, running: Loads, come: Indices, order: Indices, parameters: NDArray[np.float64], ranks: int
) -> float:
    before, there, here = running.sum(), 0.0, 0.0
    for request in come:
        there += loads[request].sum()
    for request in order:
        here += loads[request].sum()
    if there <= 0.0 or here <= 0.0:
        return 0.0
    share = there / (there + before)  # of the work that is chosen here
    time = _fill_step(loads, running, come.copy(), len(come), parameters, ranks)
    other = _fill_step(loads, running, order.copy(), len(order), parameters, ranks)
    saved = time - other
    if parameters[5] > 0.0:  # what unevenness costs a token: that some batches are larger is nobody's gain
        saved = time - _even_us(before + there, loads, parameters, ranks)
        saved -= (other - _even_us(before + here, loads, parameters, ranks)) * (before + there) / (before + here)
    return saved / time / share


@njit(fastmath=True)
def _fill_step(
    loads: Loads, running: Loads, order: Indices, forced: int, parameters: NDArray[np.float64], ranks: int
) -> float:
    """Fill the order up from its forced picks; the time of the whole in microseconds."""
    waiting, layers, slots = loads.shape
    columns, groups, each = layers * slots, layers * ranks, slots // ranks
    fixed_us, first_us, tile, row_us, arrival_us, by_tokens = parameters
    brings = loads.reshape(waiting, columns)
    rows = running.copy().reshape(columns)  # expected tokens
    # How many requests a running load is of cannot be seen; as independent tokens they miss with exp(-load).
    cold = np.exp(-rows)  # chance that nobody touches it
    totals, total = totals_of(brings), total_of(rows)
    # Without a column that could fill a tile there are no rows past one, as in decode.
    tiles = total_of(totals) + total > tile and _may_fill(brings, rows, len(order), tile)
    taken = np.zeros(waiting, np.bool_)
    touched, more, arrive = np.zeros(groups), np.zeros(groups), np.zeros(groups)  # [layer x rank], of those picked
    for group in range(groups):
        _tally(rows, cold, group, each, tile, touched, more, arrive)
    time = fixed_us
    for place in range(len(order)):
        if place >= forced:
            best, least = -1, np.inf
            for request in range(waiting):
                if taken[request]:
                    continue
                found = fixed_us + _with(
                    brings[request], rows, cold, touched, arrive, layers, ranks, each, first_us, tile, row_us,
                    arrival_us, tiles,
                )  # fmt: skip
                if by_tokens > 0.0:  # what unevenness costs a token: short prompts are not fast ones
                    both = total + totals[request]
                    found = (found - _even_us(both, loads, parameters, ranks)) / both
                if found < least:
                    best, least = request, found
            order[place] = best
        pick = order[place]
        taken[pick] = True
        total += totals[pick]
        picked = brings[pick]
        for column in range(columns):
            rows[column] += picked[column]
            cold[column] *= max(1.0 - picked[column], ALMOST_NEVER)
        for group in range(groups):
            _tally(rows, cold, group, each, tile, touched, more, arrive)
    for layer in range(layers):
        time += _layer_us(touched, more, arrive, layer, ranks, first_us, row_us, arrival_us)
    return float(time)


@njit()
def _even_us(total: float, loads: Loads, parameters: NDArray[np.float64], ranks: int) -> float:
    """The time of a batch that brings `total` tokens to all columns alike."""
    fixed_us, first_us, tile, row_us, arrival_us, _ = parameters
    layers, slots = loads.shape[1], loads.shape[2]
    rows, each = total / (layers * slots), slots // ranks
    touched = 1.0 - np.exp(-rows)
    layer = each * (touched * first_us + max(0.0, rows - tile) * row_us + rows * arrival_us)
    return float(fixed_us + layers * layer)


@njit()
def _may_fill(brings: Loads, rows: Loads, count: int, tile: float) -> bool:
    for column in range(len(rows)):
        most = 0.0
        for request in range(len(brings)):
            most = max(most, brings[request, column])
        if rows[column] + count * most > tile:
            return True
    return False


@njit(fastmath=True)
def _tally(
    rows: Loads, cold: Loads, group: int, each: int, tile: float, touched: Loads, more: Loads, arrive: Loads
) -> None:
    warm, past, here = 0.0, 0.0, 0.0
    for column in range(group * each, (group + 1) * each):
        warm += 1.0 - cold[column]
        past += max(0.0, rows[column] - tile)
        here += rows[column]
    touched[group], more[group], arrive[group] = warm, past, here


@njit()
def _layer_us(
    touched: Loads, more: Loads, arrive: Loads, layer: int, ranks: int, first_us: float, row_us: float,
    arrival_us: float,
) -> float:  # fmt: skip
    slowest, busiest = 0.0, 0.0
    for group in range(layer * ranks, (layer + 1) * ranks):
        slowest = max(slowest, touched[group] * first_us + more[group] * row_us)
        busiest = max(busiest, arrive[group])
    return slowest + busiest * arrival_us


@njit(fastmath=True)
def _with(
    brings: Loads, rows: Loads, cold: Loads, touched: Loads, arrive: Loads, layers: int, ranks: int,
    each: int, first_us: float, tile: float, row_us: float, arrival_us: float, tiles: bool,
) -> float:  # fmt: skip
    """The time of the experts of all layers, were this request added."""
    total = 0.0
    for layer in range(layers):
        slowest, busiest = 0.0, 0.0
        for group in range(layer * ranks, (layer + 1) * ranks):
            begin = group * each
            own, at, chance = brings[begin : begin + each], rows[begin : begin + each], cold[begin : begin + each]
            warm, past, here = 0.0, 0.0, 0.0
            if tiles:
                for slot in range(each):
                    warm += chance[slot] * min(own[slot], 1.0)
                    past += max(0.0, at[slot] + own[slot] - tile)
                    here += own[slot]
            else:
                for slot in range(each):
                    warm += chance[slot] * min(own[slot], 1.0)
                    here += own[slot]
            slowest = max(slowest, (touched[group] + warm) * first_us + past * row_us)
            busiest = max(busiest, arrive[group] + here)
        total += slowest + busiest * arrival_us
    return total
