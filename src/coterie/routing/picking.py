"""What routers share: the best of the workers that may be chosen, and numbers that look random and are not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import UnavailableError
from coterie.routing.fleet import Fleet

NONE = np.int64(-1)


def best(scores: NDArray[np.float64], fleet: Fleet) -> tuple[int, NDArray[np.float64]]:
    """The open worker with the lowest score, and the scores with those that are not open at infinity.

    Of equals the next after the one a round robin would have taken, so that ties do not all go to the first.
    """
    allowed = np.empty(len(scores))
    worker = best_of(scores, fleet.alive, fleet.running, fleet.places, fleet.routed % len(scores), allowed)
    return chosen(worker, fleet), allowed


def chosen(worker: np.int64, fleet: Fleet) -> int:
    """What :func:`best_of` found."""
    if worker < 0:
        raise UnavailableError(f"none of the {len(fleet)} workers is alive, or none may be chosen")
    return int(worker)


@njit()
def best_of(
    scores: NDArray[np.float64],
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    start: int,
    allowed: NDArray[np.float64],
) -> np.int64:
    """`best` for loops: the worker or -1, and what is `allowed`."""
    free = any_free(alive, running, places)
    found, least = NONE, np.inf
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
def any_free(alive: NDArray[np.bool_], running: NDArray[np.int64], places: NDArray[np.int64]) -> bool:
    """Whether a living worker has a place."""
    free = False
    for worker in range(len(alive)):
        free |= alive[worker] and running[worker] < places[worker]
    return free


def mixed(seed: int, number: int) -> int:
    """64 bits that depend on both and look random (splitmix64): a router keeps no generator between decisions."""
    word = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
