"""Figures of the ELDR suite: savings by router and load, and the published design's band, with its tail."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

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
    """Write PDF and PNG: loads and band on recorded routing, pools on synthetic. Figures without rows are left out."""
    written: list[Path] = []
    main = [row for row in rows if row["part"] == "main" and row["trace"] == MODEL]
    if main:
        written += write_figure(partial(_loads, main), folder, "eldr_loads", 5.6)
    bands, pools = ([row for row in rows if row["part"] == part] for part in ("band", "topology"))
    if bands or pools:
        written += write_figure(partial(_trends, bands, pools), folder, "eldr_trends", 4.0)
    return written


def _points(axes: Any, x: Any, rows: Rows, key: str, **style: Any) -> None:
    """Draw KEY_pct of each row with its interval."""
    errors = error_bars([interval_of(row, key) for row in rows])
    axes.errorbar(x, [row[f"{key}_pct"] for row in rows], errors, **style)


def _below_axes(axes: Any, theme: Theme) -> None:
    axes.axhline(0, color=theme.muted, lw=0.8)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _loads(rows: Rows, figure: Figure, theme: Theme) -> None:
    loads = list(dict.fromkeys((row["decoders"], row["in_flight"]) for row in rows))
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    width = 0.8 / len(COMPARED)
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        for number, (name, color) in enumerate(zip(COMPARED, theme.series, strict=True)):
            mine = [row for row in rows if row["router"] == name]
            at = np.arange(len(mine)) + (number - (len(COMPARED) - 1) / 2) * width
            axes.bar(at, [row[f"{key}_pct"] for row in mine], width * 0.92, color=color, label=name)
            _points(axes, at, mine, key, color=theme.text, ls="none", lw=1)
        axes.axhline(0, color=theme.muted, lw=0.8)
        axes.set_ylabel(label, fontsize=8)
        axes.grid(axis="y")
    panels[-1].set_xticks(range(len(loads)), [f"{decoders} x {per_decoder}" for decoders, per_decoder in loads])
    sure = "± 95%" if any(row[f"{PANELS[0][0]}_low"] is not None for row in rows) else "one split"
    panels[-1].set_xlabel(f"decoders x requests in flight on each; {MODEL} routing, against round robin, {sure}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(COMPARED), fontsize=8)


def _trends(bands: Rows, pools: Rows, figure: Figure, theme: Theme) -> None:
    panels = figure.subplots(1, bool(bands) + bool(pools), squeeze=False)[0].tolist()
    if bands:
        axes = panels.pop(0)
        places = range(len(bands))
        for color, share in zip(theme.series, ("p50", "p99"), strict=False):
            _points(axes, places, bands, f"tpot_{share}_saving", color=color, marker="o", ms=4, label=share)
        axes.set_xticks(places, [f"{row['tau']:g}" for row in bands])
        axes.set(xlabel=f"τ of the locality band, {MODEL}", ylabel="cut of TPOT, %")
        _below_axes(axes, theme)
    if pools:
        axes = panels.pop(0)
        for color, name in zip(theme.series[1:], ("locality_band", "latency_aware"), strict=False):
            mine = [row for row in pools if row["router"] == name]
            sizes = [row["decoders"] for row in mine]
            for key, style, label in (("tpot_p50_saving", "-", "p50"), ("saving_by_token", "--", "experts by token")):
                _points(axes, sizes, mine, key, color=color, marker="o", ms=4, ls=style, label=f"{name}, {label}")
            known = [(row["decoders"], row["published"]["tpot_p50"]) for row in mine if row["published"]]
            if known:
                x, y = zip(*known, strict=True)
                axes.plot(x, y, color=theme.text, marker="x", ms=7, ls="none", label="published p50")
        axes.set_xticks(sorted({row["decoders"] for row in pools}))
        axes.set(xlabel="decoders, synthetic routing", ylabel="saving, %")
        _below_axes(axes, theme)
