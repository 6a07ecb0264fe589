"""State of the search of a layer over scenarios, and the loops that update it.

Times are integers of a small unit, times the weight of their scenario. A sum over scenarios then is the expected
time, and does not depend on the order of addition. All sums fit into 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective._arrays import Array
from coterie.placement.objective.flows.splitting import touched
from coterie.placement.planning.search.state import Prices, hold, movement

Ints = NDArray[np.int64]
Units = NDArray[np.int32]
"""Times in units, multiplied by the weight of their scenario."""

UNITS = 2.0**30
"""Expected time, in units, of a rank with all experts; sums of times stay below 2^31."""

TRIED = 3
"""Number of experts tried for a gift of a slot: those whose additional replica relieves the slowest ranks most."""


class StepLayer(NamedTuple):
    """Input of the search of a layer."""

    tokens: Array
    """[expert, scenario] tokens."""
    weights: Array
    """[scenario] units per second: the scenario's weight times `scale`."""
    scale: float
    """Units per second of expected time."""
    touch: Array
    """[rank] seconds to read the weights of an expert."""
    per_token: Array
    """[rank, expert] seconds of a token."""
    load_in: Array
    """[rank, expert] seconds to load the expert; 0 if the rank holds it."""
    alive: NDArray[np.bool_]
    """[rank] whether the rank is alive."""
    whole: bool
    uniform: bool
    """Whether an expert takes the same time on all living ranks."""
    floor: float
    """Expected seconds below which a faster placement counts as no gain."""


class StepState(NamedTuple):
    """State of the search."""

    row: Ints
    """[slot] expert in the slot."""
    held: NDArray[np.int16]
    """[rank, expert] slot of the rank that holds the expert, or -1."""
    copies: Ints
    """[expert] replicas on living ranks."""
    table: Units
    """[slot, scenario] time of each slot."""
    busy: Units
    """[rank, scenario] time of each rank."""
    arrivals: Array
    """[rank] seconds to load the experts that are new on the rank."""
    first: Units
    """[scenario] time of the slowest rank; `second` and `third`: of the next two."""
    second: Units
    third: Units


class StepScratch(NamedTuple):
    """Working arrays of a pair of ranks, or of a slot to give away."""

    still: Units
    """[scenario] time of the slowest rank outside the pair."""
    mine: Units
    """[scenario] 1 if the first rank of the pair is the slowest of all, else 0; `theirs`: the same for the second."""
    theirs: Units
    there: Units
    """[slot of a rank, scenario] times of the first rank's experts on the second, if ranks differ; `back`: of the
    second's on the first."""
    back: Units
    pull: Array
    """[slot of a rank] upper bound on the fall of the expected time if the first rank gives the slot's expert away."""
    push: Array
    """[slot of a rank] lower bound on the rise of the expected time if the first rank receives the slot's expert."""
    freed: Units
    """[rank, scenario] times without the slot that is given away."""
    peak: Units
    """[scenario] time of the slowest rank after the gift."""
    more: Units
    """[scenario] time of a replica if the expert had one replica more, or one less."""
    relief: Array
    """[expert] time that an additional replica takes off the slowest ranks."""
    wanting: Ints
    """[TRIED] experts with the most relief, in order; -1 if there are fewer."""
    stale: NDArray[np.bool_]
    """[rank, rank] whether the pair of ranks must be examined again."""


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


# Loops over scenarios take plain arrays: passing the tuples above would cost more than the loops themselves.


@helper()
def fill_units(
    units: Units, tokens: Array, weights: Array, each: float, token_s: float, touch_s: float, whole: bool
) -> None:
    """Fill `units` [scenario] with the time of a replica that gets a share `each` of an expert's tokens."""
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
def take(layer: StepLayer, state: StepState, row: Ints) -> None:
    """Fill the state from a placement [slot]."""
    hold(layer.alive, row, state.row, state.held, state.copies)
    state.arrivals[:] = 0.0
    state.busy[:] = 0
    for slot in range(len(row)):
        rank = slot // (len(row) // len(layer.alive))
        if layer.alive[rank]:
            fill_slot(layer, state, slot)
            add_units(state.busy[rank], state.table[slot], 1)
            state.arrivals[rank] += layer.load_in[rank, row[slot]]
    rank_slowest(state.busy, state.first, state.second, state.third)


@helper()
def fill_slot(layer: StepLayer, state: StepState, slot: int) -> None:
    """Fill the times of a slot in `table`."""
    rank, expert = slot // (len(state.row) // len(layer.alive)), state.row[slot]
    token_s, touch_s, each = layer.per_token[rank, expert], layer.touch[rank], 1.0 / state.copies[expert]
    fill_units(state.table[slot], layer.tokens[expert], layer.weights, each, token_s, touch_s, layer.whole)


@helper()
def rank_slowest(busy: Units, first: Units, second: Units, third: Units) -> None:
    """Fill the times [scenario] of the three slowest ranks."""
    first[:] = 0
    second[:] = 0
    third[:] = 0
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
    """Mark all pairs of a rank that changed, so that they are examined again."""
    for other in range(len(stale)):
        stale[rank, other] = stale[other, rank] = True


@helper()
def objective(layer: StepLayer, prices: Prices, seconds: float, moved: float) -> float:
    return prices.horizon * max(seconds, layer.floor) + moved


@helper()
def objective_now(layer: StepLayer, state: StepState, prices: Prices, peak: Units) -> float:
    """Return the present objective if the times of the slowest ranks were `peak` [scenario]."""
    return float(objective(layer, prices, peak.sum() / layer.scale, movement(state.arrivals, prices)))
