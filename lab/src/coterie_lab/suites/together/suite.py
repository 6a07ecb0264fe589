"""All decisions together: every configuration of three fleets, on real arrivals and recorded or sampled routing.

    A    eight decoders of one GPU with prefill workers beside them: router x batching
    B    an expert-parallel group of 8 ranks: placement x when it is planned anew x which rank takes a request
    C    the same on four nodes of 8 ranks, in one cell

The same requests are served under every configuration of a cell, over seeds; differences are paired. Step times are
the calibrated model's, of an H200. Wrong to read as a measurement: docs/results/together.md.
"""

from __future__ import annotations

import time
from functools import partial
from hashlib import blake2b
from inspect import getfile
from pathlib import Path
from typing import Any, NamedTuple

from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import UnavailableError
from coterie_lab.suites.kept import KeptResults
from coterie_lab.suites.shared import one_thread, recorded_data, run_cells
from coterie_lab.suites.together import decoders, groups
from coterie_lab.suites.together.figures import draw_figures
from coterie_lab.suites.together.notes import LOADS, notes_of
from coterie_lab.suites.together.notes import TABLES as TABLES
from coterie_lab.suites.together.outcomes import Outcome
from coterie_lab.suites.together.rows import Cell, Row, against_rows, pair_rows, run_rows
from coterie_lab.suites.together.traffic import ABRUPT, TRAFFICS

NAME = "together"
SEEDS = (0, 1, 2, 3, 4)
REQUESTS = {"A": 1500, "B": 1060, "C": 2500}
"""Requests of a run: over five seeds at least 5,000 are measured in a cell."""
QUICK = 300
COMPARED = {"A": decoders.COMPARED, "B": groups.COMPARED, "C": groups.COMPARED}
NO_DATA = "together needs recorded routing: set COTERIE_DATA to the folder of real data (docs/data.md)"


class Job(NamedTuple):
    cell: Cell
    seed: int


def jobs_of(seeds: tuple[int, ...], quick: bool = False) -> list[Job]:
    """Return all jobs, the longest first; quick: one cell of fleets A and B."""
    cells = [Cell("C", LOADS[0], ABRUPT)]
    cells += [Cell(fleet, load, traffic) for fleet in ("B", "A") for load in LOADS for traffic in TRAFFICS]
    if quick:
        cells = [Cell(fleet, LOADS[0], ABRUPT) for fleet in ("B", "A")]
    return [Job(cell, seed) for cell in cells for seed in seeds]


@one_thread
def serve_job(job: Job, data: Path, requests: int | None, quick: bool = False) -> dict[str, Outcome]:
    (fleet, load, traffic), seed = job
    count = requests or (QUICK if quick else REQUESTS[fleet])
    if fleet == "A":
        return decoders.serve_decoders(load, traffic, seed, count, data)
    return groups.serve_groups(fleet, load, traffic, seed, count, data)


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = recorded_data(options.data)
    if data is None:
        raise UnavailableError(NO_DATA)
    seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    jobs = jobs_of(seeds, options.quick)
    kept = None
    if options.out is not None:
        version = f"{options.requests} {options.quick} {REQUESTS} {sources_digest()}"
        kept = KeptResults(options.out / "cells.jsonl", dict[str, Outcome], version)
    work = partial(serve_job, data=data, requests=options.requests, quick=options.quick)
    results: dict[Job, dict[str, Outcome]] = run_cells(work, jobs, report, "Serving", kept)
    rows = rows_of(results)
    runs = sum(map(len, results.values()))
    notes = [*notes_of(rows), f"{runs} runs in {len(jobs)} jobs, {time.perf_counter() - begun:.0f} s."]
    if options.out is not None:
        draw_figures(options.out, rows)
    return SuiteResult(NAME, rows, notes)


def sources_digest() -> str:
    """Return a digest of Coterie's and the suites' sources, on which kept results depend."""
    folders = (Path(getfile(SuiteOptions)).parents[1], Path(__file__).parents[1])
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()


def rows_of(results: dict[Job, dict[str, Outcome]]) -> list[Row]:
    """Make the rows of every cell; jobs that differ only in their seed are its samples."""
    rows: list[dict[str, Any]] = []
    for cell in sorted(dict.fromkeys(job.cell for job in results), key=lambda cell: cell.fleet):
        runs, compared = [result for job, result in results.items() if job.cell == cell], COMPARED[cell.fleet]
        rows += run_rows(cell, runs, compared)
        rows += against_rows(cell, runs, compared) + pair_rows(cell, runs, compared.pairs)
    return rows
