"""Expert-locality decode routing (ELDR) and beyond: what routers save of a decode step's experts and time.

    main         recorded routing, closed loop, four loads: all routers, against round robin and the best load balancer
    ahead        how far latency_aware is ahead of the locality band over all four loads
    limit        clusters made on the served requests themselves, and the share of their saving that routers reach
    unions, correlation, rho                                what expert locality rests on, on recorded routing
    band, clusters, signature                               the published design, one part of it varied at a time
    topology, expert_parallel                               synthetic routing, where recordings are too few
    prefix_cache                                            Mooncake's arrivals and prefixes, recorded routing

Routers are fitted on one half of the recorded requests and serve the other. Step times are the model's, of an H200;
what was published was measured, on other models and machines. Wrong to read as a measurement: docs/results/eldr.md.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from coterie.answers.fleet.bench import REQUESTS
from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie.errors import ConfigError, UnavailableError
from coterie.routing import routers
from coterie_lab.suites.eldr import rows as eldr_rows
from coterie_lab.suites.eldr import synthetic
from coterie_lab.suites.eldr.analysis import analyse
from coterie_lab.suites.eldr.cells import DESIGN, LIMIT_BATCH, MODEL, Cell, serve_cell
from coterie_lab.suites.eldr.fleets import ROUTERS, TRACES
from coterie_lab.suites.eldr.notes import NO_DATA, notes_of
from coterie_lab.suites.eldr.notes import TABLES as TABLES
from coterie_lab.suites.eldr.rows import Row, Runs
from coterie_lab.suites.eldr.synthetic import SyntheticCell, serve_prefixes, serve_synthetic
from coterie_lab.suites.shared import recorded_data, run_cells

NAME = "eldr"
SEEDS = tuple(range(12))
"""Seeds; each gives a split of the recorded requests and an order."""
FEW_SEEDS = 3
"""Number of seeds for parts that vary little or take long."""
LOADS = ((8, 16), (12, 16), (8, 8), (8, 24))
"""Decoders, and requests in flight per decoder."""
SMALL = (4, 16)
"""The same for DeepSeek-V2-Lite, of which there are half as many recorded requests."""
CACHE_REQUESTS = 1200


class AnalysisJob(NamedTuple):
    trace: str
    seed: int


class CacheJob(NamedTuple):
    seed: int


Job = Cell | SyntheticCell | AnalysisJob | CacheJob


def jobs_of(data: Path | None, seeds: tuple[int, ...]) -> list[Job]:
    """Return all jobs, the longest first."""
    few = seeds[:FEW_SEEDS]
    wide = (synthetic.EP_DECODERS, synthetic.EP_EACH)
    jobs: list[Job] = [SyntheticCell("expert_parallel", *wide, seed) for seed in few]
    jobs += [SyntheticCell("topology", size, synthetic.EACH, seed) for seed in few for size in synthetic.POOLS]
    if data is None:
        return jobs
    jobs += [CacheJob(seed) for seed in few]
    jobs += [Cell(MODEL, *load, seed) for load in LOADS for seed in seeds]
    jobs += [Cell("deepseek-v2-lite", *SMALL, seed) for seed in seeds]
    return jobs + [AnalysisJob(name, seed) for name in TRACES for seed in few]


def run_job(job: Job, data: Path | None, requests: int, names: tuple[str, ...] = ROUTERS) -> Any:
    if isinstance(job, SyntheticCell):
        return serve_synthetic(job)
    assert data is not None
    if isinstance(job, CacheJob):
        return serve_prefixes(job.seed, data, min(requests, CACHE_REQUESTS))
    return analyse(job, data) if isinstance(job, AnalysisJob) else serve_cell(job, data, requests, names)


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = recorded_data(options.data)
    jobs, requests = jobs_of(data, options.seeds or SEEDS), options.requests or REQUESTS
    most = max((job.decoders * job.per_decoder for job in jobs if isinstance(job, Cell)), default=0)
    if requests < 2 * most:  # fail before the work: the first cells take a while
        raise ConfigError(f"requests={requests} must be at least {2 * most}, twice what is in flight")
    names = tuple(dict.fromkeys((*ROUTERS, *(options.routers or ()))))
    for name in names:
        routers.check(name)
    if options.routers and data is None:
        raise UnavailableError("--routers needs recorded routing: set COTERIE_DATA to a folder of it (docs/data.md)")
    work = partial(run_job, data=data, requests=requests, names=names)
    rows = rows_of(run_cells(work, jobs, report, "Serving"))
    notes = notes_of(rows)
    if data is None:
        notes.insert(0, NO_DATA)
    if options.out is not None:
        report("Drawing", 0, 1)
        options.out.mkdir(parents=True, exist_ok=True)
        from coterie_lab.suites.eldr.figures import draw_figures

        draw_figures(options.out, rows)
    notes.append(f"{len(jobs)} cells in {time.perf_counter() - begun:.0f} s.")
    return SuiteResult(NAME, rows, notes)


def rows_of(results: dict[Job, Any]) -> list[Row]:
    """Make one row per router from jobs that differ only in their seed."""
    rows: list[Row] = []
    later: list[Row] = []
    by_load: list[Runs] = []
    for _, group in groupby(sorted(results, key=_kind), key=_kind):
        jobs = list(group)
        first, own = jobs[0], [results[job] for job in jobs]
        if isinstance(first, Cell):
            runs = [result.outcomes for result in own]
            rows += eldr_rows.main_rows(first.trace, first.decoders, first.per_decoder, runs)
            if first.trace == MODEL:
                by_load.append(runs)
            if first.trace == MODEL and first.per_decoder == LIMIT_BATCH:
                later += eldr_rows.limit_rows(first.decoders, own)
            if first.trace == MODEL and (first.decoders, first.per_decoder) == DESIGN:
                later += eldr_rows.design_rows(runs)
        elif isinstance(first, SyntheticCell):
            name = "qwen3-235b-a22b shape" if first.part == "expert_parallel" else "qwen3-30b-a3b shape"
            later += eldr_rows.synthetic_rows(first.part, name, first.decoders, first.per_decoder, own)
        elif isinstance(first, AnalysisJob):
            later += eldr_rows.analysis_rows(first.trace, own)
        else:
            later += eldr_rows.cache_rows(own)
    if by_load:
        later.insert(0, eldr_rows.overall_row(by_load))
    return rows + later


def _kind(job: Job) -> tuple[Any, ...]:
    """Return the sort key: everything but the seed."""
    if isinstance(job, Cell):
        order = LOADS.index((job.decoders, job.per_decoder)) if (job.decoders, job.per_decoder) in LOADS else len(LOADS)
        return 0, order, job.trace, job.decoders, job.per_decoder
    if isinstance(job, AnalysisJob):
        return 1, 0, job.trace
    return (2, job.decoders, job.part) if isinstance(job, SyntheticCell) else (3, 0, "")
