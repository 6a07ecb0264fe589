"""Gifts: a slot whose expert has other replicas goes to another expert."""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.objective._steps import touched
from coterie.placement.planning.search.steps.state import (
    StepLayer,
    StepPrices,
    StepScratch,
    StepState,
    add_part,
    add_slot,
    add_up,
    expected,
    fill_slot,
    moving,
    objective,
    raise_to,
    rank_slowest,
    share_out,
    weighed,
)

TRIED = 4
"""Experts that are tried for a slot to give away: those whose further replica relieves the slowest ranks most."""


@helper()
def look_at_gifts(layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices) -> bool:
    """Give slots to experts that use them better; whether any was given."""
    per_rank, given = len(scratch.values), False
    fill_relief(layer, state, scratch)
    for slot in range(len(state.row)):
        rank, expert = slot // per_rank, state.row[slot]
        if not layer.alive[rank] or state.copies[expert] < 2:
            continue
        pick = best_gift(layer, state, scratch, prices, slot)
        if pick < 0:
            continue
        give(layer, state, slot, pick)
        fill_relief(layer, state, scratch)
        given = True
    return given


@helper()
def fill_relief(layer: StepLayer, state: StepState, scratch: StepScratch) -> None:
    """[expert] by how much a further replica would shorten the slowest ranks, if they stayed the slowest."""
    relief, per_rank = scratch.relief, len(scratch.values)
    for expert in range(len(relief)):
        relief[expert] = 0.0
    for slot in range(len(state.row)):
        rank, expert = slot // per_rank, state.row[slot]
        busy, token_s, touch_s = state.busy[rank], layer.per_token[rank, expert], layer.touch[rank]
        each, saved = 1.0 / (state.copies[expert] + 1.0), 0.0
        for scenario in range(len(layer.weights)):
            if busy[scenario] < state.first[scenario]:
                continue
            fewer = layer.tokens[expert, scenario] * each
            less = token_s * (state.part[expert, scenario] - fewer)
            if touch_s > 0.0:
                less += touch_s * (state.stream[expert, scenario] - touched(fewer, layer.whole))
            saved += layer.weights[scenario] * less
        relief[expert] += saved


@helper()
def best_gift(layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, slot: int) -> int:
    """The expert that lowers the objective most in this slot; -1 if none does."""
    ranks, experts = state.held.shape
    per_rank, edge = len(scratch.values), state.edge[0]
    rank, was = slot // per_rank, state.row[slot]
    free_slot(layer, state, scratch, rank, was)
    living = 0
    for one in range(ranks):
        living += layer.alive[one]
    best = objective(expected(layer, state, prices), moving(state, prices), prices, edge) * (1.0 - prices.least)
    pick, last, tried = -1, np.inf, 0
    while tried < min(TRIED, experts):
        # The next by relief, the first of equals first.
        expert = -1
        for one in range(experts):
            value = scratch.relief[one]
            if value > 0.0 and value < last and (expert < 0 or value > scratch.relief[expert]):
                expert = one
        if expert < 0:
            break
        last = scratch.relief[expert]
        tried += 1
        if expert == was or state.held[rank, expert] >= 0 or state.copies[expert] >= living:
            continue
        seconds = gifted_s(layer, state, scratch, prices, rank, expert)
        added = layer.load_in[rank, expert] - layer.load_in[rank, was]
        state.arrivals[rank] += added
        value = objective(seconds, moving(state, prices), prices, edge)
        state.arrivals[rank] -= added
        if value < best:
            best, pick = value, expert
    return pick


@helper()
def free_slot(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, expert: int) -> None:
    """`freed` [rank, scenario]: times once the rank gives an expert up, and its other replicas take over."""
    fewer = 1.0 / (state.copies[expert] - 1.0)
    for one in range(len(layer.alive)):
        freed, busy = scratch.freed[one], state.busy[one]
        for scenario in range(len(freed)):
            freed[scenario] = busy[scenario]
        if state.held[one, expert] < 0:
            continue
        token_s, touch_s = layer.per_token[one, expert], layer.touch[one]
        add_slot(freed, state.part[expert], state.stream[expert], token_s, touch_s, -1.0)
        if one != rank:
            add_part(freed, layer.tokens[expert], fewer, token_s, touch_s, layer.whole)


@helper()
def gifted_s(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, rank: int, expert: int
) -> float:
    """What is expected if the slot that was freed on `rank` goes to `expert`."""
    peak, changed, more = scratch.peak, scratch.changed, 1.0 / (state.copies[expert] + 1.0)
    for scenario in range(len(peak)):
        peak[scenario] = 0.0
    for one in range(len(layer.alive)):
        holds = state.held[one, expert] >= 0
        if not holds and one != rank:
            raise_to(peak, scratch.freed[one])
            continue
        for scenario in range(len(peak)):
            changed[scenario] = scratch.freed[one, scenario]
        token_s, touch_s = layer.per_token[one, expert], layer.touch[one]
        add_part(changed, layer.tokens[expert], more, token_s, touch_s, layer.whole)
        if holds:
            add_slot(changed, state.part[expert], state.stream[expert], token_s, touch_s, -1.0)
        raise_to(peak, changed)
    return weighed(peak, layer.weights, state.edge[0], prices.lean, prices.steep)


@helper()
def give(layer: StepLayer, state: StepState, slot: int, expert: int) -> None:
    rank, was = slot // (len(state.row) // len(layer.alive)), state.row[slot]
    state.row[slot] = expert
    state.held[rank, was], state.held[rank, expert] = -1, slot
    state.copies[was] -= 1
    state.copies[expert] += 1
    share_out(layer, state, was)
    share_out(layer, state, expert)
    for one in range(len(layer.alive)):
        if one != rank and state.held[one, was] < 0 and state.held[one, expert] < 0:
            continue
        for changed in (was, expert):
            if state.held[one, changed] >= 0:
                fill_slot(layer, state, state.held[one, changed])
        add_up(layer, state, one)
    rank_slowest(state.busy, state.first, state.second, state.third)
