"""Greedy planner over scenarios, as vllm-ascend's FlashLB: heaviest expert first, to the rank that delays steps least.

Replicas are chosen as in `eplb`, by the mean load. Slots are then placed heaviest first. Each goes to the rank with
room for which the mean over scenarios of max ÷ mean rank load is lowest; ties go to the rank with the least mean load.
No choice is undone, so a search over swaps does better. The current placement is ignored, and nearly every expert
moves. Without scenarios, the mean step is the only scenario.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.planning.eplb import replicate
from coterie.placement.planning.packing import PlansAnew, Slots, living_ranks, pack_steps
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
    return pack_steps(weight, kind, _relative(load) / count[:, :, None], speed)


def _relative(load: Load) -> Array:
    """Return [layer, expert, scenario] the expert's share of the step's tokens, times the weight of the scenario."""
    steps = load.tokens[None] if load.scenarios is None else load.scenarios
    weights = np.ones(1) if load.weights is None else load.weights
    total = steps.sum(axis=2, keepdims=True)
    share = np.divide(steps, total, out=np.zeros(steps.shape), where=total > 0)
    return np.ascontiguousarray(np.moveaxis(share * weights[:, None, None], 0, 2))
