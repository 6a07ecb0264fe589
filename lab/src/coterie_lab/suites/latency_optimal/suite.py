"""Latency-optimal load balancing: balance, moves and time of a plan, the interval sweep, and real shifting loads.

Three parts, each beside what was published where anything was:

    balance   one plan for 58 layers of 256 experts on 8 ranks: how even, how many moves, how long (the paper's table);
              the ILP has a time limit and plans three of them, with all others beside it on the same three
    sweep     a round every n = 1, 10, 100, 1000 iterations, and when Coterie decides it is due (the paper's figure)
    domains   GLM-5.2's real loads as traffic shifts between domains, every plan scored on the window after its own

Wrong to read as measurements of the paper's machine: times follow from prices (docs/results/latency-optimal.md says
which were fitted), and the paper's loads are not public, so a load with the same balance stands in for them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.answers.runs import interval_of, told_apart, with_ends
from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.placement import LatencyOptimalIlp, Load, Plan, planners
from coterie.types import Placement, balancedness
from coterie_lab.suites.latency_optimal.domains import MODEL, DomainSetting, domain_rows
from coterie_lab.suites.latency_optimal.sweep import Policy, SweepSetting, run_seed
from coterie_lab.suites.shared import as_is, gain, number, plain, run_cells, spread

Array = NDArray[np.float64]

NAME = "latency-optimal"
SEEDS = (100, 101, 102, 103, 104, 105)
"""Seeds; 0 to 5 were used to fit the load and the automatic interval."""
INTERVALS = (1, 10, 100, 1000)
EPLB_S, HEURISTIC_S, OURS_S = 0.26, 0.17, 0.025
"""Seconds of planning 58 layers: two published, and the bar for ours (the balance part prints the measured time)."""
ILP_LAYERS, ILP_SECONDS = 3, 8.0
"""Layers that the ILP plans, and its time limit for each: it would take minutes for all."""
REPEATS = 5
SWAPS = "published heuristic"
"""Busiest and idlest rank swap experts; `latency_optimal` is a search of our own."""

TABLE: dict[str, dict[str, Any]] = {
    "none": {"balance": 0.650, "deviation": 0.351},
    "eplb": {"balance": 0.998, "deviation": 0.001, "moves": 13_036, "planning_s": 0.26},
    SWAPS: {"balance": 0.996, "deviation": 0.003, "moves": 2_440, "planning_s": 0.17, "rebalancing_vs_eplb_pct": -57.0},
    "latency_optimal_ilp": {"balance": 0.999, "deviation": 0.001, "moves": 2_223, "planning_s": 100.0},
}
SWEEP: dict[tuple[str, int | None], float] = {
    ("eplb", 1): -73.0,
    ("eplb", 10): -10.0,
    ("eplb", 100): 8.0,
    ("latency_optimal", 1): 0.0,
    ("latency_optimal", 10): 4.0,
    ("latency_optimal", 100): 12.5,
    ("latency_optimal", 1000): 0.0,
    ("ideal", None): 25.0,
}
"""Per cent against no balancing. EPLB's at n = 10 follows from the heuristic's 4, 15 above it."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    setting = SweepSetting()
    report("Planning 58 layers", 0, 1)
    rows = balance_rows(setting, np.random.default_rng(options.seed))
    rows += sweep_rows(setting, options.seeds or SEEDS, report)
    notes = [*_balance_notes(rows), *_sweep_notes(rows)]
    curves = None
    source = None if options.data is None else options.data / "activations" / MODEL
    if source is None or not source.exists():
        notes.append("No real loads: set COTERIE_DATA to the folder of real data (docs/data.md).")
    else:
        shifting, curves = _domains(source, report)
        rows += shifting
        notes += _domain_notes(shifting)
    if options.out is not None:
        from coterie_lab.suites.latency_optimal.figures import draw_figures

        options.out.mkdir(parents=True, exist_ok=True)
        draw_figures(options.out, rows, curves)
    notes.append(f"{time.perf_counter() - begun:.0f} s in all.")
    return SuiteResult(NAME, rows, notes)


def balance_rows(setting: SweepSetting, rng: np.random.Generator, window: int = 100) -> list[dict[str, Any]]:
    """Plan on one window of iterations; score the balance there and in the window after it."""
    layers, drift = setting.model_layers, setting.drift
    drawn = drift.draw(layers, 2 * window, rng).reshape(2, window, layers, drift.experts).sum(axis=1, dtype=np.float64)
    current = Placement.linear(layers, drift.experts, setting.ranks)
    load, topology = Load(drawn[0], window), setting.topology
    # Each move has a price, so that a planner reaches the published balance with as few moves as possible.
    target = TABLE[SWAPS]["balance"]
    objective = replace(setting.objective, horizon=1000.0, target_balance=target, move_price=1 / setting.ranks)
    named = {"eplb": "eplb", SWAPS: "swaps", "latency_optimal": "latency_optimal"}
    contenders = {title: planners.make(name, {"objective": objective}) for title, name in named.items()}
    chosen = np.linspace(0, layers - 1, ILP_LAYERS).astype(int)
    few = objective.problem(Load(drawn[0][chosen], window), topology, _layers_of(current, chosen))
    rows = [_balance_row("none", current, drawn, None)]
    there = [_balance_row("none", few.current, drawn[:, chosen], None) | {"published": None}]
    for name, planner in contenders.items():
        plans = [planner.plan(load, topology, current) for _ in range(REPEATS)]
        rows.append(_balance_row(name, plans[0].placement, drawn, plans[0]))
        rows[-1]["planning_s"] = float(np.median([plan.planning_s for plan in plans]))
        rows[-1]["rebalancing_vs_eplb_pct"] = 100 * (rows[-1]["rebalancing_s"] / rows[1]["rebalancing_s"] - 1)
        part = few.plan(plans[0].placement.slot_experts[chosen])
        there.append(
            _balance_row(name, part.placement, drawn[:, chosen], part) | {"planning_s": None, "published": None}
        )
    ilp = LatencyOptimalIlp(objective, time_limit_s=ILP_SECONDS, gap=1e-4, gap_moves=1.0)
    solved = ilp.solve(few, starts=[plans[0].placement.slot_experts[chosen]])
    row = _balance_row("latency_optimal_ilp", solved.placement, drawn[:, chosen], solved)
    row |= {"planning_s": None, "time_limit_s": ILP_SECONDS * ILP_LAYERS, "closed": int(solved.proven.closed.sum())}
    return [*rows, *there, row]


def _layers_of(placement: Placement, layers: NDArray[np.int64]) -> Placement:
    return Placement(placement.slot_experts[layers], placement.num_ranks, placement.num_experts)


def _balance_row(name: str, placement: Placement, drawn: Array, plan: Plan | None) -> dict[str, Any]:
    fitted, following = (placement.rank_load(tokens) for tokens in drawn)
    return {
        "part": "balance",
        "planner": name,
        "layers": placement.num_layers,
        "balance": balancedness(fitted),
        "deviation": float((fitted.std(axis=1) / fitted.mean(axis=1)).mean()),
        "balance_next": balancedness(following),
        "moves": len(plan.moves) if plan else 0,
        "rebalancing_s": plan.movement_s if plan else 0.0,
        "planning_s": plan.planning_s if plan else 0.0,
        "published": TABLE.get(name),
    }


def policies() -> dict[tuple[str, str], tuple[Policy, ...]]:
    """Return policies by planner and by whose planning time is charged."""
    fixed = {
        ("eplb", "published"): [Policy("eplb", n, EPLB_S, unconditional=True) for n in INTERVALS],
        ("latency_optimal", "published"): [Policy("latency_optimal", n, HEURISTIC_S, by_start=True) for n in INTERVALS],
        ("latency_optimal", "ours"): [Policy("latency_optimal", n, OURS_S) for n in INTERVALS],
    }
    automatic = {"published": HEURISTIC_S, "ours": OURS_S}
    return {
        key: (*group, *([Policy("latency_optimal", None, automatic[key[1]])] if key[0] != "eplb" else []))
        for key, group in fixed.items()
    }


def sweep_rows(setting: SweepSetting, seeds: tuple[int, ...], report: Report) -> list[dict[str, Any]]:
    groups = policies()
    flat = tuple(policy for group in groups.values() for policy in group)
    outcomes = run_cells(partial(run_seed, setting=setting, policies=flat), seeds, report, "Sweeping intervals")
    values = np.array(list(outcomes.values()), dtype=float)  # [seed, policy, field]
    rows, at = [], 0
    for (planner, planning), group in groups.items():
        mine = values[:, at : at + len(group)]
        at += len(group)
        best = int(np.argmax(mine[:, : len(INTERVALS), 0].mean(axis=0)))
        for index, policy in enumerate(group):
            row = _sweep_row(planner, planning, policy.interval, mine[:, index])
            if policy.interval is None:
                row["best_fixed"] = INTERVALS[best]
                row |= spread("ahead", 100 * (mine[:, index, 0] - mine[:, best, 0]))
            rows.append(row)
    return [*rows, _sweep_row("ideal", "none", None, values[:, -1])]


def _sweep_row(planner: str, planning: str, n: int | None, values: Array) -> dict[str, Any]:
    beside = SWEEP.get((planner, n)) if planning != "ours" else None
    return {
        "part": "sweep",
        "planner": planner,
        "planning": planning,
        "interval": n,
        **spread("gain", 100 * values[:, 0]),
        "gain_without_cost_pct": 100 * float(values[:, 1].mean()),
        "moves_per_round": float(values[:, 2].mean()),
        "rounds": float(values[:, 3].mean()),
        "planned": float(values[:, 4].mean()),
        "mean_interval": float(values[:, 5].mean()),
        "published": None if beside is None else {"gain_pct": beside},
    }


def _domains(source: Path, report: Report) -> tuple[list[dict[str, Any]], Array]:
    setting = DomainSetting()
    total = len(setting.tokens) * 4 * (setting.windows - 1)
    done = 0

    def advance(doing: str) -> None:
        nonlocal done
        done += 1
        report(f"GLM-5.2, {doing}", done, total)

    return domain_rows(source, setting, advance)


def _balance_notes(rows: list[dict[str, Any]]) -> list[str]:
    by = {(row["planner"], row["layers"]): row for row in rows if row["part"] == "balance"}
    ours, ilp = (
        next(row for row in rows if row["planner"] == name) for name in ("latency_optimal", "latency_optimal_ilp")
    )
    start, few = rows[0], ilp["layers"]
    return [
        f"Balance: a load drawn near the published 0.65 ({start['balance']:.3f}); planners asked for 0.996 with "
        "as few moves as that takes. The window after the one planned on is another: see `next`.",
        f"Rebalancing latency {ours['rebalancing_vs_eplb_pct']:+.0f}% against EPLB (published -57%): only bytes are "
        "priced, and a collective's own cost, which does not shrink with moves, is not.",
        f"ILP: {few} layers, {ilp['closed']} of them proven to a move at its time limit, {ilp['time_limit_s']:g} s; "
        f"on those layers {ilp['moves']} moves against {by['latency_optimal', few]['moves']} of our search, its start, "
        f" and {by[SWAPS, few]['moves']} of the published heuristic.",
    ]


def _sweep_notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = [
        "Sweep: published planning times, 44 MB an expert, 8,192 tokens an iteration. Fitted by hand, published "
        "figures in view: fixed time of a layer, link, skew, half-life, smoothness and scatter of the load, that the "
        "heuristic plans every n whatever its map. Only n = 1 was not used: the rest agrees because it was fitted.",
        "Seeds are not those the load was fitted on or the automatic interval worked out on.",
    ]
    for row in rows:
        if row["part"] == "sweep" and row["interval"] is None and row["planner"] != "ideal":
            ahead = interval_of(row, "ahead")
            notes.append(
                f"Automatic ({row['planning']} planning time): a round every {row['mean_interval']:.0f} iterations, "
                f"{row['gain_pct']:+.1f}%; against the best fixed n = {row['best_fixed']} "
                f"{with_ends(ahead)} points, paired: {told_apart(ahead)} ahead."
            )
    return notes


def _domain_notes(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"GLM-5.2 {row['phase']}: automatic {row['gain_pct']:+.1f}% of whole steps on the next window, costs counted; "
        f"slower than the kept map in {row['windows_slower_than_kept']} of {row['windows']} windows."
        for row in rows
        if row["part"] == "domains" and row["policy"] == "automatic"
    ]


def _published(key: str, heading: str = "pub.") -> Column:
    return Column(heading, lambda row: None if row["published"] is None else row["published"].get(key))


def _n(row: Row) -> str:
    return "-" if row["planner"] == "ideal" else "auto" if row["interval"] is None else str(row["interval"])


def _table(part: str, title: str, *columns: Column) -> SuiteTable:
    return SuiteTable(title, columns, lambda row: bool(row["part"] == part))


_MOVES = Column("moves a round", lambda row: round(row["moves_per_round"]))

TABLES = (
    _table(
        "balance",
        "One plan, 58 layers x 256 experts, 256 slots, 8 ranks, and three of the layers (pub.: published, for 58)",
        *as_is("planner", "layers"),
        Column("balance", number("balance", 3)),
        _published("balance"),
        Column("next", number("balance_next", 3)),
        Column("deviation", number("deviation", 3)),
        _published("deviation"),
        *as_is("moves"),
        _published("moves"),
        Column("planning s", number("planning_s", 3)),
        _published("planning_s"),
        Column("moving s", number("rebalancing_s", 3)),
    ),
    _table(
        "sweep",
        "A round every n iterations: gain of MoE time against no balancing, % (± 95% over seeds)",
        *as_is("planner"),
        Column("planning time", plain("planning")),
        Column("n", _n),
        Column("gain %", gain("gain")),
        _published("gain_pct", "published"),
        Column("cost left out", number("gain_without_cost_pct", 1, "+")),
        Column("rounds", number("rounds", 0)),
        _MOVES,
    ),
    _table(
        "domains",
        "GLM-5.2, 288 slots, 8 ranks, traffic shifting between domains: whole steps on the next window",
        *as_is("phase", "policy"),
        Column("step ms", number("step_ms")),
        Column("MoE ms", number("moe_ms")),
        Column("cost ms a step", number("cost_ms_per_step")),
        Column("gain %", number("gain_pct", 1, "+")),
        Column("balance", number("balance", 3)),
        *as_is("rounds"),
        _MOVES,
    ),
    _table(
        "ranks",
        "One layer of it, by rank, us",
        *as_is("policy", "rank"),
        *(Column(name, number(f"{name}_us", 0)) for name in ("compute", "communication", "wait")),
    ),
)
