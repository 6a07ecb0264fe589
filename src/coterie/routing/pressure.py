"""Pressure: the worker with the least weighted sum of KV use, pending prefill, queue and experts.

After Gimbal's request scheduler. Each term is a share of the capacity or of the largest value of any worker: KV blocks
in use, requests per place, prompt tokens still to compute, and distinct experts of a step. It is wrong where
the terms differ in cost: a full KV cache need not be as bad as a full queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fitted import FIT_HINT, RouterFit
from coterie.routing.fleet import Fleet
from coterie.routing.picking import chosen, lowest_scored


@routers.register("pressure")
@dataclass(frozen=True, slots=True)
class Pressure:
    fitted: RouterFit = needs(FIT_HINT)
    """Fit that forecasts a request's experts."""
    kv: float = 1.0
    """Weight of the KV blocks in use."""
    queue: float = 1.0
    """Weight of the requests per place."""
    prefill: float = 1.0
    """Weight of the prompt tokens still to compute."""
    experts: float = 1.0
    """Weight of the distinct experts of a step."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        profile, experts, scores = None, 0.0, np.empty(len(fleet))
        if request.footprint is not None:
            self.fitted.for_fleet(request.footprint, fleet)
            profile = self.fitted.profile(request.footprint)  # the fleet needs it to track experts
            experts = self.experts
        least_pressed = _least_pressed(
            self.kv,
            self.queue,
            self.prefill,
            experts,
            fleet.kv_used,
            fleet.prefill_tokens,
            fleet.distinct,
            fleet.speeds,
            fleet.alive,
            fleet.in_flight,
            fleet.places,
            fleet.routed,
            scores,
        )
        worker = chosen(least_pressed, fleet)
        return Decision(worker, scores, ("pressure {:.2f}, the least", scores.item(worker)), profile)


@njit()
def _least_pressed(
    kv: float,
    queue: float,
    prefill: float,
    experts: float,
    kv_used: NDArray[np.float64],
    prefill_tokens: NDArray[np.int64],
    distinct: NDArray[np.float64],
    speeds: NDArray[np.float64],
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    routed: int,
    scores: NDArray[np.float64],
) -> np.int64:
    longest, widest = 1.0, 1e-9
    for worker in range(len(alive)):
        longest, widest = max(longest, prefill_tokens[worker]), max(widest, distinct[worker])
    pressures = np.empty(len(alive))
    for worker in range(len(alive)):
        pressures[worker] = (
            kv * kv_used[worker]
            + queue * (running[worker] + 1) / (places[worker] * speeds[worker])
            + prefill * prefill_tokens[worker] / longest
            + experts * distinct[worker] / widest
        )
    return lowest_scored(pressures, alive, running, places, routed, scores)
