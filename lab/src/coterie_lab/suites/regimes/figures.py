"""The figure of the regimes suite: every strategy in every regime, helps or hurts by its colour.

A cell is the mean over arrivals of the cut of P99 against first come, first served. Colours end at a fixed number of
per cent, so that two figures can be compared and one disaster does not pale the rest; the numbers are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coterie.answers.figures import Theme, short, write_figure
from coterie_lab.suites.caps.figures import signed
from coterie_lab.suites.shared import Rows, annotate, distinct_values

NAME = "fig_regimes"
BASE = "fcfs"
CLIP_PCT = 30.0
NOTHING_PCT = 1.0
"""Less than this either way, by the 95% interval, is nothing."""
COLORS = ("#8a3c00", "#d9730d", "#f4c795", "#ffffff", "#a9cbe8", "#1f6fb4", "#0b3c6b")
"""Colours from hurts to helps. Orange and blue are distinct with any common colour vision; in grey both ends are dark,
and the sign of the number tells them apart."""


class Matrix(NamedTuple):
    """Gains at one load; NaN where there is no row."""

    load: float
    gain_pct: NDArray[np.float64]
    """[strategy, column], mean over arrivals."""
    sure: NDArray[np.bool_]
    """[strategy, column] whether it helps under all arrivals, or hurts under all, by the intervals."""
    split: NDArray[np.bool_]
    """[strategy, column] whether it helps under some arrivals and hurts under others: the mean hides it."""


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write the figure as PDF and PNG; nothing if no strategy is compared with the base."""
    compared = [row for row in rows if row["strategy"] != BASE]
    if not compared:
        return []
    regimes, names = distinct_values(compared, "regime"), distinct_values(compared, "strategy")
    columns = list(dict.fromkeys((row["regime"], row["model"]) for row in compared))
    columns.sort(key=lambda column: regimes.index(column[0]))  # models of a regime side by side
    overall = {name: _mean([row["p99_reduction_pct"] for row in compared if row["strategy"] == name]) for name in names}
    names.sort(key=lambda name: -overall[name] if np.isfinite(overall[name]) else np.inf)
    matrices = [_matrix(compared, load, names, columns) for load in sorted({row["load"] for row in compared})]
    height = 1.8 + len(matrices) * (0.35 + 0.21 * len(names))
    return write_figure(partial(_fill, matrices, names, columns), folder, NAME, height)


def _matrix(rows: Rows, load: float, names: Sequence[str], columns: Sequence[tuple[str, str]]) -> Matrix:
    gain_pct = np.full((len(names), len(columns)), np.nan)
    sure, split = np.zeros(gain_pct.shape, bool), np.zeros(gain_pct.shape, bool)
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["load"] == load:
            place = names.index(row["strategy"]), columns.index((row["regime"], row["model"]))
            cells.setdefault(place, []).append(row)
    for place, mine in cells.items():
        sides = {_side(row) for row in mine}
        gain_pct[place] = _mean([row["p99_reduction_pct"] for row in mine])
        sure[place], split[place] = sides in ({1}, {-1}), {1, -1} <= sides
    return Matrix(load, gain_pct, sure, split)


def _fill(
    matrices: Sequence[Matrix], names: Sequence[str], columns: Sequence[tuple[str, str]], figure: Figure, theme: Theme
) -> None:
    colors = LinearSegmentedColormap.from_list("coterie-diverging", list(COLORS))
    panels = figure.subplots(len(matrices), 1, squeeze=False, sharex=True)[:, 0].tolist()
    image: Any = None
    for axes, matrix in zip(panels, matrices, strict=True):
        image = axes.imshow(matrix.gain_pct, cmap=colors, vmin=-CLIP_PCT, vmax=CLIP_PCT, aspect="auto")
        for row, column in np.argwhere(np.isfinite(matrix.gain_pct)):
            value = matrix.gain_pct[row, column]
            red, green, blue, _ = colors(image.norm(value))
            ink = theme.text if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#ffffff"
            words = signed(value) + ("*" if matrix.split[row, column] else "")
            weight = "bold" if matrix.sure[row, column] else "normal"
            axes.text(column, row, words, ha="center", va="center", fontsize=8, color=ink, fontweight=weight)
        axes.set_yticks(range(len(names)), [short(name) for name in names])
        axes.tick_params(length=0, colors=theme.text, labelsize=8.5)
        axes.spines[:].set_visible(False)
        axes.set_ylabel(f"load {matrix.load:g}", fontsize=10)
        for column in range(1, len(columns)):
            edge = columns[column][0] != columns[column - 1][0]
            axes.axvline(column - 0.5, color=theme.background, lw=5 if edge else 1)
    _headings(panels, columns)
    over = max(float(np.nanmax(np.abs(matrix.gain_pct), initial=0.0)) for matrix in matrices) > CLIP_PCT
    style: dict[str, Any] = {"extend": "both" if over else "neither", "pad": 0.02, "shrink": 0.8, "aspect": 45}
    bar = figure.colorbar(image, ax=panels, location="bottom", **style)
    bar.set_label((" " * 8).join(("hurts", "←", "cut of P99 against fcfs (%)", "→", "helps")), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    words = f"Mean over arrivals. Bold: helps or hurts by more than {NOTHING_PCT:g}% under each of them, at 95%."
    if any(matrix.split.any() for matrix in matrices):
        words += "\n* helps under some arrivals and hurts under others."
    figure.supxlabel(words, fontsize=8, color=theme.muted)


def _headings(panels: Sequence[Any], columns: Sequence[tuple[str, str]]) -> None:
    """Regimes above the first panel, models below the last."""
    turned: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if len(columns) > 4 else {}
    panels[-1].set_xticks(range(len(columns)), [short(model) for _, model in columns], **turned)
    regimes = [regime for regime, _ in columns]
    for regime in dict.fromkeys(regimes):
        middle = float(np.mean([place for place, name in enumerate(regimes) if name == regime]))
        style = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "fontsize": 9.5}
        annotate(panels[0], regime, (middle, 1.0), (0, 4), **style)


def _side(row: dict[str, Any]) -> int:
    """Return 1 if the strategy helps, -1 if it hurts, 0 if it does nothing or that is not known."""
    low, high = row["p99_reduction_low"], row["p99_reduction_high"]
    if low is None or high is None:  # one seed has no interval
        return 0
    return int(low > NOTHING_PCT) - int(high < -NOTHING_PCT)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")
