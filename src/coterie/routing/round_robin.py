"""Round robin: workers in turn. Equal numbers of requests, whatever their duration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best, next_living


@routers.register("round_robin")
@dataclass(frozen=True, slots=True)
class RoundRobin:
    def route(self, request: Request, fleet: Fleet) -> Decision:
        turn = next_living(fleet.alive, fleet.routed)
        ahead = (np.arange(len(fleet)) - turn) % len(fleet)
        worker, scores = best(ahead.astype(np.float64), fleet)
        return Decision(worker, scores, f"number {fleet.routed} goes to the next")
