"""Swaps of a slot of one rank with a slot of another, weighed in all scenarios at once.

Times of the two ranks change by what the two experts take there; the other ranks count by the slowest of them, `still`.
So a swap gains only in scenarios in which one of the two ranks is the slowest, and these are added up first. In the
others it can but lose, and in most not even that, as no slot of the two ranks takes so long. What is left to add is at
least what it would be with the two ranks equally busy: swaps are given up as soon as that is no gain. Slots that no
swap gains with by its slope, which what is expected nowhere falls below, are not looked at.
"""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.planning.search.steps.state import (
    Array,
    StepLayer,
    StepPrices,
    StepScratch,
    StepState,
    Table,
    add_up,
    counted,
    fill_column,
    fill_slot,
    objective,
    rank_slowest,
    weighed,
)

CHUNK = 8
"""Scenarios that are added up before swaps are given up."""

LOOKED = 6
"""Slots of the first rank after which a swap that gains is taken, those with the steepest slope first."""


@helper()
def best_swap(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, rank: int, other: int, limit: float
) -> tuple[int, int]:
    """Places on the two ranks of the best swap found that brings the objective below `limit`; else -1."""
    values, pull, edge = scratch.values, scratch.pull, state.edge[0]
    one, two, still = state.busy[rank], state.busy[other], scratch.still
    fill_still(state.first, state.second, state.third, one, two, still, scratch.low, layer.uniform)
    least = weighed(scratch.low, layer.weights, edge, prices.lean, prices.steep)
    if objective(least, 0.0, prices, edge) >= limit:
        return -1, -1
    here, home = state.table[rank], state.table[other]
    there, back = here, home
    if not layer.uniform:
        there, back = scratch.there, scratch.back
        gather(layer, state, scratch, rank, other)
    slope = fill_slopes(layer, state, scratch, prices, here, there, back, home, one, two)
    if prices.horizon * (slope - pull[highest(pull)]) >= limit:
        return -1, -1
    count, fixed = fill_order(layer, state, scratch, prices, rank, other)
    latest, loading = 0.0, 0.0
    for at in range(len(state.arrivals)):
        loading += state.arrivals[at]
        if at not in (rank, other):
            latest = max(latest, state.arrivals[at])
    per_rank, best, first, second = len(values), limit, -1, -1
    for looked in range(per_rank):
        seconds = best / prices.horizon if prices.horizon > 0.0 else np.inf
        place = highest(pull)
        if slope - pull[place] >= seconds or (first >= 0 and looked >= LOOKED):
            break
        pull[place] = -np.inf
        mine = state.row[rank * per_rank + place]
        if state.held[other, mine] >= 0:
            continue
        for at in range(per_rank):
            values[at] = np.float32(fixed)
        for index in range(count):
            if index % CHUNK == 0 and lowest(values) + scratch.rest[index] >= seconds:
                values[0] = np.inf
                break
            scenario = scratch.order[index]
            left = np.float32(one[scenario] - here[scenario, place])
            right = np.float32(two[scenario] + there[scenario, place])
            weight, rest = np.float32(layer.weights[scenario]), np.float32(still[scenario])
            if prices.steep == 0.0:
                add_swaps(values, back[scenario], home[scenario], left, right, rest, weight)
            else:
                flat, rise, past = np.float32(prices.lean), np.float32(prices.steep), np.float32(edge)
                add_tails(values, back[scenario], home[scenario], left, right, rest, weight, past, flat, rise)
        if values[0] == np.inf:
            continue
        for at in range(per_rank):
            theirs = state.row[other * per_rank + at]
            if values[at] >= seconds or state.held[rank, theirs] >= 0:
                continue
            came = layer.load_in[rank, theirs] - layer.load_in[rank, mine]
            went = layer.load_in[other, mine] - layer.load_in[other, theirs]
            most = max(latest, max(state.arrivals[rank] + came, state.arrivals[other] + went))
            moved = prices.exposed * (most + prices.move_price * (loading + came + went))
            value = objective(values[at], moved, prices, edge)
            if value < best:
                best, first, second = value, place, at
    return first, second


@helper()
def fill_still(
    first: Array, second: Array, third: Array, one: Array, two: Array, still: Array, low: Array, uniform: bool
) -> None:
    """The slowest of the ranks but two, in each scenario, and what no swap of the two gets below."""
    for scenario in range(len(still)):
        mine, theirs = one[scenario], two[scenario]
        top, next_, last = first[scenario], second[scenario], third[scenario]
        high, less = (mine, theirs) if mine > theirs else (theirs, mine)
        after = last if less >= next_ else next_
        still[scenario] = top if high < top else after
    for scenario in range(len(still)):
        even = 0.5 * (one[scenario] + two[scenario]) if uniform else 0.0
        low[scenario] = even if even > still[scenario] else still[scenario]


@helper()
def gather(layer: StepLayer, state: StepState, scratch: StepScratch, rank: int, other: int) -> None:
    """Seconds of either rank's experts on the other."""
    per_rank = len(scratch.values)
    for place in range(per_rank):
        mine, theirs = state.row[rank * per_rank + place], state.row[other * per_rank + place]
        part, stream = state.part[mine], state.stream[mine]
        fill_column(scratch.there, place, part, stream, layer.per_token[other, mine], layer.touch[other])
        part, stream = state.part[theirs], state.stream[theirs]
        fill_column(scratch.back, place, part, stream, layer.per_token[rank, theirs], layer.touch[rank])


@helper()
def fill_order(
    layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, rank: int, other: int
) -> tuple[int, float]:
    """`order`: scenarios in which a swap may gain, then those in which it may lose; `rest`: the least that those from
    each on count. Returns how many they are, and what the others count."""
    order, still, low, weights = scratch.order, scratch.still, scratch.low, layer.weights
    one, two, long, longest = state.busy[rank], state.busy[other], state.most[rank], state.most[other]
    edge, lean, steep = state.edge[0], prices.lean, prices.steep
    count, fixed = 0, 0.0
    for scenario in range(len(weights)):
        if max(one[scenario], two[scenario]) > still[scenario]:
            order[count] = scenario
            count += 1
    for scenario in range(len(weights)):
        rest = still[scenario]
        if max(one[scenario], two[scenario]) > rest:
            continue
        if layer.uniform and one[scenario] + longest[scenario] <= rest and two[scenario] + long[scenario] <= rest:
            fixed += weights[scenario] * counted(rest, edge, lean, steep)
            continue
        order[count] = scenario
        count += 1
    scratch.rest[count] = 0.0
    for index in range(count - 1, -1, -1):
        scenario = order[index]
        scratch.rest[index] = scratch.rest[index + 1] + weights[scenario] * counted(low[scenario], edge, lean, steep)
    return count, fixed


@helper()
def fill_slopes(
    layer: StepLayer,
    state: StepState,
    scratch: StepScratch,
    prices: StepPrices,
    here: Table,
    there: Table,
    back: Table,
    home: Table,
    one: Array,
    two: Array,
) -> float:
    """`pull` [slot of a rank]: returns a time so that no swap with a slot gets below it less the slot's `pull`.

    What is expected is convex in what the two ranks pass to each other, so it is nowhere below its slope at no swap.
    Tables [scenario, slot of a rank] are seconds of the first rank's experts on it (`here`) and on the other (`there`),
    and of the other's on the first (`back`) and on it (`home`).
    """
    pull, push, edge = scratch.pull, scratch.values, state.edge[0]
    for at in range(len(pull)):
        pull[at] = push[at] = np.float32(0.0)
    for scenario in range(len(layer.weights)):
        most = max(one[scenario], two[scenario])
        if most <= scratch.still[scenario]:
            continue
        weight = np.float32(layer.weights[scenario] * (prices.lean + (prices.steep if most > edge else 0.0)))
        if one[scenario] > two[scenario]:
            add_slope(pull, push, here[scenario], back[scenario], weight)
        else:
            add_slope(pull, push, there[scenario], home[scenario], -weight)
    return weighed(state.first, layer.weights, edge, prices.lean, prices.steep) + lowest(push)


@helper()
def add_slope(pull: Table, push: Table, away: Table, back: Table, weight: np.float32) -> None:
    for at in range(len(pull)):
        pull[at] += weight * away[at]
        push[at] += weight * back[at]


@helper()
def highest(values: Table) -> int:
    best = 0
    for at in range(1, len(values)):
        if values[at] > values[best]:
            best = at
    return best


@helper()
def add_swaps(
    values: Table, back: Table, home: Table, left: np.float32, right: np.float32, still: np.float32, weight: np.float32
) -> None:
    """Add what a scenario counts after each swap of one slot.

    The loop runs over places, not scenarios: each sum has its order, so that it does not depend on how many values a
    processor adds at once.
    """
    for at in range(len(values)):
        x, y = left + back[at], right - home[at]
        most = x if x > y else y
        most = most if most > still else still
        values[at] += weight * most


@helper()
def add_tails(
    values: Table,
    back: Table,
    home: Table,
    left: np.float32,
    right: np.float32,
    still: np.float32,
    weight: np.float32,
    edge: np.float32,
    lean: np.float32,
    steep: np.float32,
) -> None:
    """As :func:`add_swaps`, with a tail."""
    for at in range(len(values)):
        x, y = left + back[at], right - home[at]
        most = x if x > y else y
        most = most if most > still else still
        past = most - edge
        past = past if past > np.float32(0.0) else np.float32(0.0)
        values[at] += weight * (lean * most + steep * past)


@helper(fastmath=True)
def lowest(values: Table) -> float:
    """The least of them, whatever the order in which they are compared."""
    least = values[0]
    for at in range(1, len(values)):
        least = values[at] if values[at] < least else least
    return float(least)


@helper()
def swap(layer: StepLayer, state: StepState, rank: int, other: int, first: int, second: int) -> None:
    per_rank = len(state.row) // len(layer.alive)
    one, two = rank * per_rank + first, other * per_rank + second
    mine, theirs = state.row[one], state.row[two]
    state.row[one], state.row[two] = theirs, mine
    state.held[rank, mine], state.held[rank, theirs] = -1, one
    state.held[other, theirs], state.held[other, mine] = -1, two
    for slot in (one, two):
        fill_slot(layer, state, slot)
        add_up(layer, state, slot // per_rank)
    rank_slowest(state.busy, state.first, state.second, state.third)
