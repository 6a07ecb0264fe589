"""One cell: every planner's plan for one kind of traffic on some ranks, scored on steps that it has not seen.

Plans start from experts in order, and moves are free, since weights are loaded at the start anyway. Phase `rows` counts
only tokens; `prefill` and `decode` are planned and timed by the prices of the H200's step model, at the tokens that
such steps have. Balancedness is that of tokens in all phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coterie.costs.presets import step_model
from coterie.errors import check_one_of
from coterie.placement import Load, Objective, Plan, planners
from coterie.types import Placement, Topology, WeightDtype
from coterie_lab.suites.placement import traffic
from coterie_lab.suites.placement.traffic import GLM, LEFT_OUT, Sample, spec_of
from coterie_lab.suites.shared import mean_of, one_thread

ROWS, PREFILL, DECODE = "rows", "prefill", "decode"
PHASES = (ROWS, PREFILL, DECODE)
RANKS = (4, 8, 16, 32)
SPARE = {256: (0, 32, 64), 64: (0, 8, 16), 32: (0, 8, 16)}
"""Spare slots tried, by experts of a layer; only those that the ranks divide."""
TIMED_RANKS, TIMED_SPARE = (8, 16), 2
"""Ranks tried in prefill and decode, and how many numbers of spare slots."""
LINEAR, EPLB, GREEDY, MEAN, STEPS = "linear", "eplb", "flashlb", "latency_optimal, mean", "latency_optimal, steps"
CONTENDERS = {LINEAR: "linear", EPLB: "eplb", GREEDY: "flashlb", MEAN: "latency_optimal", STEPS: "latency_optimal"}
"""Planners by their name in this suite: all but `flashlb` and the last plan for the mean step."""
EQUAL, OPTIMAL = "equal", "optimal"
SPLITS = (EQUAL, OPTIMAL)
"""How replicas share tokens in the scored steps: in equal parts, or by the best split of every step, which
`latency_optimal` then plans for."""
SPLIT_RANKS = (8,)
"""Ranks on which the optimal split is tried, in phase `rows` with the fewest spare slots."""
FREE = Objective(row_s=1e-6, expert_bytes=0.0, exposed=0.0)
"""Prices of phase `rows`."""


class Cell(NamedTuple):
    """A run of the grid."""

    trace: str
    traffic: str | int
    """One of GLM_TRAFFIC, or requests a step."""
    ranks: int
    seed: int


class Planned(NamedTuple):
    """Results of one planner in a cell; means over its samples."""

    planner: str
    split: str
    layers: int
    """Layers planned and scored."""
    slots: int
    phase: str
    fit: float
    """Balancedness on the steps that were planned on."""
    unseen: float
    """Balancedness on unseen steps."""
    layer_s: float
    """Predicted seconds of a layer on unseen steps, mean over layers."""
    moves: float
    planning_s: float


class Scored(NamedTuple):
    balancedness: float
    """Balancedness of tokens: mean over layers of mean ÷ max rank load."""
    layer_s: float
    """Seconds of the slowest rank, mean over layers."""


def cells_of(trace: str, seeds: Sequence[int]) -> list[Cell]:
    """Return all cells of a trace, on ranks with more than one expert each."""
    kinds: tuple[str | int, ...] = traffic.GLM_TRAFFIC if trace == GLM else traffic.REQUESTS
    ranks = [count for count in RANKS if spec_of(trace).num_experts > count]
    return [Cell(trace, kind, count, seed) for seed in seeds for kind in kinds for count in ranks]


@one_thread
def serve_cell(cell: Cell, data: Path) -> list[Planned]:
    """Plan for every phase, number of slots, planner and split."""
    results = []
    experts, left_out = spec_of(cell.trace).num_experts, cell.traffic == LEFT_OUT
    for phase in PHASES if cell.ranks in TIMED_RANKS and not left_out else (ROWS,):
        samples = samples_of(cell, phase, data)
        objective = prices(cell.trace, phase, cell.ranks, step_tokens(cell.trace, samples[0]))
        for slots in slots_of(experts, cell.ranks)[: 1 if left_out else TIMED_SPARE if phase != ROWS else None]:
            for split in splits_of(cell, phase, slots - experts):
                for planner in CONTENDERS:
                    plans = [plan_first(planner, sample, objective, cell.ranks, slots, split) for sample in samples]
                    results.append(_scored(planner, split, phase, samples, plans, objective))
    return results


def splits_of(cell: Cell, phase: str, spare: int) -> tuple[str, ...]:
    """Return the splits to try; without spare slots there is nothing to split."""
    tried = phase == ROWS and cell.ranks in SPLIT_RANKS and cell.traffic != LEFT_OUT
    return SPLITS if tried and spare == SPARE[spec_of(cell.trace).num_experts][1] else (EQUAL,)


def samples_of(cell: Cell, phase: str, data: Path) -> list[Sample]:
    if isinstance(cell.traffic, str):
        return traffic.glm_samples(traffic.read_chunks(data), cell.traffic, phase, cell.seed)
    return [traffic.read_recorded(cell.trace, data).sample(cell.traffic, phase, cell.seed)]


def step_tokens(trace: str, sample: Sample) -> int:
    """Return the mean tokens of a step over all ranks."""
    return max(1, round(float(sample.fit.tokens.sum(axis=1).mean()) / spec_of(trace).top_k))


def prices(trace: str, phase: str, ranks: int, tokens: int) -> Objective:
    """Return the prices of a phase for steps of so many tokens; moves are free."""
    if phase == ROWS:
        return FREE
    model = step_model(spec_of(trace), "h200", dtype_of(trace), topology=Topology(ranks))
    return Objective.of(model, tokens, exposed=0.0)


def dtype_of(trace: str) -> WeightDtype:
    """Return the dtype of weights: GLM-5.2's as deployed, others' as recorded."""
    return spec_of(trace).weight_dtype if trace == GLM else "bf16"


def slots_of(experts: int, ranks: int) -> list[int]:
    return [experts + spare for spare in SPARE[experts] if not (experts + spare) % ranks]


def plan_first(planner: str, sample: Sample, objective: Objective, ranks: int, slots: int, split: str = EQUAL) -> Plan:
    """Plan by a contender, from experts in order."""
    load = sample.fit.mean if planner == MEAN else sample.fit
    current = Placement.linear(load.num_layers, load.num_experts, ranks, slots)
    settings = {"split": split} if CONTENDERS[planner] == "latency_optimal" else {}
    return planners.make(CONTENDERS[planner], {"objective": objective}, **settings).plan(load, Topology(ranks), current)


def _scored(
    planner: str, split: str, phase: str, samples: Sequence[Sample], plans: Sequence[Plan], objective: Objective
) -> Planned:
    fit, unseen = (
        [score(load, plan.placement, objective, split) for load, plan in zip(loads, plans, strict=True)]
        for loads in zip(*samples, strict=True)
    )
    return Planned(
        planner=planner,
        split=split,
        layers=plans[0].placement.num_layers,
        slots=plans[0].placement.num_slots,
        phase=phase,
        fit=mean_of(fit, "balancedness"),
        unseen=mean_of(unseen, "balancedness"),
        layer_s=mean_of(unseen, "layer_s"),
        moves=float(np.mean([len(plan.moves) for plan in plans])),
        planning_s=float(np.median([plan.planning_s for plan in plans])),
    )


def score(load: Load, placement: Placement, objective: Objective, split: str = EQUAL) -> Scored:
    """Score a placement on the steps of a load, with replicas that share tokens by this split."""
    check_one_of(SPLITS, split=split)
    topology = Topology(placement.num_ranks)
    if load.scenarios is None:
        load = replace(load, scenarios=load.tokens[None] / load.steps)  # one step, which may be split too
    tokens = FREE.problem(load, topology, placement)
    timed = tokens if objective is FREE else objective.problem(load, topology, placement)
    slots, anew = placement.slot_experts, split == OPTIMAL
    return Scored(tokens.balanced(slots, per_step=anew), float(timed.slowest_s(slots, per_step=anew).mean()))
