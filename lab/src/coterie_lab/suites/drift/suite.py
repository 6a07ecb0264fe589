"""Drift: what the live loop is worth when traffic changes, on recorded routing and on recorded loads.

gpt-oss-20b's subjects and GLM-5.2's domains are served in turn on simulated fleets, by two routers: with the fit of the
first turn throughout, with the live loop that a gateway runs, and with a fresh fit at every change (:mod:`.cells`).
Step times are the model's, of an H200. Wrong to read as a measurement: docs/results/drift.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import UnavailableError
from coterie_lab.suites.drift import cells as drift_cells
from coterie_lab.suites.drift.advice import advice_rows
from coterie_lab.suites.drift.cells import CHANCE, FRESH, LOOP, VARIANTS, WITHOUT, CellResult, DriftCell
from coterie_lab.suites.drift.notes import BAR_PCT, advice_notes, notes_of
from coterie_lab.suites.drift.notes import TABLES as TABLES
from coterie_lab.suites.drift.traffic import GLM
from coterie_lab.suites.shared import mean_of, recorded_data, run_cells, savings, spread

NAME = "drift"
SEEDS = tuple(range(5))
NO_DATA = "drift needs recorded routing: set COTERIE_DATA to the folder of real data (docs/data.md)"
Row = dict[str, Any]


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = recorded_data(options.data)
    if data is None:
        raise UnavailableError(NO_DATA)
    cells = [
        DriftCell(trace, router, seed)
        for seed, trace, router in product(options.seeds or SEEDS, drift_cells.PER_DECODER, drift_cells.ROUTERS)
    ]
    work = partial(drift_cells.serve_cell, data=data, requests=options.requests or drift_cells.REQUESTS)
    rows = rows_of(run_cells(work, cells, report, "Serving"))
    report("Planning placements", len(cells), len(cells))
    advised = advice_rows(data / "activations" / GLM / "expert_counts.npz")
    notes = [*notes_of(rows), *advice_notes(advised), f"{len(cells)} cells in {time.perf_counter() - begun:.0f} s."]
    return SuiteResult(NAME, [*rows, *advised], notes)


def rows_of(results: dict[DriftCell, CellResult]) -> list[Row]:
    """Make one row per trace, router and variant; cells that differ only in their seed are its samples."""
    rows: list[Row] = []
    for trace, router in dict.fromkeys((cell.trace, cell.router) for cell in results):
        runs = [result for cell, result in results.items() if (cell.trace, cell.router) == (trace, router)]
        rows += [_row(trace, router, variant, runs) for variant in VARIANTS]
    return rows


def _row(trace: str, router: str, variant: str, runs: Sequence[CellResult]) -> Row:
    row: Row = {"trace": trace, "router": router, "variant": variant, "seeds": len(runs)}
    own, base = [run.outcomes[variant] for run in runs], [run.outcomes[WITHOUT] for run in runs]
    for name in own[0]._fields:
        saved = savings(own, base, name)
        row |= {name: mean_of(own, name)} | spread(f"{name}_saving", saved)
        if name == "tpot_ms":
            row["worst_seed_pct"] = min(saved)
            row["noise_pct"] = float(np.sqrt(np.mean(np.square(saved)))) if variant == CHANCE else None
    if variant == LOOP:
        row |= _loop_values(runs)
        row["within_bar"] = row["tpot_ms_saving_pct"] >= -BAR_PCT
        row["all_seeds_within_bar"] = row["worst_seed_pct"] >= -BAR_PCT
    row["published"] = None
    return row


def _loop_values(runs: Sequence[CellResult]) -> Row:
    kinds = ("drift", "refit_started", "refit_taken", "refit_kept", "fall_back")
    waits = [run.waited for run in runs if np.isfinite(run.waited)]
    late = [100.0 * (run.outcomes[LOOP].late_experts / run.outcomes[FRESH].late_experts - 1.0) for run in runs]
    return {
        **{kind: float(np.mean([run.events.get(kind, 0) for run in runs])) for kind in kinds},
        "changes": runs[0].changes,
        "requests_to_swap": float(np.mean(waits)) if waits else None,
        **spread("late_experts_over_fresh", late),
    }
