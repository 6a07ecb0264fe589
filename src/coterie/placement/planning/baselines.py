"""Baseline planners: experts in order of index, round-robin over ranks, or heaviest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.packing import PlansAnew, Slots, living_ranks, pack_slots
from coterie.registry import needs


@planners.register("linear")
@dataclass(frozen=True, slots=True)
class Linear(PlansAnew):
    """Put expert e into slot e, and replicas of the first experts into the slots left over. The default of engines.

    Ignores the load, so it suits a balanced or unknown load. Wrong if neighbouring experts are hot together: they are
    all on one rank.
    """

    objective: Objective = needs(PRICES_HINT)

    same: ClassVar[str] = "experts are in order already"

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        slots = living_ranks(problem) * problem.current.slots_per_rank
        return np.tile(np.arange(slots, dtype=np.int32) % load.num_experts, (load.num_layers, 1))


@planners.register("popularity")
@dataclass(frozen=True, slots=True)
class Popularity(PlansAnew):
    """Give each of the hottest experts one replica, then assign the heaviest slot first to the least busy rank.

    Longest processing time first (LPT): at most 4/3 of the optimum if slots are not the limit. It uses the speeds of
    ranks but ignores the current placement, so nearly every expert moves. Unlike `eplb` it gives each of the hottest
    experts one replica before any of them gets two: better if the load is about to change, worse if one expert is far
    hotter than the next.
    """

    objective: Objective = needs(PRICES_HINT)

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        (layers, experts), slots = load.tokens.shape, living_ranks(problem) * problem.current.slots_per_rank
        hottest = np.argsort(-load.tokens, axis=1, kind="stable")
        again = hottest[:, np.arange(slots - experts) % experts]
        kind = np.concatenate([np.tile(np.arange(experts), (layers, 1)), again], axis=1)
        replicas = 1 + (kind[:, :, None] == again[:, None, :]).sum(axis=2)
        weight = np.take_along_axis(load.tokens, kind, axis=1) / replicas
        return pack_slots(weight, kind, problem.topology.rank_speeds[problem.alive], experts)


@planners.register("round_robin")
@dataclass(frozen=True, slots=True)
class RoundRobin(PlansAnew):
    """Assign experts to ranks in round-robin order, starting again at the first expert for replicas.

    Ignores the load. If neighbouring experts are hot together it spreads them, while `linear` puts them on one rank; if
    the order of experts is arbitrary, it is no better than `linear`.
    """

    objective: Objective = needs(PRICES_HINT)

    same: ClassVar[str] = "experts are dealt in turn already"

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        row = deal(load.num_experts, living_ranks(problem), problem.current.slots_per_rank)
        return np.tile(row, (load.num_layers, 1))


def deal(num_experts: int, num_ranks: int, slots_per_rank: int) -> Slots:
    """Return the round-robin expert of each slot [slot].

    After every lcm(experts, ranks) slots the order shifts by one rank, or a rank would get the same experts again.
    """
    card = np.arange(num_ranks * slots_per_rank)
    rank = (card + card // math.lcm(num_experts, num_ranks)) % num_ranks
    by_rank = np.argsort(rank, kind="stable")
    return np.asarray(by_rank % num_experts, np.int32)
