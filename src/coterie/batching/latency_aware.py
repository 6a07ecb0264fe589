"""Latency-aware: the batch that a cost model says is fastest, as long as reordering pays for whom it delays.

It minimises predicted time, so it mixes the unlike where the slowest rank decides, and groups the like where streaming
the experts' weights does. Unlike the published strategies it also decides *whether* to reorder:

* The gain is what the chosen batch saves against the oldest requests as they come, as a share of their time.
* A batch that is faster by the gain shortens the wait of all `queued` requests: by `gain x queued` batches in sum. Being
  passed over costs one request one batch.
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
from coterie.batching.picking import NEVER, Indices, Skipping, check_snapshot, first_picks, total_of

EVEN_OUT = SpreadCost()

ALMOST_NEVER = 1e-3
"""Least chance of a request missing an expert: a product of misses then stays a number above nothing."""


@strategies.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware(Skipping):
    """The fastest batch by a cost model, where that pays."""

    cost: BatchCost = EVEN_OUT
    """What is minimised; the default knows no device, and evens the load out."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        cap = self.max_skips or NEVER
        cost = self.cost
        if isinstance(cost, StepCost):
            loads, load = cost.slot_loads(window.loads), cost.slot_loads(running)
            parameters = np.array(
                [cost.fixed_us, cost.first_us, cost.tile_rows, cost.row_us, cost.arrival_us, float(cost.by_tokens)]
            )
            order, budget, gain = _by_step(
                loads, load, window.skipped, window.queued, size, cap, parameters, cost.num_ranks
            )
        else:
            order, budget, gain = _by_spread(
                window.loads, running, window.skipped, window.queued, size, cap, cost.sensitivity
            )
        if budget == 0:
            return Selection(order, "in order of arrival: reordering would not pay")
        return Selection(order, f"predicted {gain:.1%} faster than in order of arrival, at most {budget} skips each")


@njit()
def _budget(gain: float, queued: int, max_skips: int) -> int:
    return int(min(max_skips, gain * queued)) if gain > 0.0 else 0


# ------------------------------------------------------------------------------------------------ 1 + CV


@njit(fastmath=True)
def _by_spread(
    loads: Loads, running: Loads, skipped: Indices, queued: int, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    rows, load = loads.reshape(waiting, columns), running.ravel()
    order, forced = first_picks(skipped, size, max_skips)
    count = len(order)
    if count == waiting:
        return np.arange(count), 0, 0.0
    dots, squares, totals = np.empty(waiting), np.empty(waiting), np.empty(waiting)
    for request in range(waiting):
        with_load, with_itself, total = 0.0, 0.0, 0.0
        row = rows[request]
        for column in range(columns):
            with_load += row[column] * load[column]
            with_itself += row[column] * row[column]
            total += row[column]
        dots[request], squares[request], totals[request] = with_load, with_itself, total
    square, total = 0.0, 0.0
    for column in range(columns):
        square += load[column] * load[column]
        total += load[column]
    # What the oldest would cost together, in order of arrival.
    batch = load.copy()
    for request in range(count):
        row = rows[request]
        for column in range(columns):
            batch[column] += row[column]
    as_they_come = 0.0
    fcfs_total = 0.0
    for column in range(columns):
        as_they_come += batch[column] * batch[column]
        fcfs_total += batch[column]
    fcfs_time = 1.0 + sensitivity * _cv(as_they_come, fcfs_total, columns)
    share = (fcfs_total - total) / fcfs_total if fcfs_total > 0.0 else 1.0
    if share <= 0.0:
        return np.arange(count), 0, 0.0

    cap = max_skips
    for attempt in range(2):
        order, forced = first_picks(skipped, size, cap)
        time = _fill_spread(rows, dots.copy(), squares, totals, square, total, order, forced, columns, sensitivity)
        gain = (1.0 - time / fcfs_time) / share
        budget = _budget(gain, queued, max_skips)
        if budget == 0:
            return np.arange(count), 0, 0.0
        if attempt == 1 or not _overdue(skipped, order, budget):
            return order, budget, gain
        cap = budget
    return order, budget, gain


@njit()
def _overdue(skipped: Indices, order: Indices, budget: int) -> bool:
    """Whether someone was left out who has been passed over that often already."""
    taken = np.zeros(len(skipped), np.bool_)
    for request in order:
        taken[request] = True
    return bool(np.any((skipped >= budget) & ~taken))


@njit()
def _cv(square: float, total: float, columns: int) -> float:
    if total <= 0.0:
        return 0.0
    return float(np.sqrt(max(0.0, columns * square / (total * total) - 1.0)))


@njit(fastmath=True)
def _fill_spread(
    rows: Loads, dots: NDArray[np.float64], squares: NDArray[np.float64], totals: NDArray[np.float64], square: float,
    total: float, order: Indices, forced: int, columns: int, sensitivity: float,
) -> float:  # fmt: skip
    """Fill the order up from its forced picks; the time of the whole."""
    waiting = len(rows)
    taken = np.zeros(waiting, np.bool_)
    for place in range(len(order)):
        if place >= forced:
            best, least = -1, np.inf
            for request in range(waiting):
                if not taken[request]:
                    # CV² + 1, up to the number of columns: the least of it is the least time.
                    both = total + totals[request]
                    found = (square + 2.0 * dots[request] + squares[request]) / (both * both) if both > 0.0 else 0.0
                    if found < least:
                        best, least = request, found
            order[place] = best
        pick = order[place]
        taken[pick] = True
        square += 2.0 * dots[pick] + squares[pick]
        total += totals[pick]
        picked = rows[pick]
        for request in range(waiting):
            if not taken[request]:
                row, dot = rows[request], 0.0
                for column in range(columns):
                    dot += row[column] * picked[column]
                dots[request] += dot
    return 1.0 + sensitivity * _cv(square, total, columns)


# ------------------------------------------------------------------------------------------------ the step model


@njit()
def _by_step(
    loads: Loads, running: Loads, skipped: Indices, queued: int, size: int, max_skips: int,
    parameters: NDArray[np.float64], ranks: int,
) -> tuple[Indices, int, float]:  # fmt: skip
    waiting = len(loads)
    order, forced = first_picks(skipped, size, max_skips)
    count = len(order)
    if count == waiting:
        return np.arange(count), 0, 0.0
    totals = np.empty(waiting)
    for request in range(waiting):
        totals[request] = loads[request].sum()
    before = running.sum()
    by_tokens = parameters[5] > 0.0
    come = np.arange(count)
    fcfs_time = _fill_step(loads, running, come, count, parameters, ranks)
    fcfs_total = totals[:count].sum()
    if fcfs_total <= 0.0:
        return come, 0, 0.0
    share = fcfs_total / (fcfs_total + before)
    cap = max_skips
    for attempt in range(2):
        order, forced = first_picks(skipped, size, cap)
        time = _fill_step(loads, running, order, forced, parameters, ranks)
        saved = fcfs_time - time
        if by_tokens:  # of what unevenness costs a token; that some batches are larger is nobody's gain
            here, there = before + totals[order].sum(), before + fcfs_total
            saved = fcfs_time - _even_us(there, loads, parameters, ranks)
            saved -= (time - _even_us(here, loads, parameters, ranks)) * there / here
        gain = saved / fcfs_time / share
        budget = _budget(gain, queued, max_skips)
        if budget == 0:
            return come, 0, 0.0
        if attempt == 1 or not _overdue(skipped, order, budget):
            return order, budget, gain
        cap = budget
    return order, budget, gain


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
    totals = np.empty(waiting)
    for request in range(waiting):
        totals[request] = total_of(brings[request])
    total = total_of(rows)
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
