"""Experts held by each rank, and activations demanded by each rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_positive_share
from coterie.types import Placement

Held = NDArray[np.bool_]
"""[rank, layer, expert] whether the rank holds the expert."""
Demand = NDArray[np.float64]
"""[rank, layer, expert] activations of the tokens on each rank."""


def held_by(placement: Placement) -> Held:
    """Return the experts that each rank holds, [rank, layer, expert]."""
    return placement.held


def placed(current: Placement, held: Held) -> Placement | None:
    """Return the placement with the experts of `held` in the slots of `current`; None if a rank has too few slots.

    Experts that stay keep their slots. New ones take the slots of experts that leave, then those of duplicates.
    """
    slots, before, per_rank = current.slot_experts.copy(), current.held, current.slots_per_rank
    for rank, layer in np.argwhere((before != held).any(axis=2)).tolist():
        row = slots[layer, rank * per_rank : (rank + 1) * per_rank]
        leaves = ~held[rank, layer, row]
        again = np.ones(per_rank, np.bool_)
        again[np.unique(row, return_index=True)[1]] = False
        free = np.concatenate([np.flatnonzero(leaves), np.flatnonzero(again & ~leaves)])
        new = np.flatnonzero(held[rank, layer] & ~before[rank, layer])
        if not leaves.sum() <= len(new) <= len(free):
            return None
        row[free[: len(new)]] = new
    return Placement(slots, current.num_ranks, current.num_experts)


def bit_words(held: Held) -> NDArray[np.uint64]:
    """Return bit masks [rank, layer, word], as in `Fleet.local`: bit e is set if the rank holds expert e."""
    whole = np.pad(held, ((0, 0), (0, 0), (0, -held.shape[2] % 64)))
    return np.packbits(whole, axis=2, bitorder="little").view("<u8").astype(np.uint64)


def remote_share(demand: Demand, held: Held) -> float:
    """Return the share of all activations whose expert is not on the token's own rank; 0 if there are none."""
    total = float(demand.sum())
    return float(demand[~held].sum()) / total if total else 0.0


class DemandTracker:
    """Exponentially decayed demand per worker: each record of a worker multiplies its earlier demand by `decay`.

    Wrong for idle workers: demand decays only with records, so an idle worker keeps its last demand.
    """

    def __init__(self, num_layers: int, num_experts: int, num_workers: int, *, decay: float = 0.99) -> None:
        check_at_least(1, num_layers=num_layers, num_experts=num_experts, num_workers=num_workers)
        check_positive_share(decay=decay)
        self.decay = decay
        self._demand: Demand = np.zeros((num_workers, num_layers, num_experts))

    def record(self, worker: int, counts: NDArray[np.integer] | NDArray[np.floating]) -> None:
        """Add the activations [layer, expert] of a step on this worker."""
        demand = self._of(worker)
        check(
            counts.shape == demand.shape, f"counts has shape {counts.shape}; expected [layer, expert] = {demand.shape}"
        )
        check(np.isfinite(counts).all() and (counts >= 0).all(), "counts must be finite and not negative")
        demand *= self.decay
        demand += counts

    def worker(self, worker: int) -> Demand:
        """Return a copy of a worker's demand, [layer, expert]."""
        return self._of(worker).copy()

    def _of(self, worker: int) -> Demand:
        check(0 <= worker < len(self._demand), f"worker={worker} must be in 0 … {len(self._demand) - 1}")
        return np.asarray(self._demand[worker])
