"""Those with the smallest load first, after the oldest and whoever waited too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching import Selection, Window


@dataclass(frozen=True, slots=True)
class ShortFirst:
    max_skips: int | None = 64

    def select(self, window: Window, running: NDArray[np.float64], size: int, rng: Generator) -> Selection:
        waiting = len(window.loads)
        overdue = np.zeros(waiting, bool) if self.max_skips is None else window.skipped >= self.max_skips
        overdue[:1] = True  # the oldest is always in
        load = window.loads.reshape(waiting, -1).sum(axis=1) if waiting else np.zeros(0)
        # Of the overdue the oldest first, then by load; the last key sorts first.
        order = np.lexsort((np.where(overdue, 0.0, load), ~overdue))
        return Selection(order[:size].astype(np.int64), f"the smallest of {waiting}")
