"""Joint (after the Dynamo article): weighted sum of uncached prompt tokens, non-local experts and load.

    score = kv x (1 - hit rate) x prompt tokens + experts x (1 - locality) x num_experts + load x 100 x load / most load

Locality is the share of the request's most activated experts (`top` of each layer) that the worker holds, by bitmask;
before prefill the footprint is a predictor's estimate. The three terms have different units: a long prompt outweighs
the others, as in the article.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit, set_bits
from coterie.errors import ConfigError, check_at_least, check_not_negative
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import chosen, lowest_scored

NOTHING = np.empty(0, np.int64)
ANYTHING = np.empty((1, 0), np.uint64)
"""Placeholder for `fleet.local` if all workers hold all experts."""

FINE = np.float32(2.0**-20)
"""Fractional values closer than this share of their layer's sum count as equal."""
HALVINGS = 32
"""Largest number of bisection steps; sufficient for any counts."""

REASON = "score {:.1f}: {} of {} prompt tokens cached, {:.0%} of the experts local"


class WeighedWorkers(msgspec.Struct):
    worker: int
    """Best worker."""
    scores: NDArray[np.float64]
    """[worker] score; infinite for a worker that must not be chosen."""
    local: NDArray[np.float64]
    """[worker] share of the request's experts that the worker holds."""

    def decision(self, request: Request, worker: int) -> Decision:
        cached = 0 if request.cached_tokens is None else request.cached_tokens.item(worker)
        score, local = self.scores.item(worker), self.local.item(worker)
        return Decision(worker, self.scores, (REASON, score, cached, request.prompt_tokens, local))


@routers.register("joint")
@dataclass(frozen=True, slots=True)
class Joint:
    kv: float = 1.0
    """Weight of uncached prompt tokens."""
    experts: float = 0.5
    """Weight of experts that are not local."""
    load: float = 0.3
    """Weight of the load."""
    top: int = 16
    """Number of a request's most activated experts per layer that locality counts."""

    def __post_init__(self) -> None:
        check_not_negative(kv=self.kv, experts=self.experts, load=self.load)
        check_at_least(1, top=self.top)

    def route(self, request: Request, fleet: Fleet) -> Decision:
        weighed = self.weigh(request, None if fleet.local is None else self.bits(request), fleet)
        return weighed.decision(request, weighed.worker)

    def bits(self, request: Request) -> NDArray[np.uint64] | None:
        """Return [layer, word] bitmask of the experts the request is predicted to use; None without a footprint."""
        use = request.footprint
        if use is None:
            return None
        bits = np.empty((len(use), -(-use.shape[1] // 64)), np.uint64)
        _mark_top(np.ascontiguousarray(use), use.dtype.kind in "iu", min(self.top, use.shape[1]), bits)
        return bits

    def weigh(self, request: Request, bits: NDArray[np.uint64] | None, fleet: Fleet) -> WeighedWorkers:
        """Score all workers for a request that uses the experts in `bits`."""
        local, asked, num_experts = ANYTHING, ANYTHING[0], 0
        if fleet.local is not None and bits is not None and request.footprint is not None:
            if fleet.local.shape[1:] != bits.shape:
                raise ConfigError(f"fleet.local has shape {fleet.local.shape}; a request has {bits.shape} words")
            local, asked = fleet.local.reshape(len(fleet), -1), bits.reshape(-1)
            num_experts = request.footprint.shape[1]
        shares, scores = np.empty(len(fleet)), np.empty(len(fleet))
        worker = _add_up(
            self.kv,
            self.experts * num_experts,
            self.load,
            float(request.prompt_tokens),
            NOTHING if request.cached_tokens is None else request.cached_tokens,
            local,
            asked,
            fleet.alive,
            fleet.in_flight,
            fleet.places,
            fleet.routed,
            fleet.speeds,
            shares,
            scores,
        )
        return WeighedWorkers(chosen(worker, fleet), scores, shares)


@njit()
def _add_up(
    kv: float,
    experts: float,
    load: float,
    prompt: float,
    cached: NDArray[np.int64],
    local: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    routed: int,
    speeds: NDArray[np.float64],
    shares: NDArray[np.float64],
    scores: NDArray[np.float64],
) -> np.int64:
    """Return the best worker. Fills `scores` [worker] and `shares` [worker], the share of its experts held."""
    asked, most = 0, 1.0
    for word in range(len(bits)):
        asked += int(set_bits(bits[word]))
    sums = np.empty(len(scores))
    for worker in range(len(scores)):
        most = max(most, running[worker] / speeds[worker])
    for worker in range(len(scores)):
        held = 0
        for word in range(len(bits)):
            held += int(set_bits(local[worker, word] & bits[word]))
        shares[worker] = held / asked if asked else 1.0
        missing = prompt - cached[worker] if len(cached) else prompt
        sums[worker] = (
            kv * missing + experts * (1.0 - shares[worker]) + load * 100.0 * running[worker] / speeds[worker] / most
        )
    return lowest_scored(sums, alive, running, places, routed, scores)


@njit(fastmath=True)
def _mark_top(use: NDArray[Any], whole: bool, top: int, bits: NDArray[np.uint64]) -> None:
    """Set the bits of each layer's `top` largest values above 0; ties go to lower ids. `whole`: all are integers."""
    row = np.empty(use.shape[1], np.float32)
    for layer in range(len(use)):
        total = np.float32(0.0)
        for expert in range(len(row)):
            row[expert] = use[layer, expert]
            total += row[expert]
        # Bisect for a level that exactly `top` values exceed; with ties, for bounds around the tied values only.
        # At most `top` - 1 values can exceed sum / top, so this is the first upper bound.
        low, high = np.float32(0.0), total / np.float32(top)
        nearest = np.float32(1.0) if whole else total * FINE
        for _ in range(HALVINGS):
            if high - low <= nearest:
                break
            middle, above = (low + high) / np.float32(2.0), np.float32(0.0)
            for expert in range(len(row)):  # counted in the row's dtype: other types are not vectorised
                above += np.float32(1.0) if row[expert] > middle else np.float32(0.0)
            if above >= top:
                low = middle
                if above == top:
                    break
            else:
                high = middle
        surplus = -top
        for word in range(bits.shape[1]):
            part, marked = row[64 * word : 64 * word + 64], np.uint64(0)
            for expert in range(len(part)):
                marked |= np.uint64(part[expert] > low) << np.uint64(expert)
            bits[layer, word] = marked
            surplus += int(set_bits(marked))
        for expert in range(len(row) - 1, -1, -1):  # surplus ties are dropped from the last expert on
            if surplus <= 0:
                break
            if low < row[expert] <= high:
                bits[layer, expert // 64] ^= np.uint64(1) << np.uint64(expert % 64)
                surplus -= 1
