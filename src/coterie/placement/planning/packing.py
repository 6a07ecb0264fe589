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


def pack_slots(weight: NDArray[np.float64], kind: NDArray[np.int64], speed: NDArray[np.float64], experts: int) -> Slots:
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


# One rank per expert: how many each rank holds, an even start, and the slots of a placement with replicas to spare.


def room_of(num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """[rank] experts of a layer that each holds: as many, and one more on the first ranks where they do not divide."""
    each, more = divmod(num_experts, num_ranks)
    return np.asarray(each + (np.arange(num_ranks) < more), np.int64)


def fill_spare(
    expert_ranks: NDArray[np.int64], worth: NDArray[np.float64], slots_per_rank: int, num_ranks: int
) -> Slots:
    """[layer, slot] experts, from [layer, expert] ranks; a free slot gets the expert worth most that the rank lacks.

    `worth` is [layer, expert], or [layer, expert, rank]. Every replica of an expert makes the next worth half.
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
    """[expert] ranks: heaviest first to the least busy rank that has room."""
    room, busy = room_of(len(tokens), len(speeds)), np.zeros(len(speeds))
    placed = np.zeros(len(tokens), np.int64)
    for expert in np.argsort(-tokens, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, (busy + tokens[expert]) / speeds, np.inf)))
        placed[expert] = rank
        room[rank] -= 1
        busy[rank] += tokens[expert]
    return placed
