"""Pressure: the worker under the least of it, by KV use, prefill still to do, queue and experts together.

After Gimbal's request scheduler. Every part is a share of what is full, or of the most any worker has: KV blocks in
use, requests for its places, prompt tokens still to compute, and experts that a step would touch with the request on
it. Wrong where the parts do not cost alike: nothing says that a full KV cache is as bad as a full queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best


@routers.register("pressure")
@dataclass(frozen=True, slots=True)
class Pressure:
    fitted: FittedRouting | None = None
    """Says which experts requests use; None leaves experts out."""
    kv: float = 1.0
    queue: float = 1.0
    prefill: float = 1.0
    experts: float = 1.0

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        prefill = fleet.prefill_tokens / max(1, int(fleet.prefill_tokens.max()))
        scores = (
            self.kv * fleet.kv_used + self.queue * (fleet.running + 1) / (fleet.places * fleet.speeds)
            + self.prefill * prefill
        )  # fmt: skip
        profile = None
        if self.fitted is not None and request.footprint is not None and fleet.missed.shape[1]:
            profile = self.fitted.profile(request.footprint)  # for the fleet: what a step touches is made of these
            scores = scores + self.experts * fleet.distinct / max(1e-9, float(fleet.distinct.max()))
        worker, scores = best(scores, fleet)
        return Decision(worker, scores, f"pressure {scores[worker]:.2f}, the least", profile)
