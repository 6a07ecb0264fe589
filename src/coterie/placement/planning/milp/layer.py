"""One layer as the exact search sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.placement.objective._arrays import parts_taken

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's arrays, living ranks only, in seconds."""

    unit: Array
    """[rank, expert] a step if the rank got all of the expert's tokens."""
    share: Array
    """[expert, replicas - 1] of `unit` that each of so many equal replicas takes."""
    load_in: Array
    """[rank, expert] to load it there; 0 where it is."""
    speeds: Array
    """[rank]"""
    slots: int
    """Slots per rank."""
    floor: float
    """Seconds of a step below which nothing is gained."""
    horizon: float
    slowest_price: float
    """Price per second of the slowest rank's arrivals."""
    each_price: float
    """Price per second of any rank's arrivals."""
    move_price: float
    """Seconds that each move costs besides: the multiplier of a budget of moves."""

    @property
    def held(self) -> Mask:
        return np.asarray(self.load_in == 0)

    @property
    def work(self) -> Array:
        """[expert] seconds on a rank of speed 1 where it is cheapest."""
        return np.asarray((self.unit * self.speeds[:, None]).min(axis=0))

    def excess(self, holds: Mask, shares: Array | None) -> float:
        """Seconds of the objective above horizon x floor, which no placement avoids."""
        arrivals = np.where(holds, self.load_in, 0.0).sum(axis=1)
        moves = float((holds & ~self.held).sum())
        if shares is None:
            count = holds.sum(axis=0)
            parts = np.where(holds, self.share[np.arange(len(count)), count - 1], 0.0)
        else:
            parts = parts_taken(self.share.T, shares)
        slowest = float((self.unit * parts).sum(axis=1).max())
        waited = self.horizon * max(slowest - self.floor, 0.0) + self.slowest_price * float(arrivals.max())
        return waited + self.each_price * float(arrivals.sum()) + self.move_price * moves


class Found(NamedTuple):
    """What the search of one layer ended with; seconds are above horizon x floor."""

    holds: Mask
    """[rank, expert]"""
    shares: Array | None
    """[rank, expert] share of the expert's tokens; None for equal shares."""
    excess: float
    bound: float
