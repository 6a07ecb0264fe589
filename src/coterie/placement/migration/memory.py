"""Memory for replicas or for KV cache: the same bytes buy faster steps or more requests in a step.

    tokens per second = requests in a step ÷ seconds of a step

More replicas shorten the step (fewer rows cross links) and shrink the KV cache, so that fewer requests fit. If memory
limits the batch, a replica must shorten the step by at least the share of the requests that it displaces. If there are
fewer requests than would fit, a replica uses memory that would be idle. The best number of replicas depends on both
effects. All quantities are of one rank; other ranks are assumed to be equal.

Wrong if requests differ much in length: `session_bytes` is an average, and a nearly full cache preempts requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coterie.errors import check, check_at_least
from coterie.types import ModelSpec, WeightDtype

StepSeconds = Callable[[int, float], float]
"""Seconds of a step as a function of the replicas on a rank and the requests in its batch."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Cache, batch and step time with a given number of replicas."""

    replicas: int
    """Replicas on a rank; a replica is one expert of all layers, or as many single-layer experts."""
    kv_bytes: float
    sessions: float
    """Requests in a step: as many as fit into the cache, or as there are, if fewer."""
    step_s: float
    """Seconds of a step; 0 if no request fits."""

    @property
    def tokens_per_s(self) -> float:
        return self.sessions / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of one rank for replicas and KV cache."""

    available_bytes: float
    """Memory of the rank minus weights and workspace."""
    replica_bytes: float
    """Weights of one expert in all MoE layers."""
    session_bytes: float
    """KV cache of one request at its full length."""
    max_sessions: float = float("inf")
    """Concurrent requests on this rank; cache for more requests is useless."""

    def __post_init__(self) -> None:
        for name in ("available_bytes", "replica_bytes", "session_bytes", "max_sessions"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0")

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        available_bytes: float,
        context: int,
        *,
        dtype: WeightDtype | None = None,
        max_sessions: float = float("inf"),
    ) -> MemoryBudget:
        """Make the budget of a model for requests of `context` tokens."""
        replica = spec.expert_bytes(dtype) * spec.num_moe_layers
        return cls(available_bytes, replica, float(spec.kv_bytes_per_token) * context, max_sessions)

    @property
    def max_replicas(self) -> int:
        return int(self.available_bytes // self.replica_bytes)

    def kv_bytes(self, replicas: int) -> float:
        """Return the bytes left for the KV cache; 0 if the replicas alone do not fit."""
        check_at_least(0, replicas=replicas)
        return max(0.0, self.available_bytes - replicas * self.replica_bytes)

    def fitting_sessions(self, replicas: int) -> float:
        """Return the number of requests whose cache fits, as a fraction, regardless of `max_sessions`."""
        return self.kv_bytes(replicas) / self.session_bytes

    def point(self, replicas: int, step_s: StepSeconds) -> MemoryPoint:
        sessions = min(self.max_sessions, self.fitting_sessions(replicas))
        return MemoryPoint(replicas, self.kv_bytes(replicas), sessions, step_s(replicas, sessions) if sessions else 0.0)

    def best(self, step_s: StepSeconds, counts: Iterable[int] | None = None) -> MemoryPoint:
        """Return the point with the most tokens per second among `counts` of replicas (default: all that fit).

        The smallest count wins a tie.
        """
        points = [self.point(count, step_s) for count in (range(self.max_replicas + 1) if counts is None else counts)]
        check(points, "counts must name at least one number of replicas")
        return max(points, key=lambda point: (point.tokens_per_s, -point.replicas))
