"""Gifts: a slot whose expert has other replicas goes to another expert."""

from __future__ import annotations

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
    mark_stale,
    moving,
    objective,
    raise_to,
    rank_slowest,
    share_out,
    weighed,
)


@helper()
def look_at_gifts(layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, least: float) -> bool:
    """Give slots to experts that use them better, by at least a share of the objective; whether any was given."""
    per_rank, given = len(scratch.values), False
    fill_wanting(layer, state, scratch)
    for slot in range(len(state.row)):
        rank, expert = slot // per_rank, state.row[slot]
        if not layer.alive[rank] or state.copies[expert] < 2:
            continue
        pick = best_gift(layer, state, scratch, prices, slot, least)
        if pick < 0:
            continue
        give(layer, state, scratch, slot, pick)
        fill_wanting(layer, state, scratch)
        given = True
    return given


@helper()
def fill_wanting(layer: StepLayer, state: StepState, scratch: StepScratch) -> None:
    """`wanting`: experts whose further replica would shorten the slowest ranks most, if they stayed the slowest."""
    relief, per_rank = scratch.relief, len(scratch.values)
    for expert in range(len(relief)):
        relief[expert] = 0.0
    for rank in range(len(layer.alive)):
        for scenario in range(len(layer.weights)):
            if state.busy[rank, scenario] < state.first[scenario]:
                continue
            for slot in range(rank * per_rank, (rank + 1) * per_rank):
                expert = state.row[slot]
                fewer = layer.tokens[expert, scenario] / (state.copies[expert] + 1.0)
                less = layer.per_token[rank, expert] * (state.part[expert, scenario] - fewer)
                if layer.touch[rank] > 0.0:
                    less += layer.touch[rank] * (state.stream[expert, scenario] - touched(fewer, layer.whole))
                relief[expert] += layer.weights[scenario] * less
    for at in range(len(scratch.wanting)):
        most = -1
        for expert in range(len(relief)):
            if relief[expert] > 0.0 and (most < 0 or relief[expert] > relief[most]):
                most = expert
        scratch.wanting[at] = most
        if most >= 0:
            relief[most] = 0.0


@helper()
def best_gift(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, slot: int, least: float
) -> int:
    """The expert that lowers the objective most in this slot; -1 if none does."""
    ranks = len(layer.alive)
    per_rank, edge = len(scratch.values), state.edge[0]
    rank, was = slot // per_rank, state.row[slot]
    free_slot(layer, state, scratch, rank, was)
    living = 0
    for one in range(ranks):
        living += layer.alive[one]
    best = objective(expected(layer, state, prices), moving(state, prices), prices, edge) * (1.0 - least)
    pick = -1
    for expert in scratch.wanting:
        if expert < 0 or expert == was or state.held[rank, expert] >= 0 or state.copies[expert] >= living:
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
def give(layer: StepLayer, state: StepState, scratch: StepScratch, slot: int, expert: int) -> None:
    rank, was = slot // (len(state.row) // len(layer.alive)), state.row[slot]
    state.row[slot] = expert
    state.held[rank, was], state.held[rank, expert] = -1, slot
    state.copies[was] -= 1
    state.copies[expert] += 1
    for changed in (was, expert):
        share_out(layer, state, changed)
    for one in range(len(layer.alive)):
        if one != rank and state.held[one, was] < 0 and state.held[one, expert] < 0:
            continue
        for changed in (was, expert):
            if state.held[one, changed] >= 0:
                fill_slot(layer, state, state.held[one, changed])
        add_up(layer, state, one)
        mark_stale(scratch.stale, one)
    rank_slowest(state.busy, state.first, state.second, state.third)
