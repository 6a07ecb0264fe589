"""A load table as a recording to advise on: it answers placement, and has no requests for the other decisions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.loads import Division, divide_windows, moe_layers
from coterie.traces import LoadTable
from coterie.traces.load import MERGED, choose_windows
from coterie.types import ModelSpec


class TableWindows(NamedTuple):
    """Windows of a load table, without those that are sums of others."""

    model: str
    counts: NDArray[np.float64]
    """[window, layer, expert] activations in MoE layers."""
    layer_ids: tuple[int, ...]
    what: str
    """Description of the windows and their file."""
    labels: list[str]
    """[window] label; empty if the table has none."""

    @classmethod
    def of(cls, path: Path, table: LoadTable, spec: ModelSpec) -> TableWindows:
        chosen, what = choose_windows(path, table, None)
        counts = np.asarray(table.counts[chosen], np.float64)
        ids = None if table.layer_ids is None else tuple(int(layer) for layer in table.layer_ids)
        rows, layer_ids = moe_layers(path, spec, counts.sum(axis=0), ids)
        labels = [table.labels[window] for window in chosen] if table.labels else []
        return cls(table.model, counts[:, rows], layer_ids, what, labels)

    @property
    def division(self) -> Division | None:
        """Windows to plan on and to score on; None if they cannot be divided."""
        if len(self.counts) < 2 or any(label.startswith(MERGED) for label in self.labels):
            return None
        return divide_windows(list(range(len(self.counts))), self.labels)
