"""Result files of ``coterie fleet``: the savings of each router, as a figure and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.figures import Theme, check_result, write_figure
from coterie.answers.fleet.simulation import FleetReport
from coterie.traces.store import write_json

RESULT_FILES = ("fleet.json", "fleet.png", "fleet.pdf")


def write_fleet_result(folder: Path, result: Mapping[str, Any], reports: Sequence[FleetReport]) -> list[Path]:
    """Write the figure and the numbers; replace older results of this command."""
    folder.mkdir(parents=True, exist_ok=True)
    height = 1.1 + sum(0.32 * len(report.rows) + 0.5 for report in reports)
    drawn = write_figure(partial(_draw, reports), folder, "fleet", height)
    write_json(folder / RESULT_FILES[0], dict(result))
    return [folder / RESULT_FILES[0], *drawn]


def read_fleet_result(path: Path) -> None:
    """Raise unless :func:`write_fleet_result` wrote the file."""
    check_result(path, "fleet", "trace")


def _draw(reports: Sequence[FleetReport], figure: Figure, theme: Theme) -> None:
    """Draw the savings of mean and p99 TPOT: two bars per router, a panel per weight dtype."""
    panels = np.atleast_1d(figure.subplots(len(reports), 1, sharex=True))
    for axes, report in zip(panels, reports, strict=True):
        rows = sorted(report.rows[1:], key=lambda row: row.saved_pct.mean)
        at = np.arange(len(rows))
        for offset, color, label, key in (
            (0.18, theme.series[0], "mean TPOT", "saved_pct"),
            (-0.18, theme.series[1], "p99 of TPOT", "saved_p99_pct"),
        ):
            values = [getattr(row, key) for row in rows]
            means = [value.mean for value in values]
            axes.barh(at + offset, means, 0.34, color=color, label=label)
            known = [(v.mean - v.low, v.high - v.mean) for v in values if v.low is not None and v.high is not None]
            if len(known) == len(values):
                spread = np.array(known).T
                axes.errorbar(means, at + offset, xerr=spread, color=theme.text, ls="none", lw=1)
        axes.set_yticks(at, [row.router for row in rows])
        axes.tick_params(axis="y", colors=theme.text, length=0)
        axes.axvline(0, color=theme.muted, lw=0.8)
        axes.grid(axis="x")
        axes.set_title(
            f"{report.model} in {report.dtype}: {report.decoders} decoders, {report.in_flight:.3g} requests on each",
            loc="left",
        )
    sure = f" (95% over {reports[0].splits} splits)" if reports[0].splits > 1 else ""
    panels[-1].set_xlabel(f"% less than {reports[0].rows[0].router}{sure}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)
