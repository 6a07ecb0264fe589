"""The search of a layer over scenarios: swaps and gifts of slots that lower the expected time of the slowest rank.

Each pass looks at every pair of ranks for the best swap of a slot of one with a slot of the other, and takes it if the
objective falls; then at every slot whose expert has other replicas, for an expert that would use it better. It ends
when a pass finds nothing. A swap is weighed in all scenarios at once: times of the two ranks change by what the two
experts take there, and the other ranks count by the slowest of them.

With a tail, a scenario counts by ``v + steep x max(0, v - edge)``, with the edge at the time that the worst share of
scenarios exceed now. That is at least the objective for any edge and equal to it for this one, so what lowers it lowers
the objective (Rockafellar and Uryasev's form of CVaR).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective._steps import touched
from coterie.placement.planning.search.step_state import (
    Array,
    Ints,
    StepLayer,
    StepPrices,
    StepScratch,
    StepState,
    add_part,
    add_slot,
    expected,
    find_edge,
    moving,
    objective,
    raise_to,
    rank_slowest,
    refresh,
    share_out,
    take,
    weighed,
)

PASSES = 32
"""Most passes over a layer; later ones gain next to nothing."""

KICKS = 12
"""Times that a small layer is searched again after some random swaps: a single descent may end 5% from the best."""

THOROUGH = 1024
"""Slots x ranks up to which a layer is small."""

KICKED = 3
"""Swaps of one kick."""

TRIED = 4
"""Experts that are tried for a slot to give away: those whose further replica relieves the slowest ranks most."""


# Swaps.


@helper()
def look_at_pair(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, rank: int, other: int, uniform: bool
) -> bool:
    """Take the best swap between two ranks, if one lowers the objective."""
    edge = state.edge[0]
    fill_others(state.first, state.second, state.third, state.slowest, state.next, rank, other, scratch.others)
    now = objective(expected(layer, state, prices), moving(state, prices), prices, edge)
    low = scratch.peak
    if uniform:
        at_best(scratch.others, state.busy[rank], state.busy[other], low)
    else:
        low = scratch.others
    least = weighed(low, layer.weights, edge, prices.lean, prices.steep)
    if objective(least, 0.0, prices, edge) >= now * (1.0 - prices.least):
        return False
    gather(layer, state, scratch, rank, other, uniform)
    best, first, second = best_swap(layer, state, scratch, prices, rank, other, now * (1.0 - prices.least))
    if first < 0:
        return False
    swap(layer, state, rank, other, first, second)
    return best < now


@helper()
def fill_others(
    first: Array, second: Array, third: Array, slowest: Ints, then: Ints, rank: int, other: int, others: Array
) -> None:
    """The slowest of the ranks but two, in each scenario."""
    for scenario in range(len(others)):
        others[scenario] = first[scenario]
        if slowest[scenario] in (rank, other):
            others[scenario] = third[scenario] if then[scenario] in (rank, other) else second[scenario]


@helper()
def at_best(others: Array, one: Array, two: Array, low: Array) -> None:
    """What no swap gets below: the two ranks equally busy."""
    for scenario in range(len(low)):
        low[scenario] = max(others[scenario], 0.5 * (one[scenario] + two[scenario]))


@helper()
def gather(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, other: int, uniform: bool) -> None:
    """Seconds of both ranks' experts on both ranks."""
    per_rank = len(scratch.values)
    for place in range(per_rank):
        mine, theirs = state.row[rank * per_rank + place], state.row[other * per_rank + place]
        for expert, here, there in ((mine, scratch.here, scratch.there), (theirs, scratch.back, scratch.home)):
            part, stream = state.part[expert], state.stream[expert]
            column(here, place, part, stream, layer.per_token[rank, expert], layer.touch[rank])
            if not uniform:
                column(there, place, part, stream, layer.per_token[other, expert], layer.touch[other])


@helper()
def column(table: Array, place: int, part: Array, stream: Array, token_s: float, touch_s: float) -> None:
    for scenario in range(len(part)):
        table[scenario, place] = token_s * part[scenario] + touch_s * stream[scenario]


@helper()
def best_swap(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, rank: int, other: int, limit: float
) -> tuple[float, int, int]:
    """The objective after the best swap that brings it below `limit`, and its places on the two ranks; else -1."""
    values, edge = scratch.values, state.edge[0]
    per_rank = len(values)
    latest, loading = 0.0, 0.0
    for one in range(len(state.arrivals)):
        loading += state.arrivals[one]
        if one not in (rank, other):
            latest = max(latest, state.arrivals[one])
    best, first, second = limit, -1, -1
    for place in range(per_rank):
        one, two = state.busy[rank], state.busy[other]
        swapped_s(scratch, layer.weights, one, two, place, edge, prices.lean, prices.steep)
        mine = state.row[rank * per_rank + place]
        if state.held[other, mine] >= 0:
            continue
        for at in range(per_rank):
            theirs = state.row[other * per_rank + at]
            if prices.horizon * values[at] >= best or state.held[rank, theirs] >= 0:
                continue
            came = layer.load_in[rank, theirs] - layer.load_in[rank, mine]
            went = layer.load_in[other, mine] - layer.load_in[other, theirs]
            most = max(latest, max(state.arrivals[rank] + came, state.arrivals[other] + went))
            moved = prices.exposed * (most + prices.move_price * (loading + came + went))
            value = objective(values[at], moved, prices, edge)
            if value < best:
                best, first, second = value, place, at
    return best, first, second


@helper()
def swapped_s(
    scratch: StepScratch, weights: Array, one: Array, two: Array, place: int, edge: float, lean: float, steep: float
) -> None:
    """`values` [place on the other rank]: what is expected after a swap with `place` of the first.

    The inner loop runs over places, not scenarios: each sum has its order, so that it does not depend on how many
    values a processor adds at once.
    """
    values = scratch.values
    for at in range(len(values)):
        values[at] = 0.0
    for scenario in range(len(weights)):
        left, right = one[scenario] - scratch.here[scenario, place], two[scenario] + scratch.there[scenario, place]
        still, weight = scratch.others[scenario], weights[scenario]
        back, home = scratch.back[scenario], scratch.home[scenario]
        if steep == 0.0:
            add_swaps(values, back, home, left, right, still, weight)
        else:
            add_swaps_with_tail(values, back, home, left, right, still, weight, edge, lean, steep)


@helper()
def add_swaps(values: Array, back: Array, home: Array, left: float, right: float, still: float, weight: float) -> None:
    for at in range(len(values)):
        x, y = left + back[at], right - home[at]
        most = x if x > y else y
        most = most if most > still else still
        values[at] += weight * most


@helper()
def add_swaps_with_tail(
    values: Array,
    back: Array,
    home: Array,
    left: float,
    right: float,
    still: float,
    weight: float,
    edge: float,
    lean: float,
    steep: float,
) -> None:
    for at in range(len(values)):
        x, y = left + back[at], right - home[at]
        most = x if x > y else y
        most = most if most > still else still
        past = most - edge
        past = past if past > 0.0 else 0.0
        values[at] += weight * (lean * most + steep * past)


@helper()
def swap(layer: StepLayer, state: StepState, rank: int, other: int, first: int, second: int) -> None:
    per_rank = len(state.row) // len(layer.alive)
    one, two = rank * per_rank + first, other * per_rank + second
    mine, theirs = state.row[one], state.row[two]
    state.row[one], state.row[two] = theirs, mine
    state.held[rank, mine], state.held[rank, theirs] = -1, one
    state.held[other, theirs], state.held[other, mine] = -1, two
    refresh(layer, state, rank)
    refresh(layer, state, other)
    rank_slowest(state)


# Gifts: a slot whose expert has other replicas goes to another expert.


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
    for scenario in range(len(layer.weights)):
        rank = state.slowest[scenario]
        if rank < 0:
            continue
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = state.row[slot]
            token_s, touch_s, each = (
                layer.per_token[rank, expert],
                layer.touch[rank],
                1.0 / (state.copies[expert] + 1.0),
            )
            fewer = layer.tokens[expert, scenario] * each
            saved = token_s * (state.part[expert, scenario] - fewer)
            if touch_s > 0.0:
                saved += touch_s * (state.stream[expert, scenario] - touched(fewer, layer.whole))
            relief[expert] += layer.weights[scenario] * saved


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
    peak, changed, more = scratch.peak, scratch.others, 1.0 / (state.copies[expert] + 1.0)
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
        if one == rank or state.held[one, was] >= 0 or state.held[one, expert] >= 0:
            refresh(layer, state, one)
    rank_slowest(state)


# Layers.


@helper()
def descend(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, share: float, uniform: bool
) -> None:
    """Until a pass finds nothing."""
    ranks = len(layer.alive)
    gifts = len(state.row) > len(state.copies)
    for rank in range(ranks):
        for other in range(ranks):
            scratch.stale[rank, other] = True
    for _ in range(PASSES):
        find_edge(layer, state, prices, share)
        changed = False
        for rank in range(ranks):
            for other in range(rank + 1, ranks):
                if not scratch.stale[rank, other] or not layer.alive[rank] or not layer.alive[other]:
                    continue
                while look_at_pair(layer, state, scratch, prices, rank, other, uniform):
                    changed = True
                    for one in range(ranks):
                        scratch.stale[one, rank] = scratch.stale[rank, one] = True
                        scratch.stale[one, other] = scratch.stale[other, one] = True
                scratch.stale[rank, other] = False
        if gifts and look_at_gifts(layer, state, scratch, prices):
            changed = True
            for rank in range(ranks):
                for other in range(ranks):
                    scratch.stale[rank, other] = True
        if not changed:
            return


@helper()
def kick(layer: StepLayer, state: StepState, per_rank: int, seed: int) -> int:
    """Make some random swaps; returns the next seed."""
    done = 0
    for _ in range(8 * KICKED):
        # Numbers of a linear congruence, the same everywhere.
        seed = (1103515245 * seed + 12345) % 2147483648
        one = seed // 65536 % len(state.row)
        seed = (1103515245 * seed + 12345) % 2147483648
        two = seed // 65536 % len(state.row)
        rank, other = one // per_rank, two // per_rank
        if rank == other or not layer.alive[rank] or not layer.alive[other] or done == KICKED:
            continue
        if state.held[other, state.row[one]] < 0 and state.held[rank, state.row[two]] < 0:
            swap(layer, state, rank, other, one % per_rank, two % per_rank)
            done += 1
    return seed


@helper()
def whole_objective(layer: StepLayer, state: StepState, prices: StepPrices, share: float) -> float:
    """The objective as it is, with the edge where it belongs."""
    find_edge(layer, state, prices, share)
    edge = state.edge[0]
    seconds = expected(layer, state, prices)
    return float(objective(seconds, moving(state, prices), prices, edge) + prices.horizon * prices.tail * edge)


@njit()
def search_steps(
    chosen: NDArray[np.int64],
    rows: NDArray[np.int32],
    tokens: Array,
    weights: Array,
    touch: Array,
    per_token: Array,
    load_in: Array,
    alive: NDArray[np.bool_],
    whole: bool,
    floor: Array,
    numbers: Array,
    uniform: bool,
) -> None:
    """Improve `rows` [layer, slot] of the chosen layers in place.

    Every expert must be on a living rank and none twice on one. `tokens` [layer, scenario, expert]; `numbers` are
    horizon, exposed, move_price, the tail's weight and share, and the share that an action must gain.
    """
    slots, ranks, experts = rows.shape[1], per_token.shape[1], per_token.shape[2]
    scenarios, per_rank = len(weights), rows.shape[1] // per_token.shape[1]
    state = StepState(
        row=np.zeros(slots, np.int64),
        held=np.zeros((ranks, experts), np.int16),
        copies=np.zeros(experts, np.int64),
        part=np.zeros((experts, scenarios)),
        stream=np.zeros((experts, scenarios)),
        busy=np.zeros((ranks, scenarios)),
        arrivals=np.zeros(ranks),
        first=np.zeros(scenarios),
        second=np.zeros(scenarios),
        third=np.zeros(scenarios),
        slowest=np.zeros(scenarios, np.int64),
        next=np.zeros(scenarios, np.int64),
        edge=np.zeros(1),
    )
    here, back = np.zeros((scenarios, per_rank)), np.zeros((scenarios, per_rank))
    scratch = StepScratch(
        others=np.zeros(scenarios),
        here=here,
        there=here if uniform else np.zeros((scenarios, per_rank)),
        back=back,
        home=back if uniform else np.zeros((scenarios, per_rank)),
        values=np.zeros(per_rank),
        freed=np.zeros((ranks, scenarios)),
        peak=np.zeros(scenarios),
        relief=np.zeros(experts),
        stale=np.zeros((ranks, ranks), np.bool_),
    )
    by_expert, base = np.zeros((experts, scenarios)), np.zeros(slots, np.int64)
    tail, share = numbers[3], numbers[4]
    for at in chosen:
        for scenario in range(scenarios):
            for expert in range(experts):
                by_expert[expert, scenario] = tokens[at, scenario, expert]
        for slot in range(slots):
            base[slot] = rows[at, slot]
        layer = StepLayer(by_expert, weights, touch, per_token[at], load_in[at], alive, whole)
        prices = StepPrices(floor[at], numbers[0], numbers[1], numbers[2], 1.0 - tail, tail / share, tail, numbers[5])
        least, seed = np.inf, 12345
        for _ in range(1 + (KICKS if slots * ranks <= THOROUGH else 0)):
            take(layer, state, base)
            if least < np.inf:
                seed = kick(layer, state, per_rank, seed)
            descend(layer, state, scratch, prices, share, uniform)
            found = whole_objective(layer, state, prices, share)
            if found < least:
                least = found
                for slot in range(slots):
                    base[slot] = state.row[slot]
        for slot in range(slots):
            rows[at, slot] = base[slot]
