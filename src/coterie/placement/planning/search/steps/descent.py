"""Search of a layer over scenarios: swaps and gifts of slots that lower the expected time of the slowest rank.

Each pass finds, for every pair of ranks, the best swap of two slots and applies it if the objective falls. Then it
checks every slot whose expert has other replicas for an expert that would use the slot better (a gift). The search ends
when a pass gains almost nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.planning.search.state import Prices, is_small
from coterie.placement.planning.search.steps.actions import best_swap, look_at_gifts, swap
from coterie.placement.planning.search.steps.state import (
    UNITS,
    Ints,
    StepLayer,
    StepScratch,
    StepState,
    mark_stale,
    new_scratch,
    new_state,
    objective_now,
    take,
)

PASSES = 32
"""Most passes over a layer."""

COARSE = 10.0
"""Factor of the least gain in the first pass: taking large gains first needs fewer swaps in total."""

CLOSE = 3e-3
"""Gain of a pass, as a share of the objective, below which it is the last."""

KICKS = 12
"""Number of searches of a small layer after a random kick: a single descent may end 5% from the optimum."""

TINY, TINY_KICKS = 64, 96
"""TINY: largest slots x ranks of a layer for which kicks cost almost nothing. TINY_KICKS: number of its kicks."""

KICKED = 3
"""Number of random swaps or gifts in one kick."""


@helper()
def descend_steps(layer: StepLayer, state: StepState, scratch: StepScratch, prices: Prices) -> None:
    """Apply actions until a pass gains almost nothing."""
    ranks, gifts = len(layer.alive), len(state.row) > len(state.copies)
    for at in range(PASSES):
        now = objective_now(layer, state, prices, state.first)
        before, gain = now, prices.least * (1.0 if at else COARSE)
        if at < 2:
            scratch.stale[:] = True
        for rank in range(ranks):
            for other in range(rank + 1, ranks):
                if not layer.alive[rank] or not layer.alive[other]:
                    continue
                while scratch.stale[rank, other]:
                    first, second = best_swap(layer, state, scratch, prices, rank, other, now * (1.0 - gain))
                    scratch.stale[rank, other] = False
                    if first < 0:
                        break
                    swap(layer, state, rank, other, first, second)
                    mark_stale(scratch.stale, rank)
                    mark_stale(scratch.stale, other)
                    now = objective_now(layer, state, prices, state.first)
        if gifts and look_at_gifts(layer, state, scratch, prices, gain):
            now = objective_now(layer, state, prices, state.first)
        if at and now >= before * (1.0 - CLOSE):
            return


@helper()
def kick(alive: NDArray[np.bool_], row: Ints, seed: int) -> int:
    """Make some random swaps and gifts in a row [slot]; return the next seed."""
    done, per_rank = 0, len(row) // len(alive)
    for _ in range(8 * KICKED):
        # A linear congruential generator gives the same numbers on every machine.
        seed = (1103515245 * seed + 12345) % 2147483648
        one = seed // 65536 % len(row)
        seed = (1103515245 * seed + 12345) % 2147483648
        two = seed // 65536 % len(row)
        rank, other = one // per_rank, two // per_rank
        if rank == other or not alive[rank] or not alive[other] or done == KICKED:
            continue
        taken, given, copies = False, False, 0
        for place in range(per_rank):
            taken = taken or row[rank * per_rank + place] == row[two]
            given = given or row[other * per_rank + place] == row[one]
        for slot in range(len(row)):
            copies += alive[slot // per_rank] and row[slot] == row[one]
        if not taken and copies > 1 and seed // 256 % 2:
            row[one] = row[two]
            done += 1
        elif not taken and not given:
            row[one], row[two] = row[two], row[one]
            done += 1
    return seed


@helper()
def units_of(tokens: Array, weights: Array, touch: Array, per_token: Array, slots: int) -> float:
    """Return the units per second for which all experts on the slowest rank together take UNITS."""
    total = slots * touch.max()
    for expert in range(len(tokens)):
        for scenario in range(len(weights)):
            total += weights[scenario] * tokens[expert, scenario] * per_token[:, expert].max()
    return float(UNITS / max(total, 1e-300))


@njit()
def search_steps(
    chosen: NDArray[np.int64],
    rows: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    tokens: Array,
    weights: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    load_in: Array,
    alive: NDArray[np.bool_],
    floor: Array,
    prices: Prices,
    uniform: bool,
) -> None:
    """Improve `rows` [layer, slot] of the chosen layers that are `wanted` [layer], in place.

    Every expert must be on a living rank and none twice on a rank. `tokens` is [layer, expert, scenario].
    """
    slots, ranks, experts, scenarios = rows.shape[1], per_token.shape[1], per_token.shape[2], len(weights)
    state = new_state(slots, ranks, experts, scenarios)
    scratch = new_scratch(slots // ranks, ranks, experts, scenarios)
    base, start = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    for at in chosen:
        if not wanted[at]:
            continue
        copy_row(base, rows[at])
        scale = units_of(tokens[at], weights, touch, per_token[at], slots)
        layer = StepLayer(
            tokens[at], weights * scale, scale, touch, per_token[at], load_in[at], alive, whole, uniform, floor[at]
        )
        least, seed = np.inf, 12345
        kicks = TINY_KICKS if slots * ranks <= TINY else KICKS if is_small(slots, ranks) else 0
        for trial in range(1 + kicks):
            copy_row(start, base)
            if trial:
                seed = kick(alive, start, seed)
            take(layer, state, start)
            descend_steps(layer, state, scratch, prices)
            total = objective_now(layer, state, prices, state.first)
            if not trial or total < least * (1.0 - prices.least):
                least = total
                copy_row(base, state.row)
        copy_row(rows[at], base)
