"""The figure of the ELDR suite: savings by router and load, on recorded routing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.figures import Theme, write_figure
from coterie.answers.runs import error_bars, interval_of
from coterie_lab.suites.eldr.cells import MODEL
from coterie_lab.suites.shared import Rows

COMPARED = ("join_shortest_queue", "pressure", "locality_band", "latency_aware")
PANELS = (
    ("saving_by_token", "fewer experts, by token, %"),
    ("tpot_p50_saving", "cut of median TPOT, %"),
    ("tpot_p99_saving", "cut of p99 TPOT, %"),
)


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write PDF and PNG, or nothing without recorded routing."""
    main = [row for row in rows if row["part"] == "main" and row["trace"] == MODEL]
    return write_figure(partial(_loads, main), folder, "eldr_loads", 5.6) if main else []


def _loads(rows: Rows, figure: Figure, theme: Theme) -> None:
    loads = list(dict.fromkeys((row["decoders"], row["in_flight"]) for row in rows))
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    width = 0.8 / len(COMPARED)
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        for number, (name, color) in enumerate(zip(COMPARED, theme.series, strict=True)):
            mine = [row for row in rows if row["router"] == name]
            at = np.arange(len(mine)) + (number - (len(COMPARED) - 1) / 2) * width
            axes.bar(at, [row[f"{key}_pct"] for row in mine], width * 0.92, color=color, label=name)
            errors = error_bars([interval_of(row, key) for row in mine])
            axes.errorbar(at, [row[f"{key}_pct"] for row in mine], errors, color=theme.text, ls="none", lw=1)
        axes.axhline(0, color=theme.muted, lw=0.8)
        axes.set_ylabel(label, fontsize=8)
        axes.grid(axis="y")
    panels[-1].set_xticks(range(len(loads)), [f"{decoders} x {per_decoder}" for decoders, per_decoder in loads])
    sure = "± 95%" if any(row[f"{PANELS[0][0]}_low"] is not None for row in rows) else "one split"
    panels[-1].set_xlabel(f"decoders x requests in flight on each; {MODEL} routing, against round robin, {sure}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(COMPARED), fontsize=8)
