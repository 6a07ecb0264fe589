"""Repair a layer, and take actions until its target is reached."""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.planning.search.actions import give_gain, look_at_gifts, look_at_swaps
from coterie.placement.planning.search.state import (
    EMPTY,
    TINY,
    Action,
    Best,
    Layer,
    Prices,
    Scratch,
    State,
    apply,
    fee_of,
    slowest,
)
from coterie.placement.splits._flows import NONE


@helper()
def repair(layer: Layer, state: State, target: float, fastest: float) -> bool:
    """Bring experts that no living rank has to one, and fill EMPTY slots; whether there was anything to do."""
    slots, ranks = len(state.row), len(state.busy)
    per_rank = slots // ranks
    done = False
    for expert in range(len(state.copies)):
        if state.copies[expert]:
            continue
        best, at = -np.inf, NONE
        for slot in range(slots):
            rank, was = slot // per_rank, state.row[slot]
            if layer.alive[rank] and (was == EMPTY or state.copies[was] > 1):
                gain = give_gain(layer, state, slot, expert, target)
                if was == EMPTY:
                    gain += target  # such a slot must be filled anyhow: one move less
                if gain > best:
                    best, at = gain, slot
        apply(layer, state, NONE, at, expert, fastest)
        done = True
    for slot in range(slots):
        if state.row[slot] != EMPTY:
            continue
        rank = slot // per_rank
        best, pick = -np.inf, NONE
        for expert in range(len(state.copies)):
            if state.held[rank, expert] < 0:
                fee = fee_of(layer.load_in, state.home, rank, expert, fastest)
                gain = give_gain(layer, state, slot, expert, target) - TINY * target * fee
                if gain > best:
                    best, pick = gain, expert
        apply(layer, state, NONE, slot, pick, fastest)
        done = True
    return done


@helper()
def descend(
    layer: Layer, state: State, scratch: Scratch, best: Best, prices: Prices, target: float, spare: float
) -> bool:
    """Until no rank is above the target, or nothing helps; whether none is."""
    stuck, fastest, given_up = scratch.stuck, prices.fastest, 0
    for rank in range(len(stuck)):
        stuck[rank] = False
    while True:
        rank = NONE
        for other in range(len(state.busy)):
            slow = not stuck[other] and state.busy[other] > target * (1.0 + TINY)
            if slow and (rank < 0 or state.busy[other] > state.busy[rank]):
                rank = other
        if rank < 0:
            return given_up == 0
        action = Action(TINY * target, NONE, NONE, NONE)
        action = look_at_swaps(layer, state, scratch, rank, target, fastest, action, spare)
        action = look_at_gifts(layer, state, scratch, rank, target, fastest, action, spare)
        if action.second < 0:
            stuck[rank] = True
            given_up += 1
            continue
        apply(layer, state, action.first, action.second, action.expert, fastest)
        note(layer, state, best, prices)
        if given_up:
            for other in range(len(stuck)):
                stuck[other] = False
            given_up = 0


@helper()
def note(layer: Layer, state: State, best: Best, prices: Prices) -> None:
    """Keep what is better by the objective than all before, or the first; of equals, the one with fewer moves."""
    per_rank = len(state.row) // len(state.busy)
    slot, moves, latest, seconds = 0, 0, 0.0, 0.0
    for rank in range(len(state.busy)):
        here = 0.0
        for _ in range(per_rank):
            expert = state.row[slot]
            slot += 1
            if layer.alive[rank] and not state.home[rank, expert]:
                here += layer.load_in[rank, expert]
                moves += 1
        latest = max(latest, here)
        seconds += here
    total = prices.horizon * max(slowest(state.busy), prices.floor)
    total += prices.exposed * (latest + prices.move_price * seconds)
    at = best.kept[0] - 1
    if at < 0:
        at = 0
    else:
        least = best.totals[at]
        even = abs(total - least) <= TINY * least
        if not (total < least - TINY * least or (even and moves < best.moves[at])):
            return
        if best.trail and not even and at + 1 < len(best.rows):
            at += 1
    best.kept[0] = at + 1
    best.totals[at], best.seconds[at], best.moves[at] = total, seconds, moves
    for slot in range(len(state.row)):
        best.rows[at, slot] = state.row[slot]
