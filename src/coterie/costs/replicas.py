"""The equal split: replicas of an expert share its tokens evenly.

Tokens are whole numbers when a step is timed (:func:`fill_slots`), and shares when a load is an expectation
(:func:`equal_shares`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.types import Placement


class Slots(NamedTuple):
    """A placement's slots as arrays [layer, slot] for compiled loops."""

    expert: NDArray[np.int64]
    turn: NDArray[np.int64]
    """Number of slots of the same expert before this slot."""
    replicas: NDArray[np.int64]
    """Number of slots of the same expert."""

    @classmethod
    def of(cls, placement: Placement) -> Slots:
        expert = placement.slot_experts.astype(np.int64)
        order = np.argsort(expert, axis=1, kind="stable")
        turn = np.empty_like(expert)
        for layer, row in enumerate(np.take_along_axis(expert, order, axis=1)):
            turn[layer, order[layer]] = np.arange(len(row)) - np.searchsorted(row, row)
        return cls(expert, turn, np.take_along_axis(placement.replicas, expert, axis=1))


def slot_tokens(load: NDArray[np.int64], slots: Slots) -> NDArray[np.int64]:
    """Return [layer, slot] tokens from load [layer, expert] tokens."""
    rows = np.empty(slots.expert.shape, np.int64)
    fill_slots(load, *slots, rows)
    return rows


@njit()
def fill_slots(load: Any, expert: Any, turn: Any, replicas: Any, rows: NDArray[np.int64]) -> None:
    """Fill rows [layer, slot] with equal parts of each expert's tokens; its first slots share the remainder."""
    for layer in range(rows.shape[0]):
        for slot in range(rows.shape[1]):
            tokens, shared = np.int64(load[layer, expert[layer, slot]]), replicas[layer, slot]
            rows[layer, slot] = tokens // shared + (turn[layer, slot] < tokens % shared)


@njit()
def equal_shares(slot_experts: NDArray[np.integer], experts: int, slot_alive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [layer, slot] share of the expert's tokens; slots that are not alive get 0."""
    layers, slots = slot_experts.shape
    shares = np.zeros((layers, slots))
    replicas = np.zeros(experts)
    for layer in range(layers):
        replicas[:] = 0.0
        for slot in range(slots):
            if slot_alive[slot]:
                replicas[slot_experts[layer, slot]] += 1.0
        for slot in range(slots):
            if slot_alive[slot]:
                shares[layer, slot] = 1.0 / replicas[slot_experts[layer, slot]]
    return shares
