"""Placements with slots from the experts that each rank holds."""

from __future__ import annotations

import numpy as np

from coterie.errors import ConfigError
from coterie.placement import settle
from coterie.placement.holdings import Held
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
