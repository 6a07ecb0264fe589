"""First come, first served: the baseline, and the fairest.

Right where the queue is shallow: reordering then delays requests without a gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import NEVER, Indices, Skipping, check_snapshot, fill_up, first_picks, not_in, selection


@strategies.register("fcfs")
@dataclass(frozen=True, slots=True)
class Fcfs(Skipping):
    """The oldest requests. It passes none over; requests that another strategy left overdue still go first."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        return selection(_oldest(window.skipped, size, self.max_skips or NEVER), window, "the oldest")


@njit()
def _oldest(skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    order, forced = first_picks(skipped, size, max_skips)
    fill_up(order, forced, not_in(order[:forced], len(skipped)))
    return order, forced
