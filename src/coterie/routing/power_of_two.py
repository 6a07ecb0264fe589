"""Power of two choices: two workers at random, the one with fewer requests in flight.

Nearly as even as the shortest queue, and it need not know the load of all; of eight workers or fewer it is worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.errors import UnavailableError
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import mixed


@routers.register("power_of_two")
@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    seed: int = 0

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        allowed = np.flatnonzero(fleet.open)
        if not len(allowed):
            raise UnavailableError(f"none of the {len(fleet)} workers is alive")
        word = mixed(self.seed, fleet.routed)
        first = word % len(allowed)
        second = (first + 1 + (word >> 32) % max(1, len(allowed) - 1)) % len(allowed)
        pair = allowed[[first, second]]
        scores = np.full(len(fleet), np.inf)
        scores[pair] = (fleet.running[pair] + 1) / fleet.speeds[pair]
        worker = int(pair[np.argmin(scores[pair])])
        return Decision(worker, scores, f"{fleet.running[worker]} in flight, the fewer of {pair[0]} and {pair[1]}")
