"""Joint (after the Dynamo article): prompt tokens not cached, experts not local and load, added up with weights.

    score = kv x (1 - hit rate) x prompt tokens + experts x (1 - locality) x num_experts + load x 100 x load / most load

Locality is the share of the experts a request is predicted to use most (`top` of each layer) that the worker holds, by
bitmask. The three are not in one unit: a long prompt drowns the others, which is how the article has it.

A batch is routed together in two passes: each request to its best worker or, of those nearly as good, to the one whose
requests share most experts with it; then a worker with more than twice the mean is cut to one and a half times it, and
what is cut off goes to the workers with the fewest. Every request is assigned exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best

NEARLY = 0.05
"""Of the best score: how much worse a worker may be on which a request finds others that share its experts."""


@routers.register("joint")
@dataclass(frozen=True, slots=True)
class Joint:
    fitted: FittedRouting | None = None
    """Forecasts a request's experts; without it a footprint is taken as it is."""
    kv: float = 1.0
    experts: float = 0.5
    load: float = 0.3
    top: int = 16
    """Experts of each layer that a request counts as using."""

    def __post_init__(self) -> None:
        for name in ("kv", "experts", "load"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number of at least 0")
        if self.top < 1:
            raise ConfigError(f"top={self.top} must be at least 1")

    def route(self, request: RouteRequest, fleet: Fleet) -> Decision:
        local = self._locality(self._bits(request, fleet), fleet)
        worker, scores = best(self._scores(request, fleet, local), fleet)
        return Decision(worker, scores, self._reason(request, worker, scores, local))

    def route_batch(self, requests: Sequence[RouteRequest], fleet: Fleet) -> list[Decision]:
        """Decisions for requests that come together, in their order."""
        bits = [self._bits(request, fleet) for request in requests]
        local = [self._locality(one, fleet) for one in bits]
        scores = [best(self._scores(r, fleet, near), fleet)[1] for r, near in zip(requests, local, strict=True)]
        room = np.where(fleet.alive, np.maximum(fleet.places - fleet.running, 0), 0)
        if not room.any():
            room = np.where(fleet.alive, len(requests), 0)
        chosen = _together(scores, bits, room)
        chosen = _trimmed(chosen, scores, fleet.alive, room)
        return [
            Decision(worker, score, self._reason(request, worker, score, near))
            for request, worker, score, near in zip(requests, chosen, scores, local, strict=True)
        ]

    def _scores(self, request: RouteRequest, fleet: Fleet, local: NDArray[np.float64]) -> NDArray[np.float64]:
        cached = 0 if request.cached_tokens is None else request.cached_tokens
        loads = fleet.running / fleet.speeds
        num_experts = 0 if fleet.local is None or request.footprint is None else request.footprint.shape[1]
        return np.asarray(
            self.kv * (request.prompt_tokens - cached) + self.experts * (1.0 - local) * num_experts
            + self.load * 100.0 * loads / max(1.0, float(loads.max()))
        )  # fmt: skip

    def _bits(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.uint64] | None:
        """[layer, word] experts the request is predicted to use."""
        if request.footprint is None:
            return None
        layers, experts = request.footprint.shape
        use = request.footprint if self.fitted is None else self.fitted.profile(request.footprint)
        use = np.asarray(use).reshape(layers, experts)
        top = min(self.top, experts)
        chosen = np.argpartition(use, experts - top, axis=1)[:, experts - top :]
        chosen = np.where(np.take_along_axis(use, chosen, axis=1) > 0, chosen, -1)
        bits = np.zeros((layers, -(-experts // 64) * 64), np.bool_)
        rows = np.repeat(np.arange(layers), top)
        flat = chosen.ravel()
        bits[rows[flat >= 0], flat[flat >= 0]] = True
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)

    def _locality(self, bits: NDArray[np.uint64] | None, fleet: Fleet) -> NDArray[np.float64]:
        """[worker] share of the predicted experts that it holds."""
        if fleet.local is None or bits is None or not bits.any():
            return np.ones(len(fleet))
        if fleet.local.shape[1:] != bits.shape:
            raise ConfigError(f"fleet.local has shape {fleet.local.shape}; a request has {bits.shape} words")
        held = np.bitwise_count(fleet.local & bits).sum(axis=(1, 2))
        return np.asarray(held / int(np.bitwise_count(bits).sum()))

    def _reason(
        self, request: RouteRequest, worker: int, scores: NDArray[np.float64], local: NDArray[np.float64]
    ) -> str:
        cached = 0 if request.cached_tokens is None else int(request.cached_tokens[worker])
        return (
            f"score {scores[worker]:.1f}: {cached} of {request.prompt_tokens} prompt tokens cached, "
            f"{local[worker]:.0%} of the experts local"
        )


def _together(
    scores: list[NDArray[np.float64]], bits: list[NDArray[np.uint64] | None], room: NDArray[np.int64]
) -> list[int]:
    """[request] its best worker, or of those nearly as good the one whose requests share most experts with it.

    Where none shares any, the one that got the fewest so far.
    """
    workers = len(room)
    left, chosen = room.copy(), []
    held: list[NDArray[np.uint64] | None] = [None] * workers
    for own, mine in zip(scores, bits, strict=True):
        allowed = np.where(left > 0, own, np.inf) if (left > 0).any() else own
        least = allowed.min()
        near = np.flatnonzero(allowed <= least + NEARLY * abs(least))
        shared = [
            0 if mine is None or (there := held[worker]) is None else int(np.bitwise_count(there & mine).sum())
            for worker in near
        ]
        order = np.lexsort((allowed[near], (room - left)[near], -np.array(shared)))
        worker = int(near[order[0]])
        chosen.append(worker)
        left[worker] -= 1
        before = held[worker]
        if mine is not None:
            held[worker] = mine.copy() if before is None else before | mine
    return chosen


def _trimmed(
    chosen: list[int], scores: list[NDArray[np.float64]], alive: NDArray[np.bool_], room: NDArray[np.int64]
) -> list[int]:
    """What a worker has above twice the mean goes to those with the fewest, until it has one and a half times it."""
    mean = len(chosen) / max(1, int(alive.sum()))
    keep = max(1, int(1.5 * mean))
    count = np.bincount(chosen, minlength=len(alive))
    result = list(chosen)
    for worker in np.flatnonzero(count > 2 * mean):
        mine = [at for at, where in enumerate(chosen) if where == worker]
        mine.sort(key=lambda at: scores[at][worker])  # those that fit worst go
        for at in mine[keep:]:
            others = np.flatnonzero(alive & (count < np.minimum(keep, room)))
            if not len(others):
                break  # nobody has room: it stays
            other = int(others[np.lexsort((scores[at][others], count[others]))[0]])
            result[at] = other
            count[worker] -= 1
            count[other] += 1
    return result
