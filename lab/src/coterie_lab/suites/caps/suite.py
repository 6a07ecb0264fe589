"""CAPS: batch selection by predicted expert load, all strategies, both arrival patterns, beside what was published.

A server runs batches of 8 from a window of the 32 oldest requests, 60 experts, top-4. A batch takes
``base x (1 + sensitivity x CV of its load)``. What the publication does not give (how requests arrive and use experts,
the base time, the sensitivity) was fitted to its figures at 150 and 300 requests a second; 200 and 250 are predicted.

All published gains are those of a finite run in overload: 3,000 requests arrive faster than they are served, so P99 is
the wait at the end of the run, and a server that is 12% faster cuts it by far more. They say little of a server that
keeps up, and nothing of one GPU, where the assumed straggler does not exist (docs/results/regimes.md).
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.answers.batches.drawn import DRAWN, DrawnWorkload
from coterie.answers.runs import interval
from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.batching import Strategy, strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import RunSummary, SpreadExecution, run_batches, summarise_run
from coterie.traces.store import write_json
from coterie_lab.suites.caps.published import GREEDY, RATES, REQUESTS, SEEDS, TOP_SIX, published
from coterie_lab.suites.shared import as_is, behind_best, gain, run_cells, spread

NAME = "caps"
PATTERNS = ("bursty", "poisson")
AVERAGED = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "throughput", "imbalance")
"""Fields of a run whose mean and deviation over seeds a row has."""
GAINS = ("p99_ms", "throughput", "imbalance")
FITTED_RATES = (150.0, 300.0)
"""Rates that the workload was fitted to; the others are predicted."""


class Cell(NamedTuple):
    """One run per strategy on the same requests."""

    pattern: str
    rate: float
    seed: int


def make_strategy(name: str, setting: DrawnWorkload) -> Strategy:
    """Make a strategy without a cap on skips: the published strategies have none."""
    return strategies.make(name, {"cost": SpreadCost(setting.sensitivity)}, max_skips=None)


def run_cell(cell: Cell, names: tuple[str, ...], requests: int, setting: DrawnWorkload) -> dict[str, RunSummary]:
    """Run every strategy on the same arrivals and loads."""
    pattern_seed = PATTERNS.index(cell.pattern)
    rng = np.random.default_rng([cell.seed, pattern_seed])
    arrived = setting.arrivals(cell.pattern, cell.rate).draw(requests, setting.loads.mix, rng)
    loads = setting.loads.draw(arrived.domain, rng)
    execution = SpreadExecution(loads, setting.base_s, setting.sensitivity)
    summaries = {}
    for name in names:
        config = SchedulerConfig(strategy=name, max_skips=None)
        rng = np.random.default_rng([cell.seed, pattern_seed, 1])
        run = run_batches(arrived.arrival_s, loads, execution, config, make_strategy(name, setting), rng)
        summaries[name] = summarise_run(run)
    return summaries


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    requests = options.requests or REQUESTS
    seeds, rates = options.seeds or SEEDS, options.rates or RATES
    names = compared_strategies(options.strategies)
    cells = [Cell(*cell) for cell in product(PATTERNS, rates, seeds)]
    runs = run_cells(partial(run_cell, names=names, requests=requests, setting=DRAWN), cells, report, "Simulating")
    rows = [
        _row(pattern, rate, name, [runs[Cell(pattern, rate, seed)] for seed in seeds])
        for pattern, rate, name in product(PATTERNS, rates, names)
    ]
    standard = requests == REQUESTS and seeds == SEEDS
    for row in rows:
        row["published"] = published(row["pattern"], row["rate"], row["strategy"]) if standard else None
    result = SuiteResult(NAME, rows, _notes(rows, requests, seeds, standard))
    if options.out is not None:
        report("Drawing", 0, 1)
        _write(options.out, result, paper_results(result, requests, seeds, rates, names))
    result.notes.append(f"{len(cells) * len(names)} runs in {time.perf_counter() - begun:.1f} s.")
    return result


def compared_strategies(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return fcfs, which gains are against, and the strategies asked for, or all; raise for an unknown name."""
    names = dict.fromkeys(("fcfs", *(asked or strategies.names())))
    for name in names:
        strategies.check(name)
    return tuple(names)


def _row(pattern: str, rate: float, name: str, runs: list[dict[str, RunSummary]]) -> dict[str, Any]:
    ours = np.array([run[name] for run in runs], dtype=float)  # [seed, field]
    base = np.array([run["fcfs"] for run in runs], dtype=float)
    mean, std = ours.mean(axis=0), ours.std(axis=0, ddof=1).tolist() if len(runs) > 1 else [None] * ours.shape[1]
    at = {field: index for index, field in enumerate(RunSummary._fields)}
    row: dict[str, Any] = {"pattern": pattern, "rate": rate, "strategy": name, "fitted": rate in FITTED_RATES}
    for field in AVERAGED:
        row[field], row[f"{field}_std"] = float(mean[at[field]]), std[at[field]]
    row["worst_skips"] = int(ours[:, at["worst_skips"]].max())
    row["worst_wait_ms"] = float(ours[:, at["worst_wait_ms"]].max())
    of_fcfs = {field: float(mean[index] / base[:, index].mean()) for field, index in at.items() if field in GAINS}
    row["p99_reduction_pct"] = 100.0 * (1.0 - of_fcfs["p99_ms"])
    # Seeds are paired: both ran the same requests.
    cuts = interval(100.0 * (1.0 - ours[:, at["p99_ms"]] / base[:, at["p99_ms"]]))
    shift = row["p99_reduction_pct"] - cuts.mean  # the interval of the mean of cuts, about the cut of the means
    row["p99_reduction_low"] = None if cuts.low is None else cuts.low + shift
    row["p99_reduction_high"] = None if cuts.high is None else cuts.high + shift
    row["best"] = best = min(runs[0], key=lambda other: float(np.mean([run[other].p99_ms for run in runs])))
    row |= spread("behind_best", [100.0 * (run[name].p99_ms / run[best].p99_ms - 1.0) for run in runs])
    row["throughput_gain_pct"] = 100.0 * (of_fcfs["throughput"] - 1.0)
    row["imbalance_reduction_pct"] = 100.0 * (1.0 - of_fcfs["imbalance"])
    return row


def _notes(rows: list[dict[str, Any]], requests: int, seeds: tuple[int, ...], standard: bool) -> list[str]:
    notes = [
        f"{requests:,} requests, seeds {', '.join(map(str, seeds))}; gains against fcfs on the same requests, no cap "
        "on skips.",
        "Gains of a finite run in overload: P99 is the wait at its end, so it gains far more than the server does. "
        "Where the server keeps up (poisson, 150), reordering costs more than it brings.",
    ]
    if not standard:
        return [*notes, f"Published figures are for {REQUESTS:,} requests and seeds {', '.join(map(str, SEEDS))}."]
    notes.append(
        "Fitted to the published figures of 150 and 300 requests a second: arrivals, expert use, base time, "
        "sensitivity. 200 and 250 are predicted."
    )
    by = {(row["pattern"], row["rate"], row["strategy"]): row for row in rows}
    for rate in sorted({row["rate"] for row in rows}):
        for pattern, group in (("bursty", TOP_SIX), ("poisson", GREEDY)):
            ours = [by[pattern, rate, name]["p99_reduction_pct"] for name in group if (pattern, rate, name) in by]
            known = published(pattern, rate, group[0])
            if ours and known:
                beside = known["p99_reduction_pct"]
                words = f"{beside:+.1f}" if isinstance(beside, float) else f"{beside[0]:+.1f} to {beside[1]:+.1f}"
                notes.append(
                    f"{pattern} {rate:g}/s: {'top six' if pattern == 'bursty' else 'greedy'} "
                    f"{min(ours):+.1f} to {max(ours):+.1f}% P99, published {words}% "
                    f"({'fitted' if rate in FITTED_RATES else 'predicted'})."
                )
    claim = "has the best P99, or one not told apart from it,"
    return notes + behind_best(rows, claim, lambda row: f"at {row['pattern']} {row['rate']:g}/s")


def _range(row: Row, field: str) -> str:
    """Show a published value or range."""
    value = (row["published"] or {}).get(field)
    if value is None:
        return "-"
    low, high = (value, value) if isinstance(value, float) else (value[0], value[1])
    return f"{low:+.1f}" if low == high else f"{low:+.1f}…{high:.1f}"


def _with_published(row: Row, field: str) -> str:
    beside = _range(row, field)
    return f"{row[field]:+.1f}" + (f" ({beside})" if beside != "-" else "")


def _table(pattern: str) -> SuiteTable:
    columns = (
        Column("req/s", lambda row: f"{row['rate']:g}"),
        *as_is("strategy"),
        Column("P99 ms", lambda row: round(row["p99_ms"])),
        Column("P99 gain %", gain("p99_reduction")),
        Column("published", lambda row: _range(row, "p99_reduction_pct")),
        Column("throughput %", lambda row: _with_published(row, "throughput_gain_pct")),
        Column("less imbalance %", lambda row: _with_published(row, "imbalance_reduction_pct")),
    )
    title = f"{pattern} arrivals, against fcfs (± 95% over seeds; published in brackets)"
    return SuiteTable(title, columns, lambda row: bool(row["pattern"] == pattern))


def paper_results(
    result: SuiteResult, requests: int, seeds: tuple[int, ...], rates: tuple[float, ...], names: tuple[str, ...]
) -> dict[str, Any]:
    """Arrange results in the structure of the publication's results.json."""
    now = datetime.now().isoformat(timespec="seconds")
    config = {"requests": requests, "seeds": list(seeds), "rates": list(rates), "generated": now}
    out: dict[str, Any] = {"config": config, "strategies": sorted(names)}
    for pattern in PATTERNS:
        by_rate: dict[str, Any] = {}
        for rate in rates:
            rows = [row for row in result.rows if (row["pattern"], row["rate"]) == (pattern, rate)]
            cell: dict[str, Any] = {}
            for row in rows:
                values = {}
                for field in AVERAGED:
                    short = field.removesuffix("_ms")
                    values[f"{short}_mean"], values[f"{short}_std"] = row[field], row[f"{field}_std"]
                cell[row["strategy"]] = values
            gains = ("p99_reduction_pct", "throughput_gain_pct", "imbalance_reduction_pct")
            cell["_improvements"] = {
                row["strategy"]: {key: round(row[key], 1) for key in gains} for row in rows if row["strategy"] != "fcfs"
            }
            by_rate[f"{rate:g}"] = cell
        out[pattern] = by_rate
    return out


def _write(folder: Path, result: SuiteResult, as_published: dict[str, Any]) -> None:
    from coterie_lab.suites.caps.figures import draw_figures

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", as_published)
    lines = [f"{'pattern':8} {'req/s':>6} {'strategy':20} {'p99 ms':>8} {'p99 %':>7} {'thr %':>6} {'imb %':>6} beside"]
    for row in result.rows:
        lines.append(
            f"{row['pattern']:8} {row['rate']:6g} {row['strategy']:20} {row['p99_ms']:8.0f} "
            f"{row['p99_reduction_pct']:+7.1f} {row['throughput_gain_pct']:+6.1f} "
            f"{row['imbalance_reduction_pct']:+6.1f} {json.dumps(row['published']) if row['published'] else '-'}"
        )
    (folder / "evaluation.log").write_text("\n".join([*result.notes, "", *lines, ""]), encoding="utf-8")
    draw_figures(folder, result.rows)


TABLES = tuple(_table(pattern) for pattern in PATTERNS)
