"""Popularity: one replica more for each of the hottest experts, then the heaviest slot first to the least busy rank.

Longest processing time first (LPT), at most 4/3 of the best where slots do not limit it. It heeds the speeds of ranks,
not the current placement, so it moves nearly everything. Unlike `eplb` it gives each of the hottest experts one replica
before it gives any of them two: better where the load is about to change, worse where one expert is far hotter than
the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import Objective
from coterie.placement.packing import Slots, living_ranks, pack_layer, plan_for_living
from coterie.types import Placement, Topology


@planners.register("popularity")
@dataclass(frozen=True, slots=True)
class Popularity:
    """Replicas for the hottest, then the heaviest first."""

    objective: Objective = field(default=Objective())

    def plan(self, load: Load, topology: Topology, current: Placement) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current)
        slots = np.empty((load.num_layers, living_ranks(problem) * current.slots_per_rank), np.int32)
        _place(load.tokens, topology.rank_speeds[problem.alive], slots)
        return plan_for_living(problem, slots, started, "the load asks for no other")


@njit()
def _place(tokens: NDArray[np.float64], speed: NDArray[np.float64], slots: Slots) -> None:
    layers, experts = tokens.shape
    kind = np.arange(slots.shape[1]) % experts
    for layer in range(layers):
        hottest = np.argsort(-tokens[layer], kind="mergesort")
        kind[experts:] = hottest[np.arange(slots.shape[1] - experts) % experts]
        count = np.zeros(experts)
        for expert in kind:
            count[expert] += 1.0
        pack_layer(tokens[layer][kind] / count[kind], kind, speed, experts, slots[layer])
