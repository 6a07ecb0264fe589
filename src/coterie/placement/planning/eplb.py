"""EPLB, DeepSeek's published balancer: replicate the hottest expert until the slots are used, then pack evenly.

It uses the load alone, so nearly every expert moves, whatever the current placement. Replicas are added one at a time
to the expert with the most load per replica; slots are packed heaviest first onto the least busy rank with room. In
hierarchical mode, groups of experts are packed onto nodes first, experts are replicated within their node, and slots
are packed onto the node's ranks. All ranks are assumed to be equally fast.

Unlike the published code it never puts two slots of an expert on one rank: an expert gets at most as many slots as
there are ranks (of its node). Dead ranks are left out; the plan is then global, not hierarchical.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import check, check_at_least
from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.packing import PlansAnew, Slots, living_ranks, pack_slots
from coterie.registry import needs
from coterie.types import Placement, Topology


@planners.register("eplb")
@dataclass(frozen=True, slots=True)
class Eplb(PlansAnew):
    """Replicate the hottest experts, then pack the slots."""

    objective: Objective = needs(PRICES_HINT)
    """Prices used to score the plan; EPLB itself decides without them."""
    num_groups: int | None = None
    """Number of groups of neighbouring experts, each kept on one node. None, or a number that is not a multiple of the
    nodes, plans globally."""

    def __post_init__(self) -> None:
        check_at_least(1, num_groups=self.num_groups)

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        ranks = living_ranks(problem)
        slots = ranks * problem.current.slots_per_rank
        return rebalance(load.tokens, slots, ranks, *self._hierarchy(load, problem.topology, problem.current))

    def _hierarchy(self, load: Load, topology: Topology, current: Placement) -> tuple[int, int]:
        """Return the numbers of nodes and groups to plan with; (1, 1) plans globally."""
        nodes, groups = topology.num_nodes, self.num_groups
        whole = bool((topology.rank_speeds > 0).all()) and topology.num_ranks % topology.ranks_per_node == 0
        if groups is None or nodes == 1 or groups % nodes or not whole:
            return 1, 1
        check(
            not load.num_experts % groups, f"num_experts={load.num_experts} must be a multiple of num_groups={groups}"
        )
        per_node = load.num_experts // nodes
        check(
            current.slots_per_rank <= per_node,
            f"{current.slots_per_rank} slots a rank must be at most the {per_node} experts of a node; "
            "none is held twice",
        )
        return nodes, groups


def rebalance(
    tokens: NDArray[np.float64], num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 1
) -> Slots:
    """Return experts [layer, slot] for tokens [layer, expert]; with one node and one group the plan is global."""
    layers, experts = tokens.shape
    groups = np.tile(np.arange(num_groups), (layers, 1))
    heat = tokens.reshape(layers, num_groups, -1).sum(axis=2)
    held = pack_slots(heat, groups, np.ones(num_nodes), num_groups).reshape(layers * num_nodes, -1)
    size = experts // num_groups
    # From here on a row is one node of one layer.
    members = (np.sort(held, axis=1)[:, :, None] * size + np.arange(size)).reshape(len(held), -1)
    weight = np.take_along_axis(tokens, members.reshape(layers, experts), axis=1).reshape(members.shape)
    ranks, slots = num_ranks // num_nodes, num_slots // num_nodes
    kind, count = np.empty((len(held), slots), np.int64), np.empty(members.shape, np.int64)
    replicate(weight, ranks, kind, count)
    each = np.take_along_axis(weight / count, kind, axis=1)
    placed = pack_slots(each, kind, np.ones(ranks), members.shape[1])
    return np.take_along_axis(members, placed, axis=1).reshape(layers, num_slots).astype(np.int32)


@njit()
def replicate(weight: NDArray[np.float64], most: int, kind: NDArray[np.int64], count: NDArray[np.int64]) -> None:
    """Fill `kind` [row, slot] with experts and `count` [row, expert] with their numbers of slots.

    Each further slot goes to the expert with the most load per slot that has fewer than `most` slots.
    """
    rows, experts = weight.shape
    each = np.empty(experts)
    for row in range(rows):
        for expert in range(experts):
            kind[row, expert], count[row, expert], each[expert] = expert, 1, weight[row, expert]
        for slot in range(experts, kind.shape[1]):
            busiest = -1
            for expert in range(experts):
                if count[row, expert] < most and (busiest < 0 or each[expert] > each[busiest]):
                    busiest = expert
            kind[row, slot] = busiest
            count[row, busiest] += 1
            each[busiest] = weight[row, busiest] / count[row, busiest]
