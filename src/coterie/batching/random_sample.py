"""A random batch: what any strategy that looks at loads has to beat.

In a burst of like requests it already mixes more than the order of arrival does.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import NEVER, Indices, Skipping, check_snapshot, first_picks, not_in, selection


@strategies.register("random")
@dataclass(frozen=True, slots=True)
class RandomSample(Skipping):
    """Uniformly without replacement, whatever the loads."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:
        check_snapshot(window, running, size)
        draws = rng.random(min(size, len(window.skipped)))
        return selection(_sample(window.skipped, draws, self.max_skips or NEVER), window, "a random sample")


@njit()
def _sample(skipped: Indices, draws: Loads, max_skips: int) -> tuple[Indices, int]:
    """As many requests as there are draws, each uniform in [0, 1)."""
    order, forced = first_picks(skipped, len(draws), max_skips)
    rest = not_in(order[:forced], len(skipped))
    for pick in range(forced, len(order)):
        left = len(skipped) - pick
        at = int(draws[pick] * left)
        order[pick] = rest[at]
        rest[at] = rest[left - 1]
    return order, forced
