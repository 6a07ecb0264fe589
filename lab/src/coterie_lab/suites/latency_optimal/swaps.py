"""The published heuristic, as described: swap experts of the busiest and the idlest rank, roll back what does not pay.

The swap is the one that brings both ranks nearest to their mean. It is kept if it lowers the objective, movement
included; otherwise it is rolled back and the layer is done. The description leaves ties and this choice open.
Written for its plans, not its speed: all layers are scored together, one swap each.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie.placement import Load, Objective, Plan
from coterie.types import Placement, Topology


@dataclass(frozen=True, slots=True)
class PublishedSwaps:
    """Planner without replicas, on equal ranks."""

    objective: Objective

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started, problem = perf_counter(), self.objective.problem(load, topology, current, shares)
        slots = current.slot_experts.copy()
        cost, improving = problem.score(slots).total_s, np.ones(len(slots), bool)
        while improving.any():
            swapped, busy_s = slots.copy(), problem.rank_s(slots)
            for layer in np.flatnonzero(improving):
                _swap(swapped[layer].reshape(current.num_ranks, -1), busy_s[layer], problem.unit[layer, 0])
            after = problem.score(swapped).total_s
            improving &= after < cost
            slots[improving], cost[improving] = swapped[improving], after[improving]
        return problem.plan(slots, planning_s=perf_counter() - started)


def _swap(held: NDArray[np.int32], busy_s: NDArray[np.float64], unit: NDArray[np.float64]) -> None:
    """Swap two experts of the busiest and the idlest rank in `held` [rank, slot]; `unit` [expert] seconds per step."""
    busiest, idlest = int(busy_s.argmax()), int(busy_s.argmin())
    shifted = unit[held[busiest]][:, None] - unit[held[idlest]]
    off = np.abs(shifted - (busy_s[busiest] - busy_s[idlest]) / 2)
    give, take = np.unravel_index(off.argmin(), off.shape)
    held[busiest, give], held[idlest, take] = held[idlest, take], held[busiest, give]
