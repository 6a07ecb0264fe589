"""Longest processing time first: heavy requests start early, so that none is left to run alone at the end.

Right where batches run on parallel machines and the last one to finish counts. By itself it harms the balance between
experts: it fills a batch with the heaviest requests, like or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_snapshot,
    drop,
    first_picks,
    not_in,
    selection,
    totals_of,
)  # fmt: skip


@strategies.register("lpt")
@dataclass(frozen=True, slots=True)
class Lpt(Skipping):
    """The heaviest by total load."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        return selection(_heaviest(window.loads, window.skipped, size, self.max_skips or NEVER), window, "the heaviest")


@strategies.register("lpt_balanced")
@dataclass(frozen=True, slots=True)
class LptBalanced(Skipping):
    """Of the heavier half of those left, the one that leaves the lowest peak; then the lower norm, then the heavier."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        picks = _lowest_peak(window.loads, running, window.skipped, size, self.max_skips or NEVER)
        return selection(picks, window, "lowest peak by the heavier half")


@njit()
def heaviest_first(requests: Indices, totals: Loads) -> None:
    """Sort in place by falling total; requests of one total keep their order."""
    for i in range(1, len(requests)):
        request, j = requests[i], i
        while j > 0 and totals[requests[j - 1]] < totals[request]:
            requests[j] = requests[j - 1]
            j -= 1
        requests[j] = request


@njit()
def _heaviest(loads: Loads, skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    order, forced = first_picks(skipped, size, max_skips)
    if forced < len(order):
        rest = not_in(order[:forced], waiting)
        heaviest_first(rest, totals_of(loads.reshape(waiting, columns)))
        order[forced:] = rest[: len(order) - forced]
    return order, forced


@njit(fastmath=True)
def _lowest_peak(
    loads: Loads, running: Loads, skipped: Indices, size: int, max_skips: int
) -> tuple[Indices, int]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    order, forced = first_picks(skipped, size, max_skips)
    if forced == len(order):
        return order, forced
    rows, load = loads.reshape(waiting, columns), running.ravel().copy()
    left = not_in(order[:forced], waiting)
    heaviest_first(left, totals_of(rows))
    count = len(left)
    for pick in range(len(order)):
        if pick >= forced:
            best = _best_of_half(rows, load, left[: (count + 1) // 2])
            order[pick] = left[best]
            drop(left, count, best)
            count -= 1
        picked = rows[order[pick]]
        for column in range(columns):
            load[column] += picked[column]
    return order, forced


FULLEST = 4
"""Columns to look at first: few requests fit under the lowest peak so far in all of them."""


@njit(fastmath=True)
def _best_of_half(rows: Loads, load: Loads, half: Indices) -> int:
    """Where in `half`, heaviest first, the request is that leaves the lowest peak; of those the least norm."""
    if len(load) == 0:
        return 0
    fullest = _fullest(load)
    # From the lightest on, which finds a low peak soon. Of two that tie the later one stays: it is heavier, or older.
    best, lowest = len(half) - 1, _peak(load, rows[half[-1]])
    for i in range(len(half) - 2, -1, -1):
        request, j = half[i], 0
        while j < len(fullest) and load[fullest[j]] + rows[request, fullest[j]] <= lowest:
            j += 1
        if j < len(fullest):
            continue
        above, level = 0, 0  # unlike a maximum, counts become vector code
        for column in range(len(load)):
            value = load[column] + rows[request, column]
            above += value > lowest
            level += value == lowest
        if above > 0:
            continue
        if level == 0:
            best, lowest = i, _peak(load, rows[request])
        elif _square(load, rows[request]) <= _square(load, rows[half[best]]):
            best = i
    return best


@njit()
def _peak(load: Loads, row: Loads) -> float:
    """The largest of load + row, in four lanes, since a maximum waits for the one before it."""
    columns = len(load)
    a = b = c = d = load[0] + row[0]
    for block in range(columns // 4):
        column = 4 * block
        e, f = load[column] + row[column], load[column + 1] + row[column + 1]
        g, h = load[column + 2] + row[column + 2], load[column + 3] + row[column + 3]
        a, b, c, d = e if e > a else a, f if f > b else b, g if g > c else c, h if h > d else d
    for column in range(columns - columns % 4, columns):
        a = max(a, load[column] + row[column])
    return float(max(a, b, c, d))


@njit(fastmath=True)
def _square(load: Loads, row: Loads) -> float:
    total = 0.0
    for column in range(len(load)):
        total += (load[column] + row[column]) ** 2
    return total


@njit()
def _fullest(load: Loads) -> Indices:
    """The columns of most load."""
    fullest = np.zeros(min(FULLEST, len(load)), np.int64)
    count = 0
    for column in range(len(load)):
        if count == len(fullest) and load[column] <= load[fullest[count - 1]]:
            continue
        count = min(count + 1, len(fullest))
        at = count - 1
        while at > 0 and load[fullest[at - 1]] < load[column]:
            fullest[at] = fullest[at - 1]
            at -= 1
        fullest[at] = column
    return fullest
