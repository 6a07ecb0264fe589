"""The greedy strategies: each pick is the request that fits the load so far best, by one of six measures.

Let L be the running load plus the picks so far, flattened over layers and experts to n columns of total T, and v a
candidate of total t. Each strategy takes the candidate with the least

    greedy_variance      variance of L + v              2 v·L + |v|² - (2Tt + t²) / n
    norm_minimizing      |L + v|²                       2 v·L + |v|²
    greedy_dot_product   v·L
    best_fit             distance of L + v to even      2 v·L + |v|² - 2ut
    differencing         (v - mean v)·(L - mean L)      v·L - Tt / n
    lpt_balanced         variation of L + v             |L + v|² / (T + t)²

where u is the load per column if the whole batch were even. Terms that are the same for every candidate are left out.
If all candidates have the same total, the first, second, fourth and last measure give the same order, and so do the
third and fifth, which ignore |v|², the candidate's own unevenness. If all have the same norm too, all six agree.

Right where the slowest rank decides a step (expert parallel, prefill). Wrong in one GPU's decode, where an even load
means more experts to stream.

The power of d choices: each pick compares only d of the waiting requests, drawn at random, by the first or the third
measure. The time is O(batch x d x columns) whatever the window, for queues of thousands. With d at least the window it
is the greedy strategy of the same measure. With a small d the picks are worse, and they differ from run to run unless
the generator is seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import Loads, Selection, Window, strategies
from coterie.batching.picking import (
    NEVER,
    Indices,
    Skipping,
    check_at_least_one,
    check_snapshot,
    drop,
    first_picks,
    not_in,
    selection,
    total_of,
)

Narrow = NDArray[np.int16]

VARIANCE, NORM, DOT, EVEN, DEVIATION, VARIATION = range(6)
BY = (
    "least variance",
    "least norm",
    "least dot product",
    "nearest to even",
    "most cancelled unevenness",
    "least variation",
)
"""Measures in words."""


@dataclass(frozen=True, slots=True)
class Greedy(Skipping):
    """Base of the greedy strategies: repeatedly pick the request with the least `measure`."""

    measure: ClassVar[int]

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:  # noqa: ARG002
        check_snapshot(window, running, size)
        picks = _greedy(window.loads, running, window.skipped, size, self.max_skips or NEVER, self.measure)
        return selection(picks, window, BY[self.measure])


@strategies.register("greedy_variance")
@dataclass(frozen=True, slots=True)
class GreedyVariance(Greedy):
    """The flattest load: least variance over all columns. CAPS's first strategy.

    A candidate's total counts: if the load is uneven, a heavy request that fills its valleys is picked before a light
    one that does not.
    """

    measure: ClassVar[int] = VARIANCE


@strategies.register("norm_minimizing")
@dataclass(frozen=True, slots=True)
class NormMinimizing(Greedy):
    """The load vector of least norm. Unlike the variance, it grows with any load, so it prefers light requests."""

    measure: ClassVar[int] = NORM


@strategies.register("greedy_dot_product")
@dataclass(frozen=True, slots=True)
class GreedyDotProduct(Greedy):
    """The request that overlaps least with the load. Prefers light requests and ignores a request's own unevenness."""

    measure: ClassVar[int] = DOT


@strategies.register("best_fit")
@dataclass(frozen=True, slots=True)
class BestFit(Greedy):
    """Nearest to the even load that the whole batch would have if its requests had the window's average total.

    Early picks prefer heavy requests, since the target is far; late picks fill the rest.
    """

    measure: ClassVar[int] = EVEN


@strategies.register("differencing")
@dataclass(frozen=True, slots=True)
class Differencing(Greedy):
    """Karmarkar-Karp on vectors: pick the request that cancels most of the load's difference from even.

    Ignores the unevenness that a candidate adds itself, so if the load is even already, any candidate is as good.
    """

    measure: ClassVar[int] = DEVIATION


@strategies.register("lpt_balanced")
@dataclass(frozen=True, slots=True)
class LptBalanced(Greedy):
    """Longest processing time first, among requests that even the load out: least coefficient of variation.

    Unevenness counts relative to the load, so of two equally uneven requests the heavier goes first.
    """

    measure: ClassVar[int] = VARIATION


@njit()
def _greedy(
    loads: Loads, running: Loads, skipped: Indices, size: int, max_skips: int, measure: int
) -> tuple[Indices, int]:
    return pick_greedily(loads, running, skipped, size, max_skips, measure)


# Sums of whole numbers are exact in float64 in any order, so fastmath's reordering changes no pick. The measures are
# multiplied by n (EVEN by the window as well) to keep them whole, so that ties stay exact ties.
@helper(fastmath=True)
def pick_greedily(
    loads: Loads, running: Loads, skipped: Indices, size: int, max_skips: int, measure: int | np.int64
) -> tuple[Indices, int]:
    waiting, columns = loads.shape[0], loads.shape[1] * loads.shape[2]
    order, forced = first_picks(skipped, size, max_skips)
    if forced == len(order):
        return order, forced
    rows, load = loads.reshape(waiting, columns), running.ravel()
    dots, squares, totals = np.empty(waiting), np.empty(waiting), np.empty(waiting)
    for request in range(waiting):
        row = rows[request]
        with_load, with_itself, total = 0.0, 0.0, 0.0
        for column in range(columns):
            with_load += row[column] * load[column]
            with_itself += row[column] * row[column]
            total += row[column]
        dots[request], squares[request], totals[request] = with_load, with_itself, total
    batch, batch_total, batch_square = load.copy(), total_of(load), 0.0

    by_dot, by_square, by_total, by_own_total, level = 1.0, 0.0, 0.0, 0.0, 0.0
    if measure == VARIANCE:
        by_dot, by_square, by_total, by_own_total = 2.0 * columns, 1.0 * columns, 2.0, 1.0
    elif measure == NORM:
        by_dot, by_square = 2.0, 1.0
    elif measure == EVEN:
        by_dot, by_square = 2.0 * columns * waiting, 1.0 * columns * waiting
        level = 2.0 * (waiting * batch_total + len(order) * total_of(totals))
    elif measure == DEVIATION:
        by_dot, by_total = 1.0 * columns, 1.0

    left = not_in(order[:forced], waiting)
    count = len(left)
    narrow, is_exact = _narrow(rows, squares, len(order))
    for pick in range(len(order)):
        if pick >= forced:
            best, least = 0, 0.0
            for i in range(count):
                request = left[i]
                if measure == VARIATION:
                    square = batch_square + 2.0 * dots[request] + squares[request]
                    score = _variation(square, batch_total + totals[request])
                else:
                    off_total = by_total * batch_total + by_own_total * totals[request] + level
                    score = by_dot * dots[request] + by_square * squares[request] - totals[request] * off_total
                if i == 0 or score < least:
                    best, least = i, score
            order[pick] = left[best]
            drop(left, count, best)
            count -= 1
        batch_total += totals[order[pick]]
        if measure == VARIATION:
            batch_square = _add(batch, rows[order[pick]])
        if pick + 1 == len(order):
            break
        if is_exact:
            _add_narrow_dots(dots, narrow, left[:count], narrow[order[pick]])
        else:
            _add_dots(dots, rows, left[:count], rows[order[pick]])
    return order, forced


@helper()  # not fastmath: equal ratios must give equal quotients
def _variation(square: float, total: float) -> float:
    return square / (total * total) if total > 0.0 else 0.0


@helper(fastmath=True)
def _add(batch: Loads, row: Loads) -> float:
    """Add `row` to `batch`, and return the squared norm of the sum."""
    square = 0.0
    for column in range(len(batch)):
        batch[column] += row[column]
        square += batch[column] * batch[column]
    return square


@helper(fastmath=True)
def _add_dots(dots: Loads, rows: Loads, left: Indices, picked: Loads) -> None:
    for request in left:
        row, out = rows[request], 0.0
        for column in range(len(picked)):
            out += row[column] * picked[column]
        dots[request] += out


@helper()
def _add_narrow_dots(dots: Loads, rows: Narrow, left: Indices, picked: Narrow) -> None:
    for request in left:
        row, out = rows[request], np.int32(0)
        for column in range(len(picked)):
            out = np.int32(out + np.int32(row[column]) * np.int32(picked[column]))
        dots[request] += out


NARROW_FROM = 16
"""Number of picks from which a 16-bit copy pays: each pass takes half the time, and copying costs about two passes."""


@helper(fastmath=True)
def _narrow(rows: Loads, squares: Loads, picks: int) -> tuple[Narrow, bool]:
    """Return a 16-bit copy of `rows` and True, or nothing and False if its dot products would not be exact.

    They are exact if all loads are whole numbers that fit in 16 bits and no squared norm reaches 2^31.
    """
    none = np.empty((0, 0), np.int16)
    if picks < NARROW_FROM:
        return none, False
    for square in squares:  # no dot product exceeds the largest square (Cauchy-Schwarz)
        if square >= 2.0**31:
            return none, False
    narrow = np.empty(rows.shape, np.int16)
    for request in range(len(rows)):
        changed = 0
        for column in range(rows.shape[1]):
            value = np.int16(np.int32(rows[request, column]))
            narrow[request, column] = value
            changed += value != rows[request, column]
        if changed:
            return none, False
    return narrow, True


# The power of d choices.


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
