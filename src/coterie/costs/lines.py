"""Straight-line prices: what a policy that decides in microseconds takes for the step-time model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Microseconds of a decode step, as a straight line. Make one with :meth:`of`."""

    fixed_us: float
    expert_us: float
    """Per expert that is touched, in any layer."""
    request_us: float
    context_us: float
    """Per cached token of a request."""
    prefill_us: float
    """Per prompt token that must be computed, or brought, first."""
    output_tokens: float
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
        return cls(
            fixed_us=max(0.0, fixed),
            expert_us=expert,
            request_us=max(0.0, request),
            context_us=max(0.0, per_token),
            prefill_us=prefill / chunk,
            output_tokens=output_tokens,
        )
