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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.answers.batches.drawn import DRAWN, DrawnWorkload
from coterie.answers.runs import in_parallel, interval, interval_of, with_half
from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.batching import Strategy, strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import RunSummary, SpreadExecution, run_batches, summarise_run
from coterie.traces.store import write_json
from coterie_lab.suites.caps.published import GREEDY, RATES, REQUESTS, SEEDS, TOP_SIX, published

NAME = "caps"
PATTERNS = ("bursty", "poisson")
GAINS = ("p99_ms", "throughput", "imbalance")
FITTED_RATES = (150.0, 300.0)
"""The rest is prediction."""


class Cell(NamedTuple):
    """One run for each strategy on the same requests."""

    pattern: str
    rate: float
    seed: int


def make_strategy(name: str, setting: DrawnWorkload) -> Strategy:
    """Without a cap on skips: the published strategies have none."""
    return strategies.make(name, {"cost": SpreadCost(setting.sensitivity)}, max_skips=None)


def run_cell(cell: Cell, names: tuple[str, ...], requests: int, setting: DrawnWorkload) -> dict[str, RunSummary]:
    """Every strategy on the same arrivals and loads."""
    pattern_seed = PATTERNS.index(cell.pattern)
    rng = np.random.default_rng([cell.seed, pattern_seed])
    arrived = setting.arrivals(cell.pattern, cell.rate).draw(requests, setting.loads.mix, rng)
    loads = setting.loads.draw(arrived.domain, rng)
    execution = SpreadExecution(loads, setting.base_s, setting.sensitivity)
    found = {}
    for name in names:
        config = SchedulerConfig(strategy=name, max_skips=None)
        rng = np.random.default_rng([cell.seed, pattern_seed, 1])
        run = run_batches(arrived.arrival_s, loads, execution, config, make_strategy(name, setting), rng)
        found[name] = summarise_run(run)
    return found


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    requests = options.requests or REQUESTS
    seeds, rates = options.seeds or SEEDS, options.rates or RATES
    names = _names(options.strategies)
    cells = [Cell(pattern, rate, seed) for pattern in PATTERNS for rate in rates for seed in seeds]
    found: dict[Cell, dict[str, RunSummary]] = {}
    report("Simulating", 0, len(cells))
    for cell, summaries in in_parallel(partial(run_cell, names=names, requests=requests, setting=DRAWN), cells):
        found[cell] = summaries
        report("Simulating", len(found), len(cells))
    rows = [
        _row(pattern, rate, name, [found[Cell(pattern, rate, seed)] for seed in seeds])
        for pattern in PATTERNS
        for rate in rates
        for name in names
    ]
    standard = requests == REQUESTS and seeds == SEEDS
    for row in rows:
        row["published"] = published(row["pattern"], row["rate"], row["strategy"]) if standard else None
    result = SuiteResult(NAME, rows, _notes(rows, requests, seeds, standard))
    if options.out is not None:
        report("Drawing", 0, 1)
        _write(options.out, result, requests, seeds, rates, names)
    result.notes.append(f"{len(cells) * len(names)} runs in {time.perf_counter() - begun:.1f} s.")
    return result


def _names(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    names = dict.fromkeys(("fcfs", *(asked or strategies.names())))  # gains are against FCFS
    for name in names:
        strategies.check(name)
    return tuple(names)


def _row(pattern: str, rate: float, name: str, runs: list[dict[str, RunSummary]]) -> dict[str, Any]:
    ours = np.array([run[name] for run in runs], dtype=float)  # [seed, field]
    base = np.array([run["fcfs"] for run in runs], dtype=float)
    mean, std = ours.mean(axis=0), ours.std(axis=0, ddof=1).tolist() if len(runs) > 1 else [None] * ours.shape[1]
    at = {field: index for index, field in enumerate(RunSummary._fields)}
    row: dict[str, Any] = {"pattern": pattern, "rate": rate, "strategy": name, "fitted": rate in FITTED_RATES}
    for field in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "throughput", "imbalance"):
        row[field], row[f"{field}_std"] = float(mean[at[field]]), std[at[field]]
    row["worst_skips"] = int(ours[:, at["worst_skips"]].max())
    row["worst_wait_ms"] = float(ours[:, at["worst_wait_ms"]].max())
    of_fcfs = {field: float(mean[index] / base[:, index].mean()) for field, index in at.items() if field in GAINS}
    row["p99_reduction_pct"] = 100.0 * (1.0 - of_fcfs["p99_ms"])
    # Seeds are paired: both ran the same requests.
    cuts = 100.0 * (1.0 - ours[:, at["p99_ms"]] / base[:, at["p99_ms"]])
    found = interval(cuts)
    shift = row["p99_reduction_pct"] - found.mean  # the interval of the mean of cuts, about the cut of the means
    row["p99_reduction_low"] = None if found.low is None else found.low + shift
    row["p99_reduction_high"] = None if found.high is None else found.high + shift
    best = min(runs[0], key=lambda other: float(np.mean([run[other].p99_ms for run in runs])))
    behind = interval([100.0 * (run[name].p99_ms / run[best].p99_ms - 1.0) for run in runs])
    row["best"], row["behind_best_pct"], row["behind_best_low"], row["behind_best_high"] = best, *behind
    row["throughput_gain_pct"] = 100.0 * (of_fcfs["throughput"] - 1.0)
    row["imbalance_reduction_pct"] = 100.0 * (1.0 - of_fcfs["imbalance"])
    return row


# ------------------------------------------------------------------------------------------------------ in words


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
    ours = [row for row in rows if row["strategy"] == "latency_aware"]
    if ours:
        behind = [row for row in ours if (row["behind_best_low"] or 0.0) > 0.0]
        notes.append(
            f"latency_aware has the best P99, or one not told apart from it, in {len(ours) - len(behind)} of "
            f"{len(ours)} cells"
            + "".join(
                f"; behind {row['best']} by {row['behind_best_pct']:.1f}% at {row['pattern']} {row['rate']:g}/s"
                for row in behind
            )
            + "."
        )
    return notes


def _range(row: Row, field: str, sign: float = 1.0) -> str:
    """A published value or range."""
    found = (row["published"] or {}).get(field)
    if found is None:
        return "-"
    low, high = (found, found) if isinstance(found, float) else (found[0], found[1])
    return f"{sign * low:+.1f}" if low == high else f"{sign * low:+.1f}…{sign * high:.1f}"


def _with_published(row: Row, field: str, sign: float = 1.0) -> str:
    beside = _range(row, field, sign)
    return f"{sign * row[field]:+.1f}" + (f" ({beside})" if beside != "-" else "")


def _table(pattern: str) -> SuiteTable:
    columns = (
        Column("req/s", lambda row: f"{row['rate']:g}"),
        Column("strategy", lambda row: row["strategy"]),
        Column("P99 ms", lambda row: round(row["p99_ms"])),
        Column("P99 gain %", lambda row: with_half(interval_of(row, "p99_reduction"))),
        Column("published", lambda row: _range(row, "p99_reduction_pct")),
        Column("throughput %", lambda row: _with_published(row, "throughput_gain_pct")),
        Column("less imbalance %", lambda row: _with_published(row, "imbalance_reduction_pct")),
    )
    title = f"{pattern} arrivals, against fcfs (± 95% over seeds; published in brackets)"
    return SuiteTable(title, columns, lambda row: bool(row["pattern"] == pattern))


# ------------------------------------------------------------------------------------------------------ files


def paper_results(
    result: SuiteResult, requests: int, seeds: tuple[int, ...], rates: tuple[float, ...], names: tuple[str, ...]
) -> dict[str, Any]:
    """Arrange results in the structure of the publication's results.json."""
    out: dict[str, Any] = {
        "config": {
            "requests": requests,
            "seeds": list(seeds),
            "rates": list(rates),
            "generated": datetime.now().isoformat(timespec="seconds"),
        },
        "strategies": sorted(names),
    }
    for pattern in PATTERNS:
        by_rate: dict[str, Any] = {}
        for rate in rates:
            rows = [row for row in result.rows if (row["pattern"], row["rate"]) == (pattern, rate)]
            cell: dict[str, Any] = {}
            for row in rows:
                values = {}
                for short, field in (
                    ("p50", "p50_ms"),
                    ("p90", "p90_ms"),
                    ("p99", "p99_ms"),
                    ("p999", "p999_ms"),
                    ("throughput", "throughput"),
                    ("imbalance", "imbalance"),
                ):
                    values[f"{short}_mean"], values[f"{short}_std"] = row[field], row[f"{field}_std"]
                cell[row["strategy"]] = values
            gains = ("p99_reduction_pct", "throughput_gain_pct", "imbalance_reduction_pct")
            cell["_improvements"] = {
                row["strategy"]: {key: round(row[key], 1) for key in gains} for row in rows if row["strategy"] != "fcfs"
            }
            by_rate[f"{rate:g}"] = cell
        out[pattern] = by_rate
    return out


def _write(
    folder: Path,
    result: SuiteResult,
    requests: int,
    seeds: tuple[int, ...],
    rates: tuple[float, ...],
    names: tuple[str, ...],
) -> None:
    from coterie_lab.suites.caps.figures import draw_figures

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", paper_results(result, requests, seeds, rates, names))
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
