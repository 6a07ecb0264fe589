"""Compiled loops of :mod:`coterie.placement.planning.latency_optimal`: the search of one layer, for all layers.

A layer is searched towards a target time. A rank's time above the target is its *excess*. The search repeatedly takes
the slowest rank and the action that removes the most excess per move: swap two slots of different ranks, or give a slot
whose expert has other replicas to another expert. Moves are counted against the placement at the start, so an action on
slots that have already changed costs less: a second swap with such a slot turns a pair into a ring of three ranks for
one more move, and passing on an expert that has just arrived is free. In this way rings of any length arise.

Layers are independent and each is searched by one thread in a fixed order, so the result does not depend on threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.planning.search.descent import note, reach_target, repair
from coterie.placement.planning.search.state import (
    TINY,
    Best,
    Ints,
    MeanLayer,
    MeanState,
    Prices,
    Scratch,
    is_small,
    restore,
    start,
)

SPARE = 0.3
"""Added to an action's number of moves before excess is divided by it, so that free actions still rank by excess."""

SPARES = (SPARE, 2.0, 20.0)
"""Values of SPARE that are tried if the target is out of reach: the searches end in different placements, and the best
is kept."""

LADDER = (0.0, 0.04, 0.12, 0.25, 0.45, 0.7)
"""Targets between the floor (0) and the slowest rank's present time (1): if moves are expensive, a target closer to the
present time needs fewer."""

HALVINGS = 6
"""Number of further targets, by bisection between the lowest time reached and the highest target missed: with a target
out of reach, the search lowers the total excess at the cost of the slowest rank."""

SQUEEZE = 0.02
"""Share by which the first target is below the slowest rank's time, when the target is lowered step by step."""

CLOSE = 1e-3
"""Distance to the floor, as a share of it, at which the search stops."""

AT_TARGET, KEPT, CHANGED, REPAIRED = 0, 1, 2, 3
"""Outcomes of a layer's search."""


@njit()
def search(
    chosen: NDArray[np.int64],
    rows: Ints,
    unit: Array,
    share: Array,
    load_in: Array,
    alive: NDArray[np.bool_],
    floor: Array,
    prices: Prices,
    uniform_ranks: bool,
    trail: bool,
    kept: NDArray[np.int64],
    trails: NDArray[np.int16],
    totals: Array,
    seconds: Array,
    moves: NDArray[np.int64],
    outcomes: NDArray[np.int64],
) -> None:
    """Search the chosen layers; fill `trails` [layer, step, slot] with their placements, the best last.

    `kept` [layer] is the number of steps of a trail. The first step is the current placement, repaired if necessary.
    """
    slots, ranks, experts = rows.shape[1], unit.shape[1], unit.shape[2]
    state = MeanState(
        row=np.zeros(slots, np.int64),
        held=np.zeros((ranks, experts), np.int16),
        fees=np.zeros((ranks, experts)),
        copies=np.zeros(experts, np.int64),
        part=np.zeros(experts),
        busy=np.zeros(ranks),
        own=np.zeros(slots),
        fee=np.zeros(slots),
    )
    scratch = Scratch(
        back=np.zeros(slots),
        back_fee=np.zeros(slots),
        relief=np.zeros(experts),
        burden=np.zeros(experts),
        order=np.zeros(ranks, np.int64),
        worth=np.zeros(slots // ranks),
        stuck=np.zeros(ranks, np.bool_),
    )
    base, old = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    for at in chosen:
        layer = MeanLayer(unit[at], share[at], load_in[at], alive, uniform_ranks, floor[at])
        best = Best(
            rows=trails[at],
            totals=totals[at],
            seconds=seconds[at],
            moves=moves[at],
            kept=kept[at : at + 1],
            trail=trail,
        )
        low = max(layer.floor, 1e-300)  # avoid a target of 0 (a layer without load)
        start(layer, state, base, rows[at], prices.fastest)
        restore(layer, state, base)
        repaired = repair(layer, state, low)
        copy_row(base, state.row)
        kept[at] = 0
        note(layer, state, best, prices)
        first, peak = totals[at, 0], state.busy.max()
        outcomes[at] = REPAIRED if repaired else AT_TARGET
        if peak <= low * (1.0 + TINY):
            continue
        cheapest = prices.exposed * prices.fastest * (1.0 + prices.move_price)  # cost of the cheapest move
        high = peak
        for step in LADDER:
            target = low + step * (peak - low)
            if prices.horizon * target + cheapest >= totals[at, kept[at] - 1]:
                break  # not better even if one move reached the target
            if step > 0.0:
                restore(layer, state, base)
            reach_target(layer, state, scratch, best, prices, target, SPARE)
            high = min(high, state.busy.max())
        if high > low * (1.0 + CLOSE) and is_small(slots, ranks):
            # The floor was not reached, `high` was: try targets between them.
            for _ in range(HALVINGS):
                target = (low + high) / 2.0
                if high <= low * (1.0 + CLOSE) or prices.horizon * target + cheapest >= totals[at, kept[at] - 1]:
                    break
                restore(layer, state, base)
                if not reach_target(layer, state, scratch, best, prices, target, SPARE):
                    low = target
                high = min(high, state.busy.max())
            low = layer.floor
            for spare in SPARES:  # other weights of moves lead to other placements
                if prices.horizon * low + cheapest >= totals[at, kept[at] - 1]:
                    break
                restore(layer, state, base)
                reach_target(layer, state, scratch, best, prices, low, spare)
                less = SQUEEZE
                while less > CLOSE:
                    copy_row(old, state.row)
                    peak = state.busy.max()
                    if peak <= low * (1.0 + CLOSE):
                        break
                    reach_target(layer, state, scratch, best, prices, max(low, peak * (1.0 - less)), spare)
                    if state.busy.max() > peak * (1.0 - CLOSE / 10.0):
                        restore(layer, state, old)
                        less /= 2.0
        if not repaired:
            outcomes[at] = CHANGED if totals[at, kept[at] - 1] < first else KEPT


@njit()
def spend(
    kept: NDArray[np.int64], totals: Array, seconds: Array, moves: NDArray[np.int64], budget: int
) -> NDArray[np.int64]:
    """Choose one step of each layer's trail [layer] within a budget of moves, by most saving per second of movement.

    The first step of each trail, which contains repairs, is taken regardless of the budget.
    """
    chosen = np.zeros(len(kept), np.int64)
    left = budget
    for layer in range(len(kept)):
        left -= moves[layer, 0]
    while True:
        best, which, step = 0.0, -1, -1
        for layer in range(len(kept)):
            now = chosen[layer]
            for after in range(kept[layer]):
                saved = totals[layer, now] - totals[layer, after]
                if saved <= 0.0 or moves[layer, after] - moves[layer, now] > left:
                    continue
                rate = saved / max(seconds[layer, after] - seconds[layer, now], 1e-12)
                if rate > best:
                    best, which, step = rate, layer, after
        if which < 0:
            return chosen
        left -= moves[which, step] - moves[which, chosen[which]]
        chosen[which] = step
