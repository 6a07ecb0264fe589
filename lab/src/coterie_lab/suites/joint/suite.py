"""Joint routing (after the Dynamo article): expert-aware routing, replication and batch scheduling, one by one.

The article has a table of decode with each added to the one before: time between tokens, throughput, and the share of
a step that is all-to-all. Here the same chain runs on one expert-parallel group of 8 ranks, each a worker
(:mod:`coterie.sim.group`), on recorded routing of two models and on synthetic routing at DeepSeek-V3's sizes, kept
apart by `routing`. Step times are the model's, of an H200. Wrong to read as a measurement: docs/results/joint.md.

The article also claims less time to first token than routing by cached KV alone. For that there are whole workers with
prefix caches (:mod:`coterie_lab.suites.joint.prefixes`): the joint router with each of its terms left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.answers.runs import interval
from coterie.answers.suites import Report, SuiteOptions, SuiteResult
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.eldr.synthetic import MOONCAKE
from coterie_lab.suites.joint import cells as joint_cells
from coterie_lab.suites.joint.cells import CHAIN, RANKS, STANDARD, SYNTHETIC, JointCell, Outcomes, Served, serve_cell
from coterie_lab.suites.joint.loop import GroupOutcome
from coterie_lab.suites.joint.notes import TABLES as GROUP_TABLES
from coterie_lab.suites.joint.notes import notes_of
from coterie_lab.suites.joint.prefix_report import PREFIX_TABLES, prefix_notes, prefix_rows
from coterie_lab.suites.joint.prefixes import (
    GROUPS,
    PAIRS,
    PRICED,
    RECORDED,
    SHARES,
    PrefixCell,
    PrefixOutcomes,
    serve_prefix_cell,
)
from coterie_lab.suites.joint.prefixes import SYNTHETIC as PREFIX_SYNTHETIC
from coterie_lab.suites.joint.published import published_of
from coterie_lab.suites.shared import mean_of, recorded_data, run_cells, savings, spread

NAME = "joint"
SEEDS = (0, 1, 2, 3, 4)
"""Seeds; each gives a split of the recorded requests and an order."""
FEW_SEEDS = 3
"""Number of seeds for synthetic routing."""
NO_DATA = "No recorded routing: only synthetic routing ran. Set COTERIE_DATA to the folder of real data (docs/data.md)."
SAVINGS = {"tbt_mean_saving": "tbt_mean_ms", "tbt_p99_saving": "tbt_p99_ms"}
"""Key of a row → field of an outcome that it compares."""
PARTS = ("main", "replicas", "budget", "locality", "slow link", "step size")
Row = dict[str, Any]


def jobs_of(data: Path | None, seeds: tuple[int, ...]) -> list[JointCell]:
    """Return all cells of the chain, the longest first."""
    names = [name for name in joint_cells.LOADS if name == SYNTHETIC or data is not None]
    return [
        JointCell(name, joint_cells.LOADS[name], seed)
        for name in names
        for seed in (seeds[:FEW_SEEDS] if name == SYNTHETIC else seeds)
    ]


def prefix_jobs_of(data: Path | None, seeds: tuple[int, ...]) -> list[PrefixCell]:
    """Return all cells with shared prefixes; Mooncake's own if its trace is there."""
    shares: list[float | None] = [*SHARES]
    if data is not None and (data / "requests" / MOONCAKE).is_file():
        shares.append(None)
    names = [*([RECORDED] if data is not None else []), PREFIX_SYNTHETIC]
    cells = [PrefixCell(name, share, seed) for name in names for share in shares for seed in seeds]
    priced = PRICED if data is not None else ()
    cells += [
        PrefixCell(name, share, seed, fleet)
        for name in priced
        for fleet in (PAIRS, GROUPS)
        for share in SHARES
        for seed in seeds
    ]
    return cells


def serve_job(job: JointCell | PrefixCell, data: Path | None, requests: int | None) -> Outcomes | PrefixOutcomes:
    if isinstance(job, PrefixCell):
        return serve_prefix_cell(job, data, requests)
    return serve_cell(job, data, requests)


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = recorded_data(options.data)
    seeds = options.seeds or SEEDS
    chain, prefixes = jobs_of(data, seeds), prefix_jobs_of(data, seeds)
    jobs: list[JointCell | PrefixCell] = [*chain, *prefixes]
    work = partial(serve_job, data=data, requests=options.requests)
    results: dict[Any, Any] = run_cells(work, jobs, report, "Serving")
    rows, shared = rows_of({job: results[job] for job in chain}), prefix_rows({job: results[job] for job in prefixes})
    notes = [*([] if data is not None else [NO_DATA]), *notes_of(rows), *prefix_notes(shared)]
    notes.append(f"{len(jobs)} cells in {time.perf_counter() - begun:.0f} s.")
    return SuiteResult(NAME, [*rows, *shared], notes)


def rows_of(results: dict[JointCell, Outcomes]) -> list[Row]:
    """Make one row per configuration, recorded routing first; cells that differ only in their seed are its samples."""
    rows: list[Row] = []
    kinds = dict.fromkeys((cell.trace, cell.per_rank) for cell in results)
    for trace, per_rank in sorted(kinds, key=lambda kind: kind[0] not in TRACES):
        runs = [outcomes for cell, outcomes in results.items() if (cell.trace, cell.per_rank) == (trace, per_rank)]
        rows += [_row(trace, per_rank, served, runs) for served in sorted(runs[0], key=_order)]
    return rows


def _order(served: Served) -> tuple[int, int, int]:
    return PARTS.index(served.part), served.tokens or 0, CHAIN.index(served.configuration)


def _row(trace: str, per_rank: int, served: Served, runs: Sequence[Outcomes]) -> Row:
    row: Row = {
        "part": served.part,
        "trace": trace,
        "routing": "recorded" if trace in TRACES else "synthetic",
        "configuration": served.configuration,
        "router": served.router,
        "ranks": RANKS,
        "in_flight": served.tokens or RANKS * per_rank,
        "extra_slots": served.extra_slots,
        "experts_placed_by": served.planner or "order",
        "budget": served.budget,
        "link": served.link,
        "seeds": len(runs),
    }
    for field in GroupOutcome._fields:
        row[field] = mean_of([run[served] for run in runs], field)
    _, row["tbt_mean_low"], row["tbt_mean_high"] = interval([run[served].tbt_mean_ms for run in runs])
    row |= _savings("", served, _step(runs[0], served, STANDARD), runs)
    at = CHAIN.index(served.configuration)
    if at and served.part in ("main", "slow link"):
        row |= _savings("step_", served, _step(runs[0], served, CHAIN[at - 1]), runs)
    if served == Served("main", joint_cells.ROUTING, "joint"):
        row |= _savings("shortest_", served, Served("main", STANDARD, "join_shortest_queue"), runs)
    row["published"] = published_of(served.configuration) if served.part == "main" and _in_chain(served) else None
    return row


def _in_chain(served: Served) -> bool:
    return served.router == ("round_robin" if served.configuration == STANDARD else "joint")


def _step(outcomes: Outcomes, served: Served, configuration: str) -> Served:
    """Return the step of the chain that a row is compared with: of its own part, else of the published chain."""
    if served.part == "step size":
        return Served(served.part, STANDARD, served.router, tokens=served.tokens)
    part = "slow link" if served.part == "slow link" else "main"
    wanted = (part, configuration)
    return next(step for step in outcomes if (step.part, step.configuration) == wanted and _in_chain(step))


def _savings(prefix: str, served: Served, base: Served, runs: Sequence[Outcomes]) -> Row:
    """Return savings in percent, paired by seed, with 95% intervals."""
    row: Row = {}
    for key, field in SAVINGS.items():
        row |= spread(f"{prefix}{key}", savings([run[served] for run in runs], [run[base] for run in runs], field))
    return row


TABLES = (*GROUP_TABLES, *PREFIX_TABLES)
