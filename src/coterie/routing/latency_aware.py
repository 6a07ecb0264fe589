"""Latency-aware: the worker where the request costs everyone the least time.

A request that joins n others makes each of their steps longer, and waits for the whole step itself. With
``T(D, n) = fixed + expert x D + request x n + context`` for a step that touches D experts, it costs per token

    (n + 1) x T(D + d, n + 1) - n x T(D, n)

where d is how many experts it is expected to add to those the worker's requests touch anyway, by the probabilities that
they leave one alone (:mod:`coterie.routing.fleet`). Likeness and load are then one number, in seconds, and nothing is
to be tuned: where experts do not matter it is the shortest queue, where they do, requests that share experts gather.
No clusters are needed, so none grow old; clusters of calibration requests only give an empty worker a character.
Prompt tokens that the worker does not have in its cache are paid once, spread over the tokens a request decodes.

Wrong where steps of the workers take other times than the prices say, and by as much as the forecast of a request's
experts from its prefill is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.routing._dots import SCALE, products
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.forecast import Forecast, turn_to_forecast
from coterie.routing.picking import best_of, chosen

NOTHING, UNKNOWN = np.empty(0, np.int64), np.empty(0, np.float32)
NO_FORECAST = Forecast(UNKNOWN, UNKNOWN, UNKNOWN.reshape(0, 0), UNKNOWN.reshape(0, 0), 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Microseconds of a decode step, as a straight line; the defaults are about gpt-oss-20b's on an H200."""

    fixed_us: float = 900.0
    expert_us: float = 1.8
    """Per expert that is touched, in any layer."""
    request_us: float = 2.0
    context_us: float = 0.001
    """Per cached token of a request."""
    prefill_us: float = 20.0
    """Per prompt token that must be computed, or brought, first."""
    output_tokens: float = 256.0
    """That a request decodes, about: what is paid once is shared out over them."""
    line: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """All of it for the loop, prefill shared out."""

    def __post_init__(self) -> None:
        for name in ("fixed_us", "expert_us", "request_us", "context_us", "prefill_us"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number of at least 0")
        if not 0 < self.output_tokens < np.inf:
            raise ConfigError(f"output_tokens={self.output_tokens} must be a finite number above 0")
        shared = self.prefill_us / self.output_tokens
        line = np.array([self.fixed_us, self.expert_us, self.request_us, self.context_us, shared])
        object.__setattr__(self, "line", line)

    @classmethod
    def of(cls, model: StepModel, requests: int = 16, context: int = 1024, output_tokens: float = 256.0) -> StepPrices:
        """Of a calibrated model, for decode steps of about so many requests with so many cached tokens each."""
        spec, chunk = model.spec, 2048

        def rest_us(n: int, cached: int) -> float:
            return 1e6 * (model.attention_s(Batch(decode_requests=n, decode_context=cached)) + model.dense_s(n))

        def experts_us(active: int) -> float:
            rows = np.zeros(spec.num_experts)
            rows[:active] = requests * spec.top_k / active
            return model.experts_us(rows, requests)

        few, many = max(1, spec.num_experts // 4), max(2, spec.num_experts * 3 // 4)
        expert = max(0.0, (experts_us(many) - experts_us(few)) / (many - few))
        cached = requests * context
        request = (rest_us(2 * requests, cached) - rest_us(requests, cached)) / requests
        per_token = (rest_us(requests, 2 * cached) - rest_us(requests, cached)) / cached
        whole = Batch(prefill_tokens=chunk, prefill_requests=1)
        rows = np.full(spec.num_experts, chunk * spec.top_k / spec.num_experts)
        prefill = 1e6 * (model.attention_s(whole) + model.dense_s(chunk, 1)) + spec.num_moe_layers * model.experts_us(
            rows, chunk
        )
        fixed = rest_us(requests, cached) - request * requests - per_token * cached
        fixed += spec.num_moe_layers * (experts_us(few) - expert * few)
        return cls(max(0.0, fixed), expert, max(0.0, request), max(0.0, per_token), prefill / chunk, output_tokens)


@routers.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware:
    fitted: FittedRouting | None = None
    """Forecasts a request's experts; needed for requests with a footprint."""
    prices: StepPrices = StepPrices()

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers, cells, fitted = len(fleet.places), fleet.missed.shape[1], self.fitted
        forecast, profile, tokens = NO_FORECAST, UNKNOWN, 0.0
        if request.footprint is not None and cells:
            if fitted is None:
                raise ConfigError("latency_aware needs `fitted`, for footprints: fit one with coterie fit")
            forecast, shape, right = fitted.forecast, request.footprint.shape, (fitted.num_layers, fitted.num_experts)
            if shape != right:
                raise ConfigError(f"footprint has shape {shape}; {fitted.model} was fitted for {right}")
            profile, total = forecast.read(request.footprint)
            tokens = total / (fitted.num_layers * fitted.top_k)
            if len(profile) != cells:
                raise ConfigError(f"{fitted.model} was fitted for {len(profile)} cells; the fleet keeps {cells}")
        added, scores = np.empty(workers, np.float32), np.empty(workers)
        found = _cheapest(
            self.prices.line,
            profile,
            tokens,
            forecast.own,
            forecast.noise,
            forecast.maps,
            forecast.usual,
            float(request.prompt_tokens),
            fleet.alive,
            fleet.running,
            fleet.places,
            fleet.routed % workers,
            fleet.expected,
            fleet.distinct,
            fleet.context_tokens,
            fleet.missed,
            fleet.speeds,
            NOTHING if request.cached_tokens is None else request.cached_tokens,
            added,
            scores,
        )
        worker = chosen(found, fleet)
        cost = f"{scores.item(worker):.0f} µs a token, the least of {workers}"
        if profile is UNKNOWN:
            return Decision(worker, scores, cost)
        more, others = added.item(worker), fleet.running.item(worker)
        return Decision(worker, scores, f"{cost}: {more:.1f} experts more a step for {others} others", profile)


# One call of compiled code: each takes longer to be called than to do what is not a product.
@njit()
def _cheapest(
    prices: NDArray[np.float64],
    profile: NDArray[np.float32],
    tokens: float,
    own: float,
    noise: float,
    maps: NDArray[np.float32],
    usual: NDArray[np.float32],
    prompt: float,
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    start: int,
    expected: NDArray[np.float64],
    distinct: NDArray[np.float64],
    context: NDArray[np.int64],
    missed: NDArray[np.uint8],
    speeds: NDArray[np.float64],
    cached: NDArray[np.int64],
    added: NDArray[np.float32],
    scores: NDArray[np.float64],
) -> np.int64:
    """The worker; `profile` [cell] comes as counts, and `added` and `scores` [worker] are filled.

    Without a profile requests and context are half way to the fleet's mean, as `expected` is with one.
    """
    known = len(profile) > 0
    if known:
        turn_to_forecast(profile, tokens, own, noise, maps, usual)
        products(missed, profile, added)
    living, requests, kept = 0, 0.0, 0.0
    for worker in range(len(alive)):
        if alive[worker]:
            living += 1
            requests += running[worker]
            kept += context[worker]
    costs = np.empty(len(alive))
    for worker in range(len(alive)):
        added[worker] = added[worker] / SCALE if known else 0.0
        others = expected[worker] if known else (running[worker] + requests / max(1, living)) / 2
        held = (context[worker] + kept / max(1, living)) / 2
        touched = distinct[worker] if known else 0.0
        step = prices[0] + prices[1] * touched + prices[2] * others + prices[3] * held
        more = prices[1] * added[worker] + prices[2] + prices[3] * prompt
        if len(cached):
            more += prices[4] * (prompt - cached[worker])
        costs[worker] = (step + (others + 1.0) * more) / speeds[worker]
    return best_of(costs, alive, running, places, start, scores)
