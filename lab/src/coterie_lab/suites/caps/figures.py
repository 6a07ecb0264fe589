"""The figure of the CAPS suite as PDF and PNG: the cut of P99 by rate, ours beside what was published.

Strategies that lie on top of each other are one grey group; those whose order is the claim have a line of their own,
and so have a user's own strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from coterie.answers.figures import Theme, write_figure
from coterie_lab.suites.caps import drawing
from coterie_lab.suites.caps.drawing import BASE, handle, legend_above, line_handles, published_ends, short_name, signed
from coterie_lab.suites.shared import Rows, annotate, distinct_values

NAME = "fig_p99_by_rate"
FLOOR = -60.0
"""Lowest value of the axis; larger losses are written, since drawing them would flatten all else."""


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write the figure, or nothing if no strategy is compared with the base; return the paths."""
    if all(row["strategy"] == BASE for row in rows):
        return []
    rows = sorted(rows, key=lambda row: float(row["rate"]))  # a user may give rates in any order
    return write_figure(partial(_p99_by_rate, rows), folder, NAME, 4.0)


def _p99_by_rate(rows: Rows, figure: Figure, theme: Theme) -> None:
    patterns, look = distinct_values(rows, "pattern"), drawing.look_of(rows)
    predicted = any(not row["fitted"] for row in rows)
    for axes, pattern in zip(figure.subplots(1, len(patterns), squeeze=False)[0], patterns, strict=True):
        _p99_panel(axes, theme, [row for row in rows if row["pattern"] == pattern], look)
        axes.set(title=f"{pattern} arrivals", xlabel="requests a second" + ("  (* predicted, not fitted)" * predicted))
    figure.axes[0].set_ylabel("cut of P99 against fcfs (%)")
    handles = line_handles(look)
    group = drawing.grouped(rows)
    if group:
        label = f"{len(group)} others, least to most"
        handles.append(Patch(facecolor=theme.grid, edgecolor=theme.muted, lw=0.8, label=label))
    if any(published_ends(row, "p99_reduction_pct") for row in rows):
        handles.append(handle("published", theme.text, "D", mfc=theme.background, ms=6))
    if any(row["strategy"] in look and row["p99_reduction_low"] is not None for row in rows):
        handles.append(drawing.whisker_handle(theme))
    legend_above(figure, handles)


def _p99_panel(axes: Any, theme: Theme, rows: Rows, look: dict[str, tuple[str, str]]) -> None:
    rates = distinct_values(rows, "rate")
    at = {rate: place for place, rate in enumerate(rates)}  # evenly spaced, whatever the rates
    axes.axhline(0.0, color=theme.text, lw=1.2)
    group = np.array([drawing.p99_cuts(rows, name, rates) for name in drawing.grouped(rows)])
    if group.size:
        axes.fill_between(range(len(rates)), group.min(axis=0), group.max(axis=0), color=theme.grid, lw=0)
        axes.plot(range(len(rates)), group.T, color=theme.muted, lw=0.6, marker="_", ms=7, alpha=0.8)
    lost: dict[str, list[tuple[float, float]]] = {}
    for shift, (name, (color, marker)) in zip(drawing.shifts(len(look)), look.items(), strict=True):
        mine = [row for row in rows if row["strategy"] == name]
        x = [at[row["rate"]] + shift for row in mine]
        y = np.array([row["p99_reduction_pct"] for row in mine])
        best = name == "latency_aware"
        for where, row in zip(x, mine, strict=True):
            if row["p99_reduction_low"] is not None:  # one seed has no interval
                axes.vlines(where, row["p99_reduction_low"], row["p99_reduction_high"], color=color, lw=1.0, alpha=0.7)
        axes.plot(x, y, color=color, marker=marker, ms=5, lw=2.4 if best else 1.5, zorder=4 if best else 3)
        if (y < FLOOR).any():
            lost[name] = [(row["rate"], value) for row, value in zip(mine, y, strict=True) if value < FLOOR]
    brackets = _published_p99(axes, theme, rows, at, look)
    low, high = axes.get_ylim()
    high = max(high, 5.0)
    axes.set_ylim(min(max(low, FLOOR), -0.08 * high), high)
    _rate_ticks(axes, rows, rates, brackets)
    annotate(axes, BASE, (axes.get_xlim()[1], 0), (0, -2), ha="right", va="top", fontsize=8)
    if lost:
        below = drawing.shortened_list(_below(name, spots) for name, spots in lost.items())
        drawing.write_in_corner(axes, theme, ["below the axis", *below])
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))


def _below(name: str, spots: list[tuple[float, float]]) -> str:
    lowest = signed(min(value for _, value in spots), 0)
    if len(spots) == 1:
        return f"{short_name(name)} at {spots[0][0]:g}: {lowest}"
    return f"{short_name(name)} at {len(spots)} rates: down to {lowest}"


def _published_p99(
    axes: Any, theme: Theme, rows: Rows, at: dict[float, int], look: dict[str, tuple[str, str]]
) -> float | None:
    """Draw published values at their rates, and ranges over all rates to the right. Return where those end, or None."""
    ends_at: dict[float, list[float]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for row in rows:
        ends = published_ends(row, "p99_reduction_pct")
        if ends and drawing.is_of_rate(row):
            ends_at.setdefault(row["rate"], []).extend(ends)
        elif ends:
            ranges[row["strategy"]] = ends
    x = [at[rate] for rate in ends_at]
    low, high = [min(ends) for ends in ends_at.values()], [max(ends) for ends in ends_at.values()]
    axes.vlines(x, low, high, color=theme.text, lw=1.2, zorder=6)
    axes.plot(x, np.add(low, high) / 2, "D", mfc="none", mec=theme.text, mew=1.2, ms=7, zorder=6)
    unit = _unit(at)
    first = len(at) - 1 + 0.75 * unit
    for place, (name, ends) in enumerate(ranges.items()):
        color, right = look.get(name, (theme.muted, ""))[0], first + 0.16 * unit * place
        axes.plot((right, right), ends, color=color, lw=1.4, marker="_", ms=7, mew=1.4)
        if name not in look:
            style = {"color": theme.muted, "ha": "center", "va": "bottom", "fontsize": 7, "rotation": 90}
            annotate(axes, short_name(name), (right, ends[1]), (0, 4), **style)
    return first + 0.16 * unit * (len(ranges) - 1) if ranges else None


def _rate_ticks(axes: Any, rows: Rows, rates: Sequence[float], brackets: float | None) -> None:
    fitted = {row["rate"] for row in rows if row["fitted"]}
    step = -(-len(rates) // 5)
    places = list(range(0, len(rates), step))
    words = [f"{rates[place]:g}" + ("" if rates[place] in fitted else "*") for place in places]
    axes.set_xticks(places, words)
    unit = _unit(rates)
    end = len(rates) - 1 + 0.4 * unit
    axes.set_xlim(-0.4 * unit, end if brackets is None else max(brackets + 0.35 * unit, end + 0.6 * unit))
    if brackets is not None:
        axes.axvline(end, color=axes.xaxis.label.get_color(), lw=0.6, ls=":")
        style = {"ha": "left", "va": "top", "rotation": 90, "fontsize": 6.5}
        annotate(axes, "published, all rates", (end, axes.get_ylim()[1]), (2, 0), **style)


def _unit(rates: Collection[float]) -> float:
    """Return a width beside the rates, in steps between two rates, that is the same on paper for any number of them."""
    return max(0.5, len(rates) / 4)
