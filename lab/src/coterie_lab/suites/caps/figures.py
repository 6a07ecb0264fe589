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
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from coterie.answers.figures import Theme, short, write_figure
from coterie_lab.suites.caps.published import GREEDY, TOP_SIX
from coterie_lab.suites.shared import Rows, annotate, distinct_values

NAME = "fig_p99_by_rate"
BASE = "fcfs"
GROUP = (*TOP_SIX, "differencing", "power_of_d_dot")
"""Strategies whose results under bursts are nearly the same."""
LEAST_GROUP = 4
"""Smallest group drawn as one band; members of a smaller group have a line each."""
STYLES = {
    "latency_aware": ("#1f6fb4", "o"),
    "random": ("#d9730d", "s"),
    "karmarkar_karp": ("#2a8c5a", "^"),
    "lpt": ("#8e4fb0", "v"),
    "greedy_variance": ("#5b6675", "D"),
}
COLORS, MARKERS = ("#b8326f", "#12858f", "#7a5c12", "#6b2f2f"), "PXph*"
"""Colours and markers of all other strategies: 20 pairs before one repeats."""
FLOOR = -60.0
"""Lowest value of the axis; larger losses are written, since drawing them would flatten all else."""


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write the figure, or nothing if no strategy is compared with the base; return the paths."""
    if all(row["strategy"] == BASE for row in rows):
        return []
    rows = sorted(rows, key=lambda row: float(row["rate"]))  # a user may give rates in any order
    return write_figure(partial(_p99_by_rate, rows), folder, NAME, 4.0)


def _p99_by_rate(rows: Rows, figure: Figure, theme: Theme) -> None:
    patterns, look = distinct_values(rows, "pattern"), look_of(rows)
    predicted = any(not row["fitted"] for row in rows)
    for axes, pattern in zip(figure.subplots(1, len(patterns), squeeze=False)[0], patterns, strict=True):
        _p99_panel(axes, theme, [row for row in rows if row["pattern"] == pattern], look)
        axes.set(title=f"{pattern} arrivals", xlabel="requests a second" + ("  (* predicted, not fitted)" * predicted))
    figure.axes[0].set_ylabel("cut of P99 against fcfs (%)")
    handles = [handle(short(name), color, marker, ms=5, ls="-") for name, (color, marker) in look.items()]
    group = grouped(rows)
    if group:
        label = f"{len(group)} others, least to most"
        handles.append(Patch(facecolor=theme.grid, edgecolor=theme.muted, lw=0.8, label=label))
    if any(published_p99(row) for row in rows):
        handles.append(handle("published", theme.text, "D", mfc=theme.background, ms=6))
    if any(row["strategy"] in look and row["p99_reduction_low"] is not None for row in rows):
        handles.append(handle("95% over seeds", theme.muted, "|", ms=10, mew=1.0))
    sizes = {"fontsize": 8.5, "handlelength": 2.2, "columnspacing": 1.4}
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), **sizes)


def look_of(rows: Rows) -> dict[str, tuple[str, str]]:
    """Colour and marker of each strategy that has a line of its own."""
    group = grouped(rows)
    return styles([name for name in distinct_values(rows, "strategy") if name != BASE and name not in group])


def grouped(rows: Rows) -> list[str]:
    members = [name for name in distinct_values(rows, "strategy") if name in GROUP]
    return members if len(members) >= LEAST_GROUP else []


def styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    known = {name: style for name, style in STYLES.items() if name in names}
    others = [name for name in names if name not in known]
    return known | {
        name: (COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]) for place, name in enumerate(others)
    }


def handle(label: str, color: str, marker: str, **style: Any) -> Any:
    """A marker in a legend; without a line unless `ls` is given."""
    return Line2D([], [], label=label, color=color, marker=marker, **({"ls": "none"} | style))


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def published_p99(row: dict[str, Any]) -> tuple[float, float] | None:
    """The ends of the published cut of P99, which are one number where that is known."""
    value = (row.get("published") or {}).get("p99_reduction_pct")
    if value is None:
        return None
    return (float(value[0]), float(value[1])) if isinstance(value, list | tuple) else (float(value), float(value))


def _p99_panel(axes: Any, theme: Theme, rows: Rows, look: dict[str, tuple[str, str]]) -> None:
    rates = distinct_values(rows, "rate")
    at = {rate: place for place, rate in enumerate(rates)}  # evenly spaced, whatever the rates
    axes.axhline(0.0, color=theme.text, lw=1.2)
    cuts = {(row["strategy"], row["rate"]): row["p99_reduction_pct"] for row in rows}
    group = np.array([[cuts.get((name, rate), np.nan) for rate in rates] for name in grouped(rows)], np.float64)
    if group.size:
        axes.fill_between(range(len(rates)), group.min(axis=0), group.max(axis=0), color=theme.grid, lw=0)
        axes.plot(range(len(rates)), group.T, color=theme.muted, lw=0.6, marker="_", ms=7, alpha=0.8)
    lost = []
    # Shifted along the axis, so that whiskers do not hide each other.
    shifts = (np.arange(len(look)) - (len(look) - 1) / 2) * min(0.04, 0.3 / max(len(look), 1))
    for shift, (name, (color, marker)) in zip(shifts, look.items(), strict=True):
        mine = [row for row in rows if row["strategy"] == name]
        x = [at[row["rate"]] + shift for row in mine]
        y = np.array([row["p99_reduction_pct"] for row in mine])
        best = name == "latency_aware"
        for where, row in zip(x, mine, strict=True):
            if row["p99_reduction_low"] is not None:  # one seed has no interval
                axes.vlines(where, row["p99_reduction_low"], row["p99_reduction_high"], color=color, lw=1.0, alpha=0.7)
        axes.plot(x, y, color=color, marker=marker, ms=5, lw=2.4 if best else 1.5, zorder=4 if best else 3)
        below = [f"at {row['rate']:g}: {signed(value, 0)}" for row, value in zip(mine, y, strict=True) if value < FLOOR]
        lost += [f"{short(name)} {', '.join(below)}"] if below else []
    brackets = _published_p99(axes, theme, rows, at, look)
    low, high = axes.get_ylim()
    high = max(high, 5.0)
    axes.set_ylim(min(max(low, FLOOR), -0.08 * high), high)
    _rate_ticks(axes, rows, rates, brackets)
    annotate(axes, BASE, (axes.get_xlim()[1], 0), (0, -2), ha="right", va="top", fontsize=8)
    if lost:
        words = "\n".join(["below the axis", *lost])
        style = {"ha": "right", "va": "bottom", "fontsize": 7, "color": theme.muted, "zorder": 7}
        box = {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5}
        annotate(axes, words, (1, 0), (-2, 3), xycoords="axes fraction", bbox=box, **style)
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))


def _published_p99(
    axes: Any, theme: Theme, rows: Rows, at: dict[float, int], look: dict[str, tuple[str, str]]
) -> float | None:
    """Draw published values at their rates, and ranges over all rates to the right. Return where those end, or None."""
    ends_at: dict[float, list[float]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for row in rows:
        ends = published_p99(row)
        # Of other strategies only the range over all rates is known.
        if ends and row["strategy"] in (TOP_SIX if row["pattern"] == "bursty" else GREEDY):
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
            annotate(axes, short(name), (right, ends[1]), (0, 4), **style)
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
