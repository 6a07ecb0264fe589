"""Joint (after the Dynamo article): prompt tokens not cached, experts not local and load, added up with weights.

    score = kv x (1 - hit rate) x prompt tokens + experts x (1 - locality) x num_experts + load x 100 x load / most load

Locality is the share of the experts a request's footprint has most of (`top` of each layer) that the worker holds, by
bitmask; of a request that was not prefilled yet the footprint is what a predictor expects. The three are not in one
unit: a long prompt drowns the others, which is how the article has it.

A batch is routed together in two passes: each request to its best worker or, of those nearly as good, to the one whose
requests share most experts with it; then a worker with more than twice the mean is cut to one and a half times it, and
what is cut off goes to the workers with the fewest. Every request is assigned exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError
from coterie.routing.base import Decision, RouteRequest, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best

NOTHING = np.empty(0, np.int64)

NEARLY = 0.05
"""Of the best score: how much worse a worker may be on which a request finds others that share its experts."""


@routers.register("joint")
@dataclass(frozen=True, slots=True)
class Joint:
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
        local = self._locality(self._bits(request), fleet)
        worker, scores = best(self._scores(request, fleet, local), fleet)
        return Decision(worker, scores, self._reason(request, worker, scores, local))

    def route_batch(self, requests: Sequence[RouteRequest], fleet: Fleet) -> list[Decision]:
        """Decisions for requests that come together, in their order."""
        bits = [self._bits(request) for request in requests]
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
        cached = NOTHING if request.cached_tokens is None else request.cached_tokens
        num_experts = 0 if fleet.local is None or request.footprint is None else request.footprint.shape[1]
        scores = np.empty(len(fleet))
        _add_up(
            self.kv, self.experts * num_experts, self.load, float(request.prompt_tokens), cached, local, fleet.running,
            fleet.speeds, scores,
        )  # fmt: skip
        return scores

    def _bits(self, request: RouteRequest) -> NDArray[np.uint64] | None:
        """[layer, word] experts the request is predicted to use."""
        if request.footprint is None:
            return None
        use: NDArray[Any] = np.ascontiguousarray(request.footprint)
        bits = np.zeros((len(use), -(-use.shape[1] // 64)), np.uint64)
        _mark_top(use, np.issubdtype(use.dtype, np.integer), min(self.top, use.shape[1]), bits)
        return bits

    def _locality(self, bits: NDArray[np.uint64] | None, fleet: Fleet) -> NDArray[np.float64]:
        """[worker] share of the predicted experts that it holds."""
        if fleet.local is None or bits is None:
            return np.ones(len(fleet))
        if fleet.local.shape[1:] != bits.shape:
            raise ConfigError(f"fleet.local has shape {fleet.local.shape}; a request has {bits.shape} words")
        shares = np.empty(len(fleet))
        _shares_held(fleet.local, bits, shares)
        return shares

    def _reason(
        self, request: RouteRequest, worker: int, scores: NDArray[np.float64], local: NDArray[np.float64]
    ) -> str:
        cached = 0 if request.cached_tokens is None else int(request.cached_tokens[worker])
        return (
            f"score {scores.item(worker):.1f}: {cached} of {request.prompt_tokens} prompt tokens cached, "
            f"{local.item(worker):.0%} of the experts local"
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


@njit()
def _add_up(
    kv: float, experts: float, load: float, prompt: float, cached: NDArray[np.int64], local: NDArray[np.float64],
    running: NDArray[np.int64], speeds: NDArray[np.float64], scores: NDArray[np.float64],
) -> None:  # fmt: skip
    most = 1.0
    for worker in range(len(scores)):
        most = max(most, running[worker] / speeds[worker])
    for worker in range(len(scores)):
        missing = prompt - cached[worker] if len(cached) else prompt
        scores[worker] = (
            kv * missing + experts * (1.0 - local[worker]) + load * 100.0 * running[worker] / speeds[worker] / most
        )


@njit(fastmath=True)
def _mark_top(use: NDArray[Any], whole: bool, top: int, bits: NDArray[np.uint64]) -> None:
    """Set the bits of each layer's `top` largest above 0; of equals the first. `whole`: they are whole numbers."""
    row = np.empty(use.shape[1], np.float32)
    for layer in range(len(use)):
        largest = np.float32(0.0)
        for expert in range(len(row)):
            row[expert] = use[layer, expert]
            largest = max(largest, row[expert])
        if largest <= 0.0:
            continue
        # By halving: the highest level that at least `top` reach, nearly; what is at it goes in order.
        low, high = np.float32(0.0), largest
        for _ in range(12):
            if whole and high - low < 1.0:
                break
            middle, above = (low + high) / np.float32(2.0), np.float32(0.0)
            for expert in range(len(row)):  # in the type of the row, or it is not vectorised
                above += np.float32(1.0) if row[expert] > middle else np.float32(0.0)
            if above >= top:
                low = middle
                if above == top:
                    break
            else:
                high = middle
        left = top
        for word in range(bits.shape[1]):
            here = np.uint64(0)
            for expert in range(word * 64, min(len(row), word * 64 + 64)):
                here |= np.uint64(row[expert] > high) << np.uint64(expert - word * 64)
            bits[layer, word] = here
            left -= _count(here)
        for expert in range(len(row)):
            if left <= 0:
                break
            if low < row[expert] <= high:
                bits[layer, expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
                left -= 1


@njit()
def _shares_held(local: NDArray[np.uint64], bits: NDArray[np.uint64], shares: NDArray[np.float64]) -> None:
    asked = _ones(bits)
    for worker in range(len(local)):
        held = 0
        for layer in range(bits.shape[0]):
            for word in range(bits.shape[1]):
                held += _count(local[worker, layer, word] & bits[layer, word])
        shares[worker] = held / asked if asked else 1.0


@njit()
def _ones(bits: NDArray[np.uint64]) -> int:
    total = 0
    for layer in range(bits.shape[0]):
        for word in range(bits.shape[1]):
            total += _count(bits[layer, word])
    return total


@njit()
def _count(word: np.uint64) -> int:
    """Bits that are set: pairs, then fours, then bytes side by side."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
