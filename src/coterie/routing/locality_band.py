"""Locality band (ELDR): the least loaded of the workers whose centroids are nearly as similar as the best.

Signatures of calibration requests are clustered offline, one centroid per worker. A request goes to the worker with the
fewest requests in flight among those whose cosine similarity is within `band` of the highest: a band of 0
chooses the most similar worker, whatever its load, a band of 1 the shortest queue. It is wrong where cosine similarity
does not reflect shared experts, and under drift until the router is refitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import check_share
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fitted import FIT_HINT, RouterFit
from coterie.routing.fleet import Fleet
from coterie.routing.picking import any_free, best, chosen, lowest_scored

REASON = "{} in flight, the fewest of {} within {:g} of the most similar"


@routers.register("locality_band")
@dataclass(frozen=True, slots=True)
class LocalityBand:
    fitted: RouterFit = needs(FIT_HINT)
    """Fit with the signature and the centroids."""
    band: float = 0.1
    """Largest difference from the best cosine similarity at which a worker is a candidate."""

    def __post_init__(self) -> None:
        check_share(band=self.band)

    def route(self, request: Request, fleet: Fleet) -> Decision:
        workers = len(fleet.places)
        if request.footprint is None:
            worker, scores = best((fleet.in_flight + 1) / fleet.speeds, fleet)
            return Decision(worker, scores, "no footprint: the shortest queue")
        self.fitted.check_workers(workers)
        similarity, scores = self.fitted.similarities(request.footprint), np.empty(workers)
        least_loaded, inside = _least_loaded(
            similarity, self.band, fleet.alive, fleet.in_flight, fleet.places, fleet.speeds, fleet.routed, scores
        )
        worker = chosen(least_loaded, fleet)
        return Decision(worker, scores, (REASON, fleet.in_flight.item(worker), inside, self.band))


@njit()
def _least_loaded(
    similarity: NDArray[np.float32],
    band: float,
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    speeds: NDArray[np.float64],
    routed: int,
    scores: NDArray[np.float64],
) -> tuple[np.int64, int]:
    """Return the chosen worker and the number of candidates; fills `scores` [worker]."""
    free = any_free(alive, running, places)
    most = -np.inf
    for worker in range(len(similarity)):
        if alive[worker] and (running[worker] < places[worker] or not free):
            most = max(most, similarity[worker])
    loads, inside = np.empty(len(similarity)), 0
    for worker in range(len(similarity)):
        near = similarity[worker] >= most - band
        loads[worker] = (running[worker] + 1) / speeds[worker] if near else np.inf
        inside += near and alive[worker] and (running[worker] < places[worker] or not free)
    return lowest_scored(loads, alive, running, places, routed, scores), inside
