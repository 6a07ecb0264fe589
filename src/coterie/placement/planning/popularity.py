"""Popularity: one replica more for each of the hottest experts, then the heaviest slot first to the least busy rank.

Longest processing time first (LPT), at most 4/3 of the best where slots do not limit it. It heeds the speeds of ranks,
not the current placement, so it moves nearly everything. Unlike `eplb` it gives each of the hottest experts one replica
before it gives any of them two: better where the load is about to change, worse where one expert is far hotter than
the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import PRICES_HINT, Objective
from coterie.placement.planning.packing import living_ranks, pack, plan_for_living
from coterie.registry import needs
from coterie.types import Placement, Topology


@planners.register("popularity")
@dataclass(frozen=True, slots=True)
class Popularity:
    """Replicas for the hottest, then the heaviest first."""

    objective: Objective = needs(PRICES_HINT)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        slots = living_ranks(problem) * current.slots_per_rank
        kind = _replicated(load.tokens, slots)
        replicas = 1 + (kind[:, :, None] == kind[:, None, load.num_experts :]).sum(axis=2)
        weight = np.take_along_axis(load.tokens, kind, axis=1) / replicas
        packed = pack(weight, kind, topology.rank_speeds[problem.alive], load.num_experts)
        return plan_for_living(problem, packed, started, "the load asks for no other")


def _replicated(tokens: NDArray[np.float64], slots: int) -> NDArray[np.int64]:
    """[layer, slot] expert: all once, then the hottest again, in order."""
    layers, experts = tokens.shape
    hottest = np.argsort(-tokens, axis=1, kind="stable")
    again = hottest[:, np.arange(slots - experts) % experts]
    return np.concatenate([np.tile(np.arange(experts), (layers, 1)), again], axis=1)
