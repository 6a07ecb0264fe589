"""Placements with slots from the experts that each rank holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.costs.exchange import row_trips_s
from coterie.errors import ConfigError
from coterie.placement import settle
from coterie.placement.holdings import Demand, Held
from coterie.placement.triggers.actions import ActionManager
from coterie.types import Placement


def placement_from_held(held: Held, slots_per_rank: int, current: Placement | None = None) -> Placement:
    """Assign the experts that each rank holds to slots; an expert that stays on its rank keeps its slot of `current`.

    Spare slots repeat an expert that the rank already holds, so that filling them uses no link.
    """
    ranks, layers, experts = held.shape
    slots = np.zeros((layers, ranks, slots_per_rank), np.int32)
    old = None if current is None else current.slot_experts.reshape(layers, ranks, -1)
    for rank in range(ranks):
        for layer in range(layers):
            mine = np.flatnonzero(held[rank, layer])
            if not 0 < mine.size <= slots_per_rank:
                raise ConfigError(
                    f"rank {rank} holds {mine.size} experts of layer {layer}; slots_per_rank={slots_per_rank}"
                )
            had = np.bincount(old[layer, rank], minlength=experts)[mine] if old is not None else np.zeros(mine.size)
            spare = np.full(slots_per_rank - mine.size, mine[np.argmax(had)])
            slots[layer, rank] = np.concatenate([mine, spare])
    rows = slots.reshape(layers, -1)
    if current is not None:
        rows = settle(current.slot_experts, rows, ranks)[0]
    return Placement(rows, ranks, experts)


def cheapest_homes(manager: ActionManager, demand: Demand, held: Held) -> Held:
    """Reassign all experts of each layer, one copy each, for the least link time of `demand` [rank, layer, expert].

    Layers in which that saves nothing stay as they are.
    """
    row_s, result = row_trips_s(manager.topology, manager.row_bytes), held.copy()
    room = -(-demand.shape[2] // len(demand))
    for layer in range(demand.shape[1]):
        asked = demand[:, layer]
        home, expert = linear_sum_assignment(np.repeat(row_s.T @ asked, room, axis=0))
        after = np.zeros_like(held[:, layer])
        after[home // room, expert] = True
        if _link_s(row_s, asked, after) < _link_s(row_s, asked, held[:, layer]):
            result[:, layer] = after
    return result


def _link_s(row_s: NDArray[np.float64], asked: NDArray[np.float64], held: NDArray[np.bool_]) -> float:
    """Return the link seconds of `asked` [rank, expert], each activation sent to the nearest rank that holds it."""
    nearest = np.where(held[None], row_s[:, :, None], np.inf).min(axis=1)  # [rank, expert]
    return float((asked * nearest).sum())
