"""Strategies that use only a request's total load: longest processing time first, and Karmarkar-Karp.

``lpt`` starts heavy requests early, so that none is left to run alone at the end. Right where batches run on parallel
machines and the last one to finish counts. By itself it harms the balance between experts: it fills a batch with the
heaviest requests, similar or not. ``lpt_balanced``, which does not, is among the greedy strategies.

``karmarkar_karp`` splits the window into two sides of nearly equal total, and takes the side of the oldest request. The
two largest totals go to opposite sides and are replaced by their difference, until one is left: the difference of
the sides. Right where requests differ in weight alone. It uses only totals, so it cannot tell similar requests from
dissimilar ones, and the sides do not depend on the batch size or the running load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_snapshot,
    fill_up,
    first_picks,
    not_in,
    selection,
    totals_of,
)


@strategies.register("lpt")
@dataclass(frozen=True, slots=True)
class Lpt(Skipping):
    """Longest processing time first: the requests with the largest total load."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        return selection(_heaviest(window.loads, window.skipped, size, self.max_skips or NEVER), window, "the heaviest")


@helper()
def heaviest_first(requests: Indices, totals: Loads) -> None:
    """Sort requests in place by falling total; requests of equal total keep their order."""
    requests[:] = requests[np.argsort(-totals[requests], kind="mergesort")]


@njit()
def _heaviest(loads: Loads, skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    order, forced = first_picks(skipped, size, max_skips)
    if forced < len(order):
        rest = not_in(order[:forced], waiting)
        heaviest_first(rest, totals_of(loads.reshape(waiting, columns)))
        fill_up(order, forced, rest)
    return order, forced


@strategies.register("karmarkar_karp")
@dataclass(frozen=True, slots=True)
class KarmarkarKarp(Skipping):
    """Karmarkar-Karp: the oldest request's side, heaviest first; if that is too few, the other side, oldest first."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        picks = _oldest_side(window.loads, window.skipped, size, self.max_skips or NEVER)
        return selection(picks, window, "the side of the oldest")


@helper()
def sides_of(totals: Loads) -> NDArray[np.bool_]:
    """Return [request] whether it is on the oldest request's side, by the differencing method; ties by age."""
    count = len(totals)
    ranked = np.argsort(-totals, kind="mergesort")
    values = totals[ranked]
    kept, lost = np.empty(count, np.int64), np.empty(count, np.int64)
    for merge in range(count - 1):
        # The larger request represents the pair from now on: its value is the difference, which may sort further back.
        first, difference, at = ranked[merge], values[merge] - values[merge + 1], merge + 1
        kept[merge], lost[merge] = first, ranked[at]
        while at + 1 < count and values[at + 1] > difference:
            ranked[at], values[at] = ranked[at + 1], values[at + 1]
            at += 1
        while at + 1 < count and values[at + 1] == difference and ranked[at + 1] < first:
            ranked[at], values[at] = ranked[at + 1], values[at + 1]
            at += 1
        ranked[at], values[at] = first, difference
    side = np.zeros(count, np.bool_)
    for merge in range(count - 2, -1, -1):
        side[lost[merge]] = not side[kept[merge]]
    same: NDArray[np.bool_] = side == side[0]
    return same


@njit()
def _oldest_side(loads: Loads, skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    order, forced = first_picks(skipped, size, max_skips)
    if forced == len(order):
        return order, forced
    totals = totals_of(loads.reshape(waiting, columns))
    same = sides_of(totals)
    rest = not_in(order[:forced], waiting)
    mine, others = np.empty(len(rest), np.int64), np.empty(len(rest), np.int64)
    count = 0
    for i in range(len(rest)):
        if same[rest[i]]:
            mine[count] = rest[i]
            count += 1
        else:
            others[i - count] = rest[i]
    heaviest_first(mine[:count], totals)
    for place in range(forced, len(order)):
        at = place - forced
        order[place] = mine[at] if at < count else others[at - count]
    return order, forced
