"""A split of its own for every scenario: against a linear program, and over all choices of who streams."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from coterie.placement import Load, Objective, Problem
from coterie.placement.splits.shares import optimal_shares
from coterie.types import Placement, Topology
from v3_prices import v3_prices


def make(seed: int, *, mixed: bool = False, gone: bool = False, sourced: bool = False, touch_s: float = 0.0) -> Problem:
    """Two layers of a few scenarios on a random map without duplicates on a rank.

    Experts have so many tokens that a share below one token, which is streamed in some steps only, is of no use.
    """
    rng = np.random.default_rng(seed)
    ranks, each, count = int(rng.integers(2, 5)), int(rng.integers(2, 4)), int(rng.integers(1, 5))
    experts = int(rng.integers(each, (ranks - gone) * each + 1))
    rows = np.stack([_row(rng, ranks, each, experts) for _ in range(2)])
    speeds = rng.choice([0.5, 1.0, 1.7], ranks) if mixed else np.ones(ranks)
    if gone:
        speeds[rng.integers(ranks)] = 0.0
    scenarios = np.round(rng.pareto(1.0, (count, 2, experts)) * 40) * 1000
    mean = scenarios.mean(axis=0)
    sources = rng.dirichlet(np.full(ranks, 0.3), mean.shape).transpose(2, 0, 1) * mean if sourced else None
    objective = v3_prices(row_bytes=20_000.0 if sourced else 0.0, touch_s=touch_s)
    load = Load(mean, sources=sources, scenarios=scenarios, whole_steps=True)
    topology = Topology(ranks, ranks_per_node=2, speeds=tuple(speeds))
    return objective.problem(load, topology, Placement(rows.astype(np.int32), ranks, experts))


def _row(rng: np.random.Generator, ranks: int, each: int, experts: int) -> NDArray[np.int64]:
    order = rng.permutation(experts)
    return np.concatenate([order[np.arange(rank * each, (rank + 1) * each) % experts] for rank in range(ranks)])


def least(problem: Problem, layer: int, scenario: int) -> float:
    """Seconds of the slowest rank of one scenario with the best split, by HiGHS, over who streams what."""
    assert problem.steps is not None
    steps, each = problem.steps, problem.current.slots_per_rank
    row = problem.current.slot_experts[layer]
    slots = [slot for slot in range(len(row)) if problem.alive[slot // each]]
    known = [steps.tokens[layer, scenario, row[slot]] for slot in slots]
    price = steps.per_token[layer]
    seconds = [price[slot // each, row[slot]] * tokens for slot, tokens in zip(slots, known, strict=True)]
    copies = np.bincount(row[slots], minlength=problem.current.num_experts)
    free = [at for at, slot in enumerate(slots) if copies[row[slot]] > 1 and known[at] and problem.objective.touch_s]
    best = np.inf
    for choice in product((False, True), repeat=len(free)):
        on = np.ones(len(slots), bool)
        on[free] = choice
        if not set(row[np.array(slots)[on]]) >= set(row[slots]):
            continue
        streamed = np.zeros(len(problem.alive))
        for at, slot in enumerate(slots):
            streamed[slot // each] += steps.touch[slot // each] * bool(on[at] and known[at])
        if _bound(row[slots], np.array(slots) // each, np.array(seconds), on, streamed) < best:
            best = min(best, _program(problem, row[slots], np.array(slots) // each, np.array(seconds), on, streamed))
    return best


def _bound(
    expert: NDArray[np.integer],
    rank: NDArray[np.integer],
    seconds: NDArray[np.float64],
    on: NDArray[np.bool_],
    streamed: NDArray[np.float64],
) -> float:
    """Lower bound on `_program`: for any set of ranks, the mean of the work that no rank outside of it may take."""
    holders: dict[int, int] = {}  # expert → set of ranks, as bits
    least_s: dict[int, float] = {}
    for name, place, cost in zip(expert[on].tolist(), rank[on].tolist(), seconds[on].tolist(), strict=True):
        holders[name] = holders.get(name, 0) | 1 << place
        least_s[name] = min(least_s.get(name, np.inf), cost)
    bound = 0.0
    for ranks in range(1, 1 << len(streamed)):
        members = [place for place in range(len(streamed)) if ranks >> place & 1]
        work = sum(least_s[name] for name, places in holders.items() if not places & ~ranks)
        bound = max(bound, (work + sum(streamed[place] for place in members)) / len(members))
    return bound


def _program(
    problem: Problem,
    expert: NDArray[np.integer],
    rank: NDArray[np.integer],
    seconds: NDArray[np.float64],
    on: NDArray[np.bool_],
    streamed: NDArray[np.float64],
) -> float:
    scale = max(seconds.max(), streamed.max(), 1e-12)
    busy = np.zeros((len(problem.alive), len(expert) + 1))
    busy[rank, np.arange(len(expert))] = seconds / scale
    busy[:, -1] = -1.0
    held = expert[None, :] == np.unique(expert)[:, None]
    found = linprog(
        np.append(np.zeros(len(expert)), 1.0),
        busy,
        -streamed / scale,
        np.column_stack([held, np.zeros(len(held))]),
        np.ones(len(held)),
        bounds=[(0, float(one)) for one in on] + [(0, None)],
    )
    return float(found.fun * scale) if found.success else np.inf


def slowest(problem: Problem) -> NDArray[np.float64]:
    """[layer, scenario]"""
    assert problem.steps is not None
    rows = problem.current.slot_experts
    return np.asarray(problem.steps.split_rank_s(rows, problem.topology.rank_speeds).max(axis=2))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
def test_every_scenario_gets_its_best_split(seed: int, mixed: bool, gone: bool, sourced: bool) -> None:
    problem = make(seed, mixed=mixed, gone=gone, sourced=sourced)
    found = slowest(problem)
    assert problem.steps is not None
    for layer, scenario in np.ndindex(found.shape):
        assert found[layer, scenario] == pytest.approx(least(problem, layer, scenario), rel=1e-7, abs=1e-15)
    rows = problem.current.slot_experts
    seconds = problem.slowest_s(rows, per_step=True)
    assert seconds == pytest.approx(found @ problem.steps.weights)
    assert (seconds <= problem.slowest_s(rows) * (1 + 1e-12)).all(), "equal shares are one of the splits"
    assert (seconds <= problem.slowest_s(rows, optimal_shares(problem, rows)) * (1 + 1e-9)).all(), "and so are weights"
    assert gone or (seconds >= problem.reach * (1 - 1e-9)).all(), "a rank that is gone may have the only slot"


def test_streaming_is_nearer_to_the_best_choice_of_who_streams_than_equal_shares() -> None:
    ratios = []
    for seed in range(15):
        problem = make(seed, touch_s=5e-3)
        found, equal = slowest(problem), problem.slowest_s(problem.current.slot_experts)
        best = np.array([[least(problem, *at) for at in np.ndindex(found.shape)]]).reshape(found.shape)
        assert (found >= best * (1 - 1e-3)).all()
        assert (problem.slowest_s(problem.current.slot_experts, per_step=True) <= equal * (1 + 1e-12)).all()
        ratios.extend((found[best > 0] / best[best > 0]).tolist())
    assert np.mean(ratios) < 1.05
    assert np.max(ratios) < 1.5


def test_one_scenario_is_the_split_of_the_mean() -> None:
    problem = make(3)
    assert problem.steps is not None
    tokens = problem.steps.tokens[:, 0]
    steps = Load.of_scenarios(tokens[None], whole_steps=True)
    objective, topology, current = problem.objective, problem.topology, problem.current
    one, mean = (objective.problem(load, topology, current) for load in (steps, Load(tokens)))
    rows = current.slot_experts
    shares = optimal_shares(mean, rows)
    assert one.slowest_s(rows, per_step=True) == pytest.approx(mean.slowest_s(rows, shares))
    assert mean.slowest_s(rows, shares, per_step=True) == pytest.approx(mean.slowest_s(rows, shares)), "no scenarios"


def test_plans_with_the_optimal_split_are_priced_by_it() -> None:
    problem = make(5)
    rows = problem.current.slot_experts
    shares = optimal_shares(problem, rows)
    plan = problem.plan(rows, shares, split="optimal")
    assert plan.after_s == pytest.approx(problem.slowest_s(rows, per_step=True).sum())
    assert plan.balance_after == pytest.approx(problem.balanced(rows, per_step=True))
    assert plan.before_s == pytest.approx(problem.slowest_s(rows).sum()), "equal shares in force"
    again = replace(problem, shares=shares).plan(rows, shares, split="optimal")
    assert again.before_s == again.after_s, "in force already"


def test_a_step_streams_an_expert_on_one_rank_only() -> None:
    """Two experts of two ranks, a few tokens each: either rank streams one of them."""
    steps = np.array([[[4.0, 4.0]], [[4.0, 4.0]]])
    current = Placement(np.array([[0, 1, 0, 1]], np.int32), 2, 2)
    objective = Objective(row_s=0.0, expert_bytes=0.0, touch_s=1.0)
    problem = objective.problem(Load.of_scenarios(steps, whole_steps=True), Topology(2), current)
    assert problem.slowest_s(current.slot_experts)[0] == 2.0
    assert problem.slowest_s(current.slot_experts, per_step=True)[0] == 1.0
