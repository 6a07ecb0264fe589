"""Colours and markers of strategies, labels and legends of the CAPS suite's figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from coterie.answers.figures import MAX_LABEL, Theme
from coterie_lab.suites.caps.published import GREEDY, TOP_SIX
from coterie_lab.suites.shared import Rows, annotate, distinct_values

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
    BASE: ("#1c2430", "."),
}
COLORS, MARKERS = ("#b8326f", "#12858f", "#7a5c12", "#6b2f2f"), "PXph*"
"""Colours and markers of all other strategies: 20 pairs before one repeats."""
MOST_LISTED = 8
"""Lines of small print in a corner."""


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


def published_ends(row: dict[str, Any], field: str) -> tuple[float, float] | None:
    value = (row.get("published") or {}).get(field)
    if value is None:
        return None
    return (float(value[0]), float(value[1])) if isinstance(value, list | tuple) else (float(value), float(value))


def is_of_rate(row: dict[str, Any]) -> bool:
    """Whether the published P99 is of the row's rate; for other strategies only the range over all rates is known."""
    return row["strategy"] in (TOP_SIX if row["pattern"] == "bursty" else GREEDY)


def p99_cuts(rows: Rows, name: str, rates: Sequence[float]) -> NDArray[np.float64]:
    by = {row["rate"]: row["p99_reduction_pct"] for row in rows if row["strategy"] == name}
    return np.array([by.get(rate, np.nan) for rate in rates], np.float64)


def shifts(count: int) -> NDArray[np.float64]:
    """Shifts along the axis, so that whiskers do not hide each other."""
    return np.asarray((np.arange(count) - (count - 1) / 2) * min(0.04, 0.3 / max(count, 1)), np.float64)


def short_name(name: str) -> str:
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def shortened_list(lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return lines if len(lines) <= MOST_LISTED else [*lines[:MOST_LISTED], f"and {len(lines) - MOST_LISTED} more"]


def write_in_corner(axes: Any, theme: Theme, lines: Sequence[str]) -> None:
    """Small print in the lower right, above all else."""
    style = {"ha": "right", "va": "bottom", "fontsize": 7, "color": theme.muted, "zorder": 7}
    box = {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5}
    annotate(axes, "\n".join(lines), (1, 0), (-2, 3), xycoords="axes fraction", bbox=box, **style)


def handle(label: str, color: str, marker: str, **style: Any) -> Line2D:
    """A marker in a legend; without a line unless `ls` is given."""
    return Line2D([], [], label=label, color=color, marker=marker, **({"ls": "none"} | style))


def whisker_handle(theme: Theme) -> Any:
    return handle("95% over seeds", theme.muted, "|", ms=10, mew=1.0)


def line_handles(look: dict[str, tuple[str, str]]) -> list[Any]:
    return [
        handle(short_name(name), color, marker, ms=5, ls="--" if name == BASE else "-")
        for name, (color, marker) in look.items()
    ]


def legend_above(figure: Figure, handles: Sequence[Any]) -> None:
    if handles:
        sizes = {"fontsize": 8.5, "handlelength": 2.2, "columnspacing": 1.4}
        figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), **sizes)
