"""Placement: plans for single steps, plans for their mean, and the planners of others, on steps that none has seen.

Four models' real routing, 4 to 32 ranks, with and without spare slots (:mod:`.cells`); re-plans after the traffic has
become another (:mod:`.shifts`); the mix of today against single domains (:mod:`.mixtures`). Wrong to read as a
measurement: layer times are the step model's, of an H200 (docs/results/placement.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.answers.runs import in_parallel
from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import UnavailableError
from coterie_lab.suites.placement.cells import Cell, cells_of, serve_cell
from coterie_lab.suites.placement.mixtures import Mixture, mixtures_of, serve_mixture
from coterie_lab.suites.placement.notes import TABLES as TABLES
from coterie_lab.suites.placement.notes import notes_of
from coterie_lab.suites.placement.rows import mixture_rows, plan_rows, shift_rows
from coterie_lab.suites.placement.shifts import GROUPS, Shift, serve_shift, shifts_of
from coterie_lab.suites.placement.traffic import GLM, RECORDED

NAME = "placement"
SEEDS = (0, 1, 2)
NO_DATA = "placement needs recorded routing: set COTERIE_DATA to the folder of real data (docs/data.md)"
Task = Cell | Shift | Mixture


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    if options.data is None or not (options.data / "activations").is_dir():
        raise UnavailableError(NO_DATA)
    data: Path = options.data
    tasks = tasks_of(options.seeds or SEEDS)
    found: dict[Task, Any] = {}
    report("Planning", 0, len(tasks))
    for task, result in in_parallel(partial(serve, data=data), tasks):
        found[task] = result
        report("Planning", len(found), len(tasks))
    rows = rows_of({task: found[task] for task in tasks})
    if options.out is not None:
        from coterie_lab.suites.placement.figures import draw_figure

        options.out.mkdir(parents=True, exist_ok=True)
        draw_figure(options.out, data)
    return SuiteResult(NAME, rows, [*notes_of(rows), f"{len(tasks)} cells in {time.perf_counter() - begun:.0f} s."])


def tasks_of(seeds: Sequence[int]) -> list[Task]:
    """The cells of all parts; those that take longest first."""
    cells = [cell for trace in (GLM, *RECORDED) for cell in cells_of(trace, seeds)]
    return [*cells, *mixtures_of(seeds), *(shift for trace in GROUPS for shift in shifts_of(trace, seeds))]


def serve(task: Task, data: Path) -> Any:
    if isinstance(task, Cell):
        return serve_cell(task, data)
    return serve_shift(task, data) if isinstance(task, Shift) else serve_mixture(task, data)


def rows_of(found: dict[Task, Any]) -> list[dict[str, Any]]:
    return [
        *plan_rows({task: one for task, one in found.items() if isinstance(task, Cell)}),
        *shift_rows({task: one for task, one in found.items() if isinstance(task, Shift)}),
        *mixture_rows({task: one for task, one in found.items() if isinstance(task, Mixture)}),
    ]
