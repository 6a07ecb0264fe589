"""Packing of slots onto ranks, shared by planners that ignore the current placement.

Items (slots of experts that have no rank yet) are packed heaviest first onto the least busy rank with room, never two
of an expert on one rank. If every rank with room already holds the expert, an item of a full rank moves to a rank with
room and frees its place. Such an item always exists as long as no expert has more slots than there are ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from time import perf_counter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.errors import check
from coterie.placement.base import Load, Plan
from coterie.placement.objective import Objective, Problem
from coterie.types import Placement, Topology

Slots = NDArray[np.int32]


def living_ranks(problem: Problem) -> int:
    """Return the number of living ranks. Raise ConfigError if a rank has more slots than there are experts."""
    per_rank, experts = problem.current.slots_per_rank, problem.current.num_experts
    check(per_rank <= experts, f"{per_rank} slots a rank must be at most num_experts={experts}; none is held twice")
    return int(problem.alive.sum())


def on_living(problem: Problem, slots: Slots) -> Slots:
    """Return experts [layer, slot] from `slots` [layer, slot of a living rank]; slots of dead ranks are unchanged."""
    placed = np.array(problem.current.slot_experts, np.int32)
    placed[:, np.repeat(problem.alive, problem.current.slots_per_rank)] = slots
    return placed


class PlansAnew(ABC):
    """Base of planners that ignore the current placement."""

    __slots__ = ()
    objective: Objective
    same: ClassVar[str] = "the load asks for no other"
    """Reason for keeping the current placement, if the planner chooses the same."""

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        chosen = on_living(problem, self.slots_for(problem, load))
        plan = problem.plan(chosen, planning_s=perf_counter() - started)
        return plan if len(plan.moves) else replace(plan, skip_reason=self.same)

    @abstractmethod
    def slots_for(self, problem: Problem, load: Load) -> Slots:
        """Return experts [layer, slot of a living rank]."""


def pack_slots(weight: NDArray[np.float64], kind: NDArray[np.int64], speed: NDArray[np.float64], experts: int) -> Slots:
    """Pack items with weights and experts (`kind`) [row, item]; return experts [row, slot], a block of slots per rank.

    Each row is packed independently onto ranks of `speed` [rank].
    """
    return pack_steps(weight, kind, np.zeros((len(weight), experts, 0)), speed)


def pack_steps(
    weight: NDArray[np.float64], kind: NDArray[np.int64], tokens: NDArray[np.float64], speed: NDArray[np.float64]
) -> Slots:
    """Pack as :func:`pack_slots`, onto the rank for which the sum over scenarios of the busiest rank's load is lowest.

    `tokens` [row, expert, scenario] is the load of one slot of the expert. Ties go to the least busy rank.
    """
    out = np.empty(weight.shape, np.int32)
    # Sort with NumPy: compiling a sort with Numba takes longer than compiling all the rest.
    order = np.argsort(-weight, axis=1, kind="stable")
    side_by_side(_place, len(weight), order, weight, kind, tokens, speed, out)
    return out


@njit()
def _place(
    chosen: NDArray[np.int64],
    order: NDArray[np.int64],
    weight: NDArray[np.float64],
    kind: NDArray[np.int64],
    tokens: NDArray[np.float64],
    speed: NDArray[np.float64],
    out: Slots,
) -> None:
    """Fill `out` [layer, slot] with experts, in the chosen layers.

    An item is an expert's slot before it has a rank. `tokens` [layer, expert, scenario] is the load of one slot of the
    expert; `weight` [layer, item] is the item's mean load, `kind` [layer, item] its expert, and `order` [layer, item]
    the items by descending weight.
    """
    experts, scenarios = tokens.shape[1:]
    ranks, items = len(speed), kind.shape[1]
    room = items // ranks
    packed = np.empty((ranks, room), np.int64)
    filled, total = np.zeros(ranks, np.int64), np.zeros(ranks)
    holds = np.zeros((ranks, experts), np.bool_)
    busy, peak = np.zeros((ranks, scenarios)), np.zeros(scenarios)
    for layer in chosen:
        filled[:] = 0
        total[:] = 0.0
        holds[:] = False
        busy[:] = 0.0
        peak[:] = 0.0
        for item in order[layer]:
            expert = kind[layer, item]
            best, least, lightest = -1, np.inf, np.inf
            for rank in range(ranks):
                if filled[rank] < room and not holds[rank, expert]:
                    # Without scenarios all are equally high; to find that out would take most of the time.
                    height = _height(tokens[layer, expert], speed[rank], busy[rank], peak) if scenarios > 0 else 0.0
                    light = (total[rank] + weight[layer, item]) / speed[rank]
                    if height < least or (height == least and light < lightest):
                        best, least, lightest = rank, height, light
            if best < 0:
                best = make_room(item, weight[layer], kind[layer], speed, packed, filled, total, holds)
                _recount(tokens[layer], kind[layer], speed, packed, filled, busy, peak)
            packed[best, filled[best]] = item
            filled[best] += 1
            total[best] += weight[layer, item]
            holds[best, expert] = True
            for scenario in range(scenarios):
                busy[best, scenario] += tokens[layer, expert, scenario] / speed[best]
                peak[scenario] = max(peak[scenario], busy[best, scenario])
        for rank in range(ranks):
            for place in range(room):
                out[layer, rank * room + place] = kind[layer, packed[rank, place]]


@helper()
def _height(tokens: NDArray[np.float64], speed: float, busy: NDArray[np.float64], peak: NDArray[np.float64]) -> float:
    """Return the sum over scenarios of the busiest rank's load if the rank got a slot with these tokens."""
    height = 0.0
    for scenario in range(len(peak)):
        height += max(peak[scenario], busy[scenario] + tokens[scenario] / speed)
    return height


@helper()
def _recount(
    tokens: NDArray[np.float64],
    kind: NDArray[np.int64],
    speed: NDArray[np.float64],
    packed: NDArray[np.int64],
    filled: NDArray[np.int64],
    busy: NDArray[np.float64],
    peak: NDArray[np.float64],
) -> None:
    """Recompute the loads of all ranks after an item has changed ranks."""
    busy[:] = 0.0
    peak[:] = 0.0
    for rank in range(len(filled)):
        for place in range(filled[rank]):
            expert = kind[packed[rank, place]]
            for scenario in range(len(peak)):
                busy[rank, scenario] += tokens[expert, scenario] / speed[rank]
                peak[scenario] = max(peak[scenario], busy[rank, scenario])


@helper()
def make_room(
    item: int,
    weight: NDArray[np.float64],
    kind: NDArray[np.int64],
    speed: NDArray[np.float64],
    packed: NDArray[np.int64],
    filled: NDArray[np.int64],
    total: NDArray[np.float64],
    holds: NDArray[np.bool_],
) -> int:
    """Move an item from a full rank without this item's expert to a rank with room; return the rank it left.

    The move is chosen that minimises the time of the busier of the two ranks.
    """
    ranks, room = packed.shape
    best_from, best_to, best_place, least = -1, -1, -1, np.inf
    for source in range(ranks):
        if holds[source, kind[item]]:
            continue
        for target in range(ranks):
            if filled[target] == room:
                continue
            for place in range(room):
                moved = packed[source, place]
                if holds[target, kind[moved]]:
                    continue
                left = (total[source] - weight[moved] + weight[item]) / speed[source]
                gained = (total[target] + weight[moved]) / speed[target]
                if max(left, gained) < least:
                    best_from, best_to, best_place, least = source, target, place, max(left, gained)
    moved = packed[best_from, best_place]
    packed[best_to, filled[best_to]] = moved
    filled[best_to] += 1
    total[best_to] += weight[moved]
    holds[best_to, kind[moved]] = True
    filled[best_from] -= 1
    packed[best_from, best_place] = packed[best_from, filled[best_from]]
    total[best_from] -= weight[moved]
    holds[best_from, kind[moved]] = False
    return best_from


# Placements with one rank per expert: experts per rank, a balanced packing, and replicas in the spare slots.


def room_of(num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """Return the number of experts per rank [rank]; the first ranks hold one more if ranks do not divide experts."""
    each, more = divmod(num_experts, num_ranks)
    return np.asarray(each + (np.arange(num_ranks) < more), np.int64)


def fill_spare(
    expert_ranks: NDArray[np.int64], worth: NDArray[np.float64], slots_per_rank: int, num_ranks: int
) -> Slots:
    """Return experts [layer, slot] from ranks [layer, expert]; spare slots get the most valuable experts.

    `worth` is the value of a replica, [layer, expert] or [layer, expert, rank]. Each replica halves the value of the
    expert's next replica.
    """
    layers, experts = expert_ranks.shape
    by_rank = np.repeat(worth[:, :, None], num_ranks, axis=2) if worth.ndim == 2 else worth
    out = np.empty((layers, num_ranks * slots_per_rank), np.int32)
    for layer in range(layers):
        holds = np.zeros((num_ranks, experts), bool)
        holds[expert_ranks[layer], np.arange(experts)] = True
        left = by_rank[layer].T / holds.sum(axis=0)
        for _ in range(num_ranks * slots_per_rank - experts):
            open_ = (holds.sum(axis=1) < slots_per_rank)[:, None] & ~holds
            rank, expert = divmod(int(np.argmax(np.where(open_, left, -1.0))), experts)
            holds[rank, expert] = True
            left[:, expert] /= 2.0
        out[layer] = np.nonzero(holds)[1]
    return out


def pack_even(tokens: NDArray[np.float64], speeds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ranks [expert]: heaviest expert first, each to the least busy rank with room."""
    room, busy = room_of(len(tokens), len(speeds)), np.zeros(len(speeds))
    placed = np.zeros(len(tokens), np.int64)
    for expert in np.argsort(-tokens, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, (busy + tokens[expert]) / speeds, np.inf)))
        placed[expert] = rank
        room[rank] -= 1
        busy[rank] += tokens[expert]
    return placed
