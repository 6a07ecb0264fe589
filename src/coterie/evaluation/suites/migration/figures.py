"""The figure of the migration suite: remote share by strategy, every model beside the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from coterie.evaluation.figures import Theme, write_figure

Rows = Sequence[dict[str, Any]]

NAME = "fig_migration"


def draw_figure(folder: Path, rows: Rows, order: Sequence[str], published: Mapping[str, Sequence[float]]) -> list[Path]:
    """A panel for each kind of traffic, as PDF and PNG."""
    return write_figure(partial(_fill, rows, order, published), folder, NAME, 3.4)


def _fill(
    rows: Rows, order: Sequence[str], published: Mapping[str, Sequence[float]], figure: Figure, theme: Theme
) -> None:
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = figure.subplots(1, len(traffics), sharey=True, squeeze=False)[0]
    for panel, traffic in zip(panels, traffics, strict=True):
        has_published = any(row["published"] for row in rows if row["traffic"] == traffic)
        if has_published:
            theirs = [published[name][0] for name in order]
            panel.plot(order, theirs, color=theme.muted, ls="--", marker="s", ms=4, lw=1.2, label="published")
        for color, marker, model in zip(theme.series, "o^Dv", models, strict=False):
            mine = {
                row["strategy"]: row["remote_pct"]
                for row in rows
                if row["model"] == model and row["traffic"] == traffic
            }
            panel.plot(order, [mine[name] for name in order], color=color, marker=marker, ms=5, lw=1.4, label=model)
        panel.set_title(traffic if traffic == "at random" else f"by domain, {traffic}")
        panel.grid(axis="y")
        panel.set_ylim(45, 95)
        panel.tick_params(axis="x", labelrotation=35)
        for label in panel.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    panels[0].set_ylabel("remote activations, %")
    panels[0].legend(fontsize=8, loc="lower left")
