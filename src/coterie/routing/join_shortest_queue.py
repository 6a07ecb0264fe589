"""Join the shortest queue: fewest requests in flight relative to speed. The best policy by load alone."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best


@routers.register("join_shortest_queue")
@dataclass(frozen=True, slots=True)
class JoinShortestQueue:
    def route(self, request: Request, fleet: Fleet) -> Decision:
        worker, scores = best((fleet.running + 1) / fleet.speeds, fleet)
        return Decision(worker, scores, ("{} in flight, the fewest for its speed", fleet.running.item(worker)))
