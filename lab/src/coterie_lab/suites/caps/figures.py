"""The figures of the CAPS suite, each as PDF and PNG, ours beside what was published.

A strategy has the same colour and marker in every figure. Strategies that lie on top of each other are one grey group;
those whose order is the claim have a line of their own, and so have a user's own strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from coterie.answers.figures import Theme, write_figure
from coterie_lab.suites.caps import drawing
from coterie_lab.suites.caps.drawing import BASE, handle, legend_above, line_handles, published_ends, short_name, signed
from coterie_lab.suites.shared import Rows, annotate, distinct_values

PERCENTILES = {"p50_ms": "50", "p90_ms": "90", "p99_ms": "99", "p999_ms": "99.9"}
SHOWN = (BASE, "random", "greedy_variance", "latency_aware")
"""Strategies whose percentiles are drawn; others take the place of missing ones."""
FLOOR = -60.0
"""Lowest value of the axis; larger losses are written, since drawing them would flatten all else."""
NEAR = {"p99_reduction_pct": 5.0, "throughput_gain_pct": 2.0, "imbalance_reduction_pct": 2.0}
"""Points from the published value that count as agreement."""
MOST_RATES = 4
"""Most columns of the percentiles; of more rates, evenly spread ones are drawn."""


def draw_figures(folder: Path, rows: Rows) -> list[Path]:
    """Write the figures that the rows have numbers for; return the paths in order of the figures."""
    if not rows:
        return []
    rows = sorted(rows, key=lambda row: float(row["rate"]))  # a user may give rates in any order
    bursty = [row for row in rows if row["pattern"] == "bursty" and row["strategy"] != BASE]
    pairs, patterns = _pairs(rows), distinct_values(rows, "pattern")
    fills: list[tuple[str, Callable[[Figure, Theme], None], float]] = []
    if any(row["strategy"] != BASE for row in rows):
        fills.append(("fig1_p99_by_rate", partial(_p99_by_rate, rows), 4.0))
    if pairs:
        fills.append(("fig2_ours_vs_published", partial(_against_published, pairs), 4.3))
    if bursty:
        names = len(distinct_values(bursty, "strategy"))
        fills.append(("fig3_strategies", partial(_by_strategy, bursty), 1.3 + 0.22 * names))
    fills.append(("fig4_percentiles", partial(_percentiles, rows), 0.8 + 1.7 * len(patterns)))
    return [path for name, fill, height in fills for path in write_figure(fill, folder, name, height)]


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


class Pair(NamedTuple):
    """Ours and the published number of a cell, or of a strategy if only the range over the rates is known."""

    field: str
    pattern: str
    strategy: str
    rate: float | None
    """None if `ours` and `theirs` are ranges over the rates."""
    fitted: bool
    ours: tuple[float, float]
    interval: tuple[float, float]
    theirs: tuple[float, float]

    @property
    def off(self) -> float:
        """Points between ours and the published number, at the end where they are further apart."""
        if self.ours[0] == self.ours[1]:
            return max(self.theirs[0] - self.ours[0], self.ours[0] - self.theirs[1], 0.0)
        return max(abs(ours - theirs) for ours, theirs in zip(self.ours, self.theirs, strict=True))


def _pairs(rows: Rows) -> list[Pair]:
    pairs: list[Pair] = []
    over_rates: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        for field in NEAR:
            theirs = published_ends(row, field)
            if theirs and field == "p99_reduction_pct" and drawing.is_of_rate(row):
                ours, low = (row[field], row[field]), row["p99_reduction_low"]
                ends = ours if low is None else (low, row["p99_reduction_high"])
                cell = row["pattern"], row["strategy"], row["rate"], row["fitted"]
                pairs.append(Pair(field, *cell, ours, ends, theirs))
            elif theirs:
                over_rates.setdefault((field, row["pattern"], row["strategy"]), []).append(row)
    for (field, pattern, name), mine in over_rates.items():
        values = [row[field] for row in mine]
        ours, theirs = (min(values), max(values)), published_ends(mine[0], field)
        assert theirs is not None
        pairs.append(Pair(field, pattern, name, None, all(row["fitted"] for row in mine), ours, ours, theirs))
    return pairs


def _against_published(pairs: list[Pair], figure: Figure, theme: Theme) -> None:
    fields = [("cut of P99 (%)", ("p99_reduction_pct",)), ("throughput gain, imbalance cut (%)", tuple(NEAR)[1:])]
    panels = [(title, [pair for pair in pairs if pair.field in wanted]) for title, wanted in fields]
    panels = [(title, mine) for title, mine in panels if mine]
    for axes, (title, mine) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        near = NEAR[mine[0].field]
        ends = [end for pair in mine for end in (*pair.ours, *pair.theirs)]
        low, high = min(0.0, *ends), max(0.0, *ends)
        low, high = low - 0.08 * (high - low) * (low < 0), high + 0.08 * (high - low)
        axes.fill_between((low, high), (low - near, high - near), (low + near, high + near), color=theme.grid, lw=0)
        axes.plot((low, high), (low, high), color=theme.muted, lw=1)
        for kind in dict.fromkeys(map(_kind, mine)):
            _draw_pairs(axes, theme, [pair for pair in mine if _kind(pair) == kind])
        axes.set(title=title, xlabel="published", ylabel="ours")
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        style = {"fontsize": 8, "rotation": 45, "rotation_mode": "anchor", "color": theme.muted}
        annotate(axes, f"± {near:g} points", (low, low + near), (4, 4), **style)
        far = _far(mine, near)
        if far:
            drawing.write_in_corner(axes, theme, ["outside the band", *far])
    legend_above(figure, _pair_handles(pairs, theme))


def _kind(pair: Pair) -> tuple[str, str]:
    """Return the label and the marker that pairs of one kind share."""
    words = {"throughput_gain_pct": ("throughput", "s"), "imbalance_reduction_pct": ("imbalance", "^")}
    return words.get(pair.field, (f"P99, {pair.pattern}", "o"))


def _pair_color(theme: Theme, pair: Pair) -> str:
    if pair.field == "p99_reduction_pct":
        return theme.series[0] if pair.pattern == "bursty" else theme.series[1]
    return theme.series[2] if pair.field == "throughput_gain_pct" else theme.series[3]


def _draw_pairs(axes: Any, theme: Theme, pairs: list[Pair]) -> None:
    color, (_, marker) = _pair_color(theme, pairs[0]), _kind(pairs[0])
    ranges = [pair for pair in pairs if pair.rate is None]
    if ranges:
        ends = [np.transpose([getattr(pair, side) for pair in ranges]) for side in ("theirs", "ours")]
        sign, size = ("_", 6.0) if marker == "o" else (marker, 4.5)  # the ends of a P99, which moves with the rate
        axes.plot(*ends, color=color, lw=1.4, marker=sign, ms=size, zorder=3)
    for fitted in (True, False):
        cells = [pair for pair in pairs if pair.rate is not None and pair.fitted == fitted]
        if not cells:
            continue
        x, y = [sum(pair.theirs) / 2 for pair in cells], [pair.ours[0] for pair in cells]
        low, high = np.transpose([pair.interval for pair in cells])
        axes.vlines(x, low, high, color=color, lw=0.7, alpha=0.35)
        axes.hlines(y, *np.transpose([pair.theirs for pair in cells]), color=color, lw=1.0)
        axes.plot(x, y, "o", ms=5.5, mec=color, mfc=color if fitted else theme.background, mew=1.2, zorder=4)


def _pair_handles(pairs: list[Pair], theme: Theme) -> list[Any]:
    kinds = {_kind(pair): _pair_color(theme, pair) for pair in pairs}
    handles = [handle(label, color, marker, ms=6) for (label, marker), color in kinds.items()]
    shown = {pair.fitted for pair in pairs if pair.rate is not None}
    if True in shown:
        handles.append(handle("rate fitted", theme.muted, "o", ms=6))
    if False in shown:
        handles.append(handle("rate predicted", theme.muted, "o", ms=6, mfc=theme.background))
    if any(pair.rate is None and pair.field == "p99_reduction_pct" for pair in pairs):
        handles.append(handle("least to most of the rates", theme.muted, "_", ms=6, lw=1.4, ls="-"))
    if any(pair.rate is not None and pair.interval[0] < pair.interval[1] for pair in pairs):
        handles.append(drawing.whisker_handle(theme))
    return handles


def _far(pairs: list[Pair], near: float) -> list[str]:
    """Name the strategies that are further than `near` from the published number, one line per kind."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        label = _kind(pair)[0]
        if pair.field == "p99_reduction_pct":
            label = f"{pair.pattern} {pair.rate:g}" if pair.rate is not None else f"{pair.pattern}, all rates"
        groups.setdefault(label, []).append(pair)
    lines = []
    for label, group in groups.items():
        far = [short_name(pair.strategy) for pair in group if pair.off > near]
        if far:
            lines.append(f"{label}: " + (", ".join(far) if len(far) < 3 else f"{len(far)} of {len(group)}"))
    return drawing.shortened_list(lines)


def _by_strategy(rows: Rows, figure: Figure, theme: Theme) -> None:
    fields = {"throughput_gain_pct": "throughput gain (%)", "imbalance_reduction_pct": "imbalance cut (%)"}
    names = distinct_values(rows, "strategy")
    by_name = {name: [row for row in rows if row["strategy"] == name] for name in names}
    names.sort(key=lambda name: float(np.mean([row["throughput_gain_pct"] for row in by_name[name]])))
    places = np.arange(len(names))
    panels = figure.subplots(1, 2, sharey=True)
    any_published = False
    for axes, (field, title), color in zip(panels, fields.items(), theme.series[2:], strict=True):
        means = [float(np.mean([row[field] for row in by_name[name]])) for name in names]
        axes.barh(places, means, height=0.62, color=color, alpha=0.75)
        known = {name: ends for row in rows if (ends := published_ends(row, field)) for name in [row["strategy"]]}
        spots = [(place, end) for place, name in enumerate(names) for end in known.get(name, ())]
        if spots:
            any_published = True
            axes.plot(*np.transpose(spots)[::-1], "|", color=theme.text, ms=11, mew=1.2)
        low, high = min(0.0, *means), max(1e-9, *means, *(end for _, end in spots))
        axes.set(xlabel=title, xlim=(low * 1.05, high + 0.2 * (high - low)))
        for place, mean in enumerate(means):
            axes.annotate(signed(mean), (axes.get_xlim()[1], place), ha="right", va="center", fontsize=8)
        axes.axvline(0.0, color=theme.text, lw=1)
        ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])  # none under the numbers
        axes.grid(axis="x")
    panels[0].set_yticks(places, [short_name(name) for name in names])
    panels[0].tick_params(axis="y", length=0, labelcolor=theme.text, labelsize=9)
    panels[1].tick_params(axis="y", length=0)
    rates = distinct_values(rows, "rate")
    over = f"{', '.join(f'{rate:g}' for rate in rates)}" if len(rates) <= 6 else f"{rates[0]:g} to {rates[-1]:g}"
    label = f"bursty arrivals, {'mean over ' if len(rates) > 1 else ''}{over} requests a second"
    handles: list[Any] = [Patch(color=theme.muted, alpha=0.75, label=label)]
    if any_published:
        handles.append(handle("published, both ends", theme.text, "|", ms=9, mew=1.2))
    legend_above(figure, handles)


def _percentiles(rows: Rows, figure: Figure, _: Theme) -> None:
    patterns, rates, names = (distinct_values(rows, key) for key in ("pattern", "rate", "strategy"))
    shown = sorted(names, key=lambda name: name not in SHOWN)[: len(SHOWN)]
    look = drawing.styles(shown)
    if len(rates) > MOST_RATES:
        rates = [rates[place] for place in np.linspace(0, len(rates) - 1, MOST_RATES).round().astype(int)]
    panels = figure.subplots(len(patterns), len(rates), squeeze=False)
    by = {(row["pattern"], row["rate"], row["strategy"]): row for row in rows}
    for pattern, line in zip(patterns, panels, strict=True):
        for rate, axes in zip(rates, line, strict=True):
            seconds = []
            for name in shown:
                color, marker = look[name]
                row = by.get((pattern, rate, name))
                values = [row[field] / 1e3 if row else np.nan for field in PERCENTILES]
                width = 2.0 if name == "latency_aware" else 1.2
                dashes, above = ("--", 3) if name == BASE else ("-", 2)
                axes.plot(values, color=color, marker=marker, ms=4, lw=width, ls=dashes, zorder=above)
                seconds += [value for value in values if value > 0]
            last = pattern == patterns[-1]
            axes.set_xticks(range(len(PERCENTILES)), list(PERCENTILES.values()) if last else [])
            axes.tick_params(labelsize=8)
            if seconds and max(seconds) > 20 * min(seconds):
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, max(seconds, default=1.0) * 1.08)
                axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.grid(axis="y")
            axes.set_title(f"{pattern}, {rate:g}/s", fontsize=9)
        line[0].set_ylabel("latency (s)", fontsize=9)
    figure.supxlabel("percentile of requests", fontsize=9)
    legend_above(figure, line_handles(look))
