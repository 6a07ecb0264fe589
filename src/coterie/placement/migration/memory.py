"""Replicas or KV cache: the same memory buys faster steps or more requests in a step.

    tokens a second = requests in a step ÷ seconds of a step

More replicas shorten the step (fewer rows cross links) and shrink the KV cache, and with it how many requests fit.
Where memory limits the batch, a replica must shorten the step by the share of the requests it displaces; where there
are fewer requests than would fit, it takes only what nobody uses. So the best count follows from both, and from
neither alone. All of one rank: the others are taken to be like it.

Wrong where requests differ much in length: `session_bytes` is an average, and a cache that is nearly full preempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coterie.errors import ConfigError, check_at_least
from coterie.types import ModelSpec, WeightDtype

StepSeconds = Callable[[int, float], float]
"""Seconds of a step as a function of the replicas on a rank and the requests in its batch."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """One count of replicas."""

    replicas: int
    """On a rank; a replica is one expert of all layers, or as many single layers."""
    kv_bytes: float
    sessions: float
    """Requests that fit, or are at hand."""
    step_s: float
    """0 where no request fits."""

    @property
    def tokens_per_s(self) -> float:
        return self.sessions / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of one rank for replicas and KV cache."""

    available_bytes: float
    """Memory less weights and workspace."""
    replica_bytes: float
    """One expert of all MoE layers."""
    session_bytes: float
    """KV cache of one request at its full length."""
    max_sessions: float = float("inf")
    """Requests at hand on this rank: cache for more is worth nothing."""

    def __post_init__(self) -> None:
        for name in ("available_bytes", "replica_bytes", "session_bytes", "max_sessions"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")

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
        """Budget of a model, for requests of `context` tokens."""
        replica = spec.expert_bytes(dtype) * spec.num_moe_layers
        return cls(available_bytes, replica, float(spec.kv_bytes_per_token) * context, max_sessions)

    @property
    def max_replicas(self) -> int:
        return int(self.available_bytes // self.replica_bytes)

    def kv_bytes(self, replicas: int) -> float:
        """Left for the cache; nothing where the replicas alone do not fit."""
        check_at_least(0, replicas=replicas)
        return max(0.0, self.available_bytes - replicas * self.replica_bytes)

    def fitting_sessions(self, replicas: int) -> float:
        """Requests whose cache fits, whether or not there are so many; a part of one is counted as such."""
        return self.kv_bytes(replicas) / self.session_bytes

    def point(self, replicas: int, step_s: StepSeconds) -> MemoryPoint:
        sessions = min(self.max_sessions, self.fitting_sessions(replicas))
        return MemoryPoint(replicas, self.kv_bytes(replicas), sessions, step_s(replicas, sessions) if sessions else 0.0)

    def best(self, step_s: StepSeconds, counts: Iterable[int] | None = None) -> MemoryPoint:
        """The count with the most tokens a second, of `counts` or of all that fit; of equals the smallest."""
        points = [self.point(count, step_s) for count in (range(self.max_replicas + 1) if counts is None else counts)]
        if not points:
            raise ConfigError("counts must name at least one number of replicas")
        return max(points, key=lambda point: (point.tokens_per_s, -point.replicas))


# ---------------------------------------------------------------------------------------------- the published example

PUBLISHED_BUDGET = MemoryBudget(163.7e9, 10.7e9, 61 * 4096 * 131_072)
"""Reproduces a published table's cache and sessions. Its text gives the 10.7 GB; the 163.7 are its first row; 4,096 B a
token and layer (8 heads of 128, keys and values, 16 bits) is what makes 5.0 sessions of 128 Ki tokens of them."""
PUBLISHED_STEP_S = 40e-3
PUBLISHED_SAVING_S = 11.25e-6
"""Saving per replica and step: 45 µs for 4."""


def published_step_s(replicas: int, sessions: float) -> float:  # noqa: ARG001  a batch of any size takes the same
    """Published formula: 40 ms less the replicas' saving."""
    return PUBLISHED_STEP_S - replicas * PUBLISHED_SAVING_S
