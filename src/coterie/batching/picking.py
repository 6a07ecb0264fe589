"""Helpers of all strategies: their common setting, and the forced picks.

:func:`must_take` lists the forced picks, and :func:`first_picks` does so in compiled code: the oldest request, and
requests passed over too often (:func:`is_due`). A strategy chooses the rest.

Call the compiled functions of this module from compiled code only. A function that returns an array must not be called
from Python too: if both it and its compiled caller come from numba's cache, numba 0.68 confuses their constants and
raises "'descr' is NULL".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.batching.base import DEFAULT_MAX_SKIPS, Loads, Selection, Window
from coterie.errors import ConfigError

Indices = NDArray[np.int64]

NEVER = 1 << 62
"""Larger than any skip count: the compiled loops get it for `max_skips=None`."""


def check_at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class Skipping:
    """Base of the built-in strategies: their common setting."""

    max_skips: int | None = DEFAULT_MAX_SKIPS
    """Times a request may be passed over before it is taken first; None for no limit."""

    def __post_init__(self) -> None:
        if self.max_skips is not None:
            check_at_least_one("max_skips", self.max_skips)


def check_snapshot(window: Window, running: Loads, size: int) -> None:
    """Raise ConfigError for wrong shapes: compiled loops do not check them and would read past an array's end."""
    if window.loads.ndim != 3 or running.shape != window.loads.shape[1:]:
        raise ConfigError(f"running has shape {running.shape}; loads {window.loads.shape} must be [request, *running]")
    if not window.loads.flags.c_contiguous:
        raise ConfigError(f"loads {window.loads.shape} must be contiguous: np.ascontiguousarray makes them so")
    if len(window.skipped) != len(window.loads):
        raise ConfigError(f"skipped has {len(window.skipped)} requests; loads has {len(window.loads)}")
    if size < 0:  # not check_at_least: it would take a fifth of the time of a small pick
        raise ConfigError(f"size={size} must be at least 0")


@helper()
def is_due(request: int, skips: int, limit: int) -> bool:
    """Return whether a window's request must be taken: it is the oldest, or was passed over `limit` times or more."""
    return request == 0 or skips >= limit


def must_take(window: Window, size: int, max_skips: int | None) -> list[int]:
    """Return the oldest request, then those passed over `max_skips` times or more, oldest first; at most `size`."""
    limit = NEVER if max_skips is None else max_skips
    skipped = window.skipped.tolist()
    if skipped and max(skipped) < limit:  # none is overdue: only the oldest is checked
        skipped = skipped[:1]
    return [request for request, skips in enumerate(skipped) if is_due(request, skips, limit)][:size]


def selection(picks: tuple[Indices, int], window: Window, by: str) -> Selection:
    """Return the selection of `picks` (order, number of forced picks), with the reason as text."""
    order, forced = picks
    reason = f"{by} of {len(window.loads)} waiting"
    return Selection(order, reason if forced < 2 else f"{reason}, after {forced - 1} overdue")


@helper()
def first_picks(skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    """Return an order with its forced picks filled in, the oldest then the overdue, oldest first, and their number."""
    order = np.empty(min(size, len(skipped)), np.int64)
    forced = 0
    for request in range(len(skipped)):
        if forced == len(order):
            break
        if is_due(request, skipped[request], max_skips):
            order[forced] = request
            forced += 1
    return order, forced


@helper()
def fill_up(order: Indices, forced: int, rest: Indices) -> None:
    """Fill the places after the forced picks from `rest`; in a loop, as slices take a second to compile."""
    for place in range(forced, len(order)):
        order[place] = rest[place - forced]


@helper()
def not_in(picks: Indices, waiting: int) -> Indices:
    """Return the requests of a window that are not in `picks`, oldest first."""
    taken = np.zeros(waiting, np.bool_)
    for request in picks:
        taken[request] = True
    rest = np.empty(waiting - len(picks), np.int64)
    count = 0
    for request in range(waiting):
        if not taken[request]:
            rest[count] = request
            count += 1
    return rest


@helper()
def drop(items: Indices, count: int, at: int) -> None:
    """Remove the item at `at` from the first `count` items, keeping the order of the others."""
    for i in range(at, count - 1):
        items[i] = items[i + 1]


@helper(fastmath=True)
def total_of(row: Loads) -> float:
    total = 0.0
    for column in range(len(row)):  # by index: iterating over the row itself is not vectorised
        total += row[column]
    return total


@helper(fastmath=True)
def totals_of(rows: Loads) -> Loads:
    """Return [request] the total tokens of rows [request, column]."""
    totals = np.empty(len(rows))
    for request in range(len(rows)):
        totals[request] = total_of(rows[request])
    return totals


@helper()
def oldest_first(skipped: Indices, size: int, max_skips: int) -> tuple[Indices, int]:
    """Return the oldest requests, overdue ones first, and the number of forced picks."""
    order, forced = first_picks(skipped, size, max_skips)
    fill_up(order, forced, not_in(order[:forced], len(skipped)))
    return order, forced


@helper()
def due(skipped: Indices, size: int, max_skips: int, budget: int) -> tuple[Indices, int]:
    """Return an order filled with forced picks, overdue ones, then those skipped `budget` times, and their number."""
    order, forced = first_picks(skipped, size, max_skips)
    for request in range(1, len(skipped)):
        if forced == len(order):
            break
        if budget <= skipped[request] < max_skips:
            order[forced] = request
            forced += 1
    return order, forced


@helper()
def allowed_skips(avoidable: float, expected_gain: float, max_skips: int) -> int:
    """Return how often a request may be passed over: `avoidable` share of a batch's time x `expected_gain`."""
    return int(min(float(max_skips), avoidable * expected_gain)) if avoidable > 0.0 else 0
