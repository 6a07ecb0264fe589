"""Swaps of two slots of different ranks, and gifts of a slot, evaluated over all scenarios.

A swap changes the times of two ranks by the times of the two experts; the other ranks count by the slowest of them,
`still`. The expected time is convex in the times that the two ranks exchange, so it is bounded below by its tangent
at no swap: swaps that gain nothing by the tangent are skipped. A gift gives a slot to another expert; the slot's
previous expert keeps other replicas.
"""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.objective._arrays import copy_row
from coterie.placement.planning.search.state import Prices
from coterie.placement.planning.search.steps.state import (
    StepLayer,
    StepScratch,
    StepState,
    Units,
    add_units,
    fill_slot,
    fill_units,
    mark_stale,
    objective,
    objective_now,
    rank_slowest,
)

LOOKED = 2
"""Number of slots of the first rank, steepest slope first, after which the best gaining swap so far is taken."""


@helper()
def best_swap(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: Prices, rank: int, other: int, limit: float
) -> tuple[int, int]:
    """Return the places on the two ranks of the best swap that lowers the objective below `limit`; else (-1, -1)."""
    one, two, still = state.busy[rank], state.busy[other], scratch.still
    low = fill_still(state.first, state.second, state.third, one, two, still, scratch.mine, scratch.theirs)
    if layer.uniform and objective(layer, prices, low / layer.scale, 0.0) >= limit:
        return -1, -1
    per_rank, now = len(scratch.pull), state.first.sum()
    here, home = state.table[rank * per_rank : (rank + 1) * per_rank], state.table[other * per_rank :]
    there, back = here, home
    if not layer.uniform:
        there, back = scratch.there, scratch.back
        gather(layer, state, scratch, rank, other)
    latest, loading = 0.0, 0.0
    for at in range(len(state.arrivals)):
        loading += state.arrivals[at]
        if at not in (rank, other):
            latest = max(latest, state.arrivals[at])
    for at in range(per_rank):
        scratch.pull[at] = slope(scratch.mine, here[at], scratch.theirs, there[at])
        scratch.push[at] = slope(scratch.mine, back[at], scratch.theirs, home[at])
    most_s, best, first, second = limit / max(prices.horizon, 1e-300), limit, -1, -1
    for looked in range(per_rank):
        place = 0
        for at in range(1, per_rank):
            if scratch.pull[at] > scratch.pull[place]:
                place = at
        if scratch.pull[place] == -np.inf or (first >= 0 and looked >= LOOKED):
            break
        top = now - scratch.pull[place]
        scratch.pull[place] = -np.inf
        mine = state.row[rank * per_rank + place]
        if state.held[other, mine] >= 0:
            continue
        for at in range(per_rank):
            theirs = state.row[other * per_rank + at]
            if top + scratch.push[at] >= most_s * layer.scale or state.held[rank, theirs] >= 0:
                continue
            units = after_swap(one, two, still, here[place], there[place], back[at], home[at])
            if units >= most_s * layer.scale:
                continue
            came = layer.load_in[rank, theirs] - layer.load_in[rank, mine]
            went = layer.load_in[other, mine] - layer.load_in[other, theirs]
            most = max(latest, max(state.arrivals[rank] + came, state.arrivals[other] + went))
            moved = prices.exposed * (most + prices.move_price * (loading + came + went))
            value = objective(layer, prices, units / layer.scale, moved)
            if value < best:
                best, first, second = value, place, at
                most_s = best / max(prices.horizon, 1e-300)
    return first, second


@helper()
def fill_still(
    first: Units, second: Units, third: Units, one: Units, two: Units, still: Units, mine: Units, theirs: Units
) -> int:
    """Fill, per scenario, the time of the slowest rank other than a pair, and which of the pair is slower than all.

    Returns a lower bound on the expected time after any swap of the pair, for ranks on which experts take equal time.
    """
    low, none, some = np.int32(0), np.int32(0), np.int32(1)
    for scenario in range(len(still)):
        here, there = one[scenario], two[scenario]
        top, after, last = first[scenario], second[scenario], third[scenario]
        high = here if here > there else there
        less = there if here > there else here
        other = last if less >= after else after
        rest = top if high < top else other
        still[scenario] = rest
        mine[scenario] = some if here > rest and here >= there else none
        theirs[scenario] = some if there > rest and there > here else none
        even = np.int32(np.int32(here + there) >> 1)
        low = np.int32(low + (even if even > rest else rest))
    return int(low)


@helper()
def slope(mine: Units, here: Units, theirs: Units, there: Units) -> float:
    """Return a slot's time in scenarios where the first rank is slowest minus that where the second rank is."""
    total = np.int32(0)
    for scenario in range(len(here)):
        gain = np.int32(np.int32(mine[scenario] * here[scenario]) - np.int32(theirs[scenario] * there[scenario]))
        total = np.int32(total + gain)
    return float(total)


@helper()
def gather(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, other: int) -> None:
    """Compute the times of each rank's experts on the other rank."""
    per_rank = len(scratch.pull)
    for place in range(per_rank):
        for near, far, units in ((rank, other, scratch.there[place]), (other, rank, scratch.back[place])):
            expert = state.row[near * per_rank + place]
            token_s, touch_s, each = layer.per_token[far, expert], layer.touch[far], 1.0 / state.copies[expert]
            fill_units(units, layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)


@helper()
def after_swap(one: Units, two: Units, still: Units, here: Units, there: Units, back: Units, home: Units) -> int:
    """Return the expected time after a swap: the first rank gives `here` for `back`, the other `home` for `there`."""
    total = np.int32(0)
    for scenario in range(len(one)):
        x = np.int32(np.int32(one[scenario] - here[scenario]) + back[scenario])
        y = np.int32(np.int32(two[scenario] + there[scenario]) - home[scenario])
        most = x if x > y else y
        most = most if most > still[scenario] else still[scenario]
        total = np.int32(total + most)
    return int(total)


@helper()
def swap(layer: StepLayer, state: StepState, rank: int, other: int, first: int, second: int) -> None:
    per_rank = len(state.row) // len(layer.alive)
    one, two = rank * per_rank + first, other * per_rank + second
    mine, theirs = state.row[one], state.row[two]
    state.row[one], state.row[two] = theirs, mine
    state.held[rank, mine], state.held[rank, theirs] = -1, one
    state.held[other, theirs], state.held[other, mine] = -1, two
    state.arrivals[rank] += layer.load_in[rank, theirs] - layer.load_in[rank, mine]
    state.arrivals[other] += layer.load_in[other, mine] - layer.load_in[other, theirs]
    for slot in (one, two):
        add_units(state.busy[slot // per_rank], state.table[slot], -1)
        fill_slot(layer, state, slot)
        add_units(state.busy[slot // per_rank], state.table[slot], 1)
    rank_slowest(state.busy, state.first, state.second, state.third)


# Gifts.


@helper()
def look_at_gifts(layer: StepLayer, state: StepState, scratch: StepScratch, prices: Prices, least: float) -> bool:
    """Give slots to experts that use them better; `least` is the least gain as a share. Return whether any was."""
    per_rank, given = len(scratch.pull), False
    fill_wanting(layer, state, scratch)
    for slot in range(len(state.row)):
        if layer.alive[slot // per_rank] and state.copies[state.row[slot]] > 1:
            pick = best_gift(layer, state, scratch, prices, slot, least)
            if pick >= 0:
                give(layer, state, scratch, slot, pick)
                fill_wanting(layer, state, scratch)
                given = True
    return given


@helper()
def fill_wanting(layer: StepLayer, state: StepState, scratch: StepScratch) -> None:
    """Fill `wanting` with the experts whose additional replica would relieve the slowest ranks most."""
    relief, per_rank = scratch.relief, len(scratch.pull)
    relief[:] = 0.0
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
def best_gift(layer: StepLayer, state: StepState, scratch: StepScratch, prices: Prices, slot: int, least: float) -> int:
    """Return the expert that lowers the objective most in this slot; -1 if none gains enough."""
    rank, was = slot // len(scratch.pull), state.row[slot]
    for other in range(len(layer.alive)):
        copy_row(scratch.freed[other], state.busy[other])
    copy_less(layer, state, scratch, rank, was)
    best, pick = objective_now(layer, state, prices, state.first) * (1.0 - least), -1
    for expert in scratch.wanting:
        if expert < 0 or state.held[rank, expert] >= 0:
            continue
        copy_more(layer, state, scratch, rank, expert)
        added = layer.load_in[rank, expert] - layer.load_in[rank, was]
        state.arrivals[rank] += added
        value = objective_now(layer, state, prices, scratch.peak)
        state.arrivals[rank] -= added
        if value < best:
            best, pick = value, expert
    return pick


@helper()
def copy_less(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, expert: int) -> None:
    """Update `freed` [rank, scenario]: times after the rank drops an expert and its other replicas take over."""
    each = 1.0 / (state.copies[expert] - 1.0)
    for other in range(len(layer.alive)):
        if state.held[other, expert] < 0:
            continue
        add_units(scratch.freed[other], state.table[state.held[other, expert]], -1)
        if other != rank:
            token_s, touch_s = layer.per_token[other, expert], layer.touch[other]
            fill_units(scratch.more, layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)
            add_units(scratch.freed[other], scratch.more, 1)


@helper()
def copy_more(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, expert: int) -> None:
    """Fill `peak` [scenario]: time of the slowest rank if the freed slot on `rank` goes to `expert`."""
    peak, more, each = scratch.peak, scratch.more, 1.0 / (state.copies[expert] + 1.0)
    peak[:] = 0
    for other in range(len(layer.alive)):
        times, held = scratch.freed[other], state.held[other, expert]
        if held < 0 and other != rank:
            raise_to(peak, times)
            continue
        token_s, touch_s = layer.per_token[other, expert], layer.touch[other]
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
        for other in range(len(layer.alive)):
            if state.held[other, changed] >= 0:
                add_units(state.busy[other], state.table[state.held[other, changed]], -1)
    state.row[slot] = expert
    state.held[rank, was], state.held[rank, expert] = -1, slot
    state.copies[was] -= 1
    state.copies[expert] += 1
    state.arrivals[rank] += layer.load_in[rank, expert] - layer.load_in[rank, was]
    mark_stale(scratch.stale, rank)
    for changed in (was, expert):
        for other in range(len(layer.alive)):
            held = state.held[other, changed]
            if held >= 0:
                fill_slot(layer, state, held)
                add_units(state.busy[other], state.table[held], 1)
                mark_stale(scratch.stale, other)
    rank_slowest(state.busy, state.first, state.second, state.third)
