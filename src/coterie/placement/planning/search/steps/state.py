"""Where the search of a layer over scenarios stands, and the loops that keep it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective._steps import touched

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[np.float32]
"""Seconds at half the width: actions are weighed on them, and must gain far more than they are rounded by."""


TRIED = 3
"""Experts that are tried for a slot to give away: those whose further replica relieves the slowest ranks most."""


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
    part: Array
    """[expert, scenario] tokens of each replica."""
    stream: Array
    """[expert, scenario] chance that a replica is streamed."""
    busy: Array
    """[rank, scenario] seconds."""
    most: Array
    """[rank, scenario] seconds of the rank's longest slot."""
    table: Table
    """[rank, scenario, slot of a rank] seconds."""
    arrivals: Array
    """[rank] seconds of loading."""
    first: Array
    """[scenario] seconds of the slowest rank; `second` and `third` of the next ones."""
    second: Array
    third: Array
    edge: Array
    """[1] seconds past which a scenario belongs to the tail."""


class StepScratch(NamedTuple):
    """Working arrays of a pair of ranks, or of a slot to give away."""

    still: Array
    """[scenario] seconds of the slowest of the ranks that do not change."""
    low: Array
    """[scenario] seconds that no swap gets below."""
    order: Ints
    """[scenario] those to add up, in order."""
    rest: Array
    """[scenario + 1] the least that those from each in `order` on count."""
    there: Table
    """[scenario, slot of a rank] seconds of one rank's experts on the other, where ranks differ."""
    back: Table
    """[scenario, slot of a rank] seconds of the other rank's experts on the first."""
    values: Table
    """[slot of a rank] what is expected after a swap."""
    pull: Table
    """[slot of a rank] by how much giving it away lowers what is expected, at most."""
    freed: Array
    """[rank, scenario] seconds without the slot that is given away."""
    peak: Array
    """[scenario]"""
    changed: Array
    """[scenario] seconds of a rank that a gift changes."""
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
        part=np.zeros((experts, scenarios)),
        stream=np.zeros((experts, scenarios)),
        busy=np.zeros((ranks, scenarios)),
        most=np.zeros((ranks, scenarios)),
        table=np.zeros((ranks, scenarios, slots // ranks), np.float32),
        arrivals=np.zeros(ranks),
        first=np.zeros(scenarios),
        second=np.zeros(scenarios),
        third=np.zeros(scenarios),
        edge=np.zeros(1),
    )


@helper()
def new_scratch(per_rank: int, ranks: int, experts: int, scenarios: int) -> StepScratch:
    return StepScratch(
        still=np.zeros(scenarios),
        low=np.zeros(scenarios),
        order=np.zeros(scenarios, np.int64),
        rest=np.zeros(scenarios + 1),
        there=np.zeros((scenarios, per_rank), np.float32),
        back=np.zeros((scenarios, per_rank), np.float32),
        values=np.zeros(per_rank, np.float32),
        pull=np.zeros(per_rank, np.float32),
        freed=np.zeros((ranks, scenarios)),
        peak=np.zeros(scenarios),
        changed=np.zeros(scenarios),
        relief=np.zeros(experts),
        wanting=np.zeros(TRIED, np.int64),
        stale=np.zeros((ranks, ranks), np.bool_),
    )


# Loops over scenarios take plain arrays: a call that passes the tuples above costs more than what it would do there.


@helper()
def add_slot(times: Array, part: Array, stream: Array, token_s: float, touch_s: float, sign: float) -> None:
    """Add what a slot takes in each scenario, or take it away."""
    token_s, touch_s = sign * token_s, sign * touch_s
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
def add_longest(most: Array, part: Array, stream: Array, token_s: float, touch_s: float) -> None:
    """Raise to what a slot takes in each scenario."""
    for scenario in range(len(most)):
        seconds = token_s * part[scenario] + touch_s * stream[scenario]
        most[scenario] = seconds if seconds > most[scenario] else most[scenario]


@helper()
def fill_column(table: Table, place: int, part: Array, stream: Array, token_s: float, touch_s: float) -> None:
    for scenario in range(len(part)):
        table[scenario, place] = np.float32(token_s * part[scenario] + touch_s * stream[scenario])


@helper()
def raise_to(peak: Array, times: Array) -> None:
    for scenario in range(len(peak)):
        peak[scenario] = times[scenario] if times[scenario] > peak[scenario] else peak[scenario]


@helper()
def weighed(times: Array, weights: Array, edge: float, lean: float, steep: float) -> float:
    """What the times of the scenarios count; four sums side by side, as each waits for the one before."""
    one, two, three, four, whole = 0.0, 0.0, 0.0, 0.0, len(times) // 4 * 4
    for at in range(0, whole, 4):
        one += weights[at] * counted(times[at], edge, lean, steep)
        two += weights[at + 1] * counted(times[at + 1], edge, lean, steep)
        three += weights[at + 2] * counted(times[at + 2], edge, lean, steep)
        four += weights[at + 3] * counted(times[at + 3], edge, lean, steep)
    for at in range(whole, len(times)):
        one += weights[at] * counted(times[at], edge, lean, steep)
    return (one + two) + (three + four)


@helper()
def counted(time: float, edge: float, lean: float, steep: float) -> float:
    """What a time counts: more past the edge."""
    past = time - edge
    return lean * time + steep * (past if past > 0.0 else 0.0)


@helper()
def share_out(layer: StepLayer, state: StepState, expert: int) -> None:
    """What each replica of an expert gets, by how many there are."""
    part, stream, whole = state.part[expert], state.stream[expert], layer.whole
    tokens, each = layer.tokens[expert], 1.0 / max(1, state.copies[expert])
    streams = False
    for rank in range(len(layer.touch)):
        streams = streams or layer.touch[rank] > 0.0
    for scenario in range(len(part)):
        part[scenario] = tokens[scenario] * each
    if streams:
        for scenario in range(len(part)):
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
    for slot in range(len(row)):
        fill_slot(layer, state, slot)
    for rank in range(ranks):
        add_up(layer, state, rank)
    rank_slowest(state.busy, state.first, state.second, state.third)


@helper()
def fill_slot(layer: StepLayer, state: StepState, slot: int) -> None:
    """The slot's times in `table`."""
    per_rank = len(state.row) // len(layer.alive)
    rank, expert = slot // per_rank, state.row[slot]
    token_s, touch_s = layer.per_token[rank, expert], layer.touch[rank]
    fill_column(state.table[rank], slot % per_rank, state.part[expert], state.stream[expert], token_s, touch_s)


@helper()
def add_up(layer: StepLayer, state: StepState, rank: int) -> None:
    """A rank's times from its slots: rounding errors do not add up."""
    busy, most, per_rank = state.busy[rank], state.most[rank], len(state.row) // len(layer.alive)
    for scenario in range(len(busy)):
        busy[scenario] = 0.0
        most[scenario] = 0.0
    state.arrivals[rank] = 0.0
    if not layer.alive[rank]:
        return
    for slot in range(rank * per_rank, (rank + 1) * per_rank):
        expert = state.row[slot]
        state.arrivals[rank] += layer.load_in[rank, expert]
        token_s, touch_s = layer.per_token[rank, expert], layer.touch[rank]
        add_slot(busy, state.part[expert], state.stream[expert], token_s, touch_s, 1.0)
        add_longest(most, state.part[expert], state.stream[expert], token_s, touch_s)


@helper()
def rank_slowest(busy: Array, first: Array, second: Array, third: Array) -> None:
    """The times of the three slowest ranks in every scenario."""
    for scenario in range(len(first)):
        first[scenario], second[scenario], third[scenario] = 0.0, 0.0, 0.0
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
    """A rank changed: look at its pairs."""
    for other in range(len(stale)):
        stale[rank, other] = stale[other, rank] = True


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
