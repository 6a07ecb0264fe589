"""What suites share: cells run in parallel, samples over seeds, traces at hand, columns of printed tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from coterie.answers.runs import interval, interval_of
from coterie.answers.suites import Column, Report, Row
from coterie.costs.step import StepModel
from coterie.errors import UnknownNameError
from coterie.models import get_model
from coterie.types import NVLINK4, Link, ModelSpec
from coterie_lab.suites.kept import KeptResults
from coterie_lab.suites.running import in_parallel, with_half

Rows = Sequence[dict[str, Any]]
C = TypeVar("C", bound=Hashable)
R = TypeVar("R")
P = ParamSpec("P")


def run_cells(
    work: Callable[[C], R], cells: Sequence[C], report: Report, doing: str, kept: KeptResults[R] | None = None
) -> dict[C, R]:
    """Run every cell, one process per core; return the results in the order of `cells`.

    Results go into the file of `kept` as they complete, and cells whose result is in it already do not run.
    """
    results: dict[C, R] = {} if kept is None else kept.read(cells)
    missing = [cell for cell in cells if cell not in results]
    report(doing, len(results), len(cells))
    for cell, result in in_parallel(work, missing):
        results[cell] = result if kept is None else kept.add(cell, result)
        report(doing, len(results), len(cells))
    return {cell: results[cell] for cell in cells}


def one_thread(work: Callable[P, R]) -> Callable[P, R]:
    """Let compiled loops use one thread while `work` runs: cells run one process per core, and threads would wait."""

    @wraps(work)
    def run(*arguments: P.args, **settings: P.kwargs) -> R:
        threads = numba.get_num_threads()
        numba.set_num_threads(1)
        try:
            return work(*arguments, **settings)
        finally:
            numba.set_num_threads(threads)

    return run


def joined_by(model: StepModel, link: Link) -> StepModel:
    """Return the model on ranks of its topology that are joined by `link`.

    Over any but NVLink the all-to-all is the one measured between nodes, as if every rank were a node; rings and moved
    weights take the rate of the link.
    """
    if link == NVLINK4 or model.topology.exchange is None:
        return replace(model, topology=replace(model.topology, intra=link))
    between = model.topology.exchange[1]
    return replace(model, topology=replace(model.topology, intra=link, exchange=(between,) * 3))


def savings(own: Iterable[Any], base: Iterable[Any], field: str) -> list[float]:
    """Percent by which `field` is lower than in the base, one value per pair of runs."""
    return [100.0 * (1.0 - getattr(a, field) / getattr(b, field)) for a, b in zip(own, base, strict=True)]


def spread(key: str, samples: Sequence[float] | NDArray[np.float64], unit: str = "_pct") -> dict[str, Any]:
    """Return the mean of samples and its 95% interval as fields of a row: KEY_pct, KEY_low and KEY_high."""
    mean, low, high = interval(samples)
    return {f"{key}{unit}": mean, f"{key}_low": low, f"{key}_high": high}


def mean_of(runs: Iterable[Any], field: str) -> float:
    return float(np.mean([getattr(run, field) for run in runs]))


def distinct_values(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a field, each once, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def existing_paths(folder: Path, names: Iterable[str], notes: list[str], missing: str) -> list[Path]:
    """Return the paths that exist; for each of the others add the note `missing`, with {path} filled in."""
    paths = [folder / name for name in names]
    notes += [missing.format(path=path) for path in paths if not path.exists()]
    return [path for path in paths if path.exists()]


def recorded_data(data: Path | None) -> Path | None:
    """Return the folder of real data, or None if it holds no recorded routing."""
    return data if data is not None and (data / "activations").is_dir() else None


def known_model(name: str) -> ModelSpec | None:
    """Return the shipped shape of that name, or None if there is none."""
    try:
        return get_model(name)
    except UnknownNameError:
        return None


def behind_best(rows: Sequence[Row], claim: str, where: Callable[[Row], str]) -> list[str]:
    """Say in how many cells latency_aware does as the claim says, and by how much it is behind elsewhere."""
    ours = [row for row in rows if row["strategy"] == "latency_aware"]
    behind = [row for row in ours if (row["behind_best_low"] or 0.0) > 0.0]
    words = [f"behind {row['best']} by {row['behind_best_pct']:.1f}% {where(row)}" for row in behind]
    counted = f"latency_aware {claim} in {len(ours) - len(behind)} of {len(ours)} cells"
    return ["; ".join([counted, *words]) + "."] if ours else []


# Columns of printed tables.


def plain(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get(key)


def as_is(*keys: str) -> tuple[Column, ...]:
    """Return columns that show fields as they are, each under its own name."""
    return tuple(Column(key, plain(key)) for key in keys)


def number(key: str, digits: int = 2, sign: str = "") -> Callable[[Row], str | None]:
    return lambda row: None if row.get(key) is None else f"{row[key]:{sign}.{digits}f}"


def gain(key: str, digits: int = 1) -> Callable[[Row], str]:
    """Show KEY_pct ± half of its interval; nothing if the row has no such field."""
    return lambda row: "" if row.get(f"{key}_pct") is None else with_half(interval_of(row, key), digits)


def annotate(axes: Any, words: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """Write words beside a point of a figure, shifted by so many points of type."""
    axes.annotate(words, at, shift, textcoords="offset points", **style)


def median_imbalance(rank_load: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return max ÷ median over ranks [layer] of a load [layer, rank], as Sem-MoE does; 1 for a layer without load.

    Infinite if more than half of the ranks have no load.
    """
    median = np.median(rank_load, axis=1)
    peak = rank_load.max(axis=1)
    ratio = np.divide(peak, median, out=np.full(len(peak), np.inf), where=median > 0)
    return np.where(peak > 0, ratio, 1.0)
