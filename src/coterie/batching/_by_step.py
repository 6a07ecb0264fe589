"""Compiled loops of :mod:`coterie.batching.latency_aware` that minimise a :class:`~coterie.costs.lines.StepCost`.

`parameters` are :meth:`StepCost.numbers`; loads are [request, layer, slot], with a rank's slots contiguous.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import Loads
from coterie.batching.picking import Indices, allowed_skips, drop, due, in_order, not_in
from coterie.costs.lines import line_us, rows_past

ALMOST_NEVER = 1e-3
"""Lower limit of the probability that a request misses an expert: keeps the product over many requests above 0."""


@njit()
def by_step(
    loads: Loads,
    running: Loads,
    skipped: Indices,
    expected_gain: float,
    size: int,
    max_skips: int,
    parameters: NDArray[np.float64],
    ranks: int,
) -> tuple[Indices, int, float]:
    arrived = in_order(skipped, size, max_skips)
    if len(arrived) == len(loads):
        return arrived, 0, 0.0
    time = step_us(loads, running, arrived, parameters, ranks)
    budget = allowed_skips(step_avoidable(loads, running, arrived, time, parameters, ranks), expected_gain, max_skips)
    if budget == 0:
        return arrived, 0, 0.0
    order, forced = due(skipped, size, max_skips, budget)
    other = _fill_step(loads, running, order, forced, parameters, ranks)
    gain = _step_gain(loads, running, arrived, time, order, other, parameters, ranks)
    return (order, budget, gain) if gain > 0.0 else (arrived, 0, 0.0)


@njit()
def step_avoidable(
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
        least = step_us(loads, running, arrived[:0], parameters, ranks)
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
def step_us(loads: Loads, running: Loads, order: Indices, parameters: NDArray[np.float64], ranks: int) -> float:
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
            for slot in range(per_rank):
                by_group[group, request, slot] = brings[request, group, slot]
                chance[group, request, slot] = min(brings[request, group, slot], 1.0)
            own[group, request] = _total(brings[request, group])
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
            score = line_us(parameters, ranks, touched, past, arrived, i)
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
    return line_us(parameters, ranks, parts[0], parts[1], parts[2], 0)


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
