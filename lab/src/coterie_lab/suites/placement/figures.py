"""The figure of the placement suite: the load of every rank, step by step, under EPLB's plan and under ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from coterie.answers.figures import Theme, write_figure
from coterie.types import layer_balance
from coterie_lab.suites.placement.cells import EPLB, FREE, ROWS, STEPS, plan_first
from coterie_lab.suites.placement.traffic import ONE_DOMAIN, glm_samples, read_chunks

Array = NDArray[np.float64]

NAME = "placement"
RANKS, SLOTS = 16, 288
FAR = 0.7
"""Deviation from the mean at which colours end."""
SHOWN = {EPLB: "EPLB, planned on the mean", STEPS: "latency_optimal, planned on steps"}


class Strips(NamedTuple):
    """One layer's load of every rank in steps that no plan has seen."""

    layer: int
    """Index among the layers that were planned."""
    domains: tuple[str, ...]
    """Domains of the steps in this order, with an equal number of steps each."""
    loads: dict[str, Array]
    """Planner → [rank, step] load ÷ mean rank load of the step."""


def strips_of(data: Path) -> Strips:
    """The layer whose gain over EPLB is the median of all layers; every unseen chunk is a step."""
    chunks = read_chunks(data)
    sample = glm_samples(chunks, ONE_DOMAIN, ROWS, 0)[0]
    steps = chunks.halves(0)[1].reshape(-1, *sample.fit.tokens.shape)
    relative = {}
    for planner in SHOWN:
        placement = plan_first(planner, sample, FREE, RANKS, SLOTS).placement
        loads = np.array([placement.rank_load(step) for step in steps])  # [step, layer, rank]
        relative[planner] = loads / loads.mean(axis=2, keepdims=True)
    even = {name: np.mean([layer_balance(step) for step in loads], axis=0) for name, loads in relative.items()}
    gain = even[STEPS] - even[EPLB]
    layer = int(np.argsort(gain)[len(gain) // 2])
    return Strips(layer, chunks.domains, {name: loads[:, layer].T for name, loads in relative.items()})


def draw_figure(folder: Path, data: Path) -> list[Path]:
    """Write PDF and PNG."""
    return write_figure(partial(_fill, strips_of(data)), folder, NAME, 7.2)


def _fill(strips: Strips, figure: Figure, theme: Theme) -> None:
    panels: Any = figure.subplots(3, 1, sharex=True, height_ratios=(1.0, 1.0, 0.8))
    colors = LinearSegmentedColormap.from_list("load", [theme.series[0], theme.background, theme.series[1]])
    image: Any = None
    for axes, (planner, label) in zip(panels, SHOWN.items(), strict=False):
        scale = {"vmin": 1 - FAR, "vmax": 1 + FAR, "interpolation": "nearest"}
        image = axes.imshow(strips.loads[planner], aspect="auto", cmap=colors, **scale)
        axes.set(ylabel="rank", yticks=range(0, RANKS, 5))
        axes.set_title(label, loc="left")
        axes.tick_params(axis="x", length=0)
        _divide(axes, strips, theme.muted)
    bar = figure.colorbar(image, ax=panels[:2].tolist(), pad=0.02, extend="both")
    bar.set_label("load ÷ mean of the step")
    bar.outline.set_visible(False)
    _slowest(panels[2], strips, theme)


def _slowest(axes: Any, strips: Strips, theme: Theme) -> None:
    for color, (planner, label) in zip((theme.series[1], theme.series[0]), SHOWN.items(), strict=True):
        slowest = strips.loads[planner].max(axis=0)
        at = np.arange(len(slowest) + 1) - 0.5
        axes.stairs(slowest, at, color=color, lw=1.8, label=f"{label}: {slowest.mean():.2f}", baseline=None)
    axes.set(ylabel="slowest rank ÷ mean", ylim=(1.0, None))
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(SHOWN), borderaxespad=0.2)
    axes.grid(axis="y")
    _divide(axes, strips, theme.muted)
    each = next(iter(strips.loads.values())).shape[1] // len(strips.domains)
    middles = each * np.arange(len(strips.domains)) + (each - 1) / 2
    axes.set_xticks(middles, [name.replace("_", "\n") for name in strips.domains], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(f"GLM-5.2, one layer: unseen steps of one domain each, {each} of every domain")


def _divide(axes: Any, strips: Strips, color: str) -> None:
    """Lines between the domains."""
    count = next(iter(strips.loads.values())).shape[1]
    for edge in range(0, count + 1, count // len(strips.domains)):
        axes.axvline(edge - 0.5, color=color, lw=0.8)
