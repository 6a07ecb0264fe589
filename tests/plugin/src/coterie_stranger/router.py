"""The worker whose requests are expected to share the most experts with a new one, priced against its queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.costs.lines import DecodeStepPrices
from coterie.registry import needs
from coterie.routing import Decision, Fleet, Request, RouterFit
from coterie.routing.picking import best


@dataclass(frozen=True, slots=True)
class Overlap:
    fitted: RouterFit = needs("what was learned from a trace")
    cost: DecodeStepPrices = needs("the prices of a decode step")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        queue_us = (fleet.running + 1) / fleet.speeds * self.cost.request_us
        if request.footprint is None:
            worker, scores = best(queue_us, fleet)
            return Decision(worker, scores, "nothing is known of the request: the cheapest queue")
        profile = self.fitted.profile(request.footprint)
        shared = self.fitted.profiles @ profile  # [worker] experts that both are expected to touch
        worker, scores = best(queue_us - self.cost.expert_us * shared, fleet)
        return Decision(worker, scores, f"{shared[worker]:.1f} experts shared", np.asarray(profile, np.float32))
