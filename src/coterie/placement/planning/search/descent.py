"""Repair a layer's placement, and apply actions until its target time is reached."""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.objective._arrays import copy_row
from coterie.placement.objective.flows.chains import NONE
from coterie.placement.planning.search.state import (
    EMPTY,
    TINY,
    Action,
    Best,
    MeanLayer,
    MeanState,
    Prices,
    Scratch,
    apply,
    part_of,
)


@helper()
def repair(layer: MeanLayer, state: MeanState, target: float) -> bool:
    """Load experts that no living rank holds, and fill EMPTY slots; return whether anything changed."""
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
                    gain += target  # an EMPTY slot must be filled anyway: saves a move
                if gain > best:
                    best, at = gain, slot
        apply(layer, state, NONE, at, expert)
        done = True
    for slot in range(slots):
        if state.row[slot] != EMPTY:
            continue
        rank = slot // per_rank
        best, pick = -np.inf, NONE
        for expert in range(len(state.copies)):
            if state.held[rank, expert] < 0:
                gain = give_gain(layer, state, slot, expert, target) - TINY * target * state.fees[rank, expert]
                if gain > best:
                    best, pick = gain, expert
        apply(layer, state, NONE, slot, pick)
        done = True
    return done


@helper()
def reach_target(
    layer: MeanLayer, state: MeanState, scratch: Scratch, best: Best, prices: Prices, target: float, spare: float
) -> bool:
    """Apply actions until no rank is above the target or no action helps; return whether the target was reached."""
    stuck = scratch.stuck
    stuck[:] = False
    while True:
        rank = NONE
        for other in range(len(state.busy)):
            slow = not stuck[other] and state.busy[other] > target * (1.0 + TINY)
            if slow and (rank < 0 or state.busy[other] > state.busy[rank]):
                rank = other
        if rank < 0:
            return not stuck.any()
        action = Action(TINY * target, NONE, NONE, NONE)
        action = find_swap(layer, state, scratch, rank, target, action, spare)
        action = find_gift(layer, state, scratch, rank, target, action, spare)
        if action.second < 0:
            stuck[rank] = True
            continue
        apply(layer, state, action.first, action.second, action.expert)
        note(layer, state, best, prices)
        stuck[:] = False


@helper()
def note(layer: MeanLayer, state: MeanState, best: Best, prices: Prices) -> None:
    """Record the present placement if its objective is the best so far, or equal with fewer moves, or the first."""
    per_rank = len(state.row) // len(state.busy)
    moves, latest, seconds = 0, 0.0, 0.0
    for rank in range(len(state.busy)):
        arrival = 0.0
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = state.row[slot]
            if layer.alive[rank] and state.fees[rank, expert] > 0.0:
                arrival += layer.load_in[rank, expert]
                moves += 1
        latest = max(latest, arrival)
        seconds += arrival
    total = prices.horizon * max(state.busy.max(), layer.floor)
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
    copy_row(best.rows[at], state.row)


# Actions: swap two slots, or give a slot to another expert.

DEPTH = 0.03
"""Weight of the squared room below the target in `excess`, so that the search fills the emptiest ranks first; this
takes fewer moves."""

ROOMIEST = 4
"""Number of ranks tried for a swap if there are more than eight, those with the most room first. On 32 ranks, trying
all takes 50% longer and saves 5% of the moves."""


@helper()
def excess(busy: float, target: float, steep: float) -> float:
    over = busy - target
    return over if over > 0.0 else steep * over * over


@helper()
def give_gain(layer: MeanLayer, state: MeanState, slot: int, expert: int, target: float) -> float:
    """Return the excess removed by giving the slot to an expert that its rank does not hold."""
    rank, was, steep = slot // (len(state.row) // len(state.busy)), state.row[slot], DEPTH / target
    less = part_of(layer.share, expert, state.copies[expert] + 1)
    drop = state.part[expert] - less if state.copies[expert] else 0.0
    rise = 0.0
    if was != EMPTY and state.copies[was] > 1:
        rise = part_of(layer.share, was, state.copies[was] - 1) - state.part[was]
    gain = 0.0
    for other in range(len(state.busy)):
        change = 0.0
        if other == rank:
            change = layer.unit[rank, expert] * less - (state.own[slot] if was != EMPTY else 0.0)
        else:
            if state.held[other, expert] >= 0:
                change -= layer.unit[other, expert] * drop
            if was != EMPTY and state.held[other, was] >= 0:
                change += layer.unit[other, was] * rise
        if change != 0.0:
            gain += excess(state.busy[other], target, steep) - excess(state.busy[other] + change, target, steep)
    return gain


@helper(division_raises=False)
def find_swap(
    layer: MeanLayer, state: MeanState, scratch: Scratch, rank: int, target: float, best: Action, spare: float
) -> Action:
    """Return the best swap of one of the rank's slots with a slot of another rank, or `best` if that is better.

    Ranks with the most room come first; a rank is skipped if even a perfect fit would not be better.
    """
    row, held, part, busy, own, fee = state.row, state.held, state.part, state.busy, state.own, state.fee
    back, back_fee, order, worth = scratch.back, scratch.back_fee, scratch.order, scratch.worth
    ranks = len(busy)
    per_rank = len(row) // ranks
    mine = rank * per_rank
    steep = DEPTH / target
    here = excess(busy[rank], target, steep)
    for place in range(ranks):
        at = place
        while at > 0 and busy[order[at - 1]] > busy[place]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = place
    mine_fee = fee[mine : mine + per_rank].max()
    for index in range(ranks if ranks <= 8 else ROOMIEST):
        other = order[index]
        if other == rank or not layer.alive[other]:
            continue
        now = excess(busy[other], target, steep)
        fits = here + now
        if layer.uniform_ranks:  # the seconds that one rank loses, the other gains
            fits = min(here, max(target - busy[other], 0.0)) + (now if busy[other] < target else 0.0)
        start_at = other * per_rank
        theirs_fee = fee[start_at : start_at + per_rank].max()
        if mine_fee == 0.0 and theirs_fee == 0.0 and fits <= best.score * spare:
            continue
        cheap = np.inf
        for slot in range(start_at, start_at + per_rank):
            expert = row[slot]
            back_fee[slot] = np.inf
            if held[rank, expert] < 0:
                back[slot] = layer.unit[rank, expert] * part[expert]
                back_fee[slot] = state.fees[rank, expert] - fee[slot]
                cheap = min(cheap, back_fee[slot])
        theirs, theirs_back = own[start_at : start_at + per_rank], back[start_at : start_at + per_rank]
        returns = back_fee[start_at : start_at + per_rank]
        for first in range(mine, mine + per_rank):
            expert = row[first]
            if held[other, expert] >= 0:
                continue
            moves = state.fees[other, expert] - fee[first]
            if fits <= best.score * max(moves + cheap + spare, spare / 2):
                continue
            left = busy[rank] - own[first] - target
            there = busy[other] + layer.unit[other, expert] * part[expert] - target
            for place in range(len(worth)):  # no branches, so that it is vectorised
                mine_over = left + theirs_back[place]
                theirs_over = there - theirs[place]
                after = mine_over if mine_over > 0.0 else steep * mine_over * mine_over
                after += theirs_over if theirs_over > 0.0 else steep * theirs_over * theirs_over
                worth[place] = (here + now - after) / max(moves + returns[place] + spare, spare / 2)
            for place in range(len(worth)):
                if worth[place] > best.score:
                    best = Action(worth[place], first, start_at + place, EMPTY)
    return best


@helper()
def find_gift(
    layer: MeanLayer, state: MeanState, scratch: Scratch, rank: int, target: float, best: Action, spare: float
) -> Action:
    """Return the best gift of a slot, or `best` if that is better.

    A slot elsewhere goes to an expert of the rank, or a slot of the rank to any expert. The excess of other ranks is
    summed up per expert first. These sums are wrong if a rank holds both experts, so candidates are evaluated again.
    """
    share, row, held, count, part, busy = layer.share, state.row, state.held, state.copies, state.part, state.busy
    relief, steep = scratch.relief, DEPTH / target
    per_rank = len(row) // len(busy)
    if count.max() < 2:
        return best
    wanted = False  # whether the rank has a slot to give
    for place in range(rank * per_rank, (rank + 1) * per_rank):
        wanted = wanted or count[row[place]] > 1
    weigh_replicas(layer, state, scratch, rank, target, wanted)
    most = -np.inf  # largest relief of an expert of the rank; below, of any expert
    for place in range(rank * per_rank, (rank + 1) * per_rank):
        most = max(most, relief[row[place]])
    most_here = relief.max() if wanted else -np.inf
    for other in range(len(busy)):
        if not layer.alive[other]:
            continue
        for slot in range(other * per_rank, (other + 1) * per_rank):
            was = row[slot]
            if count[was] < 2:
                continue
            # `burden` includes the slot's own rank, which loses the expert: take that part out again.
            more = layer.unit[other, was] * (part_of(share, was, count[was] - 1) - part[was])
            rest = excess(busy[other] + more, target, steep) - scratch.burden[was]
            # An upper bound: the new expert only adds excess, and the moves can only be more than `least`.
            least = max(spare - state.fee[slot], spare / 2)
            if (most_here if other == rank else most) + rest <= best.score * least:
                continue
            free = busy[other] - state.own[slot]
            for place in range(len(relief) if other == rank else per_rank):
                expert = place if other == rank else row[rank * per_rank + place]
                if relief[expert] + rest <= best.score * least or held[other, expert] >= 0:
                    continue
                brings = layer.unit[other, expert] * part_of(share, expert, count[expert] + 1)
                gain = relief[expert] + rest - excess(free + brings, target, steep)
                divisor = max(state.fees[other, expert] - state.fee[slot] + spare, spare / 2)
                if gain > best.score * divisor:
                    per_move = give_gain(layer, state, slot, expert, target) / divisor
                    if per_move > best.score:
                        best = Action(per_move, NONE, slot, expert)
    return best


@helper()
def weigh_replicas(
    layer: MeanLayer, state: MeanState, scratch: Scratch, rank: int, target: float, wanted: bool
) -> None:
    """Fill `relief` and `burden`: of all experts if `wanted`, else the relief of the rank's experts only."""
    unit, share, count, part, busy = layer.unit, layer.share, state.copies, state.part, state.busy
    relief, burden, steep = scratch.relief, scratch.burden, DEPTH / target
    per_rank = len(state.row) // len(busy)
    relief[:] = 0.0
    burden[:] = 0.0
    for other in range(len(busy)):
        if not layer.alive[other]:
            continue
        now = excess(busy[other], target, steep)
        for slot in range(other * per_rank, (other + 1) * per_rank):
            expert = state.row[slot]
            whole = unit[other, expert]
            if wanted or state.held[rank, expert] >= 0:
                less = whole * (part[expert] - part_of(share, expert, count[expert] + 1))
                relief[expert] += now - excess(busy[other] - less, target, steep)
            if count[expert] > 1:
                more = whole * (part_of(share, expert, count[expert] - 1) - part[expert])
                burden[expert] += excess(busy[other] + more, target, steep) - now
