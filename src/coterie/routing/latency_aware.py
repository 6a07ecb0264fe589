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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.routing._dots import dots
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best


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

    def __post_init__(self) -> None:
        for name in ("fixed_us", "expert_us", "request_us", "context_us", "prefill_us"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number of at least 0")
        if not 0 < self.output_tokens < np.inf:
            raise ConfigError(f"output_tokens={self.output_tokens} must be a finite number above 0")

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
        return cls(
            max(0.0, fixed), expert, max(0.0, request), max(0.0, per_token), prefill / chunk, output_tokens
        )


@routers.register("latency_aware")
@dataclass(frozen=True, slots=True)
class LatencyAware:
    fitted: FittedRouting | None = None
    """Forecasts a request's experts; needed for requests with a footprint."""
    prices: StepPrices = StepPrices()

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        prices, profile = self.prices, None
        requests, distinct, added = _half_way(fleet.running, fleet), np.zeros(1), np.zeros(1)
        if request.footprint is not None and fleet.missed.shape[1]:
            if self.fitted is None:
                raise ConfigError("latency_aware needs `fitted`, for footprints: fit one with coterie fit")
            profile = self.fitted.profile(request.footprint)
            requests, distinct, added = fleet.expected, fleet.distinct, dots(fleet.missed, profile)
        context = _half_way(fleet.context_tokens, fleet)
        more_us = prices.expert_us * added + prices.request_us + prices.context_us * request.prompt_tokens
        step_us = (
            prices.fixed_us + prices.expert_us * distinct + prices.request_us * requests + prices.context_us * context
        )
        cost_us = step_us + (requests + 1) * more_us
        if request.cached_tokens is not None:
            to_compute = request.prompt_tokens - request.cached_tokens
            cost_us = cost_us + (requests + 1) * prices.prefill_us * to_compute / prices.output_tokens
        worker, scores = best(np.asarray(cost_us / fleet.speeds), fleet)
        why = f"{scores[worker]:.0f} µs a token, the least of {len(fleet)}"
        if profile is not None:
            why += f": {added[worker]:.1f} experts more a step for {fleet.running[worker]} others"
        return Decision(worker, scores, why, profile)


def _half_way(values: NDArray[np.int64], fleet: Fleet) -> NDArray[np.float64]:
    """[worker] between what it is and the mean of those alive: what it will be while a request is there."""
    alive = max(1, int(np.count_nonzero(fleet.alive)))
    return np.asarray((values + float(values @ fleet.alive) / alive) / 2)
