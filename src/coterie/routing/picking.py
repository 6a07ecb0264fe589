"""Helpers of routers: the best open worker, and pseudo-random numbers without state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import UnavailableError
from coterie.routing.fleet import Fleet

NONE = np.int64(-1)


def best(scores: NDArray[np.float64], fleet: Fleet) -> tuple[int, NDArray[np.float64]]:
    """Return the open worker with the lowest score, and the scores, infinite for workers that are not open.

    Ties go to the next living worker in round-robin order, so that they do not all go to the first.
    """
    allowed = np.empty(len(scores))
    worker = lowest_scored(scores, fleet.alive, fleet.in_flight, fleet.places, fleet.routed, allowed)
    return chosen(worker, fleet), allowed


def chosen(worker: np.int64, fleet: Fleet) -> int:
    """Return the worker found by :func:`lowest_scored`; raise UnavailableError if it is -1."""
    if worker < 0:
        raise UnavailableError(f"none of the {len(fleet)} workers is alive, or none may be chosen")
    return int(worker)


@njit()
def lowest_scored(
    scores: NDArray[np.float64],
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    routed: int,
    allowed: NDArray[np.float64],
) -> np.int64:
    """Compiled form of `best`: return the worker or -1; `allowed` [worker] becomes the scores of open workers."""
    free = any_free(alive, running, places)
    lowest, least, start = NONE, np.inf, next_living(alive, routed)
    for turn in range(len(scores)):
        worker = start + turn
        if worker >= len(scores):
            worker -= len(scores)
        may = alive[worker] and (running[worker] < places[worker] or not free)
        allowed[worker] = scores[worker] if may else np.inf
        if allowed[worker] < least:
            lowest, least = np.int64(worker), allowed[worker]
    return lowest


@njit()
def next_living(alive: NDArray[np.bool_], routed: int) -> int:
    """Return the living worker whose turn it is after `routed` requests.

    Turns count living workers only, so that a dead worker's turns do not all go to its neighbour.
    """
    living = 0
    for worker in range(len(alive)):
        living += alive[worker]
    left = routed % max(1, living)
    for worker in range(len(alive)):
        left -= alive[worker]
        if left < 0:
            return worker
    return 0


@helper()
def any_free(alive: NDArray[np.bool_], running: NDArray[np.int64], places: NDArray[np.int64]) -> bool:
    """Return whether a living worker has a free place."""
    free = False
    for worker in range(len(alive)):
        free |= alive[worker] and running[worker] < places[worker]
    return free


def mixed(seed: int, number: int) -> int:
    """Return 64 pseudo-random bits from both numbers (splitmix64): a router keeps no generator between decisions."""
    word = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
