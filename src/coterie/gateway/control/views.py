"""Snapshots of the control loop, as endpoints and the dashboard show them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.control import LoadSeen


class HeatMap(msgspec.Struct, frozen=True):
    """Tokens in a worker's last window, by layer and expert."""

    layers: int
    experts: int
    values: bytes
    """JSON list of layers x experts integers, layer by layer; the gateway passes it on unparsed."""
    layers_left_out: int = 0


class ControlView(msgspec.Struct):
    """Snapshot of the loop, sent at most once a second."""

    status: dict[str, Any]
    """State of the loop: the values of `ControlLoop.status()`, and the counters of the event streams in `streams`."""
    events: list[dict[str, Any]] = []
    """Decisions of the loop, newest last: at_s (seconds since the epoch), kind, reason, values."""
    advice: dict[str, Any] | None = None
    """The last placement advice; its `reason` says why to apply it or not. None before the first."""
    loads: dict[str, HeatMap] = {}
    """Worker id → heat map of its load."""


PIECES = 30
"""Number of last reports of a worker that are summed: half a minute at one report per second."""
MOST_WORKERS = 256
"""Most workers whose loads are kept; those of further workers are dropped."""
MOST_CELLS = 1 << 15
"""Most values in a heat map: enough for 61 layers of 512 experts."""
MOST_TOKENS = 1 << 53
"""Largest count that is sent: JavaScript's integers are exact up to 2^53."""


class RecentLoads:
    """Sums of each worker's loads over a sliding window of reports."""

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
        if len(pieces) > PIECES:  # counts are integers below 2^53, so the running sum is exact
            total -= pieces.popleft()

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers except these."""
        for worker in [one for one in self._pieces if one not in workers]:
            del self._pieces[worker], self._sums[worker]

    def as_maps(self) -> dict[str, HeatMap]:
        """Return the heat map of each worker."""
        return {worker: as_map(total) for worker, total in self._sums.items()}


def as_map(tokens: NDArray[np.float64]) -> HeatMap:
    """Make a heat map from `tokens` [layer, expert], cut to the size that a page can show."""
    experts = min(tokens.shape[1], MOST_CELLS)
    layers = min(len(tokens), MOST_CELLS // max(1, experts))
    whole = np.minimum(tokens[:layers, :experts], MOST_TOKENS).astype(np.int64)
    return HeatMap(layers, experts, msgspec.json.encode(whole.ravel().tolist()), len(tokens) - layers)
