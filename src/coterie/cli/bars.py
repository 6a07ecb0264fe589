"""Bars of text: one a rank, against what an even load would give each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from coterie.cli.output import out

MAX_ROWS = 32
"""Ranks shown; of more, the busiest."""
_PARTS = " ▏▎▍▌▋▊▉█"


def bar(value: float, full: float, width: int) -> str:
    """`value` as blocks, `full` being all of the width."""
    eighths = round(8 * width * min(value / full, 1.0)) if full > 0 else 0
    return ("█" * (eighths // 8) + _PARTS[eighths % 8]).rstrip().ljust(width)


class Column(NamedTuple):
    """Values of the ranks, drawn against all columns of the same scale."""

    name: str
    values: NDArray[np.float64]
    """[rank]"""
    scale: int


def print_rank_bars(title: str, columns: Sequence[Column], note: str) -> None:
    """A row a rank."""
    width = max(4, min(24, (min(out.width, 120) - 8) // len(columns) - 8))
    full: dict[int, float] = {}
    for column in columns:
        full[column.scale] = max(full.get(column.scale, 0.0), float(column.values.max()))
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    table.add_column("rank", justify="right")
    for column in columns:
        table.add_column(column.name)
    busiest = np.argsort(-np.max([column.values for column in columns], axis=0), kind="stable")
    for rank in np.sort(busiest[:MAX_ROWS]):
        cells = [f"{bar(c.values[rank], full[c.scale], width)} {c.values[rank]:.2f}" for c in columns]
        table.add_row(str(rank), *(Text(cell) for cell in cells))
    out.print(table)
    if len(busiest) > MAX_ROWS:
        out.print(f"({len(busiest) - MAX_ROWS} less busy ranks are left out)", highlight=False)


def relative(busy: NDArray[np.float64]) -> NDArray[np.float64]:
    """[rank] of [rank], 1 being the mean."""
    return busy / busy.mean() if busy.any() else np.zeros(len(busy))
