"""Optimal shares of one layer for arbitrary seconds per rank and expert: the simplex method on a small dense table.

Needed if an expert's seconds on its ranks differ by more than the ranks' speeds, because the exchange of rows counts.
Every variable is at least 0. The rows of the table are the basic variables: a constant (last column) and a coefficient
for each nonbasic variable, whose value is 0 (the other columns):

    share of an expert's key replica = 1 - shares of its other replicas
    room of a rank                   = limit - its seconds
    limit                            = seconds of the busiest rank + room of the busiest rank

The key replica of an expert is the one that starts with all its tokens. The room of a rank is its seconds below the
limit. At the start all rooms are at least 0, so the first basis is feasible and needs no search. The table is (ranks +
replicated experts) x replicas: a pivot on 32 ranks with 32 spare slots takes about 1 µs, with 256 spare slots 50 µs.
"""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.placement.objective._arrays import Array
from coterie.placement.objective.flows.chains import NONE, Indices, Split

STALL = 50
"""Pivots without progress after which the first improving column is chosen, not the steepest: Bland's rule, which
cannot cycle."""

SMALL = 1e-11
"""Slopes below this count as 0; seconds are scaled so that the busiest rank starts at 1."""


@helper()
def solve_shares(split: Split, unit: Array, fixed: Array) -> float:
    """Set the optimal shares in `split`; return the seconds of the slowest rank."""
    ranks, slots = len(split.busy), len(split.share)
    busiest = _gather(split, unit, fixed)
    scale = split.busy[busiest]
    if scale <= 0.0:
        return 0.0
    replicated = links = 0
    for count in split.copies:
        replicated += count > 1
        links += max(count - 1, 0)
    table = np.zeros((ranks + replicated, links + 2))
    inside = np.empty(len(table), np.int64)  # [row] basic variable: slot for a share, slots + rank for a room
    outside = np.empty(links + 1, np.int64)  # [column] nonbasic variable, coded likewise
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
    """Give each expert's tokens to its key replica, the one with the largest share; return the busiest rank."""
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
    # The rows of rooms lack the limit so far; the limit is the busiest rank's seconds plus its room.
    outside[column] = slots + busiest
    for j in range(table.shape[1]):
        limit = 1.0 if j == column else -table[busiest, j]
        for rank in range(ranks):
            table[rank, j] += limit
        table[busiest, j] = limit


@helper()
def _descend(table: Array, inside: Indices, outside: Indices, goal: int) -> None:
    """Pivot until no column lowers the row `goal`, the limit."""
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
        if row == NONE:  # seconds are bounded below: only rounding errors lead here
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
    """Scale every expert's shares to add up to 1 despite rounding errors, and sum up the seconds of the ranks."""
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
