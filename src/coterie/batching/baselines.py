"""Strategies that ignore loads, the oldest requests or a random sample: baselines for strategies that use loads."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_snapshot,
    first_picks,
    not_in,
    oldest_first,
    selection,
)


@strategies.register("fcfs")
@dataclass(frozen=True, slots=True)
class Fcfs(Skipping):
    """First come, first served: the fairest order. Requests that another strategy left overdue still go first.

    Right where the queue is shallow: reordering then delays requests without a gain.
    """

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        return selection(_oldest(window.skipped, size, self.max_skips or NEVER), window, "the oldest")


@njit()
def _oldest(skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    return oldest_first(skipped, size, max_skips)


@strategies.register("random")
@dataclass(frozen=True, slots=True)
class RandomSample(Skipping):
    """Random sample: requests drawn uniformly without replacement, whatever their loads.

    After a burst of similar requests it already mixes requests more than the order of arrival does.
    """

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:
        check_snapshot(window, running, size)
        draws = rng.random(min(size, len(window.skipped)))
        return selection(_sample(window.skipped, draws, self.max_skips or NEVER), window, "a random sample")


@njit()
def _sample(skipped: Indices, draws: Loads, max_skips: int) -> tuple[Indices, int]:
    """Sample one request per draw; draws are uniform in [0, 1)."""
    order, forced = first_picks(skipped, len(draws), max_skips)
    rest = not_in(order[:forced], len(skipped))
    for pick in range(forced, len(order)):
        left = len(skipped) - pick
        at = int(draws[pick] * left)
        order[pick] = rest[at]
        rest[at] = rest[left - 1]
    return order, forced
