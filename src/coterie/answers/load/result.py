"""Result files of ``coterie load``: percentile curves as a figure, and the numbers as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coterie.answers.figures import MAX_LABEL, Theme, check_result, write_figure
from coterie.answers.load.compare import Contender
from coterie.answers.load.report import WORDS
from coterie.answers.load.summary import METRICS
from coterie.traces.store import write_json

RESULT_FILES = ("load.json", "load.png", "load.pdf")
_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)


def write_result(folder: Path, result: Mapping[str, Any], contenders: Sequence[Contender], skip: int) -> list[Path]:
    """Write the figure and the numbers; replace older results of this command."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = write_figure(partial(_draw, contenders, skip), folder, "load", 3.3)
    write_json(folder / RESULT_FILES[0], dict(result))
    return [folder / RESULT_FILES[0], *drawn]


def read_result(path: Path) -> None:
    """Raise unless :func:`write_result` wrote the file."""
    check_result(path, "load", "url")


def _draw(contenders: Sequence[Contender], skip: int, figure: Figure, theme: Theme) -> None:
    """Draw one panel per metric: time against the percentile of requests, with the tail stretched."""
    shown = {name: [_values(one, attribute, skip) for one in contenders] for name, attribute in METRICS.items()}
    shown = {name: values for name, values in shown.items() if name != "gap" and any(map(len, values))}
    panels = np.atleast_1d(figure.subplots(1, max(1, len(shown))))
    for axes, (name, series) in zip(panels, shown.items(), strict=False):
        most = max(map(len, series))
        for index, (contender, values) in enumerate(zip(contenders, series, strict=True)):
            if len(values):
                shares = np.arange(len(values)) / len(values)
                label = contender.name if len(contender.name) <= MAX_LABEL else contender.name[: MAX_LABEL - 1] + "…"
                color, style = theme.series[index % len(theme.series)], ("-", "--", ":")[index // len(theme.series) % 3]
                axes.plot(_stretched(shares), 1e3 * np.sort(values), style, color=color, label=label)
        ticks = [tick for tick in _TICKS if (1 - tick) * most >= 1 or tick <= 0.5]
        axes.set_xticks(_stretched(np.array(ticks)), [f"{100 * tick:g}" for tick in ticks])
        axes.set(title=WORDS[name], xlabel="% of requests", ylim=(0, None))
        axes.grid(True)
    panels[0].set_ylabel("ms, at most")
    if len(contenders) > 1 and shown:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(4, len(contenders)),
            fontsize=9,
        )


def _stretched(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -log10(1 - share), so that each further 9 of 99.9…% takes the same width."""
    return np.asarray(-np.log10(1 - np.minimum(shares, 1 - 1e-9)), np.float64)


def _values(contender: Contender, attribute: str, skip: int) -> NDArray[np.float64]:
    outcomes = [one for run in contender.runs for one in run.outcomes if one.request >= skip]
    found = [getattr(one, attribute) for one in outcomes if one.failure is None]
    return np.array([value for value in found if value is not None], np.float64)
