"""Planning over scenarios beside planning for their mean: how long it takes, at DeepSeek-V3's size.

Scenarios are steps of a few subjects: each subject has the Zipf load of :func:`~coterie.traces.load.zipf_drift`, every
expert scaled by a lognormal factor of its own, and each step mixes subjects anew. Plans start from the map in order,
with free moves: the largest search. Balancedness is over the scenarios.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from coterie.answers.suites import Report
from coterie.placement import DEEPSEEK_V3_PREFILL, Load, planners
from coterie.traces.load import zipf_drift
from coterie.types import Placement, Topology
from coterie_lab.benches.timing import Row, median_us

SCENARIOS, SUBJECTS, SCATTER = 64, 12, 0.6
"""`SCATTER`: sigma of the factor by which a subject differs from all."""
SIZES = ((256, 8), (288, 8), (256, 32), (288, 32))
"""Slots and ranks."""
REPEATS = 7


def steps_of_subjects(layers: int, experts: int, tokens: float, seed: int) -> Load:
    """Draw steps of so many tokens per layer."""
    rng = np.random.default_rng(seed)
    window = zipf_drift(layers, experts, rng, exponent=0.7).after
    subjects = window * rng.lognormal(0.0, SCATTER, (SUBJECTS, *window.shape))
    steps = np.tensordot(rng.dirichlet(np.full(SUBJECTS, 0.3), SCENARIOS), subjects, 1)
    return Load.of_scenarios(steps / steps.sum(axis=2, keepdims=True) * tokens)


def plan_row(
    planner: str, split: str, shape: tuple[int, int, int, int], ms: float, balance: float, moves: float
) -> Row:
    """Make the row of a plan; `shape` is layers, experts, slots and ranks."""
    sizes = zip(("layers", "experts", "slots", "ranks"), shape, strict=True)
    results = {"median_ms": round(ms, 3), "balancedness": round(balance, 4), "moves": moves}
    return {"planner": planner, "split": split, **dict(sizes), **results}


def scenario_rows(report: Report, layers: int, experts: int, tokens: float) -> Iterator[Row]:
    """Make a row for the scenarios and one for their mean, at every size."""
    load = steps_of_subjects(layers, experts, tokens, seed=0)
    objective = replace(DEEPSEEK_V3_PREFILL, exposed=0.0)
    planner = planners.make("latency_optimal", {"objective": objective})
    for done, (slots, ranks) in enumerate(SIZES):
        report(f"over scenarios, {slots} slots, {ranks} ranks", done, len(SIZES))
        topology, current = Topology(ranks, ranks_per_node=ranks), Placement.linear(layers, experts, ranks, slots)
        problem = objective.problem(load, topology, current)
        for given in (load, load.mean):
            spent = median_us(partial(planner.plan, given, topology, current), REPEATS) / 1e3
            plan = planner.plan(given, topology, current)
            balance, shape = problem.balanced(plan.placement.slot_experts), (layers, experts, slots, ranks)
            yield plan_row("latency_optimal", plan.split, shape, spent, balance, len(plan.moves)) | {
                "duplicates": plan.placement.duplicates,
                "scenarios": given.num_scenarios,
                "setting": f"{SCENARIOS} steps of {SUBJECTS} subjects, Zipf 0.7, from linear, moves free",
            }
