"""Traffic that becomes another: how many moves a re-plan takes, from the plan that runs.

A first plan is made on traffic of some domains and runs. Then others come: the planner is given steps of theirs and its
own running placement, and what it moves is counted. Moves have their price now, prefill's, over `HORIZON` steps; they
stop the engine. Scored are steps of the new traffic that it was not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coterie.evaluation.suites.drift.traffic import SUBJECTS, TURNS
from coterie.evaluation.suites.placement.cells import (
    CONTENDERS,
    EPLB,
    GREEDY,
    MEAN,
    PREFILL,
    STEPS,
    plan_first,
    prices,
    score,
    slots_of,
    step_tokens,
)
from coterie.evaluation.suites.placement.traffic import (
    GLM,
    GLM_TOKENS,
    TINY,
    Sample,
    by_chunk,
    read_chunks,
    read_recorded,
    spec_of,
)
from coterie.placement import Load, planners
from coterie.types import Topology

HORIZON = 3_000.0
"""Steps that a re-plan serves: the default interval between two rearrangements in vLLM."""
RANKS = 8
REQUESTS = 16
"""Requests a step of recorded traces."""
PLANNERS = (EPLB, GREEDY, MEAN, STEPS)
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    GLM: (TURNS[0], TURNS[1]),
    "gpt-oss-20b": (SUBJECTS[0], SUBJECTS[1]),
    "deepseek-v2-lite": (("intent", "law"), ("summary", "translation")),
    TINY: (("code", "math"), ("medical", "legal")),
}
"""Domains before and after."""


class Shift(NamedTuple):
    """A run of the grid."""

    trace: str
    slots: int
    seed: int


class Replanned(NamedTuple):
    """One planner after the shift."""

    planner: str
    layers: int
    before: float
    """Balancedness of the plan that ran, on unseen steps of the new traffic."""
    after: float
    layer_s: float
    """Predicted seconds of a layer there, with the new plan."""
    moves: int
    movement_s: float
    planning_s: float


def shifts_of(trace: str, seeds: Sequence[int]) -> list[Shift]:
    slots = slots_of(spec_of(trace).num_experts, RANKS)
    return [Shift(trace, count, seed) for seed in seeds for count in slots]


def serve_shift(shift: Shift, data: Path) -> list[Replanned]:
    return list(_serve(shift, data))


def _serve(shift: Shift, data: Path) -> Iterator[Replanned]:
    old, new = (_sample(shift, group, data) for group in GROUPS[shift.trace])
    tokens, topology = step_tokens(shift.trace, new), Topology(RANKS)
    free = prices(shift.trace, PREFILL, RANKS, tokens)
    priced = replace(free, exposed=1.0, horizon=HORIZON)
    for name in PLANNERS:
        running = plan_first(name, old, free, RANKS, shift.slots).placement
        load = new.fit.mean if name == MEAN else new.fit
        plan = planners.make(CONTENDERS[name], {"objective": priced}).plan(load, topology, running)
        after = score(new.unseen, plan.placement, priced)
        yield Replanned(
            planner=name,
            layers=plan.placement.num_layers,
            before=score(new.unseen, running, priced).balancedness,
            after=after.balancedness,
            layer_s=after.layer_s,
            moves=len(plan.moves),
            movement_s=plan.movement_s,
            planning_s=plan.planning_s,
        )


def _sample(shift: Shift, domains: tuple[str, ...], data: Path) -> Sample:
    if shift.trace != GLM:
        return read_recorded(shift.trace, data).sample(REQUESTS, PREFILL, shift.seed, domains)
    chunks = read_chunks(data)
    rows = GLM_TOKENS[PREFILL] * spec_of(GLM).top_k
    chosen = [chunks.domains.index(name) for name in domains]
    fit, unseen = (rows * half[chosen] for half in chunks.halves(shift.seed))
    return Sample(by_chunk(fit), Load.of_scenarios(unseen.mean(axis=1)))
