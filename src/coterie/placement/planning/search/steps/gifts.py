"""Gifts: a slot whose expert has other replicas goes to another expert."""

from __future__ import annotations

from coterie._numba import helper
from coterie.placement.planning.search.steps.state import (
    StepLayer,
    StepPrices,
    StepScratch,
    StepState,
    Units,
    add_units,
    expected,
    fill_slot,
    fill_units,
    mark_stale,
    moving,
    objective,
    objective_now,
    rank_slowest,
)


@helper()
def look_at_gifts(layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, least: float) -> bool:
    """Give slots to experts that use them better, by at least a share of the objective; whether any was given."""
    per_rank, given = len(scratch.pull), False
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
    relief, per_rank = scratch.relief, len(scratch.pull)
    for expert in range(len(relief)):
        relief[expert] = 0.0
    for rank in range(len(layer.alive)):
        for scenario in range(len(layer.weights)):
            if not layer.alive[rank] or state.busy[rank, scenario] < state.first[scenario]:
                continue
            for slot in range(rank * per_rank, (rank + 1) * per_rank):
                expert = state.row[slot]
                relief[expert] += state.table[slot, scenario] / (state.copies[expert] + 1.0)
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
    ranks, rank, was = len(layer.alive), slot // len(scratch.pull), state.row[slot]
    living = 0
    for one in range(ranks):
        living += layer.alive[one]
        for scenario in range(len(scratch.peak)):
            scratch.freed[one, scenario] = state.busy[one, scenario]
    copy_less(layer, state, scratch, rank, was)
    best, pick = objective_now(layer, state, prices) * (1.0 - least), -1
    for expert in scratch.wanting:
        if expert < 0 or expert == was or state.held[rank, expert] >= 0 or state.copies[expert] >= living:
            continue
        copy_more(layer, state, scratch, rank, expert)
        added = layer.load_in[rank, expert] - layer.load_in[rank, was]
        state.arrivals[rank] += added
        value = objective(expected(layer, state, prices, scratch.peak), moving(state, prices), prices, state.edge[0])
        state.arrivals[rank] -= added
        if value < best:
            best, pick = value, expert
    return pick


@helper()
def copy_less(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, expert: int) -> None:
    """`freed` [rank, scenario]: times once the rank gives an expert up, and its other replicas take over."""
    each = 1.0 / (state.copies[expert] - 1.0)
    for one in range(len(layer.alive)):
        if state.held[one, expert] < 0:
            continue
        add_units(scratch.freed[one], state.table[state.held[one, expert]], -1)
        if one != rank:
            token_s, touch_s = layer.per_token[one, expert], layer.touch[one]
            fill_units(scratch.more, layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)
            add_units(scratch.freed[one], scratch.more, 1)


@helper()
def copy_more(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, expert: int) -> None:
    """`peak` [scenario]: time of the slowest rank if the slot that was freed on `rank` goes to `expert`."""
    peak, more, each = scratch.peak, scratch.more, 1.0 / (state.copies[expert] + 1.0)
    for scenario in range(len(peak)):
        peak[scenario] = 0
    for one in range(len(layer.alive)):
        times, held = scratch.freed[one], state.held[one, expert]
        if held < 0 and one != rank:
            raise_to(peak, times)
            continue
        token_s, touch_s = layer.per_token[one, expert], layer.touch[one]
        fill_units(more, layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)
        if held >= 0:
            add_units(more, state.table[held], -1)
        add_units(more, times, 1)
        raise_to(peak, more)


@helper()
def raise_to(peak: Units, times: Units) -> None:
    for scenario in range(len(peak)):
        peak[scenario] = times[scenario] if times[scenario] > peak[scenario] else peak[scenario]


@helper()
def give(layer: StepLayer, state: StepState, scratch: StepScratch, slot: int, expert: int) -> None:
    rank, was = slot // len(scratch.pull), state.row[slot]
    for changed in (was, expert):
        for one in range(len(layer.alive)):
            if state.held[one, changed] >= 0:
                add_units(state.busy[one], state.table[state.held[one, changed]], -1)
    state.row[slot] = expert
    state.held[rank, was], state.held[rank, expert] = -1, slot
    state.copies[was] -= 1
    state.copies[expert] += 1
    state.arrivals[rank] += layer.load_in[rank, expert] - layer.load_in[rank, was]
    mark_stale(scratch.stale, rank)
    for changed in (was, expert):
        for one in range(len(layer.alive)):
            held = state.held[one, changed]
            if held >= 0:
                fill_slot(layer, state, held)
                add_units(state.busy[one], state.table[held], 1)
                mark_stale(scratch.stale, one)
    rank_slowest(state.busy, state.first, state.second, state.third)
