"""Where the search of a layer over scenarios stands, and the loops that keep it.

Times are whole numbers of a small unit, each scenario's weight multiplied in: a sum over scenarios is then what is
expected, and does not depend on the order in which a processor adds. No sum is past 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective._steps import find_edge, touched

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Units = NDArray[np.int32]
"""Times, weighted."""

UNITS = 2.0**30
"""Units of a rank that had all experts, expected over the scenarios."""

TRIED = 3
"""Experts that are tried for a slot to give away: those whose further replica relieves the slowest ranks most."""


class StepLayer(NamedTuple):
    """What the search of a layer is given."""

    tokens: Array
    """[expert, scenario]"""
    weights: Array
    """[scenario] units of a second."""
    scale: float
    """Units of a second, over all scenarios."""
    touch: Array
    """[rank] seconds to stream an expert."""
    per_token: Array
    """[rank, expert] seconds."""
    load_in: Array
    """[rank, expert] seconds to load; 0 where the rank has it."""
    alive: NDArray[np.bool_]
    """[rank]"""
    whole: bool
    uniform: bool
    """Whether an expert takes the same time on all living ranks."""


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


class StepState(NamedTuple):
    """Where the search stands."""

    row: Ints
    """[slot] expert."""
    held: NDArray[np.int16]
    """[rank, expert] slot that holds it, or -1."""
    copies: Ints
    """[expert]"""
    table: Units
    """[slot, scenario] time of each slot."""
    busy: Units
    """[rank, scenario]"""
    arrivals: Array
    """[rank] seconds of loading."""
    first: Units
    """[scenario] time of the slowest rank; `second` and `third` of the next ones."""
    second: Units
    third: Units
    edge: Array
    """[1] seconds past which a scenario belongs to the tail."""
    edges: Units
    """[scenario] the same."""


class StepScratch(NamedTuple):
    """Working arrays of a pair of ranks, or of a slot to give away."""

    still: Units
    """[scenario] time of the slowest of the ranks that do not change."""
    mine: Units
    """[scenario] 1 where the first rank of the pair is the slowest of all, else 0; `theirs`: where the second is."""
    theirs: Units
    there: Units
    """[slot of a rank, scenario] one rank's experts on the other, where ranks differ; in `back` the other's on the
    one."""
    back: Units
    pull: Array
    """[slot of a rank] upper bound on how far the expected time falls if the slot is given away."""
    push: Array
    """[slot of a rank] lower bound on how far it rises for the expert that is taken instead."""
    freed: Units
    """[rank, scenario] times without the slot that is given away."""
    peak: Units
    """[scenario]"""
    more: Units
    """[scenario] time of a replica if there were one more, or one less."""
    relief: Array
    """[expert]"""
    wanting: Ints
    """[rank of relief] experts with the most of it, -1 where there are no more."""
    stale: NDArray[np.bool_]
    """[rank, rank] whether a pair must be looked at."""


@helper()
def new_state(slots: int, ranks: int, experts: int, scenarios: int) -> StepState:
    return StepState(
        row=np.zeros(slots, np.int64),
        held=np.zeros((ranks, experts), np.int16),
        copies=np.zeros(experts, np.int64),
        table=np.zeros((slots, scenarios), np.int32),
        busy=np.zeros((ranks, scenarios), np.int32),
        arrivals=np.zeros(ranks),
        first=np.zeros(scenarios, np.int32),
        second=np.zeros(scenarios, np.int32),
        third=np.zeros(scenarios, np.int32),
        edge=np.zeros(1),
        edges=np.zeros(scenarios, np.int32),
    )


@helper()
def new_scratch(per_rank: int, ranks: int, experts: int, scenarios: int) -> StepScratch:
    return StepScratch(
        still=np.zeros(scenarios, np.int32),
        mine=np.zeros(scenarios, np.int32),
        theirs=np.zeros(scenarios, np.int32),
        there=np.zeros((per_rank, scenarios), np.int32),
        back=np.zeros((per_rank, scenarios), np.int32),
        pull=np.zeros(per_rank),
        push=np.zeros(per_rank),
        freed=np.zeros((ranks, scenarios), np.int32),
        peak=np.zeros(scenarios, np.int32),
        more=np.zeros(scenarios, np.int32),
        relief=np.zeros(experts),
        wanting=np.zeros(TRIED, np.int64),
        stale=np.zeros((ranks, ranks), np.bool_),
    )


# Loops over scenarios take plain arrays: a call that passes the tuples above costs more than what it would do there.


@helper()
def fill_units(
    units: Units, tokens: Array, weights: Array, each: float, token_s: float, touch_s: float, whole: bool
) -> None:
    """The time of a replica that gets `each` of an expert's tokens."""
    row_s = token_s * each
    if touch_s == 0.0:
        for scenario in range(len(units)):
            units[scenario] = np.int32(weights[scenario] * tokens[scenario] * row_s + 0.5)
    else:
        for scenario in range(len(units)):
            seconds = tokens[scenario] * row_s + touch_s * touched(tokens[scenario] * each, whole)
            units[scenario] = np.int32(weights[scenario] * seconds + 0.5)


@helper()
def add_units(times: Units, units: Units, sign: int) -> None:
    factor = np.int32(sign)
    for scenario in range(len(times)):
        times[scenario] = np.int32(times[scenario] + np.int32(factor * units[scenario]))


@helper()
def summed(times: Units) -> int:
    total = np.int32(0)
    for scenario in range(len(times)):
        total = np.int32(total + times[scenario])
    return int(total)


@helper()
def summed_past(times: Units, edges: Units) -> int:
    """Sum of the scenario times beyond the edge of the tail."""
    total = np.int32(0)
    for scenario in range(len(times)):
        past = np.int32(times[scenario] - edges[scenario])
        total = np.int32(total + (past if past > 0 else np.int32(0)))
    return int(total)


@helper()
def take(layer: StepLayer, state: StepState, row: Ints) -> None:
    """Fill the state from a placement [slot]."""
    ranks = len(layer.alive)
    per_rank = len(row) // ranks
    for expert in range(len(state.copies)):
        state.copies[expert] = 0
    for rank in range(ranks):
        for expert in range(len(state.copies)):
            state.held[rank, expert] = -1
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            state.row[slot] = row[slot]
            if layer.alive[rank]:
                state.copies[row[slot]] += 1
                state.held[rank, row[slot]] = slot
    for rank in range(ranks):
        state.arrivals[rank] = 0.0
        for scenario in range(len(state.first)):
            state.busy[rank, scenario] = 0
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            if layer.alive[rank]:
                fill_slot(layer, state, slot)
                add_units(state.busy[rank], state.table[slot], 1)
                state.arrivals[rank] += layer.load_in[rank, row[slot]]
    rank_slowest(state.busy, state.first, state.second, state.third)


@helper()
def fill_slot(layer: StepLayer, state: StepState, slot: int) -> None:
    """The slot's times in `table`."""
    rank, expert = slot // (len(state.row) // len(layer.alive)), state.row[slot]
    token_s, touch_s, each = layer.per_token[rank, expert], layer.touch[rank], 1.0 / state.copies[expert]
    fill_units(state.table[slot], layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)


@helper()
def rank_slowest(busy: Units, first: Units, second: Units, third: Units) -> None:
    """The times of the three slowest ranks in every scenario."""
    for scenario in range(len(first)):
        first[scenario], second[scenario], third[scenario] = 0, 0, 0
    for rank in range(len(busy)):
        times = busy[rank]
        for scenario in range(len(first)):
            value, one, two, three = times[scenario], first[scenario], second[scenario], third[scenario]
            less = value if value < one else one
            first[scenario] = value if value > one else one
            least = less if less < two else two
            second[scenario] = less if less > two else two
            third[scenario] = least if least > three else three


@helper()
def mark_stale(stale: NDArray[np.bool_], rank: int) -> None:
    """Mark all pairs of a rank that changed, so that they are looked at again."""
    for other in range(len(stale)):
        stale[rank, other] = stale[other, rank] = True


@helper()
def expected(layer: StepLayer, state: StepState, prices: StepPrices, peak: Units) -> float:
    """Seconds that the objective counts for the times of the slowest ranks, `peak` [scenario]."""
    if prices.steep == 0.0:
        return summed(peak) / layer.scale
    return (prices.lean * summed(peak) + prices.steep * summed_past(peak, state.edges)) / layer.scale


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
def objective_now(layer: StepLayer, state: StepState, prices: StepPrices) -> float:
    """The objective without the part of the tail that is the edge itself, the same for all candidates."""
    seconds = expected(layer, state, prices, state.first)
    return float(objective(seconds, moving(state, prices), prices, state.edge[0]))


@helper()
def set_edge(layer: StepLayer, state: StepState, prices: StepPrices, share: float) -> None:
    """Put the edge at the time that the worst `share` of scenarios reach now."""
    state.edge[0] = 0.0
    if prices.steep <= 0.0:
        return
    times = np.zeros(len(layer.weights))
    for scenario in range(len(times)):
        times[scenario] = state.first[scenario] / max(layer.weights[scenario], 1e-300)
    state.edge[0] = find_edge(times, layer.weights / layer.scale, share)
    for scenario in range(len(times)):
        state.edges[scenario] = np.int32(state.edge[0] * layer.weights[scenario] + 0.5)
