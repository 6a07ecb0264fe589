"""One rank per expert: how many each rank holds, an even start, and the slots of a placement with replicas to spare."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.placement.planning.packing import Slots


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
