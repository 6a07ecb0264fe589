"""Power of two choices: two workers at random, the one with fewer requests in flight.

Nearly as even as the shortest queue without knowing every worker's load; worse with eight workers or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import NONE, any_free, chosen, mixed


@routers.register("power_of_two")
@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    seed: int = 0

    def route(self, request: Request, fleet: Fleet) -> Decision:
        word, scores = mixed(self.seed, fleet.routed), np.empty(len(fleet))
        found, other = _less_loaded(
            word & 0xFFFFFFFF, word >> 32, fleet.alive, fleet.running, fleet.places, fleet.speeds, scores
        )
        worker = chosen(found, fleet)
        return Decision(worker, scores, f"{fleet.running.item(worker)} in flight, the fewer of {worker} and {other}")


@njit()
def _less_loaded(
    one: int,
    two: int,
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    speeds: NDArray[np.float64],
    scores: NDArray[np.float64],
) -> tuple[np.int64, np.int64]:
    """Pick two open workers by the random numbers; returns the less loaded, then the other; -1 if none is open."""
    free, allowed, count = any_free(alive, running, places), np.empty(len(alive), np.int64), 0
    for worker in range(len(alive)):
        scores[worker] = np.inf
        if alive[worker] and (running[worker] < places[worker] or not free):
            allowed[count] = worker
            count += 1
    if count == 0:
        return NONE, NONE
    place = one % count
    first, second = allowed[place], allowed[(place + 1 + two % max(1, count - 1)) % count]
    for worker in (first, second):
        scores[worker] = (running[worker] + 1) / speeds[worker]
    return (first, second) if scores[first] <= scores[second] else (second, first)
