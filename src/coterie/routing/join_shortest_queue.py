"""Join the shortest queue: the fewest requests in flight, for its speed. The best that load alone can do."""

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
        return Decision(worker, scores, f"{fleet.running[worker]} in flight, the fewest for its speed")
