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
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import BatchCost, Loads, Selection, Window, strategies
from coterie.batching.greedy import DOT, pick_greedily
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    allowed_skips,
    check_snapshot,
    drop,
    due,
    not_in,
    oldest_first,
    total_of,
)
from coterie.costs.lines import StepCost, line_us, rows_past
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
            order, budget, gain = _by_step(
                loads, load, window.skipped, expected_gain, size, cap, cost.numbers(), cost.num_ranks
            )
        else:
            order, budget, gain = _by_spread(
                window.loads, running, window.skipped, expected_gain, size, cap, cost.sensitivity
            )
        reason = f"predicted {gain:.1%} faster than in order of arrival; up to {budget} skips each"
        return Selection(order, reason if budget else f"in order of arrival of {len(order)}: reordering would not pay")


def measure_trust(
    cost: BatchCost, predicted: Loads, truth: Loads, stream: Indices, size: int = 8, window: int = 32, running: int = 0
) -> float:
    """Return the share of avoidable time that choosing avoids; `predicted` and `truth` are [request, layer, expert].

    `stream` lists requests in a typical order of arrival. They are served twice, by prediction and in order, always
    with `window` waiting and `running` others under way, and both runs are timed with the true loads. That includes two
    effects that a single choice does not show: predictions are wrong, and a request passed over is served later. Do not
    use requests that the strategy is evaluated on.
    """
    check(
        predicted.shape == truth.shape,
        f"predicted {predicted.shape} and truth {truth.shape} must be of the same requests",
    )
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
        time = _step_us(loads, running, everyone, prices, cost.num_ranks)
        return time, _step_avoidable(loads, running, everyone, time, prices, cost.num_ranks)
    rows, load = loads.reshape(len(loads), -1), running.ravel()
    time = _spread(rows, load, everyone, cost.sensitivity)
    return time, _spread_avoidable(rows, load, everyone, time)


# Compiled loops that minimise a SpreadCost, ``1 + sensitivity x CV`` of the load.

BY_DOT = np.int64(DOT)
"""`DOT` as a NumPy integer: Numba would compile `pick_greedily` again for a Python integer."""


@njit()
def _by_spread(
    loads: Loads, running: Loads, skipped: Indices, expected_gain: float, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    arrived, _ = oldest_first(skipped, size, max_skips)
    if len(arrived) == len(loads):
        return arrived, 0, 0.0
    rows, load = loads.reshape(len(loads), loads.shape[1] * loads.shape[2]), running.ravel()
    time = _spread(rows, load, arrived, sensitivity)
    budget = allowed_skips(_spread_avoidable(rows, load, arrived, time), expected_gain, max_skips)
    if budget == 0:
        return arrived, 0, 0.0
    order, forced = due(skipped, size, max_skips, budget)
    if forced < len(order):
        # Dot product, not the least CV of this batch: over many batches it passes the same requests over least often.
        order = pick_greedily(loads, running, skipped, size, budget, BY_DOT)[0]
    gain = 1.0 - _spread(rows, load, order, sensitivity) / time
    return (order, budget, gain) if gain > 0.0 else (arrived, 0, 0.0)


@njit()
def _spread_avoidable(rows: Loads, load: Loads, arrived: Indices, time: float) -> float:
    """Return the share of `time` that unevenness costs, divided by the share of the load that `arrived` brings."""
    brought = 0.0
    for request in arrived:
        brought += total_of(rows[request])
    return (1.0 - 1.0 / time) / (brought / (brought + total_of(load))) if brought > 0.0 else 0.0


@njit(fastmath=True)
def _spread(rows: Loads, load: Loads, order: Indices, sensitivity: float) -> float:
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
    uneven = np.sqrt(max(0.0, len(batch) * square / (total * total) - 1.0)) if total > 0.0 else 0.0
    return float(1.0 + sensitivity * uneven)


# Compiled loops that minimise a StepCost. `parameters` are StepCost.numbers(); loads are [request, layer, slot], with a
# rank's slots contiguous.

ALMOST_NEVER = 1e-3
"""Lower limit of the probability that a request misses an expert: keeps the product over many requests above 0."""


@njit()
def _by_step(
    loads: Loads,
    running: Loads,
    skipped: Indices,
    expected_gain: float,
    size: int,
    max_skips: int,
    parameters: NDArray[np.float64],
    ranks: int,
) -> tuple[Indices, int, float]:
    arrived, _ = oldest_first(skipped, size, max_skips)
    if len(arrived) == len(loads):
        return arrived, 0, 0.0
    time = _step_us(loads, running, arrived, parameters, ranks)
    budget = allowed_skips(_step_avoidable(loads, running, arrived, time, parameters, ranks), expected_gain, max_skips)
    if budget == 0:
        return arrived, 0, 0.0
    order, forced = due(skipped, size, max_skips, budget)
    other = _fill_step(loads, running, order, forced, parameters, ranks)
    gain = _step_gain(loads, running, arrived, time, order, other, parameters, ranks)
    return (order, budget, gain) if gain > 0.0 else (arrived, 0, 0.0)


@njit()
def _step_avoidable(
    loads: Loads, running: Loads, arrived: Indices, time: float, parameters: NDArray[np.float64], ranks: int
) -> float:
    """Return the share of the step's time that depends on the choice of requests, divided by their share of the tokens.

    In prefill that is the cost of unevenness, in decode that of streaming experts for these requests alone.
    """
    before, brought = _tokens(running), _brought(loads, arrived)
    if brought <= 0.0:
        return 0.0
    if parameters[5] > 0.0:
        least = _even_us(before + brought, loads, parameters, ranks)
    else:
        least = _step_us(loads, running, arrived[:0], parameters, ranks)
    return float((1.0 - least / time) * (before + brought) / brought)


@helper()
def _step_gain(
    loads: Loads,
    running: Loads,
    arrived: Indices,
    time: float,
    order: Indices,
    other: float,
    parameters: NDArray[np.float64],
    ranks: int,
) -> float:
    """Return the share of `time`, that of `arrived`, which `order` saves; `other` is the time of `order`."""
    if parameters[5] > 0.0:  # compares unevenness per token: a batch of more tokens is no gain
        before = _tokens(running)
        arrived_tokens, tokens = before + _brought(loads, arrived), before + _brought(loads, order)
        uneven = (other - _even_us(tokens, loads, parameters, ranks)) / tokens
        return float((time - _even_us(arrived_tokens, loads, parameters, ranks) - uneven * arrived_tokens) / time)
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


# Arrays below are [layer x rank, …, slot of the rank], so that inner loops run over whole rows: loops that begin or end
# inside a row are not vectorised. Whole-array statements would take seconds to compile.
@njit()
def _step_us(loads: Loads, running: Loads, order: Indices, parameters: NDArray[np.float64], ranks: int) -> float:
    """Return the time in microseconds of a step of the requests in `order` and the running load."""
    brings = loads.reshape(len(loads), loads.shape[1] * ranks, loads.shape[2] // ranks)
    rows, cold = _together(brings, running, order)
    return _time_us(rows, cold, parameters, ranks)


@helper()
def _fill_step(
    loads: Loads, running: Loads, order: Indices, forced: int, parameters: NDArray[np.float64], ranks: int
) -> float:
    """Fill `order` after its forced picks; return the time of the whole step in microseconds."""
    waiting, layers, slots = loads.shape
    groups, per_rank, tile, by_tokens = layers * ranks, slots // ranks, parameters[2], parameters[5] > 0.0
    brings = loads.reshape(waiting, groups, per_rank)
    rows, cold = _together(brings, running, order[:forced])
    if forced == len(order):
        return _time_us(rows, cold, parameters, ranks)
    left = not_in(order[:forced], waiting)
    count, total = len(left), _tokens(rows)
    by_group, chance = np.empty((groups, waiting, per_rank)), np.empty((groups, waiting, per_rank))
    own, totals = np.empty((groups, waiting)), np.zeros(waiting)
    for group in range(groups):
        for request in range(waiting):
            brought, likely = brings[request, group], chance[group, request]
            for slot in range(per_rank):
                likely[slot] = min(brought[slot], 1.0)
            by_group[group, request] = brought
            own[group, request] = _total(brought)
            totals[request] += own[group, request]
    # [group, candidate] slots touched, rows past a first tile, and rows, if the candidate joins.
    touched, past, arrived = np.empty((groups, waiting)), np.zeros((groups, waiting)), np.empty((groups, waiting))
    # If no slot can fill a tile, as in decode, there are no rows past a first tile to count.
    tiles = _may_fill(by_group, rows, len(order), tile)
    for place in range(forced, len(order)):
        for group in range(groups):
            _dots(chance[group], left[:count], cold[group], touched[group])
            if tiles:
                _pasts(by_group[group], left[:count], rows[group], tile, past[group])
            warm, present = per_rank - _total(cold[group]), _total(rows[group])
            for i in range(count):
                touched[group, i] += warm
                arrived[group, i] = present + own[group, left[i]]
        best, least = -1, np.inf
        for i in range(count):
            score = line_us(parameters, layers, ranks, touched, past, arrived, i)
            if by_tokens:  # unevenness per token: otherwise short prompts would always win
                tokens = total + totals[left[i]]
                score = (score - _even_us(tokens, loads, parameters, ranks)) / tokens
            if score < least:
                best, least = i, score
        order[place] = left[best]
        total += totals[left[best]]
        drop(left, count, best)
        count -= 1
        _add(rows, cold, brings[order[place]])
    return _time_us(rows, cold, parameters, ranks)


@helper()
def _together(brings: Loads, running: Loads, order: Indices) -> tuple[Loads, Loads]:
    """Return per slot the expected tokens of these requests and the running load, and the probability of none."""
    rows = running.copy().reshape(brings.shape[1], brings.shape[2])
    cold = np.empty(rows.shape)
    for group in range(len(rows)):
        for slot in range(rows.shape[1]):
            # The number of running requests is unknown; independent tokens all miss a slot with probability exp(-load).
            cold[group, slot] = np.exp(-rows[group, slot])
    for request in order:
        _add(rows, cold, brings[request])
    return rows, cold


@helper()
def _time_us(rows: Loads, cold: Loads, parameters: NDArray[np.float64], ranks: int) -> float:
    parts = np.zeros((3, len(rows), 1))  # slots touched, rows past a first tile, rows
    for group in range(len(rows)):
        parts[0, group, 0] = rows.shape[1] - _total(cold[group])
        for slot in range(rows.shape[1]):
            parts[1, group, 0] += rows_past(rows[group, slot], parameters[2])
        parts[2, group, 0] = _total(rows[group])
    return line_us(parameters, len(rows) // ranks, ranks, parts[0], parts[1], parts[2], 0)


@helper()  # not fastmath, unlike `total_of`: equal requests must keep equal totals
def _total(row: Loads) -> float:
    total = 0.0
    for slot in range(len(row)):
        total += row[slot]
    return total


@helper(fastmath=True)
def _add(rows: Loads, cold: Loads, brings: Loads) -> None:
    for group in range(len(rows)):
        for slot in range(rows.shape[1]):
            rows[group, slot] += brings[group, slot]
            cold[group, slot] *= max(1.0 - brings[group, slot], ALMOST_NEVER)


@helper(fastmath=True)
def _dots(chance: Loads, left: Indices, cold: Loads, out: Loads) -> None:
    """Fill `out` with the expected number of slots that each request in `left` would be the first to touch."""
    for i in range(len(left)):
        row, dot = chance[left[i]], 0.0
        for slot in range(len(cold)):
            dot += row[slot] * cold[slot]
        out[i] = dot


@helper(fastmath=True)
def _pasts(brings: Loads, left: Indices, rows: Loads, tile: float, out: Loads) -> None:
    """Fill `out` with the tokens past a first tile if each request in `left` joined."""
    for i in range(len(left)):
        row, past = brings[left[i]], 0.0
        for slot in range(len(rows)):
            past += rows_past(rows[slot] + row[slot], tile)
        out[i] = past


@helper()
def _even_us(total: float, loads: Loads, parameters: NDArray[np.float64], ranks: int) -> float:
    """Return the time of a batch whose `total` tokens are spread evenly over all layers and slots."""
    fixed_us, first_us, tile, row_us, arrival_us, _ = parameters
    layers, slots = loads.shape[1], loads.shape[2]
    rows, per_rank = total / (layers * slots), slots // ranks
    touched = 1.0 - np.exp(-rows)
    layer = per_rank * (touched * first_us + rows_past(rows, tile) * row_us + rows * arrival_us)
    return float(fixed_us + layers * layer)


@helper()
def _may_fill(by_group: Loads, rows: Loads, count: int, tile: float) -> bool:
    for group in range(len(rows)):
        for request in range(by_group.shape[1]):
            for slot in range(rows.shape[1]):
                if rows[group, slot] + count * by_group[group, request, slot] > tile:
                    return True
    return False
