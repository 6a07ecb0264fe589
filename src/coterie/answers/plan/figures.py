"""Figure of a placement: the number of slots or the rank of every expert, and the load of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from coterie.answers.figures import HEIGHT_IN, Theme, write_figure
from coterie.placement.maps.formats import PlacementMap

EVEN = 0.01
"""Relative distance from the mean below which a text replaces the colours, which would look the same."""


def draw_map(
    path: Path, map: PlacementMap, rank_load: NDArray[np.float64] | None, load: NDArray[np.float64] | None
) -> list[Path]:
    """Write the figure to `path` (.png) and as .pdf beside it; replace older files."""
    placement, counts = map.placement, map.placement.replicas
    order = None if load is None else np.argsort(-load, axis=1, kind="stable")
    what = "expert" if load is None else "expert, hottest first"
    ids = list(range(len(counts)) if map.layer_ids is None else map.layer_ids)

    def fill(figure: Any, theme: Theme) -> None:
        upper, lower = (figure.add_subplot(), None) if rank_load is None else figure.subplots(2, 1)
        if counts.max() > 1:
            _replicas(
                figure, upper, theme, counts if order is None else np.take_along_axis(counts, order, 1), ids, what
            )
        elif placement.num_ranks > 1:  # every count is 1: a heat map of the counts would have one colour
            ranks = np.argsort(placement.slot_experts, axis=1, kind="stable") // placement.slots_per_rank
            _homes(figure, upper, theme, ranks, ids, "expert", ("Rank of every expert", "rank"))
        else:
            _homes(figure, upper, theme, placement.slot_experts, ids, "slot", ("Expert of every slot", "expert"))
        if rank_load is not None:
            _ranks(figure, lower, theme, rank_load, ids)

    return write_figure(fill, path.parent, path.stem, HEIGHT_IN * (1 if rank_load is None else 1.9))


def _replicas(figure: Any, axes: Any, theme: Theme, counts: NDArray[np.int64], ids: list[int], what: str) -> None:
    most = int(counts.max())
    colors = theme.colormap().resampled(max(most, 2))
    image = axes.imshow(
        counts,
        aspect="auto",
        interpolation="nearest",
        cmap=colors,
        norm=BoundaryNorm(np.arange(0.5, max(most, 2) + 1.0), max(most, 2)),
        extent=_extent(counts.shape),
    )
    axes.set(xlabel=what, ylabel="layer", title="Slots of every expert")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _layers(axes, ids)
    ticks = np.unique(np.linspace(1, max(most, 2), min(max(most, 2), 9)).round().astype(int))
    bar = figure.colorbar(image, ax=axes, ticks=ticks, pad=0.02)
    bar.minorticks_off()
    bar.set_label("slots")
    bar.outline.set_visible(False)


def _homes(
    figure: Any, axes: Any, theme: Theme, values: NDArray[np.integer], ids: list[int], what: str, named: tuple[str, str]
) -> None:
    """Draw ranks [layer, expert] or experts [layer, slot]; `named` holds the title and the label of the colour bar."""
    title, label = named
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", cmap=theme.colormap(), vmin=0, extent=_extent(values.shape)
    )
    axes.set(xlabel=what, ylabel="layer", title=f"{title} (no expert has a replica)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _layers(axes, ids)
    bar = figure.colorbar(image, ax=axes, ticks=MaxNLocator(8, integer=True), pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _ranks(figure: Any, axes: Any, theme: Theme, rank_load: NDArray[np.float64], ids: list[int]) -> None:
    mean = rank_load.mean(axis=1, keepdims=True)
    values = np.divide(rank_load, mean, out=np.zeros_like(rank_load), where=mean > 0)
    # The scale is symmetric around the mean. The most loaded rank (series[1]) makes the others of its layer wait.
    apart = float(np.abs(values - 1.0).max())
    far = max(0.1, apart)
    colors = LinearSegmentedColormap.from_list("coterie-ranks", [theme.series[0], theme.grid, theme.series[1]])
    image = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap=colors,
        vmin=1.0 - far,
        vmax=1.0 + far,
        extent=_extent(values.shape),
    )
    axes.set(xlabel="rank", ylabel="layer", title="Load of every rank")
    if apart < EVEN:  # differences too small to see as colours
        middle = (values.shape[1] - 1) / 2, (values.shape[0] - 1) / 2
        said = f"even: all within {100 * max(apart, 1e-4):.2f}% of their layer's mean"
        axes.text(*middle, said, ha="center", va="center", color=theme.text)
    axes.set_xticks(range(0, values.shape[1], -(-values.shape[1] // 16)))
    _layers(axes, ids)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("load ÷ mean of the layer")
    bar.outline.set_visible(False)


def _extent(shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    return (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)


def _layers(axes: Any, ids: list[int]) -> None:
    at = list(range(0, len(ids), -(-len(ids) // 12)))
    axes.set_yticks(at, [str(ids[i]) for i in at])
