"""Activations to slots: choose the replica of an expert that computes an activation.

A replica on the token's own rank is preferred, since nothing need be sent. Otherwise replicas are used round-robin: the
i-th activation of an expert that a rank has to send goes to replica (i + rank) mod replicas, so that ranks do not all
begin with the same replica.

It is wrong where replicas should get unequal shares, which :mod:`coterie.placement.splits` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check

Ints = NDArray[np.int64]


class SlotTable(NamedTuple):
    """Slots of each expert in one layer of a placement."""

    slots: Ints
    """[expert, replica] slot, rising; padded with the first slot if the expert has fewer replicas."""
    replicas: Ints
    """[expert] number of slots that hold the expert."""
    per_rank: int

    @classmethod
    def of(cls, row: Sequence[int] | NDArray[np.integer], num_experts: int, num_ranks: int) -> SlotTable:
        """Make the table from one layer of a placement: [slot] expert."""
        experts = np.asarray(row, np.int64)
        check(len(experts) % num_ranks == 0, f"{len(experts)} slots must be a multiple of num_ranks={num_ranks}")
        replicas = np.bincount(experts, minlength=num_experts)
        check(
            len(replicas) == num_experts and replicas.all(),
            f"the row must hold every expert in 0 … {num_experts - 1} and no other",
        )
        by_expert = np.argsort(experts, kind="stable")
        starts = np.cumsum(replicas) - replicas
        turn = np.arange(replicas.max())[None, :]
        slots = by_expert[starts[:, None] + np.where(turn < replicas[:, None], turn, 0)]
        return cls(slots, replicas, len(experts) // num_ranks)


def choose_slots(experts: NDArray[np.integer], rank: int, table: SlotTable) -> Ints:
    """Return [token, k] the slot for each activation in `experts` [token, k] of tokens that are on `rank`."""
    flat = np.asarray(experts, np.int64).ravel()
    if flat.size and not 0 <= flat.min() <= flat.max() < len(table.replicas):
        wrong = flat[(flat < 0) | (flat >= len(table.replicas))][0]
        raise ConfigError(f"experts holds {wrong}; it must be in 0 … {len(table.replicas) - 1}")
    options = table.slots[flat]  # [activation, replica]
    own = options // table.per_rank == rank
    chosen = options[np.arange(len(flat)), own.argmax(axis=1)]
    away = np.flatnonzero(~own.any(axis=1))
    chosen[away] = options[away, (_occurrence(flat[away]) + rank) % table.replicas[flat[away]]]
    return np.asarray(chosen.reshape(np.shape(experts)))


def _occurrence(values: Ints) -> Ints:
    """Return [i] the number of earlier entries equal to entry i."""
    order = np.argsort(values, kind="stable")
    earlier = np.empty(len(values), np.int64)
    earlier[order] = np.arange(len(values)) - np.searchsorted(values, values[order], sorter=order)
    return earlier
