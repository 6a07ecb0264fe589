"""Locality band (ELDR): of the workers whose centroid is nearly as like the request as the best, the least loaded.

Offline, signatures of calibration requests are clustered, one centroid a worker. A request goes to the worker with the
fewest requests in flight among those whose cosine similarity is within `band` of the highest. 0 is the most alike
whatever its load, 1 the shortest queue. Wrong where cosine similarity is not overlap of experts, and under drift, until
it is fitted anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.errors import ConfigError
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best


@routers.register("locality_band")
@dataclass(frozen=True, slots=True)
class LocalityBand:
    fitted: FittedRouting | None = None
    """Signature and centroids; needed."""
    band: float = 0.1
    """Cosine similarity below the best at which a worker is still a candidate."""

    def __post_init__(self) -> None:
        if not 0 <= self.band <= 1:
            raise ConfigError(f"band={self.band} must be in 0 … 1")

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        load = (fleet.running + 1) / fleet.speeds
        if request.footprint is None:
            worker, scores = best(load, fleet)
            return Decision(worker, scores, "no footprint: the shortest queue")
        if self.fitted is None:
            raise ConfigError("locality_band needs `fitted`: fit one with coterie fit")
        self.fitted.check_workers(len(fleet))
        alike = self.fitted.similarities(request.footprint)
        allowed = fleet.open
        near = alike >= np.where(allowed, alike, -np.inf).max() - self.band
        worker, scores = best(np.where(near, load, np.inf), fleet)
        inside = int((near & allowed).sum())
        reason = f"{fleet.running[worker]} in flight, the fewest of {inside} within {self.band:g} of the most alike"
        return Decision(worker, scores, reason)
