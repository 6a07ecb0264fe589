"""Slots to ranks from scratch: what planners share that do not look at the current placement.

Items are packed heaviest first onto the rank that is least busy and has room, never beside another slot of the same
expert. Where every rank with room holds the expert already, one of its items changes places with one of a full rank:
there always is one, as long as no expert has more slots than there are ranks.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import ConfigError
from coterie.placement.base import Plan
from coterie.placement.objective import Problem

Slots = NDArray[np.int32]


def living_ranks(problem: Problem) -> int:
    """Ranks to plan for. A rank cannot hold more slots than there are experts without holding one twice."""
    per_rank, experts = problem.current.slots_per_rank, problem.current.num_experts
    if per_rank > experts:
        raise ConfigError(f"{per_rank} slots a rank must be at most num_experts={experts}; none is held twice")
    return int(problem.alive.sum())


def on_living(problem: Problem, slots: Slots) -> Slots:
    """[layer, slot] with `slots` [layer, slot of a living rank]; slots of the others stay as they are."""
    placed = np.array(problem.current.slot_experts, np.int32)
    placed[:, np.repeat(problem.alive, problem.current.slots_per_rank)] = slots
    return placed


def plan_for_living(problem: Problem, slots: Slots, started: float, same: str) -> Plan:
    """The plan to `slots` [layer, slot of a living rank].

    `started` is when planning began, `same` what to say where that moves nothing.
    """
    plan = problem.plan(on_living(problem, slots), planning_s=perf_counter() - started)
    return plan if len(plan.moves) else replace(plan, skip_reason=same)


def pack(weight: NDArray[np.float64], kind: NDArray[np.int64], speed: NDArray[np.float64], experts: int) -> Slots:
    """[row, slot] experts in blocks of one rank each, from the [row, item] weights and experts (`kind`) of items.

    Rows are packed apart from each other, onto ranks of `speed` [rank].
    """
    out = np.empty(weight.shape, np.int32)
    # The order is NumPy's: a sort takes numba longer to compile than all the rest.
    _pack(np.argsort(-weight, axis=1, kind="stable"), weight, kind, speed, experts, out)
    return out


@njit()
def _pack(
    order: NDArray[np.int64],
    weight: NDArray[np.float64],
    kind: NDArray[np.int64],
    speed: NDArray[np.float64],
    experts: int,
    out: Slots,
) -> None:
    rows, items = weight.shape
    ranks = len(speed)
    room = items // ranks
    packed = np.empty((ranks, room), np.int64)
    filled = np.zeros(ranks, np.int64)
    total = np.zeros(ranks)
    holds = np.zeros((ranks, experts), np.bool_)
    for row in range(rows):
        filled[:] = 0
        total[:] = 0.0
        holds[:] = False
        for item in order[row]:
            expert, tokens = kind[row, item], weight[row, item]
            best, least = -1, np.inf
            for rank in range(ranks):
                if filled[rank] < room and not holds[rank, expert]:
                    busy = (total[rank] + tokens) / speed[rank]
                    if busy < least:
                        best, least = rank, busy
            if best < 0:
                best = make_room(item, weight[row], kind[row], speed, packed, filled, total, holds)
            packed[best, filled[best]] = item
            filled[best] += 1
            total[best] += tokens
            holds[best, expert] = True
        for rank in range(ranks):
            for place in range(room):
                out[row, rank * room + place] = kind[row, packed[rank, place]]


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
    """A full rank without the item's expert, from which something went to a rank with room: the least busy pair."""
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
