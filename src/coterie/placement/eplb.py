"""EPLB, DeepSeek's published balancer: replicate the hottest expert until the slots are used, then pack evenly.

It looks at the load alone, so it moves nearly everything whatever the current placement is. Replicas are added one at
a time to the expert whose replicas are busiest; slots are packed heaviest first onto the least busy rank with room.
Hierarchical, groups of experts are packed onto nodes first, experts are replicated inside their node, and slots are
packed onto the node's ranks. Unlike the published code, a slot is not packed beside another of the same expert, as
long as there is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError
from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import Objective
from coterie.types import Placement, Topology


@planners.register("eplb")
@dataclass(frozen=True, slots=True)
class Eplb:
    """Replicate the hottest, then pack."""

    num_groups: int | None = None
    """Groups of neighbouring experts that stay on one node; None plans globally, as does a number that the nodes do
    not divide."""
    objective: Objective = field(default=Objective())

    def plan(self, load: Load, topology: Topology, current: Placement) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current)
        groups = self._groups(load, topology)
        slots = rebalance(load.tokens, current.num_slots, current.num_ranks, topology.num_nodes, groups)
        return problem.plan(slots, planning_s=perf_counter() - started)

    def _groups(self, load: Load, topology: Topology) -> int:
        if not (topology.rank_speeds > 0).all():
            raise ConfigError("eplb cannot leave a rank out; use latency_optimal where one is gone")
        if self.num_groups is None or topology.num_nodes == 1 or self.num_groups % topology.num_nodes:
            return 0
        if load.num_experts % self.num_groups:
            raise ConfigError(f"num_experts={load.num_experts} must be a multiple of num_groups={self.num_groups}")
        return self.num_groups


def rebalance(
    tokens: NDArray[np.float64], num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 0
) -> NDArray[np.int32]:
    """[layer, slot] expert, from [layer, expert] tokens; `num_groups` 0 plans globally."""
    slots = np.empty((len(tokens), num_slots), np.int32)
    for layer, weight in enumerate(tokens):
        if not num_groups:
            slots[layer] = _place(weight, num_slots, num_ranks)
            continue
        size = len(weight) // num_groups
        node_of = _pack(weight.reshape(num_groups, size).sum(axis=1), np.arange(num_groups), num_nodes)
        per_node = num_slots // num_nodes
        for node in range(num_nodes):
            members = np.concatenate([np.arange(g * size, (g + 1) * size) for g in np.sort(node_of[node])])
            part = _place(weight[members], per_node, num_ranks // num_nodes)
            slots[layer, node * per_node : (node + 1) * per_node] = members[part]
    return slots


def _place(weight: NDArray[np.float64], num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    experts, each = _replicate(weight, num_slots)
    packed = _pack(each, experts, num_ranks)
    return experts[packed].reshape(-1)


@njit()
def _replicate(weight: NDArray[np.float64], num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """[slot] expert and the tokens of that replica."""
    num_experts = len(weight)
    count = np.ones(num_experts, np.int64)
    experts = np.empty(num_slots, np.int64)
    experts[:num_experts] = np.arange(num_experts)
    for slot in range(num_experts, num_slots):
        hottest = np.argmax(weight / count)
        experts[slot] = hottest
        count[hottest] += 1
    return experts, weight[experts] / count[experts]


@njit()
def _pack(weight: NDArray[np.float64], kind: NDArray[np.int64], packs: int) -> NDArray[np.int64]:
    """[pack, place] items, as many in each: heaviest first, to the lightest with room, one without its kind if any."""
    items = len(weight)
    room = items // packs
    packed = np.empty((packs, room), np.int64)
    filled = np.zeros(packs, np.int64)
    total = np.zeros(packs)
    for item in np.argsort(-weight, kind="mergesort"):
        best, best_twice = -1, True
        for pack in range(packs):
            if filled[pack] == room:
                continue
            twice = False
            for place in range(filled[pack]):
                if kind[packed[pack, place]] == kind[item]:
                    twice = True
            if best < 0 or (best_twice and not twice) or (best_twice == twice and total[pack] < total[best]):
                best, best_twice = pack, twice
        packed[best, filled[best]] = item
        filled[best] += 1
        total[best] += weight[item]
    return packed
