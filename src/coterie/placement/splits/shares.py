"""How an expert's replicas share its tokens: a decision that moves nothing, so it is the first to try.

* ``equal``: every replica takes as much. vLLM does this (a hash of the token's index), and it is all it can do.
* ``weighted``: fixed weights, chosen when planning and kept until the next plan. Any engine whose dispatch draws a
  replica by a weight can do this.
* ``optimal``: shares solved again for every window (or batch), as DeepSeek's LPLB and SGLang's
  ``--ep-dispatch-algorithm lp`` do.

Weighted and optimal are the same numbers, from different windows: weights are what was best for the window they were
fitted on. On the next one they are worse than optimal, and may be worse than equal.

The optimum is of a price that is affine in the share. With `touch_s` at 0 that is the objective's own. Above 0 a
replica also streams the expert's weights in the steps that touch it; the line through what one and each of two replicas
take stands for that, which is close unless a step has few tokens for the replica. A split is then near the optimum, and
never worse than equal shares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import ConfigError
from coterie.placement.objective import Problem
from coterie.placement.splits._flows import NONE, Array, Indices, Split, least_limit, link, new_split, separable

MOST_FIXED = 0.999
"""Largest fixed part of an expert's seconds: a share of its tokens always costs something."""


class Affine(NamedTuple):
    """Seconds of slots: ``unit x (share + fixed)``."""

    unit: Array
    """[layer, rank, expert] seconds of all its tokens."""
    fixed: Array
    """[layer, expert] of that, for the slot itself."""


def optimal_shares(problem: Problem, slot_experts: NDArray[np.integer]) -> Array:
    """[layer, slot] shares with which the slowest rank of each layer is fastest; exact where the price is affine.

    They start from equal ones and differ as little as shortest chains of replicas allow. Of an expert's slots on one
    rank the last computes all; slots of ranks that are gone nothing, and neither does an expert that is only there.
    """
    rows = np.ascontiguousarray(slot_experts, np.int64)
    if rows.shape != problem.current.slot_experts.shape:
        raise ConfigError(f"slot_experts has shape {rows.shape}; expected {problem.current.slot_experts.shape}")
    shares = np.zeros(rows.shape)
    _optimal_shares(rows, problem.alive, problem.topology.rank_speeds, *affine(problem), shares)
    if problem.objective.touch_s:
        equal = problem.equal_shares(rows)
        worse = problem.rank_s(rows, shares).max(axis=1) >= problem.rank_s(rows, equal).max(axis=1)
        shares[worse] = equal[worse]
    return shares


def affine(problem: Problem) -> Affine:
    """The price of a share as a straight line: through one replica and each of two."""
    layers, replicas, experts = problem.share.shape
    if not problem.objective.touch_s or replicas < 2:
        return Affine(problem.unit, np.zeros((layers, experts)))
    still = np.clip(2.0 * problem.share[:, 1] - 1.0, 0.0, MOST_FIXED)
    return Affine(problem.unit * (1.0 - still)[:, None, :], still / (1.0 - still))


@njit()
def _optimal_shares(
    rows: Indices, alive: NDArray[np.bool_], speeds: Array, unit: Array, fixed: Array, shares: Array
) -> None:
    layers, slots = rows.shape
    ranks, experts = unit.shape[1:]
    for layer in range(layers):
        split, search = new_split(slots, experts, ranks), np.empty((4, ranks), np.int64)
        link(rows[layer], alive, unit[layer], fixed[layer], split)
        work = speed = 0.0  # less than an even share of the load where an expert is on no living rank
        for rank in range(ranks):
            work += split.busy[rank] * speeds[rank]
            speed += speeds[rank]
        least_limit(split, unit[layer], speeds, work / speed, search)
        if not separable(split, unit[layer], speeds):
            solve_exactly(split, unit[layer], fixed[layer])
        for slot in range(slots):  # a whole row at once would compile a shape check: 4 s
            shares[layer, slot] = split.share[slot]


# The best shares of one layer for any seconds by rank and expert: the simplex method on a small dense table.
#
# Needed where an expert's seconds on its ranks differ by more than their speeds: where the way its rows travel counts.
# Every variable is at least 0. The table's rows are those that are not 0 now, each a constant (last column) and how it
# changes with each variable that is 0 now (the other columns):
#
#     share of an expert's key replica = 1 - shares of its other replicas
#     room of a rank                   = limit - its seconds
#     limit                            = seconds of the busiest rank + room of the busiest rank
#
# With everything on key replicas all rooms are at least 0, so there is nothing to search for before the first step. The
# table is (ranks + replicated experts) x replicas: a step on 32 ranks and 32 spare slots takes about a microsecond, one
# with 256 spare slots about fifty.

STALL = 50
"""Steps without progress after which the first column that helps is taken, not the steepest: that cannot go round."""

SMALL = 1e-11
"""Slope that counts as none; seconds are scaled so that the busiest rank begins with 1."""


@helper()
def solve_exactly(split: Split, unit: Array, fixed: Array) -> float:
    """Set the best shares; the slowest rank's seconds."""
    ranks, slots = len(split.busy), len(split.share)
    busiest = _gather(split, unit, fixed)
    scale = split.busy[busiest]
    if scale <= 0.0:
        return 0.0
    replicated = links = 0
    for count in split.copies:
        if count > 1:
            replicated += 1
            links += count - 1
    table = np.zeros((ranks + replicated, links + 2))
    inside = np.empty(len(table), np.int64)  # [row] variable: a slot for its share, slots + rank for a rank's room
    outside = np.empty(links + 1, np.int64)  # [column]
    _fill(split, unit, busiest, scale, table, inside, outside)
    _descend(table, inside, outside, busiest)
    for slot in outside:
        if slot < slots:
            split.share[slot] = 0.0
    for row in range(len(table)):
        if inside[row] < slots and row != busiest:
            split.share[inside[row]] = max(0.0, table[row, -1])
    _settle(split, unit, fixed)
    return float(split.busy.max())


@helper()
def _gather(split: Split, unit: Array, fixed: Array) -> int:
    """Give each expert's tokens to its replica with the largest share, the key one; the busiest rank then."""
    each = len(split.share) // len(split.busy)
    split.busy[:] = 0.0
    for expert in range(len(split.first)):
        slot = split.first[expert]
        if slot == NONE:
            continue
        key = slot
        while slot >= 0:
            if split.share[slot] > split.share[key]:
                key = slot
            slot = split.after[slot]
        slot = split.first[expert]
        while slot >= 0:
            split.share[slot] = 1.0 if slot == key else 0.0
            split.busy[slot // each] += unit[slot // each, expert] * (split.share[slot] + fixed[expert])
            slot = split.after[slot]
    return int(np.argmax(split.busy))


@helper()
def _fill(
    split: Split, unit: Array, busiest: int, scale: float, table: Array, inside: Indices, outside: Indices
) -> None:
    ranks, slots = len(split.busy), len(split.share)
    each = slots // ranks
    row, column = ranks, 0
    for rank in range(ranks):
        inside[rank] = slots + rank
        table[rank, -1] = -split.busy[rank] / scale
    for expert in range(len(split.first)):
        if split.copies[expert] < 2:
            continue
        key = split.first[expert]
        while split.share[key] == 0.0:
            key = split.after[key]
        slot = split.first[expert]
        while slot >= 0:
            if slot != key:
                outside[column] = slot
                table[row, column] = -1.0
                table[slot // each, column] -= unit[slot // each, expert] / scale
                table[key // each, column] += unit[key // each, expert] / scale
                column += 1
            slot = split.after[slot]
        inside[row] = key
        table[row, -1] = 1.0
        row += 1
    # Rooms were written without the limit, which is the busiest rank's seconds and room.
    outside[column] = slots + busiest
    for j in range(table.shape[1]):
        limit = 1.0 if j == column else -table[busiest, j]
        for rank in range(ranks):
            table[rank, j] += limit
        table[busiest, j] = limit


@helper()
def _descend(table: Array, inside: Indices, outside: Indices, goal: int) -> None:
    """Exchange columns for rows until no column lowers the row `goal`, the limit."""
    stalled, lowest = 0, np.inf
    while True:
        column = NONE
        for j in range(len(outside)):
            if table[goal, j] < -SMALL and (
                column == NONE
                or (outside[j] < outside[column] if stalled > STALL else table[goal, j] < table[goal, column])
            ):
                column = j
        if column == NONE:
            return
        row, least = NONE, np.inf
        for i in range(len(table)):
            if i != goal and table[i, column] < -SMALL:
                ratio = max(0.0, table[i, -1]) / -table[i, column]
                if ratio < least or (ratio == least and inside[i] < inside[row]):
                    row, least = i, ratio
        if row == NONE:  # seconds cannot fall for ever: only rounding can say so
            return
        _exchange(table, row, column)
        inside[row], outside[column] = outside[column], inside[row]
        stalled = 0 if table[goal, -1] < lowest - SMALL else stalled + 1
        lowest = min(lowest, table[goal, -1])


@helper()
def _exchange(table: Array, row: int, column: int) -> None:
    pivot = 1.0 / table[row, column]
    for j in range(table.shape[1]):
        table[row, j] *= -pivot
    table[row, column] = pivot
    for i in range(len(table)):
        slope = table[i, column]
        if i != row and slope != 0.0:
            table[i, column] = 0.0
            for j in range(table.shape[1]):
                table[i, j] += slope * table[row, j]


@helper()
def _settle(split: Split, unit: Array, fixed: Array) -> None:
    """Make every expert's shares add up to 1 in spite of rounding, and sum up the ranks' seconds."""
    each = len(split.share) // len(split.busy)
    split.busy[:] = 0.0
    for expert in range(len(split.first)):
        total, slot = 0.0, split.first[expert]
        while slot >= 0:
            total += split.share[slot]
            slot = split.after[slot]
        slot = split.first[expert]
        while slot >= 0:
            split.share[slot] /= total
            split.busy[slot // each] += unit[slot // each, expert] * (split.share[slot] + fixed[expert])
            slot = split.after[slot]
