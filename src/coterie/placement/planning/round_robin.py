"""Round robin: experts dealt to the ranks like cards, and again from the first for replicas.

It looks at nothing but the sizes. Where neighbouring experts are hot together it spreads what `linear` piles up; for an
order without meaning it is as good or bad as that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import PRICES_HINT, Objective
from coterie.placement.planning.packing import Slots, living_ranks, plan_for_living
from coterie.registry import needs
from coterie.types import Placement, Topology


@planners.register("round_robin")
@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Experts dealt to the ranks in turn."""

    objective: Objective = needs(PRICES_HINT)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        row = deal(current.num_experts, living_ranks(problem), current.slots_per_rank)
        slots = np.tile(row, (current.num_layers, 1))
        return plan_for_living(problem, slots, started, "experts are dealt in turn already")


def deal(num_experts: int, num_ranks: int, slots_per_rank: int) -> Slots:
    """[slot] expert. Whenever cards and ranks come round together the deal moves on by one rank, or it would repeat."""
    card = np.arange(num_ranks * slots_per_rank)
    rank = (card + card // math.lcm(num_experts, num_ranks)) % num_ranks
    by_rank = np.argsort(rank, kind="stable")
    return np.asarray(by_rank % num_experts, np.int32)
