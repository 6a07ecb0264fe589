"""The figure of the latency-optimal suite: the sweep, one layer's ranks, and step times as traffic shifts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coterie.answers.figures import Theme, write_figure
from coterie.answers.runs import error_bars, interval_of
from coterie_lab.suites.latency_optimal.domains import POLICIES
from coterie_lab.suites.shared import Rows, annotate, distinct_values

NAME = "latency-optimal"
LOWEST_PCT = -30.0
"""Lower end of the sweep's axis; EPLB at n = 1 is far below and written there."""


def draw_figures(folder: Path, rows: Rows, curves: NDArray[np.float64] | None) -> list[Path]:
    """Write PDF and PNG; without real loads, the sweep alone. `curves` are [policy, window] seconds."""
    panels = 1 if curves is None else 3
    return write_figure(partial(_fill, rows, curves), folder, NAME, 0.6 + 2.9 * panels)


def _fill(rows: Rows, curves: NDArray[np.float64] | None, figure: Figure, theme: Theme) -> None:
    panels = figure.subplots(1 if curves is None else 3, 1, squeeze=False)[:, 0].tolist()
    _sweep([row for row in rows if row["part"] == "sweep"], panels[0], theme)
    if curves is not None:
        _windows(curves, panels[1], theme)
        _ranks([row for row in rows if row["part"] == "ranks"], panels[2], theme)


def _sweep(rows: Rows, axes: Any, theme: Theme) -> None:
    groups = (
        ("eplb", "published", "EPLB"),
        ("latency_optimal", "published", "our search, published planning time"),
        ("latency_optimal", "ours", "our search, its planning time"),
    )
    for color, (planner, planning, label) in zip(theme.series, groups, strict=False):
        mine = [row for row in rows if (row["planner"], row["planning"]) == (planner, planning)]
        fixed = [row for row in mine if row["interval"] is not None]
        n = np.array([row["interval"] for row in fixed])
        gain = np.array([row["gain_pct"] for row in fixed])
        error = error_bars([interval_of(row, "gain") for row in fixed])
        axes.errorbar(n, gain, error, color=color, marker="o", ms=4, label=label)
        known = [(row["interval"], row["published"]["gain_pct"]) for row in fixed if row["published"]]
        if known:
            axes.plot(*zip(*known, strict=True), color=color, marker="x", ms=7, mew=1.8, ls="none", zorder=5)
        for row in mine:
            if row["interval"] is None:
                axes.plot(row["mean_interval"], row["gain_pct"], color=color, marker="*", ms=13, ls="none", zorder=6)
        if gain.min() < LOWEST_PCT:
            annotate(axes, f"{gain.min():.0f}%", (n[gain.argmin()], LOWEST_PCT), (9, 3), color=color)
    ideal = next(row["gain_pct"] for row in rows if row["planner"] == "ideal")
    axes.axhline(ideal, color=theme.muted, ls="--", lw=1)
    annotate(axes, "ideal balance", (1.05, ideal), (0, -12), color=theme.muted)
    axes.axhline(0, color=theme.muted, lw=0.8)
    axes.plot([], [], color=theme.text, marker="x", ls="none", label="published")
    axes.plot([], [], color=theme.text, marker="*", ms=10, ls="none", label="automatic interval")
    axes.set(xscale="log", ylim=(LOWEST_PCT, 32), xlabel="iterations between rounds", ylabel="gain of MoE time, %")
    axes.legend(fontsize=8, loc="lower right")


def _windows(curves: NDArray[np.float64], axes: Any, theme: Theme) -> None:
    for color, name, curve in zip(theme.series, POLICIES, curves, strict=True):
        axes.plot(np.arange(1, len(curve) + 1), 1e3 * curve, color=color, label=name, lw=1.5)
    axes.set(xlabel="window of 100 steps, GLM-5.2 prefill", ylabel="step incl. costs, ms")
    axes.grid(axis="y")
    axes.legend(fontsize=8, ncols=len(curves), loc="upper center", bbox_to_anchor=(0.5, 1.18))


def _ranks(rows: Rows, axes: Any, theme: Theme) -> None:
    parts = (("compute_us", "compute"), ("communication_us", "communication"), ("wait_us", "wait"))
    names = distinct_values(rows, "policy")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["rank"])
        at = np.arange(len(mine)) + (number - (len(names) - 1) / 2) * width
        bottom = np.zeros(len(mine))
        for color, (key, label) in zip((theme.series[0], theme.series[2], theme.grid), parts, strict=True):
            value = np.array([row[key] for row in mine])
            axes.bar(at, value, width * 0.92, bottom=bottom, color=color, label=label if not number else None)
            bottom += value
        for x in at:
            annotate(axes, name[0], (x, 0), (0, 2), ha="center", fontsize=7, color=theme.background)
    words = ", ".join(f"{name[0]}: {name}" for name in names)
    axes.set(xlabel=f"rank ({words}), layer {rows[0]['layer']}", ylabel="time in the layer, us")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
