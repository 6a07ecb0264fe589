"""What the process of the control loop last told, as endpoints and the page show it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.control import LoadSeen


class HeatMap(msgspec.Struct, frozen=True):
    """Tokens of a worker's last window, by layer and expert."""

    layers: int
    experts: int
    values: bytes
    """A list of layers x experts whole numbers, row by row, in JSON: the gateway passes it on as it is."""
    layers_left_out: int = 0


class ControlView(msgspec.Struct):
    """A snapshot of the loop, at most one a second."""

    status: dict[str, Any]
    """State of the loop, as `ControlLoop.status()` gives it, and `streams`: what the workers' event streams brought."""
    events: list[dict[str, Any]] = []
    """Decisions of the loop, newest last: at_s (seconds since the epoch), kind, reason, values."""
    advice: dict[str, Any] | None = None
    """The last placement advice, of which `reason` says why it is to be kept or followed; None before the first."""
    loads: dict[str, HeatMap] = {}
    """By worker id."""


PIECES = 30
"""Reports of a worker that are summed: half a minute at a report a second."""
MOST_WORKERS = 256
"""Workers whose loads are kept; those of others are left out."""
MOST_CELLS = 1 << 15
"""Cells of a heat map: 61 layers of 512 experts fit."""
MOST_TOKENS = 1 << 53
"""A page's numbers are whole up to here."""


class RecentLoads:
    """Sums over a sliding window of reports."""

    def __init__(self) -> None:
        self._pieces: dict[str, deque[NDArray[np.float64]]] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, seen: LoadSeen) -> None:
        if seen.worker not in self._pieces:
            if len(self._pieces) >= MOST_WORKERS:
                return
            self._pieces[seen.worker], self._sums[seen.worker] = deque(), np.zeros_like(seen.tokens)
        pieces, total = self._pieces[seen.worker], self._sums[seen.worker]
        pieces.append(seen.tokens)
        total += seen.tokens
        if len(pieces) > PIECES:  # counts are whole numbers below 2^53: nothing is lost by rounding
            total -= pieces.popleft()

    def keep(self, workers: Collection[str]) -> None:
        """Forget the workers that are not among these."""
        for worker in [one for one in self._pieces if one not in workers]:
            del self._pieces[worker], self._sums[worker]

    def as_maps(self) -> dict[str, HeatMap]:
        """By worker."""
        return {worker: as_map(total) for worker, total in self._sums.items()}


def as_map(tokens: NDArray[np.float64]) -> HeatMap:
    """`tokens` [layer, expert], cut to what a page can show."""
    experts = min(tokens.shape[1], MOST_CELLS)
    layers = min(len(tokens), MOST_CELLS // max(1, experts))
    whole = np.minimum(tokens[:layers, :experts], MOST_TOKENS).astype(np.int64)
    return HeatMap(layers, experts, msgspec.json.encode(whole.ravel().tolist()), len(tokens) - layers)
