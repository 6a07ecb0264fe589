"""A new placement fitted to the one in force: what stays keeps its slot, and shares their ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.replicas import equal_shares
from coterie.errors import ConfigError
from coterie.types import Placement

Array = NDArray[np.float64]


def settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`new` with the slots of each rank reordered so that what stays keeps its slot, and where each came from.

    Both [layer, slot]; the second holds, for each slot of the result, the slot of `new` it was.
    """
    order = np.empty(new.shape, np.int64)
    _settle(old, new, ranks, order)
    return np.take_along_axis(new, order, axis=1), order


@njit()
def _settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int, order: NDArray[np.int64]) -> None:
    layers, slots = new.shape
    per_rank = slots // ranks
    used = np.zeros(per_rank, np.bool_)
    for layer in range(layers):
        for rank in range(ranks):
            start = rank * per_rank
            used[:] = False
            for slot in range(start, start + per_rank):
                order[layer, slot] = -1
            for slot in range(start, start + per_rank):
                for other in range(per_rank):
                    if not used[other] and new[layer, start + other] == old[layer, slot]:
                        used[other] = True
                        order[layer, slot] = start + other
                        break
            other = 0
            for slot in range(start, start + per_rank):
                if order[layer, slot] < 0:
                    while used[other]:
                        other += 1
                    used[other] = True
                    order[layer, slot] = start + other


def living_shares(shares: NDArray[np.floating], current: Placement, alive: NDArray[np.bool_]) -> Array:
    """[layer, slot] with what ranks that are gone had spread over an expert's others: as they shared, else equally."""
    given, experts = np.ascontiguousarray(shares, np.float64), current.slot_experts
    if given.shape != experts.shape:
        raise ConfigError(f"shares has shape {given.shape}; the placement {experts.shape}")
    bad = np.argwhere(~((given >= 0) & (given < np.inf)))
    if bad.size:
        layer, slot = (int(index) for index in bad[0])
        raise ConfigError(f"shares[{layer}, {slot}] is {given[layer, slot]}; it must be finite and not negative")
    row = np.arange(current.num_layers)[:, None]
    total = np.zeros((current.num_layers, current.num_experts))
    np.add.at(total, (row, experts), given)
    bad = np.argwhere(~np.isclose(total, 1.0, rtol=0.0, atol=1e-6))
    if bad.size:
        layer, expert = (int(index) for index in bad[0])
        raise ConfigError(f"shares of layer {layer}, expert {expert} add up to {total[layer, expert]:g}; it must be 1")
    slot_alive = np.repeat(alive, current.slots_per_rank)
    if slot_alive.all():
        return given
    living = given * slot_alive
    total[:] = 0.0
    np.add.at(total, (row, experts), living)
    left = total[row, experts]
    equal = equal_shares(experts, current.num_experts, slot_alive)
    return np.where(left > 0, living / np.where(left > 0, left, 1.0), equal)
