"""Helpers of routers: the best open worker, and pseudo-random numbers without state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import UnavailableError
from coterie.routing.fleet import Fleet

NONE = np.int64(-1)


def best(scores: NDArray[np.float64], fleet: Fleet) -> tuple[int, NDArray[np.float64]]:
    """The open worker with the lowest score, and the scores with those that are not open at infinity.

    Ties go to the next living worker in round-robin order, so that they do not all go to the first.
    """
    allowed = np.empty(len(scores))
    worker = lowest_scored(scores, fleet.alive, fleet.running, fleet.places, fleet.routed, allowed)
    return chosen(worker, fleet), allowed


def chosen(worker: np.int64, fleet: Fleet) -> int:
    """Worker found by :func:`lowest_scored`; raises if there is none."""
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
    """Compiled form of `best`: returns the worker or -1, and fills `allowed`."""
    free = any_free(alive, running, places)
    found, least, start = NONE, np.inf, next_living(alive, routed)
    for turn in range(len(scores)):
        worker = start + turn
        if worker >= len(scores):
            worker -= len(scores)
        may = alive[worker] and (running[worker] < places[worker] or not free)
        allowed[worker] = scores[worker] if may else np.inf
        if allowed[worker] < least:
            found, least = np.int64(worker), allowed[worker]
    return found


@njit()
def next_living(alive: NDArray[np.bool_], routed: int) -> int:
    """The worker whose turn it is after `routed` requests; a dead worker's turns are not all its neighbour's."""
    living = 0
    for worker in range(len(alive)):
        living += alive[worker]
    left = routed % max(1, living)
    for worker in range(len(alive)):
        left -= alive[worker]
        if left < 0:
            return worker
    return 0


@njit()
def any_free(alive: NDArray[np.bool_], running: NDArray[np.int64], places: NDArray[np.int64]) -> bool:
    """Whether a living worker has a free place."""
    free = False
    for worker in range(len(alive)):
        free |= alive[worker] and running[worker] < places[worker]
    return free


def mixed(seed: int, number: int) -> int:
    """64 pseudo-random bits of both numbers (splitmix64): a router keeps no generator between decisions."""
    word = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
