"""Drift: what the live loop is worth when traffic changes, on recorded routing and on recorded loads.

gpt-oss-20b's subjects and GLM-5.2's domains are served in turn on simulated fleets, by two routers: with the fit of the
first turn for all of them, with the live loop that a gateway runs, and with a fresh fit at every change
(:mod:`.cells`). Step times are the model's, of an H200. Wrong to read as a measurement: docs/results/drift.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.runs import in_parallel, interval
from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import UnavailableError
from coterie_lab.suites.drift.advice import advice_rows
from coterie_lab.suites.drift.cells import (
    CHANCE,
    FRESH,
    LOOP,
    PER_DECODER,
    REQUESTS,
    ROUTERS,
    VARIANTS,
    WITHOUT,
    DriftCell,
    Found,
    serve_cell,
)
from coterie_lab.suites.drift.notes import BAR_PCT, advice_notes, notes_of
from coterie_lab.suites.drift.notes import TABLES as TABLES
from coterie_lab.suites.drift.traffic import GLM

NAME = "drift"
SEEDS = tuple(range(5))
NO_DATA = "drift needs recorded routing: set COTERIE_DATA to the folder of real data (docs/data.md)"
Row = dict[str, Any]


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    if options.data is None or not (options.data / "activations").is_dir():
        raise UnavailableError(NO_DATA)
    data: Path = options.data
    cells = [
        DriftCell(trace, router, seed) for seed in options.seeds or SEEDS for trace in PER_DECODER for router in ROUTERS
    ]
    found: dict[DriftCell, Found] = {}
    report("Serving", 0, len(cells))
    for cell, result in in_parallel(partial(serve_cell, data=data, requests=options.requests or REQUESTS), cells):
        found[cell] = result
        report("Serving", len(found), len(cells))
    rows = rows_of({cell: found[cell] for cell in cells})
    report("Planning placements", len(found), len(cells))
    advised = advice_rows(data / "activations" / GLM / "expert_counts.npz")
    notes = [*notes_of(rows), *advice_notes(advised), f"{len(cells)} cells in {time.perf_counter() - begun:.0f} s."]
    return SuiteResult(NAME, [*rows, *advised], notes)


def rows_of(found: dict[DriftCell, Found]) -> list[Row]:
    """One row per trace, router and variant; cells that differ in their seed alone are its samples."""
    rows: list[Row] = []
    for trace, router in dict.fromkeys((cell.trace, cell.router) for cell in found):
        runs = [one for cell, one in found.items() if (cell.trace, cell.router) == (trace, router)]
        rows += [_row(trace, router, variant, runs) for variant in VARIANTS]
    return rows


def _row(trace: str, router: str, variant: str, runs: Sequence[Found]) -> Row:
    row: Row = {"trace": trace, "router": router, "variant": variant, "seeds": len(runs)}
    own, base = [run.outcomes[variant] for run in runs], [run.outcomes[WITHOUT] for run in runs]
    for name in own[0]._fields:
        row[name] = float(np.mean([getattr(one, name) for one in own]))
        saved = [100.0 * (1.0 - getattr(a, name) / getattr(b, name)) for a, b in zip(own, base, strict=True)]
        spread = interval(saved)
        row |= {f"{name}_saving_pct": spread.mean, f"{name}_saving_low": spread.low, f"{name}_saving_high": spread.high}
        if name == "tpot_ms":
            row["worst_seed_pct"] = min(saved)
            row["noise_pct"] = float(np.sqrt(np.mean(np.square(saved)))) if variant == CHANCE else None
    if variant == LOOP:
        row |= _loop_values(runs)
        row["within_bar"] = row["tpot_ms_saving_pct"] >= -BAR_PCT
        row["all_seeds_within_bar"] = row["worst_seed_pct"] >= -BAR_PCT
    row["published"] = None
    return row


def _loop_values(runs: Sequence[Found]) -> Row:
    kinds = ("drift", "refit_started", "refit_taken", "refit_kept", "fall_back")
    waits = [run.waited for run in runs if np.isfinite(run.waited)]
    late = interval(
        [100.0 * (run.outcomes[LOOP].late_experts / run.outcomes[FRESH].late_experts - 1.0) for run in runs]
    )
    return {
        **{kind: float(np.mean([run.events.get(kind, 0) for run in runs])) for kind in kinds},
        "changes": runs[0].changes,
        "requests_to_swap": float(np.mean(waits)) if waits else None,
        "late_experts_over_fresh_pct": late.mean,
        "late_experts_over_fresh_low": late.low,
        "late_experts_over_fresh_high": late.high,
    }
