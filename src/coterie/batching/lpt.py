"""Longest processing time first: heavy requests start early, so that none is left to run alone at the end.

Right where batches run on parallel machines and the last one to finish counts. By itself it harms the balance between
experts: it fills a batch with the heaviest requests, like or not. ``lpt_balanced``, which does not, is among the greedy
strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

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
    """The heaviest by total load."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        return selection(_heaviest(window.loads, window.skipped, size, self.max_skips or NEVER), window, "the heaviest")


@helper()
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
        fill_up(order, forced, rest)
    return order, forced
