"""Placement: plans for single steps, plans for their mean, and other planners, on unseen steps.

Four models' real routing, 4 to 32 ranks, with and without spare slots (:mod:`.cells`); re-plans after the traffic has
changed (:mod:`.shifts`); the current mix against single domains (:mod:`.mixtures`). Wrong to read as a measurement:
layer times are the step model's, of an H200 (docs/results/placement.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import UnavailableError
from coterie_lab.suites.placement.cells import Cell, cells_of, serve_cell
from coterie_lab.suites.placement.mixtures import Mixture, mixtures_of, serve_mixture
from coterie_lab.suites.placement.notes import TABLES as TABLES
from coterie_lab.suites.placement.notes import notes_of
from coterie_lab.suites.placement.rows import mixture_rows, plan_rows, shift_rows
from coterie_lab.suites.placement.shifts import GROUPS, Shift, serve_shift, shifts_of
from coterie_lab.suites.placement.traffic import GLM, RECORDED
from coterie_lab.suites.shared import recorded_data, run_cells

NAME = "placement"
SEEDS = (0, 1, 2)
NO_DATA = "placement needs recorded routing: set COTERIE_DATA to the folder of real data (docs/data.md)"
Task = Cell | Shift | Mixture


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = recorded_data(options.data)
    if data is None:
        raise UnavailableError(NO_DATA)
    tasks = tasks_of(options.seeds or SEEDS)
    rows = rows_of(run_cells(partial(serve, data=data), tasks, report, "Planning"))
    if options.out is not None:
        from coterie_lab.suites.placement.figures import draw_figure

        options.out.mkdir(parents=True, exist_ok=True)
        draw_figure(options.out, data)
    return SuiteResult(NAME, rows, [*notes_of(rows), f"{len(tasks)} cells in {time.perf_counter() - begun:.0f} s."])


def tasks_of(seeds: Sequence[int]) -> list[Task]:
    """Return the cells of all parts, the longest first."""
    cells = [cell for trace in (GLM, *RECORDED) for cell in cells_of(trace, seeds)]
    return [*cells, *mixtures_of(seeds), *(shift for trace in GROUPS for shift in shifts_of(trace, seeds))]


def serve(task: Task, data: Path) -> Any:
    if isinstance(task, Cell):
        return serve_cell(task, data)
    return serve_shift(task, data) if isinstance(task, Shift) else serve_mixture(task, data)


def rows_of(results: dict[Task, Any]) -> list[dict[str, Any]]:
    return [
        *plan_rows({task: result for task, result in results.items() if isinstance(task, Cell)}),
        *shift_rows({task: result for task, result in results.items() if isinstance(task, Shift)}),
        *mixture_rows({task: result for task, result in results.items() if isinstance(task, Mixture)}),
    ]
