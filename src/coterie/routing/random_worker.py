"""Random: any open worker. The baseline of load balancing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.errors import UnavailableError
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import mixed


@routers.register("random")
@dataclass(frozen=True, slots=True)
class RandomWorker:
    seed: int = 0

    def route(self, request: Request, fleet: Fleet) -> Decision:
        allowed = np.flatnonzero(fleet.open)
        if not len(allowed):
            raise UnavailableError(f"none of the {len(fleet)} workers is alive")
        worker = int(allowed[mixed(self.seed, fleet.routed) % len(allowed)])
        return Decision(worker, np.where(fleet.open, 0.0, np.inf), f"any of {len(allowed)}")
