"""Traffic that changes: how many moves a re-plan takes, from the running plan.

Steps are of one group of domains or of another. A first plan is made while most steps are of the first group; then most
are of the second: the planner gets such steps and its own running placement, and its moves are counted. Moves now have
a price, that of prefill: they stop the engine, and each is charged its time on the link (`move_price` = 1), over the
steps that the new plan will serve. It is scored on unseen steps of the new traffic. `FEW` may take a quarter of EPLB's
moves: what is left of the gain where moves are dearer to a service than their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.placement import Load, Objective, Plan, planners
from coterie.types import Placement, Topology
from coterie_lab.suites.drift.traffic import SUBJECTS, TURNS
from coterie_lab.suites.placement import cells, traffic
from coterie_lab.suites.placement.cells import CONTENDERS, EPLB, GREEDY, MEAN, PREFILL, STEPS, plan_first, score
from coterie_lab.suites.placement.traffic import GLM, TINY, Sample, spec_of

Array = NDArray[np.float64]

HORIZONS = (300.0, 3_000.0)
"""Steps that a re-plan serves; the second is vLLM's default interval between two rearrangements."""
RANKS = 8
REQUESTS, GROUP_STEPS = 16, 75
"""Requests a step of recorded traces, and steps of each group."""
FEW = "latency_optimal, few moves"
FEW_PCT = 25
"""Most moves of FEW, as a share of EPLB's."""
CHANGES = {"3/4 to 1/4": 0.75, "all": 1.0}
"""Share of the first group's steps before the change, and of the second group's after it."""
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    GLM: (TURNS[0], TURNS[1]),
    "gpt-oss-20b": (SUBJECTS[0], SUBJECTS[1]),
    "deepseek-v2-lite": (("intent", "law"), ("summary", "translation")),
    TINY: (("code", "math"), ("medical", "legal")),
}


class Shift(NamedTuple):
    """A run of the grid."""

    trace: str
    slots: int
    change: str
    seed: int


class Replanned(NamedTuple):
    """Results of one planner after the shift."""

    planner: str
    horizon: float
    layers: int
    before: float
    """Balancedness of the plan that ran, on unseen steps of the new traffic."""
    after: float
    layer_s: float
    """Predicted seconds of a layer on those steps, with the new plan."""
    moves: int
    movement_s: float
    planning_s: float

    @property
    def total_s(self) -> float:
        """Seconds of all layers of all steps that the plan serves, and of its movement."""
        return self.horizon * self.layers * self.layer_s + self.movement_s


def shifts_of(trace: str, seeds: Sequence[int]) -> list[Shift]:
    """Return all shifts of a trace, with the smallest number of spare slots."""
    slots = cells.slots_of(spec_of(trace).num_experts, RANKS)[1]
    return [Shift(trace, slots, change, seed) for seed in seeds for change in CHANGES]


def serve_shift(shift: Shift, data: Path) -> list[Replanned]:
    results = []
    old, new = samples_of(shift, data)
    free = cells.prices(shift.trace, PREFILL, RANKS, cells.step_tokens(shift.trace, new))
    most: dict[float, int] = {}
    for name in (EPLB, GREEDY, MEAN, STEPS, FEW):
        running = plan_first(STEPS if name == FEW else name, old, free, RANKS, shift.slots).placement
        for horizon in HORIZONS:
            priced = replace(free, exposed=1.0, horizon=horizon, move_price=1.0)
            plan = _again(name, new, priced, running, most.get(horizon, 0))
            if name == EPLB:
                most[horizon] = FEW_PCT * len(plan.moves) // 100
            after = score(new.unseen, plan.placement, priced)
            before, layers = score(new.unseen, running, priced).balancedness, plan.placement.num_layers
            costs: dict[str, Any] = {
                "moves": len(plan.moves),
                "movement_s": plan.movement_s,
                "planning_s": plan.planning_s,
            }
            results.append(Replanned(name, horizon, layers, before, *after, **costs))
    return results


def _again(planner: str, sample: Sample, objective: Objective, running: Placement, most: int) -> Plan:
    load = sample.fit.mean if planner == MEAN else sample.fit
    settings = {"max_moves": most} if planner == FEW else {}
    made = planners.make(CONTENDERS[STEPS if planner == FEW else planner], {"objective": objective}, **settings)
    return made.plan(load, Topology(RANKS), running)


def samples_of(shift: Shift, data: Path) -> tuple[Sample, Sample]:
    """Return the traffic before and after the change."""
    one, other = (_steps(shift, group, data) for group in GROUPS[shift.trace])
    share, whole = CHANGES[shift.change], shift.trace != GLM
    before, after = (
        Sample(*(_joined(a, b, part, whole) for a, b in zip(one, other, strict=True))) for part in (share, 1 - share)
    )
    return before, after


def _steps(shift: Shift, domains: tuple[str, ...], data: Path) -> tuple[Array, Array]:
    """Return tokens [step, layer, expert] of these domains, to plan on and to score."""
    if shift.trace != GLM:
        return traffic.read_recorded(shift.trace, data).of_areas(domains, REQUESTS, GROUP_STEPS, shift.seed)
    chunks = traffic.read_chunks(data)
    rows = traffic.GLM_TOKENS[PREFILL] * spec_of(GLM).top_k
    chosen = [chunks.domains.index(name) for name in domains]
    fit, unseen = (rows * half[chosen] for half in chunks.halves(shift.seed))
    return traffic.but_one(fit).reshape(-1, *fit.shape[2:]), unseen.mean(axis=1)


def _joined(one: Array, other: Array, share: float, whole: bool) -> Load:
    """Join the steps of both groups, the first with this share of the weight; a group without weight is left out."""
    parts = [(steps, part / len(steps)) for steps, part in ((one, share), (other, 1 - share)) if part]
    weights = np.concatenate([np.full(len(steps), each) for steps, each in parts])
    return Load.of_scenarios(np.concatenate([steps for steps, _ in parts]), weights, whole_steps=whole)
