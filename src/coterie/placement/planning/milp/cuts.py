"""Rows that a relaxation breaks: sets of ranks must give work away."""

from __future__ import annotations

import numpy as np

from coterie.placement.planning.milp.layer import Array, Index, Layer, Mask
from coterie.placement.planning.milp.program import Program

ALL_SETS = 10
"""Ranks up to which every set of them is looked at for cuts; past it, sets grown from single ranks."""
CUTS_A_ROUND, LEAST_VIOLATION = 24, 1e-3


class Cuts:
    """Sets of ranks that must give work away, and the rows that say so.

    What a set's own experts (those held nowhere else) need beyond its ranks' time leaves only through new replicas
    outside. Capped at what must leave, the work of these replicas sums to at least that; and there are at least as many
    of them as it takes of the largest.
    """

    def __init__(self, program: Program) -> None:
        layer = program.layer
        self.program = program
        sets = _all_sets(len(layer.unit)) if len(layer.unit) <= ALL_SETS else _grown_sets(layer)
        own = np.asarray(~(layer.held.T[None, :, :] & ~sets[:, None, :]).any(axis=2))  # [set, expert] held nowhere else
        must = own @ program.work - program.slowest * (sets @ layer.speeds)
        useful = must > 1e-6 * program.scale
        self.sets, self.own, self.must = sets[useful], own[useful], must[useful]
        largest = np.zeros(layer.unit.shape)
        np.maximum.at(largest, (program.places.rank, program.places.expert), program.places.outward)
        self.fewest = np.array([self._fewest(which, largest) for which in range(len(self.must))])
        self._done: set[tuple[int, bool]] = set()

    def _fewest(self, which: int, largest: Array) -> int:
        """New replicas that the set must give away, at the least."""
        outside, own = ~self.sets[which], self.own[which]
        leaving = -np.sort(-largest[np.ix_(outside, own)].ravel())
        if self.program.layer.share.shape[1] == 1:  # no replicas: as many others come in, whole
            coming = np.sort(self.program.work[~own])
            pairs = min(len(leaving), len(coming))
            leaving = leaving[:pairs] - coming[:pairs]
        reached = np.cumsum(leaving) >= self.must[which] - 1e-9 * self.program.scale
        return int(np.argmax(reached)) + 1 if reached.any() else 1

    def violated(self, values: Array) -> list[tuple[Index, Array]]:
        """Rows of at least 1 that these columns break most: their columns and values."""
        program, places = self.program, self.program.places
        on = program.arriving[values[program.arriving] > 1e-9]
        leaving = self.own[:, places.expert[on]] & ~self.sets[:, places.rank[on]]
        capped = np.minimum(places.outward[on][None, :] / self.must[:, None], 1.0)
        short = np.array([1.0 - (capped * leaving) @ values[on], 1.0 - leaving @ values[on] / self.fewest])
        rows = []
        for which in np.argsort(-short, axis=None)[:CUTS_A_ROUND]:
            kind, member = divmod(int(which), len(self.must))
            if short[kind, member] < LEAST_VIOLATION:
                break
            if (member, bool(kind)) not in self._done:
                self._done.add((member, bool(kind)))
                rows.append(self._row(member, bool(kind)))
        return rows

    def _row(self, which: int, counted: bool) -> tuple[Index, Array]:
        arriving, places = self.program.arriving, self.program.places
        leaves = self.own[which, places.expert[arriving]] & ~self.sets[which, places.rank[arriving]]
        columns = arriving[leaves]
        if counted:
            return columns, np.full(len(columns), 1.0 / self.fewest[which])
        return columns, np.minimum(places.outward[columns] / self.must[which], 1.0)


def _all_sets(ranks: int) -> Mask:
    return (np.arange(1, 2**ranks - 1)[:, None] >> np.arange(ranks)[None, :] & 1).astype(bool)


def _grown_sets(layer: Layer) -> Mask:
    """From each rank alone, always adding the rank that leaves the most work without a place."""
    work, held = layer.work, layer.held
    even = work.sum() / layer.speeds.sum()
    sets: dict[bytes, Mask] = {}
    for start in range(len(held)):
        chosen = np.zeros(len(held), bool)
        chosen[start] = True
        while not chosen.all():
            sets[chosen.tobytes()] = chosen.copy()
            elsewhere = held[~chosen].sum(axis=0)  # [expert] ranks outside that hold it
            gain = (held & (elsewhere == 1)) @ work - even * layer.speeds
            chosen[int(np.argmax(np.where(chosen, -np.inf, gain)))] = True
    return np.array(list(sets.values()))
