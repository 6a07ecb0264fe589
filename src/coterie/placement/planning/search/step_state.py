"""Where the search of a layer over scenarios stands, and the loops that keep it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective._steps import touched

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class StepLayer(NamedTuple):
    """What the search of a layer is given."""

    tokens: Array
    """[expert, scenario]"""
    weights: Array
    """[scenario]"""
    touch: Array
    """[rank] seconds to stream an expert."""
    per_token: Array
    """[rank, expert] seconds."""
    load_in: Array
    """[rank, expert] seconds to load; 0 where the rank has it."""
    alive: NDArray[np.bool_]
    """[rank]"""
    whole: bool


class StepPrices(NamedTuple):
    """Prices of the objective for one layer."""

    floor: float
    """Expected seconds below which nothing is gained."""
    horizon: float
    exposed: float
    move_price: float
    lean: float
    """Weight of a scenario's time."""
    steep: float
    """Weight of what it takes beyond the edge."""
    tail: float
    """Weight of the edge itself: what is the same for all while searching."""
    least: float
    """Share of the objective that an action must gain."""


class StepState(NamedTuple):
    """Where the search stands."""

    row: Ints
    """[slot] expert."""
    held: NDArray[np.int16]
    """[rank, expert] slot that holds it, or -1."""
    copies: Ints
    """[expert]"""
    part: Array
    """[expert, scenario] tokens of each replica."""
    stream: Array
    """[expert, scenario] chance that a replica is streamed."""
    busy: Array
    """[rank, scenario] seconds."""
    arrivals: Array
    """[rank] seconds of loading."""
    first: Array
    """[scenario] seconds of the slowest rank; `second` and `third` of the next ones."""
    second: Array
    third: Array
    slowest: Ints
    """[scenario] the slowest rank, and the next in `next`."""
    next: Ints
    edge: Array
    """[1] seconds past which a scenario belongs to the tail."""


class StepScratch(NamedTuple):
    """Working arrays of a pair of ranks, or of a slot to give away."""

    others: Array
    """[scenario] the slowest of the ranks that do not change."""
    here: Array
    """[scenario, slot of a rank] seconds of one rank's experts there, and on the other rank (`there`)."""
    there: Array
    back: Array
    """[scenario, slot of a rank] seconds of the other rank's experts on the first, and at home (`home`). On uniform
    ranks `there` is `here`, and `home` is `back`."""
    home: Array
    values: Array
    """[slot of a rank] objective after a swap."""
    freed: Array
    """[rank, scenario] seconds without the slot that is given away."""
    peak: Array
    """[scenario]"""
    relief: Array
    """[expert]"""
    stale: NDArray[np.bool_]
    """[rank, rank] whether a pair must be looked at."""


# Loops over scenarios take plain arrays: a call that passes the tuples above costs more than what it would do there.


@helper()
def add_slot(times: Array, part: Array, stream: Array, token_s: float, touch_s: float, sign: float) -> None:
    """Add what a slot takes in each scenario, or take it away."""
    token_s, touch_s = sign * token_s, sign * touch_s
    if touch_s == 0.0:
        for scenario in range(len(times)):
            times[scenario] += token_s * part[scenario]
    else:
        for scenario in range(len(times)):
            times[scenario] += token_s * part[scenario] + touch_s * stream[scenario]


@helper()
def add_part(times: Array, tokens: Array, each: float, token_s: float, touch_s: float, whole: bool) -> None:
    """Add what a slot that gets `each` of the tokens takes in each scenario."""
    row_s = token_s * each
    if touch_s == 0.0:
        for scenario in range(len(times)):
            times[scenario] += row_s * tokens[scenario]
    else:
        for scenario in range(len(times)):
            times[scenario] += row_s * tokens[scenario] + touch_s * touched(tokens[scenario] * each, whole)


@helper()
def raise_to(peak: Array, times: Array) -> None:
    for scenario in range(len(peak)):
        peak[scenario] = max(peak[scenario], times[scenario])


@helper()
def weighed(times: Array, weights: Array, edge: float, lean: float, steep: float) -> float:
    """What the times of the scenarios count."""
    total = 0.0
    for scenario in range(len(times)):
        total += weights[scenario] * (lean * times[scenario] + steep * max(0.0, times[scenario] - edge))
    return total


@helper()
def share_out(layer: StepLayer, state: StepState, expert: int) -> None:
    """What each replica of an expert gets, by how many there are."""
    part, stream, whole = state.part[expert], state.stream[expert], layer.whole
    each = 1.0 / max(1, state.copies[expert])
    for scenario in range(len(part)):
        part[scenario] = layer.tokens[expert, scenario] * each
        stream[scenario] = touched(part[scenario], whole)


@helper()
def take(layer: StepLayer, state: StepState, row: Ints) -> None:
    """Stand at a placement."""
    experts, ranks = len(state.copies), len(layer.alive)
    per_rank = len(row) // ranks
    for expert in range(experts):
        state.copies[expert] = 0
    for rank in range(ranks):
        for expert in range(experts):
            state.held[rank, expert] = -1
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            state.row[slot] = row[slot]
            if layer.alive[rank]:
                state.copies[row[slot]] += 1
                state.held[rank, row[slot]] = slot
    for expert in range(experts):
        share_out(layer, state, expert)
    for rank in range(ranks):
        refresh(layer, state, rank)
    rank_slowest(state)


@helper()
def refresh(layer: StepLayer, state: StepState, rank: int) -> None:
    """A rank's times from its slots: rounding errors do not add up."""
    busy, per_rank = state.busy[rank], len(state.row) // len(layer.alive)
    for scenario in range(len(busy)):
        busy[scenario] = 0.0
    state.arrivals[rank] = 0.0
    if not layer.alive[rank]:
        return
    for slot in range(rank * per_rank, (rank + 1) * per_rank):
        expert = state.row[slot]
        state.arrivals[rank] += layer.load_in[rank, expert]
        token_s, touch_s = layer.per_token[rank, expert], layer.touch[rank]
        add_slot(busy, state.part[expert], state.stream[expert], token_s, touch_s, 1.0)


@helper()
def rank_slowest(state: StepState) -> None:
    """The three slowest ranks of every scenario."""
    ranks, scenarios = state.busy.shape
    for scenario in range(scenarios):
        one, two, three, at, then = 0.0, 0.0, 0.0, -1, -1
        for rank in range(ranks):
            value = state.busy[rank, scenario]
            if value > one:
                one, two, three, at, then = value, one, two, rank, at
            elif value > two:
                two, three, then = value, two, rank
            elif value > three:
                three = value
        state.first[scenario], state.second[scenario], state.third[scenario] = one, two, three
        state.slowest[scenario], state.next[scenario] = at, then


@helper()
def expected(layer: StepLayer, state: StepState, prices: StepPrices) -> float:
    """What the slowest ranks count over the scenarios."""
    return weighed(state.first, layer.weights, state.edge[0], prices.lean, prices.steep)


@helper()
def moving(state: StepState, prices: StepPrices) -> float:
    latest, total = 0.0, 0.0
    for rank in range(len(state.arrivals)):
        latest = max(latest, state.arrivals[rank])
        total += state.arrivals[rank]
    return prices.exposed * (latest + prices.move_price * total)


@helper()
def objective(seconds: float, moved: float, prices: StepPrices, edge: float) -> float:
    return prices.horizon * max(seconds, prices.floor - prices.tail * edge) + moved


@helper()
def find_edge(layer: StepLayer, state: StepState, prices: StepPrices, share: float) -> None:
    """The time that the worst `share` of scenarios exceed now."""
    state.edge[0] = 0.0
    if prices.steep <= 0.0:
        return
    left, last = share, np.inf
    while True:
        top, weight = -1.0, 0.0
        for scenario in range(len(layer.weights)):
            value = state.first[scenario]
            if value < last and value > top:
                top = value
        for scenario in range(len(layer.weights)):
            if state.first[scenario] == top:
                weight += layer.weights[scenario]
        if top < 0.0:
            return
        state.edge[0] = top
        left -= weight
        last = top
        if left <= 0.0:
            return
