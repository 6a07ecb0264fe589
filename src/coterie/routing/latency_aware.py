"""Latency-aware: the worker where the request adds the least time, summed over the requests that run there.

A request that joins n others makes each of their steps longer, and waits for the whole step itself. With
``T(D, n) = fixed + expert x D + request x n + context`` for a step that touches D experts, it costs per token

    (n + 1) x T(D + d, n + 1) - n x T(D, n)

where d is the number of experts the request is expected to add to those that the worker's requests touch anyway, from
their probabilities of missing an expert (:mod:`coterie.routing.fleet`). A worker never runs more than its `places` in a
step. If all are taken, T is the step of a full batch, the request waits for one more place to become free than requests
wait now, each of which takes T ÷ places per token of a request, and those that wait pay for longer steps as well.
Similarity and load are both expressed as time,
so no weight needs tuning: where experts do not matter, this is the shortest queue; where they do, requests that share
experts gather. It needs no clusters, which would become stale; those of calibration requests only give empty workers a
prior. Prompt tokens missing from the worker's cache are paid once, spread over the tokens a request decodes: all who
run wait while they are computed, the request alone while their KV is transferred, or while prompts before it are
computed.

It is wrong where the workers' step times differ from the prices, or the forecast of a request's experts is poor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.lines import PREFILL, TRANSFER, DecodeStepPrices, added_us, decode_us
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fitted import FIT_HINT, RouterFit
from coterie.routing.fleet import Fleet, beside
from coterie.routing.forecast import turn_to_forecast
from coterie.routing.learned import SCALE, products
from coterie.routing.picking import chosen, lowest_scored

NOTHING, UNKNOWN = np.empty(0, np.int64), np.empty(0, np.float32)

COST = "{:.0f} µs a token, the least of {}"
COST_OF_EXPERTS = COST + ": {:.1f} experts more, over all layers, beside the {} running"


@routers.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware:
    fitted: RouterFit = needs(FIT_HINT)
    """Fit that forecasts a request's experts."""
    cost: DecodeStepPrices = needs("the prices of a decode step; make them with DecodeStepPrices.of(step_model)")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        workers, learned = len(fleet.places), self.fitted.for_fleet(request.footprint, fleet)
        forecast, profile, tokens = learned.forecast.map, UNKNOWN, 0.0
        if request.footprint is not None:
            profile, tokens = learned.read(request.footprint)
        added, scores = np.empty(workers, np.float32), np.empty(workers)
        cheapest = _cheapest(
            self.cost.line,
            profile,
            tokens,
            forecast.own,
            forecast.noise,
            forecast.rows,
            forecast.prior,
            float(request.prompt_tokens),
            fleet.alive,
            fleet.in_flight,
            fleet.places,
            fleet.routed,
            fleet.expected,
            fleet.distinct,
            fleet.context_tokens,
            fleet.missed,
            fleet.speeds,
            NOTHING if request.cached_tokens is None else request.cached_tokens,
            request.prefilled,
            fleet.prefill_tokens,
            added,
            scores,
        )
        worker = chosen(cheapest, fleet)
        cost = scores.item(worker)
        if profile is UNKNOWN:
            return Decision(worker, scores, (COST, cost, workers))
        more, others = added.item(worker), fleet.in_flight.item(worker)
        return Decision(worker, scores, (COST_OF_EXPERTS, cost, workers, more, others), profile)


# One compiled call: call overhead dominates all but the products.
@njit()
def _cheapest(
    prices: NDArray[np.float64],
    profile: NDArray[np.float32],
    tokens: float,
    own: float,
    noise: float,
    rows: NDArray[np.float32],
    prior: NDArray[np.float32],
    prompt: float,
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    routed: int,
    expected: NDArray[np.float64],
    distinct: NDArray[np.float64],
    context: NDArray[np.int64],
    missed: NDArray[np.uint8],
    speeds: NDArray[np.float64],
    cached: NDArray[np.int64],
    prefilled: bool,
    waiting: NDArray[np.int64],
    added: NDArray[np.float32],
    scores: NDArray[np.float64],
) -> np.int64:
    """Return the cheapest worker. Turns counts in `profile` [expert index] into a forecast.

    Fills `added` [worker], the experts added to a step, and `scores` [worker]. The context, and without a profile the
    number of requests, are half way between the worker's own and the fleet's mean, as `expected` is. On a full worker
    `ahead` places must become free first, and `queued` requests wait at a time: longer steps delay them too.
    """
    known = len(profile) > 0
    if known:
        turn_to_forecast(profile, tokens, own, noise, rows, prior)
        products(missed, profile, added)
    living, requests, kept = 0, 0.0, 0.0
    for worker in range(len(alive)):
        if alive[worker]:
            living += 1
            requests += running[worker]
            kept += context[worker]
    costs = np.empty(len(alive))
    mean = requests / max(1, living)
    for worker in range(len(alive)):
        added[worker] = added[worker] / SCALE if known else 0.0
        others = expected[worker] if known else beside(running[worker], mean, places[worker])
        held = (context[worker] + kept / max(1, living)) / 2
        ahead, queued = max(0, running[worker] - places[worker] + 1), 0.0
        if ahead > 0:
            queued = max(0.0, (running[worker] + mean) / 2 - others)
            held *= others / max(others + queued, 1.0)
        touched = distinct[worker] if known else 0.0
        step = decode_us(prices, touched, others, held)
        more = added_us(prices, 0.0, added[worker], 1.0, prompt)
        cost = step + (others + queued + 1.0) * more + ahead * (step + more) / places[worker]
        if len(cached):
            once = prices[TRANSFER] if prefilled else prices[PREFILL] * (others + 1.0)
            cost += once * (prompt - cached[worker])
        if not prefilled:
            cost += prices[PREFILL] * waiting[worker]
        costs[worker] = cost / speeds[worker]
    return lowest_scored(costs, alive, running, places, routed, scores)
