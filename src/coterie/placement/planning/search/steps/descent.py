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
from coterie.placement.planning.search.steps.gifts import look_at_gifts
from coterie.placement.planning.search.steps.state import (
    Array,
    StepLayer,
    StepPrices,
    StepScratch,
    StepState,
    expected,
    find_edge,
    moving,
    objective,
    take,
)
from coterie.placement.planning.search.steps.swaps import look_at_pair, swap

PASSES = 32
"""Most passes over a layer; later ones gain next to nothing."""

KICKS = 12
"""Times that a small layer is searched again after some random swaps: a single descent may end 5% from the best."""

THOROUGH = 1024
"""Slots x ranks up to which a layer is small."""

KICKED = 3
"""Swaps of one kick."""


@helper()
def descend(layer: StepLayer, state: StepState, scratch: StepScratch, prices: StepPrices, share: float) -> None:
    """Until a pass finds nothing."""
    ranks = len(layer.alive)
    gifts = len(state.row) > len(state.copies)
    for rank in range(ranks):
        for other in range(ranks):
            scratch.stale[rank, other] = True
    for _ in range(PASSES):
        find_edge(layer, state, prices, share)
        now, changed = objective_now(layer, state, prices), False
        for rank in range(ranks):
            for other in range(rank + 1, ranks):
                if not scratch.stale[rank, other] or not layer.alive[rank] or not layer.alive[other]:
                    continue
                while look_at_pair(layer, state, scratch, prices, rank, other, now):
                    now, changed = objective_now(layer, state, prices), True
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
def objective_now(layer: StepLayer, state: StepState, prices: StepPrices) -> float:
    """The objective, less what the edge itself counts."""
    return objective(expected(layer, state, prices), moving(state, prices), prices, state.edge[0])


@helper()
def whole_objective(layer: StepLayer, state: StepState, prices: StepPrices, share: float) -> float:
    """The objective as it is, with the edge where it belongs."""
    find_edge(layer, state, prices, share)
    return objective_now(layer, state, prices) + prices.horizon * prices.tail * state.edge[0]


@njit()
def search_steps(
    chosen: NDArray[np.int64],
    rows: NDArray[np.int32],
    wanted: NDArray[np.bool_],
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
    """Improve `rows` [layer, slot] of the chosen layers that are `wanted` [layer], in place.

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
        most=np.zeros((ranks, scenarios)),
        table=np.zeros((ranks, scenarios, per_rank), np.float32),
        arrivals=np.zeros(ranks),
        first=np.zeros(scenarios),
        second=np.zeros(scenarios),
        third=np.zeros(scenarios),
        edge=np.zeros(1),
    )
    scratch = StepScratch(
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
        stale=np.zeros((ranks, ranks), np.bool_),
    )
    by_expert, base = np.zeros((experts, scenarios)), np.zeros(slots, np.int64)
    tail, share = numbers[3], numbers[4]
    for at in chosen:
        if not wanted[at]:
            continue
        for scenario in range(scenarios):
            for expert in range(experts):
                by_expert[expert, scenario] = tokens[at, scenario, expert]
        for slot in range(slots):
            base[slot] = rows[at, slot]
        layer = StepLayer(by_expert, weights, touch, per_token[at], load_in[at], alive, whole, uniform)
        prices = StepPrices(floor[at], numbers[0], numbers[1], numbers[2], 1.0 - tail, tail / share, tail, numbers[5])
        least, seed = np.inf, 12345
        for _ in range(1 + (KICKS if slots * ranks <= THOROUGH else 0)):
            take(layer, state, base)
            if least < np.inf:
                seed = kick(layer, state, per_rank, seed)
            descend(layer, state, scratch, prices, share)
            found = whole_objective(layer, state, prices, share)
            if found < least:
                least = found
                for slot in range(slots):
                    base[slot] = state.row[slot]
        for slot in range(slots):
            rows[at, slot] = base[slot]
