"""How far co-clustering is from the proven optimum, on small instances drawn from recorded routing.

An instance is a drawn layer of a split's fitted part: its hottest experts, and items drawn from the fitted ones, with
their weights on these experts. The 0-1 program (exact.py) proves its optimum. Two measures:

* remote: all items count alike, and theta is so high that an uneven number of items costs more than it could save.
  Every rank then has as many items, and costs differ by remote activations alone.
* cost: items with their recorded sizes, and the default theta of the alternating algorithm. `sem_moe` minimises this
  cost. `co_cluster` does not: it bounds the tokens of a rank and does not price their spread.

Planners are the registered ones. Features of `co_cluster` that the program lacks are switched off: the bound on the
load of experts, and the distrust of rare items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Report, SuiteOptions
from coterie.placement import Items, Load, planners
from coterie.placement.co_clustering import cost
from coterie.placement.co_clustering.alternating import AlternatingSettings
from coterie.types import Placement, Topology
from coterie_lab.suites.sem_moe.exact import solve_exactly
from coterie_lab.suites.sem_moe.locality import NO_PRICES, SEEDS, TRACES, locality_cases
from coterie_lab.suites.shared import run_cells, spread

Row = dict[str, Any]

EXPERTS, ITEMS = 8, 12
"""Hottest experts of a layer, and items, of an instance."""
INSTANCES: Mapping[int, int] = {4: 4, 2: 10}
"""Ranks → instances. On 4 ranks a proof takes ten times as long."""
THETA: Mapping[str, float] = {"remote": 0.9, "cost": 0.5}
"""Measure → weight of imbalance. At 0.9 an item too many costs 1.8; it saves at most 0.1 x EXPERTS."""
TIME_LIMIT_S = 30.0
"""Time limit of the solver per instance: several times its time on an idle core, enough for a proof on a busy one."""
PROOF = 1e-3
"""Largest gap between cost and bound, as a share of the cost, at which an optimum counts as proven."""
BAR_PCT = 3.0
"""Gap that co-clustering must not exceed where the data allows no gain over baselines."""
PLANNERS = ("sem_moe", "co_cluster")


class Instance(NamedTuple):
    """One draw; instances of a case differ by `number`, and take the seeds of splits in turn."""

    case: int
    ranks: int
    measure: str
    number: int


def optimum_rows(options: SuiteOptions, report: Report, instances: Mapping[int, int] = INSTANCES) -> list[Row]:
    """Make one row per trace, kind of items, number of ranks, measure and planner."""
    cases = locality_cases(options)
    kinds = [
        (at, ranks, measure)
        for ranks in instances
        for at, case in enumerate(cases)
        for measure in THETA
        if (options.trace is not None or case.trace in TRACES) and case.experts >= 2 * ranks
    ]
    work = [Instance(*kind, number) for kind in kinds for number in range(instances[kind[1]])]
    gaps = run_cells(partial(_measure, options=options), work, report, "Optimum")
    return [
        _row(planner, cases[kind[0]].trace, cases[kind[0]].items, kind, [gaps[one] for one in work if one[:3] == kind])
        for kind in sorted(kinds)
        for planner in PLANNERS
    ]


def draw_instance(items: Items, num_experts: int, ranks: int, rng: Generator, *, alike: bool) -> Items:
    """Draw a layer, its hottest experts and some items; as many of both as ranks divide, up to EXPERTS and ITEMS.

    Token ids are drawn by frequency, requests evenly.
    """
    layer = int(rng.integers(items.num_layers))
    own = items.layers(slice(layer, layer + 1))
    hot = np.argsort(-own.load(num_experts)[0], kind="stable")[: min(EXPERTS, num_experts) // ranks * ranks]
    drawn_by = None if items.one_rank else items.frequency / items.frequency.sum()
    who = rng.choice(len(items), max(min(ITEMS, len(items)) // ranks * ranks, 1), replace=False, p=drawn_by)
    shares = np.zeros((len(who), num_experts))
    np.add.at(shares, (np.arange(len(who))[:, None], own.experts[who, 0]), own.weights[who, 0])
    tokens = np.ones(len(who)) if alike else items.frequency[who]
    return Items.of_counts((shares[:, hot] * tokens[:, None])[:, None], tokens, one_rank=items.one_rank)


def optimum_gaps(items: Items, num_experts: int, ranks: int, theta: float, seed: int) -> dict[str, float] | None:
    """Return percent of cost above the optimum by planner; None if the optimum was not proven in time."""
    exact = solve_exactly(items, num_experts, ranks, theta, time_limit_s=TIME_LIMIT_S, gap=PROOF / 10)
    best, bound = float(exact.cost.sum()), float(exact.bound.sum())
    if best - bound > PROOF * best + 1e-9:
        return None
    topology, current = Topology(ranks), Placement.linear(items.num_layers, num_experts, ranks)
    settings: dict[str, dict[str, Any]] = {
        "sem_moe": {"settings": AlternatingSettings(theta=theta)},
        "co_cluster": {"load_slack": float(ranks), "shrink": 0.0},
    }
    costs = {}
    for name in PLANNERS:
        planner: Any = planners.make(name, {"objective": NO_PRICES, "items": items, "seed": seed}, **settings[name])
        clusters = planner.cluster(Load(items.load(num_experts)), topology, current)
        costs[name] = float(cost(items, clusters.expert_ranks, clusters.ranks, ranks, theta).sum())
    best = min(best, *costs.values())  # within the proof's gap, a planner may be below the solver
    # If nothing need be remote, gaps are relative to the cost of all activations as remote ones.
    whole = best if best > 0 else max((1 - theta) * float(items.frequency @ items.weights.sum(axis=(1, 2))), 1e-300)
    return {name: 100 * (value - best) / whole for name, value in costs.items()}


def _measure(instance: Instance, options: SuiteOptions) -> dict[str, float] | None:
    case, ranks, measure, number = instance
    seeds = options.seeds or SEEDS
    experts = locality_cases(options)[case].experts
    fitted = _fitted(options, case, seeds[number % len(seeds)])
    items = draw_instance(fitted, experts, ranks, default_rng([number, ranks]), alike=measure == "remote")
    return optimum_gaps(items, min(EXPERTS, experts) // ranks * ranks, ranks, THETA[measure], number)


@lru_cache(maxsize=16)
def _fitted(options: SuiteOptions, case: int, seed: int) -> Items:
    return locality_cases(options)[case].sample(default_rng(seed)).items


def _row(
    planner: str, trace: str, items: str, kind: tuple[int, int, str], instances: Sequence[dict[str, float] | None]
) -> Row:
    gaps = [gap[planner] for gap in instances if gap is not None]
    return {
        "part": "optimum",
        "trace": trace,
        "items": items,
        "ranks": kind[1],
        "measure": kind[2],
        "planner": planner,
        "instances": len(instances),
        "proven": len(gaps),
        **(spread("gap", gaps) if gaps else dict.fromkeys(("gap_pct", "gap_low", "gap_high"))),
        "worst_gap_pct": max(gaps, default=None),
        "published": None,
    }


def optimum_notes(rows: Sequence[Row]) -> list[str]:
    """Say how instances are drawn, and per trace how far each planner is from the optimum."""
    if not rows:
        return []
    drawn, proven = (sum(row[key] for row in rows if row["planner"] == PLANNERS[0]) for key in ("instances", "proven"))
    notes = [
        f"The optimum is that of instances drawn from what was fitted, up to {EXPERTS} experts of a layer and {ITEMS} "
        f"items: {proven} of {drawn} were proven, to {PROOF:.1%}, within {TIME_LIMIT_S:g} s; the others are left out. "
        "`remote`: items count alike and every rank has as many, so that only remote activations differ. `cost`: items "
        "of recorded sizes, imbalance and remote activations weighed alike, which is what sem_moe searches by; "
        "co_cluster bounds the tokens of a rank and does not price their spread, which a dozen items cannot even out."
    ]
    for trace, items, ranks in dict.fromkeys((row["trace"], row["items"], row["ranks"]) for row in rows):
        part = [row for row in rows if (row["trace"], row["items"], row["ranks"]) == (trace, items, ranks)]
        shown = [_gap(row) for row in part if row["proven"]]
        if shown:
            notes.append(f"{trace}, {items} as items, {ranks} ranks: above the optimum " + "; ".join(shown) + ".")
    reached = [row for row in rows if row["planner"] == "co_cluster" and row["measure"] == "remote" and row["proven"]]
    if reached:
        within, worst = sum(row["gap_pct"] <= BAR_PCT for row in reached), max(row["worst_gap_pct"] for row in reached)
        notes.append(
            f"co_cluster's remote activations are on average within {BAR_PCT:g}% of the optimum in {within} of "
            f"{len(reached)} cases at the same balance; the worst instance is {worst:.1f}% above."
        )
    return notes


def _gap(row: Row) -> str:
    return (
        f"{row['planner']} {with_ends(interval_of(row, 'gap'), 1, '', '%')} by {row['measure']} "
        f"(at most {row['worst_gap_pct']:.1f}%)"
    )
