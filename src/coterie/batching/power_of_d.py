"""The power of d choices: each pick compares only d of the waiting requests, drawn at random.

The time is O(batch x d x columns) whatever the window, for queues of thousands. With d at least the window it is the
greedy strategy of the same measure, and it is right and wrong in the same cases. With a small d the picks are worse,
and they differ from run to run unless the generator is seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from numpy.random import Generator

from coterie._numba import njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.greedy import BY, DOT, VARIANCE
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_at_least_one,
    check_snapshot,
    first_picks,
    not_in,
    selection,
    total_of,
)


@dataclass(frozen=True, slots=True)
class Sampled(Skipping):
    """Base of both strategies: repeatedly draw `d` requests at random and pick the one with the least measure."""

    d: int = 8
    """Number of requests that each pick compares."""

    measure: ClassVar[int]

    def __post_init__(self) -> None:
        Skipping.__post_init__(self)
        check_at_least_one("d", self.d)

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:
        check_snapshot(window, running, size)
        waiting = len(window.skipped)
        draws = rng.random((min(size, waiting), min(self.d, waiting)))
        flat, limit = self.measure == VARIANCE, self.max_skips or NEVER
        picks = _sampled(window.loads, running, window.skipped, draws, limit, flat)
        return selection(picks, window, f"{BY[self.measure]} of a few")


@strategies.register("power_of_d")
@dataclass(frozen=True, slots=True)
class PowerOfD(Sampled):
    """The request of least variance of the load, among d drawn at random."""

    measure: ClassVar[int] = VARIANCE


@strategies.register("power_of_d_dot")
@dataclass(frozen=True, slots=True)
class PowerOfDDot(Sampled):
    """The request of least dot product with the load, among d drawn at random."""

    measure: ClassVar[int] = DOT


@njit(fastmath=True)
def _sampled(
    loads: Loads, running: Loads, skipped: Indices, draws: Loads, max_skips: int, flat: bool
) -> tuple[Indices, int]:
    """Pick requests; `draws` [pick, choice] are uniform in [0, 1); `flat` compares by variance, else by dot product."""
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    rows, load = loads.reshape(waiting, columns), running.ravel().copy()
    batch_total = total_of(load)
    order, forced = first_picks(skipped, len(draws), max_skips)
    rest = not_in(order[:forced], waiting)
    for pick in range(len(order)):
        if pick >= forced:
            left = waiting - pick
            best, least = 0, 0.0
            for choice in range(min(draws.shape[1], left)):
                at = choice + int(draws[pick, choice] * (left - choice))
                request = rest[at]
                rest[at], rest[choice] = rest[choice], request
                row = rows[request]
                with_load, with_itself, total = 0.0, 0.0, 0.0
                for column in range(columns):
                    with_load += row[column] * load[column]
                    with_itself += row[column] * row[column]
                    total += row[column]
                score = with_load
                if flat:
                    score = columns * (2.0 * with_load + with_itself) - (2.0 * batch_total + total) * total
                if choice == 0 or score < least or (score == least and request < rest[best]):
                    best, least = choice, score
            order[pick] = rest[best]
            rest[best] = rest[left - 1]
        picked = rows[order[pick]]
        for column in range(columns):
            load[column] += picked[column]
        batch_total += total_of(picked)
    return order, forced
