"""EPLB, DeepSeek's published balancer: replicate the hottest expert until the slots are used, then pack evenly.

It looks at the load alone, so it moves nearly everything whatever the current placement is. Replicas are added one at
a time to the expert whose replicas are busiest; slots are packed heaviest first onto the least busy rank with room.
Hierarchical, groups of experts are packed onto nodes first, experts are replicated inside their node, and slots are
packed onto the node's ranks. It takes all ranks to be equally fast.

Unlike the published code it never puts two slots of an expert on one rank: an expert gets at most as many as there are
ranks (of its node), and is not packed where it is. It leaves out a rank that is gone, planning globally then.
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
from coterie.placement.packing import Slots, living_ranks, pack_layer, plan_for_living
from coterie.types import Placement, Topology


@planners.register("eplb")
@dataclass(frozen=True, slots=True)
class Eplb:
    """Replicate the hottest, then pack."""

    num_groups: int | None = None
    """Groups of neighbouring experts that stay on one node; None plans globally, as does a number that the nodes do
    not divide."""
    objective: Objective = field(default=Objective())

    def __post_init__(self) -> None:
        if self.num_groups is not None and self.num_groups < 1:
            raise ConfigError(f"num_groups={self.num_groups} must be at least 1, or None")

    def plan(self, load: Load, topology: Topology, current: Placement) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current)
        ranks = living_ranks(problem)
        whole = ranks == current.num_ranks
        nodes, groups = self._hierarchy(load, topology, current) if whole else (1, 1)
        slots = rebalance(load.tokens, ranks * current.slots_per_rank, ranks, nodes, groups)
        return plan_for_living(problem, slots, started, "the load asks for no other")

    def _hierarchy(self, load: Load, topology: Topology, current: Placement) -> tuple[int, int]:
        """Nodes and groups to plan with."""
        nodes, groups = topology.num_nodes, self.num_groups
        if groups is None or nodes == 1 or groups % nodes or topology.num_ranks % topology.ranks_per_node:
            return 1, 1
        if load.num_experts % groups:
            raise ConfigError(f"num_experts={load.num_experts} must be a multiple of num_groups={groups}")
        per_node = load.num_experts // nodes
        if current.slots_per_rank > per_node:
            raise ConfigError(
                f"{current.slots_per_rank} slots a rank must be at most the {per_node} experts of a node; "
                "none is held twice"
            )
        return nodes, groups


def rebalance(
    tokens: NDArray[np.float64], num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 1
) -> Slots:
    """[layer, slot] expert, from [layer, expert] tokens; with one node and one group it plans globally."""
    slots = np.empty((len(tokens), num_slots), np.int32)
    _rebalance(np.ascontiguousarray(tokens, np.float64), num_ranks // num_nodes, num_nodes, num_groups, slots)
    return slots


@njit()
def _rebalance(tokens: NDArray[np.float64], ranks: int, nodes: int, groups: int, slots: Slots) -> None:
    """`ranks` of a node."""
    layers, experts = tokens.shape
    size, per_node = experts // groups, slots.shape[1] // nodes
    alike, node_alike = np.ones(ranks), np.ones(nodes)
    placed, node_groups = np.empty(per_node, np.int32), np.empty(groups, np.int32)
    members = np.empty(experts // nodes, np.int64)
    for layer in range(layers):
        heat = tokens[layer].copy().reshape(groups, size).sum(axis=1)
        pack_layer(heat, np.arange(groups), node_alike, groups, node_groups)
        for node in range(nodes):
            held = np.sort(node_groups[node * (groups // nodes) : (node + 1) * (groups // nodes)])
            for place in range(len(members)):
                members[place] = held[place // size] * size + place % size
            weight = tokens[layer][members]
            kind, count = _replicate(weight, per_node, ranks)
            pack_layer(weight[kind] / count[kind], kind, alike, len(members), placed)
            slots[layer, node * per_node : (node + 1) * per_node] = members[placed]


@njit()
def _replicate(
    weight: NDArray[np.float64], num_slots: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[slot] expert and [expert] slots: the busiest gets the next, up to `most`."""
    experts = len(weight)
    count = np.ones(experts, np.int64)
    kind = np.arange(num_slots)
    each = weight.copy()
    for slot in range(experts, num_slots):
        if count.max() == most:
            each[count == most] = -1.0
        busiest = np.argmax(each)
        kind[slot] = busiest
        count[busiest] += 1
        each[busiest] = weight[busiest] / count[busiest]
    return kind, count
