"""Figures in one shared style, drawn without a display.

Every plot is a function of plain numbers, axes and a :class:`Theme`, so that a page can carry a light and a dark
version and another suite can reuse it. None (a value that could not be computed) is drawn as a gap.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from coterie.traces.store import write_json

Numbers = Sequence[float | None]
WIDTH_IN, HEIGHT_IN, DPI = 7.2, 4.0, 150
MAX_LABEL = 22
"""Most characters of an axis label; a longer name is cut."""


@dataclass(frozen=True, slots=True)
class Theme:
    name: str
    background: str
    text: str
    muted: str
    """Colour of ticks and reference lines."""
    grid: str
    series: tuple[str, ...]
    """Colours of the plotted series, in order of use; distinct with any common colour vision."""
    ramp: tuple[str, ...]
    """Colours of a heat map, from the lowest to the highest value."""

    def colormap(self) -> Any:
        return LinearSegmentedColormap.from_list(f"coterie-{self.name}", list(self.ramp))


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#1c2430",
    muted="#5b6675",
    grid="#e3e7ec",
    series=("#1f6fb4", "#d9730d", "#2a8c5a", "#8e4fb0"),
    ramp=("#f3f7fb", "#a9cbe8", "#4a90c9", "#1b5a94", "#0b2f57"),
)
DARK = Theme(
    name="dark",
    background="#171b21",
    text="#e6eaf0",
    muted="#9aa6b5",
    grid="#2c333d",
    series=("#6db3f2", "#f2a65a", "#63c794", "#c08fe0"),
    ramp=("#1c232c", "#1f4a75", "#2f7dbd", "#7fbdf0", "#e4f2ff"),
)
THEMES = (LIGHT, DARK)


def draw(plot: Callable[[Any, Theme], None], theme: Theme, height_in: float = HEIGHT_IN) -> bytes:
    """Return a PNG of one pair of axes that `plot` fills."""
    with _figure(lambda figure, theme: plot(figure.add_subplot(), theme), theme, height_in) as figure:
        return _png(figure)


def write_figure(
    fill: Callable[[Figure, Theme], None], folder: Path, name: str, height_in: float = HEIGHT_IN, theme: Theme = LIGHT
) -> list[Path]:
    """Write a figure that `fill` draws (one or more axes) as ``name.pdf`` and ``name.png``; replace older files."""
    with _figure(fill, theme, height_in) as figure:
        png, pdf = _png(figure), io.BytesIO()
        figure.savefig(pdf, format="pdf", metadata={"Creator": None, "Producer": None, "CreationDate": None})
    paths = [folder / f"{name}.pdf", folder / f"{name}.png"]
    for path, data in zip(paths, (pdf.getvalue(), png), strict=True):
        path.write_bytes(data)
    return paths


def write_result(
    folder: Path, verb: str, result: Mapping[str, Any], fill: Callable[[Figure, Theme], None], height_in: float
) -> list[Path]:
    """Write the numbers and the figure of a verb to ``VERB.json``, ``.pdf`` and ``.png``; replace older results."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = write_figure(fill, folder, verb, height_in)
    write_json(folder / f"{verb}.json", dict(result))
    return [folder / f"{verb}.json", *drawn]


def short(name: str) -> str:
    """Cut a long name for an axis label."""
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "font.size": 10.0,
        "axes.titlesize": 11.0,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.text,
        "axes.facecolor": theme.background,
        "figure.facecolor": theme.background,
        "text.color": theme.text,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "grid.color": theme.grid,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }


@contextmanager
def _figure(fill: Callable[[Figure, Theme], None], theme: Theme, height_in: float) -> Iterator[Figure]:
    with matplotlib.rc_context(_style(theme)):
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure, theme)
        # Compute the layout once, before any file is saved: otherwise every save lays out and draws the figure twice.
        layout = figure.get_layout_engine()
        assert layout is not None
        layout.execute(figure)
        figure.set_layout_engine(None)
        yield figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Leave out the version and the date, so that the same numbers give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def heat_map(load: Sequence[Sequence[float]], layer_ids: Sequence[int], axes: Any, theme: Theme) -> None:
    """Plot load [layer, expert] as a heat map relative to the layer's mean: a row per layer, hottest expert first."""
    values = -np.sort(-np.asarray(load), axis=1)
    values = values / np.maximum(values.mean(axis=1, keepdims=True), 1e-300)
    # The scale ends at the 99.5th percentile: with a single far outlier, all other values would have one colour.
    top = max(1.5, float(np.percentile(values, 99.5)))
    axes.set(xlabel="expert, hottest first", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, prune=None))
    extend = "max" if values.max() > top else "neither"
    _image(axes, values, "load ÷ mean of the layer", layer_ids, 1, extend, cmap=theme.colormap(), vmin=0.0, vmax=top)


def layer_lines(
    layer_ids: Sequence[int],
    series: Mapping[str, Numbers],
    ylabel: str,
    band: tuple[float, float, str] | None,
    axes: Any,
    theme: Theme,
) -> None:
    """Plot one line per series over the layers; `band` (low, high, label) shades a range, such as published values."""
    if band is not None:
        axes.axhspan(band[0], band[1], color=theme.muted, alpha=0.16, lw=0, label=band[2])
    for color, (label, values) in zip(theme.series, series.items(), strict=False):
        axes.plot(range(len(layer_ids)), _array(values), color=color, marker="o", ms=3.5, label=label)
    axes.set(xlabel="layer", ylabel=ylabel, xlim=(-0.5, len(layer_ids) - 0.5))
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(high, 1e-3) * 1.02)
    _layer_ticks(axes.xaxis, layer_ids, 16)
    _legend(axes)


def against_batch(
    batch: Sequence[int], series: Mapping[str, Numbers], reference: Numbers, experts: int, axes: Any, theme: Theme
) -> None:
    """Plot distinct experts per layer against batch size; `reference` is the curve of uniform random routing."""
    axes.axhline(experts, color=theme.muted, lw=1, ls=":")
    axes.annotate(
        f"all {experts}", (batch[0], experts), (2, 3), textcoords="offset points", color=theme.muted, fontsize=9
    )
    axes.plot(batch, _array(reference), color=theme.muted, ls="--", label="uniform random routing")
    for color, marker, (label, values) in zip(theme.series, "osd^", series.items(), strict=False):
        axes.plot(batch, _array(values), color=color, marker=marker, ms=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(batch), [str(b) for b in batch])
    axes.set(xlabel="decode tokens in the step, each of another request", ylabel="distinct experts in a layer")
    axes.set_ylim(0, experts * 1.1)
    _legend(axes, loc="lower right")


def matrix(names: Sequence[str], values: Sequence[Numbers], label: str, axes: Any, theme: Theme) -> None:
    """Plot a square matrix of similarities, with its numbers as text."""
    cells = np.array([_array(row) for row in values])
    low = min(0.9, float(np.floor(np.nanmin(cells, initial=1.0) * 10) / 10))
    image = _image(axes, cells, label, cmap=theme.colormap(), vmin=low, vmax=1.0)
    labels = [short(name) for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), labels)
    axes.tick_params(length=0, colors=theme.text, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row, column in np.ndindex(cells.shape):
        value = cells[row, column]
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "#10161e" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#ffffff"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)


def drift_curve(
    lag: Sequence[float], skew_left: Numbers, unit: str, fitted: tuple[float, float] | None, axes: Any, theme: Theme
) -> None:
    """Plot the share of the initial skew left against lag; `fitted` is the half-life (in `unit`) and the floor."""
    axes.plot(lag, _array(skew_left), "o", ms=4, color=theme.series[0], label="measured, noise removed")
    if fitted is not None:
        half_life, floor = fitted
        fine = np.linspace(0, lag[-1], 200)
        label = f"fit: half-life {half_life:,.{'3g' if half_life < 1e4 else '0f'}} {unit}"
        axes.plot(fine, floor + (1 - floor) * 2 ** (-fine / half_life), color=theme.series[1], label=label)
    axes.axhline(1.0, color=theme.muted, lw=1, ls=":")
    axes.set(xlabel=f"lag ({unit})", ylabel="share of the first skew left", xlim=(0, lag[-1] * 1.02))
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(1.05, high))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_locator(MaxNLocator(7))
    _legend(axes, loc="lower left")


def steps(values: Sequence[float], bin_s: float, mean: float, axes: Any, theme: Theme) -> None:
    """Plot the arrival rate over time: `values` in requests per second, one per bin of `bin_s` seconds."""
    scale, unit = (60.0, "min") if bin_s * len(values) > 600 else (1.0, "s")
    edges = np.arange(len(values) + 1) * bin_s / scale
    axes.stairs(values, edges, fill=True, color=theme.series[0], alpha=0.3)
    axes.stairs(values, edges, color=theme.series[0], lw=1.4, label=f"per bin of {bin_s:,.3g} s")
    axes.axhline(mean, color=theme.muted, lw=1.2, ls="--", label=f"mean {mean:,.3g} a second")
    axes.set(xlabel=f"time ({unit})", ylabel="requests a second", xlim=(0, edges[-1]), ylim=(0, max(values) * 1.25))
    _legend(axes)


def _image(
    axes: Any,
    values: NDArray[Any],
    label: str,
    layer_ids: Sequence[int] = (),
    first: int = 0,
    extend: str = "neither",
    **settings: Any,
) -> Any:
    """Draw values [row, column] as colours, with a colour bar; `first` is the number of the first column."""
    rows, columns = values.shape
    extent = (first - 0.5, first + columns - 0.5, rows - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, **settings)
    if layer_ids:
        _layer_ticks(axes.yaxis, layer_ids, 12)
    bar = axes.figure.colorbar(image, ax=axes, extend=extend, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return image


def _array(values: Numbers) -> NDArray[np.float64]:
    return np.array([np.nan if v is None else v for v in values], np.float64)


def _layer_ticks(axis: Any, layer_ids: Sequence[int], most: int) -> None:
    at = range(0, len(layer_ids), -(-len(layer_ids) // most))
    axis.set_ticks(at, [str(layer_ids[i]) for i in at])


def _legend(axes: Any, loc: str | None = None) -> None:
    """Draw horizontal grid lines, and a legend for two or more series: at `loc`, or above the axes if None."""
    axes.grid(axis="y")
    count = len(axes.get_legend_handles_labels()[0])
    above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": count, "borderaxespad": 0.2}
    if count > 1:
        axes.legend(**(above if loc is None else {"loc": loc}), fontsize=9)
