"""Baseline planners: experts in order of index, round-robin over ranks, or heaviest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import PRICES_HINT, Objective
from coterie.placement.planning.packing import Slots, living_ranks, pack_slots, plan_for_living
from coterie.registry import needs
from coterie.types import Placement, Topology


@planners.register("linear")
@dataclass(frozen=True, slots=True)
class Linear:
    """Put expert e into slot e, and replicas of the first experts into the slots left over. The default of engines.

    Ignores the load, so it suits a balanced or unknown load. Wrong if neighbouring experts are hot together: they are
    all on one rank.
    """

    objective: Objective = needs(PRICES_HINT)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        slots = living_ranks(problem) * current.slots_per_rank
        row = np.arange(slots, dtype=np.int32) % current.num_experts
        return plan_for_living(problem, np.tile(row, (current.num_layers, 1)), started, "experts are in order already")


@planners.register("popularity")
@dataclass(frozen=True, slots=True)
class Popularity:
    """Give each of the hottest experts one replica, then assign the heaviest slot first to the least busy rank.

    Longest processing time first (LPT): at most 4/3 of the optimum if slots are not the limit. It uses the speeds of
    ranks but ignores the current placement, so nearly every expert moves. Unlike `eplb` it gives each of the hottest
    experts one replica before any of them gets two: better if the load is about to change, worse if one expert is far
    hotter than the next.
    """

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
        packed = pack_slots(weight, kind, topology.rank_speeds[problem.alive], load.num_experts)
        return plan_for_living(problem, packed, started, "the load asks for no other")


def _replicated(tokens: NDArray[np.float64], slots: int) -> NDArray[np.int64]:
    """Return experts [layer, slot]: every expert once, then the hottest again, in order of load."""
    layers, experts = tokens.shape
    hottest = np.argsort(-tokens, axis=1, kind="stable")
    again = hottest[:, np.arange(slots - experts) % experts]
    return np.concatenate([np.tile(np.arange(experts), (layers, 1)), again], axis=1)


@planners.register("round_robin")
@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Assign experts to ranks in round-robin order, starting again at the first expert for replicas.

    Ignores the load. If neighbouring experts are hot together it spreads them, while `linear` puts them on one rank; if
    the order of experts is arbitrary, it is no better than `linear`.
    """

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
    """Return the round-robin expert of each slot [slot].

    After every lcm(experts, ranks) slots the order shifts by one rank, or a rank would get the same experts again.
    """
    card = np.arange(num_ranks * slots_per_rank)
    rank = (card + card // math.lcm(num_experts, num_ranks)) % num_ranks
    by_rank = np.argsort(rank, kind="stable")
    return np.asarray(by_rank % num_experts, np.int32)
