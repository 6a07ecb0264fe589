"""Greedy planner over scenarios, as vllm-ascend's FlashLB: heaviest expert first, to the rank that delays steps least.

Replicas are chosen as in `eplb`, by the mean load. Slots are then placed heaviest first. Each goes to the rank with
room for which the mean over scenarios of max ÷ mean rank load is lowest; ties go to the rank with the least mean load.
No choice is undone, so a search over swaps does better. The current placement is ignored, and nearly every expert
moves. Without scenarios, the mean step is the only scenario.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.planning.eplb import replicate
from coterie.placement.planning.packing import PlansAnew, Slots, living_ranks, make_room
from coterie.registry import needs


@planners.register("flashlb")
@dataclass(frozen=True, slots=True)
class FlashLb(PlansAnew):
    """Greedy placement, heaviest slot first, by the mean over scenarios of max ÷ mean rank load."""

    objective: Objective = needs(PRICES_HINT)
    """Prices used to score the plan; the greedy algorithm decides by tokens alone."""

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        speed = problem.topology.rank_speeds[problem.alive]
        return greedy(load, living_ranks(problem) * problem.current.slots_per_rank, speed)


def greedy(load: Load, num_slots: int, speed: Array) -> Slots:
    """Return experts [layer, slot] for ranks of `speed` [rank]; each rank has a contiguous block of slots."""
    layers, experts = load.tokens.shape
    kind, count = np.empty((layers, num_slots), np.int64), np.empty((layers, experts), np.int64)
    replicate(load.tokens, len(speed), kind, count)
    weight = np.take_along_axis(load.tokens / count, kind, axis=1)
    order = np.argsort(-weight, axis=1, kind="stable")
    out = np.empty((layers, num_slots), np.int32)
    side_by_side(_place, layers, order, weight, kind, _relative(load) / count[:, :, None], speed, out)
    return out


def _relative(load: Load) -> Array:
    """Return [layer, expert, scenario] the expert's share of the step's tokens, times the weight of the scenario."""
    steps = load.tokens[None] if load.scenarios is None else load.scenarios
    weights = np.ones(1) if load.weights is None else load.weights
    total = steps.sum(axis=2, keepdims=True)
    share = np.divide(steps, total, out=np.zeros(steps.shape), where=total > 0)
    return np.ascontiguousarray(np.moveaxis(share * weights[:, None, None], 0, 2))


@njit()
def _place(
    chosen: NDArray[np.int64],
    order: NDArray[np.int64],
    weight: Array,
    kind: NDArray[np.int64],
    tokens: Array,
    speed: Array,
    out: Slots,
) -> None:
    """Fill `out` [layer, slot] with experts, in the chosen layers.

    An item is an expert's slot before it has a rank. `tokens` [layer, expert, scenario] is the load of one slot of the
    expert; `weight` [layer, item] is the item's mean load, `kind` [layer, item] its expert, and `order` [layer, item]
    the items by descending weight.
    """
    experts, scenarios = tokens.shape[1:]
    ranks, items = len(speed), kind.shape[1]
    room = items // ranks
    packed = np.empty((ranks, room), np.int64)
    filled, total = np.zeros(ranks, np.int64), np.zeros(ranks)
    holds = np.zeros((ranks, experts), np.bool_)
    busy, peak = np.zeros((ranks, scenarios)), np.zeros(scenarios)
    for layer in chosen:
        filled[:] = 0
        total[:] = 0.0
        holds[:] = False
        busy[:] = 0.0
        peak[:] = 0.0
        for item in order[layer]:
            expert = kind[layer, item]
            best, least, lightest = -1, np.inf, np.inf
            for rank in range(ranks):
                if filled[rank] < room and not holds[rank, expert]:
                    height = _height(tokens[layer, expert], speed[rank], busy[rank], peak)
                    light = (total[rank] + weight[layer, item]) / speed[rank]
                    if height < least or (height == least and light < lightest):
                        best, least, lightest = rank, height, light
            if best < 0:
                best = make_room(item, weight[layer], kind[layer], speed, packed, filled, total, holds)
                _recount(tokens[layer], kind[layer], speed, packed, filled, busy, peak)
            packed[best, filled[best]] = item
            filled[best] += 1
            total[best] += weight[layer, item]
            holds[best, expert] = True
            for scenario in range(scenarios):
                busy[best, scenario] += tokens[layer, expert, scenario] / speed[best]
                peak[scenario] = max(peak[scenario], busy[best, scenario])
        for rank in range(ranks):
            for place in range(room):
                out[layer, rank * room + place] = kind[layer, packed[rank, place]]


@helper()
def _height(tokens: Array, speed: float, busy: Array, peak: Array) -> float:
    """Return the sum over scenarios of the busiest rank's load if the rank got a slot with these tokens."""
    height = 0.0
    for scenario in range(len(peak)):
        height += max(peak[scenario], busy[scenario] + tokens[scenario] / speed)
    return height


@helper()
def _recount(
    tokens: Array,
    kind: NDArray[np.int64],
    speed: Array,
    packed: NDArray[np.int64],
    filled: NDArray[np.int64],
    busy: Array,
    peak: Array,
) -> None:
    """Recompute the loads of all ranks after an item has changed ranks."""
    busy[:] = 0.0
    peak[:] = 0.0
    for rank in range(len(filled)):
        for place in range(filled[rank]):
            expert = kind[packed[rank, place]]
            for scenario in range(len(peak)):
                busy[rank, scenario] += tokens[expert, scenario] / speed[rank]
                peak[scenario] = max(peak[scenario], busy[rank, scenario])
