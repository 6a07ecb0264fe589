"""Log of a worker's last steps, one row each: sums would hide how a step's distinct experts depend on its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError

KEPT = 1 << 14
COLUMNS = ENDED_S, ROWS, DISTINCT, SECONDS = range(4)
"""End on the machine's monotonic clock; tokens computed; distinct experts of a layer, mean over layers; time of the
forward pass, 0 where the worker does not measure it."""


class Steps(NamedTuple):
    total: int
    """Steps since the worker's start."""
    rows: NDArray[np.float64]
    """[step, column] of the last steps; a copy."""


class StepLog:
    """Ring buffer of the last steps, in memory of this process unless shared arrays are given."""

    def __init__(self, ring: NDArray[np.float64] | None = None, total: NDArray[np.uint64] | None = None) -> None:
        self._ring = np.zeros((KEPT, len(COLUMNS))) if ring is None else ring
        self._total = np.zeros(1, np.uint64) if total is None else total

    @property
    def total(self) -> int:
        """Steps since the start, those no longer kept included."""
        return int(self._total[0])

    def add(self, ended_s: float, rows: int, distinct: float, seconds: float = 0.0) -> None:
        self._ring[self.total % len(self._ring)] = ended_s, rows, distinct, seconds
        self._total[0] += np.uint64(1)

    def read(self, after: int | None = None) -> Steps:
        """Steps after the first `after` since the start; by default all that are kept."""
        total = self.total
        first = max(0, total - len(self._ring))
        if after is None:
            after = first
        if not first <= after <= total:
            raise InputError(f"steps after {after} were asked for; of {total}, the last {len(self._ring)} are kept")
        return Steps(total, self._ring[np.arange(after, total) % len(self._ring)])
