"""Figures of the suite: what every configuration saves, and how two decisions act together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.figures import Theme, write_figure
from coterie_lab.suites.shared import Rows, distinct_values

MARKS = {"steady": "o", "drifting": "s", "abrupt": "^"}


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write PDF and PNG of one figure per fleet, and one of the pairs."""
    paths = []
    for fleet in distinct_values(rows, "fleet"):
        mine = [row for row in rows if row["fleet"] == fleet and row["kind"] == "run"]
        configs = distinct_values(mine, "config")
        height = 1.2 + 0.26 * len(configs)
        paths += write_figure(partial(_fleet, mine, configs), folder, f"together_{fleet.lower()}", height)
    pairs = [row for row in rows if row["kind"] == "pair"]
    named = list(dict.fromkeys((row["fleet"], row["first"], row["second"]) for row in pairs))
    return paths + write_figure(partial(_pairs, pairs, named), folder, "together_pairs", 1.4 + 0.9 * len(named))


def _fleet(rows: Rows, configs: list[str], figure: Figure, theme: Theme) -> None:
    """Two panels: the saving of median TPOT, and goodput ÷ the highest of the cell; a mark per load and traffic."""
    panels = figure.subplots(1, 2, sharey=True)
    best = {cell: max(row["goodput"] for row in rows if _cell(row) == cell) for cell in map(_cell, rows)}
    loads = distinct_values(rows, "load")
    for row in rows:
        load = loads.index(row["load"])
        at = configs.index(row["config"]) + 0.22 * (load - (len(loads) - 1) / 2)
        style: Any = {"marker": MARKS[row["traffic"]], "color": theme.series[load], "ms": 4, "ls": "none", "alpha": 0.8}
        panels[0].plot(row["tpot_p50_saving_pct"], at, **style)
        panels[1].plot(100.0 * row["goodput"] / best[_cell(row)], at, **style)
    panels[0].set_yticks(range(len(configs)), configs, fontsize=8)
    panels[0].invert_yaxis()
    panels[0].axvline(0, color=theme.muted, lw=0.8)
    panels[0].set_xlabel("cut of median TPOT, %")
    panels[1].set_xlabel("goodput, % of the highest")
    for axes in panels:
        axes.grid(axis="x")
    shown: list[Any] = [
        *(
            panels[0].plot([], [], "o", color=theme.series[at], label=f"load {load:g}")[0]
            for at, load in enumerate(loads)
        ),
        *(
            panels[0].plot([], [], MARKS[name], color=theme.muted, label=name)[0]
            for name in distinct_values(rows, "traffic")
        ),
    ]
    figure.legend(handles=shown, loc="outside upper center", ncols=len(shown), fontsize=8)


def _cell(row: dict[str, Any]) -> tuple[float, str]:
    return row["load"], row["traffic"]


def _pairs(rows: Rows, named: list[tuple[str, str, str]], figure: Figure, theme: Theme) -> None:
    """A group of bars per pair: each decision alone, both, and the sum of both alone; means over cells."""
    axes = figure.add_subplot()
    bars = ("first", "second", "both")
    for at, key in enumerate(named):
        mine = [row for row in rows if (row["fleet"], row["first"], row["second"]) == key]
        means = [float(np.mean([row[f"tpot_p50_{bar}_pct"] for row in mine])) for bar in bars]
        for number, (bar, mean) in enumerate(zip(bars, means, strict=True)):
            label = {"first": "first alone", "second": "second alone", "both": "both"}[bar] if at == 0 else None
            axes.barh(at + 0.25 * (number - 1), mean, 0.23, color=theme.series[number], label=label)
        axes.plot(
            means[0] + means[1], at + 0.25, "|", color=theme.text, ms=14, label=None if at else "sum of both alone"
        )
    axes.set_yticks(
        range(len(named)), [f"{fleet}: {first}\nand {second}" for fleet, first, second in named], fontsize=8
    )
    axes.invert_yaxis()
    axes.axvline(0, color=theme.muted, lw=0.8)
    axes.set_xlabel("cut of median TPOT, %, mean over cells")
    axes.grid(axis="x")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
