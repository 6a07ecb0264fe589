"""Plans over scenarios: against brute force, theory and the plan for the mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement import Eplb, LatencyOptimal, Load, Objective
from coterie.placement.planning.over_scenarios import FEW
from coterie.placement.scenarios import steps_of_requests
from coterie.types import Placement, Topology

FREE = Objective(row_s=1e-6, expert_bytes=0.0)
"""Moves cost nothing."""


def steps(seed: int, scenarios: int, layers: int, experts: int) -> NDArray[np.float64]:
    """Steps of a few requests, each with experts of its own."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(experts, 0.3), (12, layers))
    footprints = rng.poisson(400 * taste)
    return steps_of_requests(footprints, 3, scenarios, rng)


def slowest(slot_experts: NDArray[np.integer], tokens: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """[scenario] tokens of the slowest rank of one layer [scenario, expert], written as the objective says it."""
    replicas = np.bincount(slot_experts, minlength=tokens.shape[1])
    each = tokens[:, slot_experts] / replicas[slot_experts]
    return np.asarray(each.reshape(len(tokens), ranks, -1).sum(axis=2).max(axis=1))


@pytest.mark.parametrize("seed", range(6))
def test_close_to_the_best_of_all_placements(seed: int) -> None:
    tokens = steps(seed, 7, 1, 8)
    load, topology, current = Load.of_scenarios(tokens), Topology(4, 4), Placement.linear(1, 8, 4)
    plan = LatencyOptimal(objective=FREE).plan(load, topology, current)
    best = min(slowest(np.array(order), tokens[:, 0], 4).mean() for order in permutations(range(8)))
    found = slowest(plan.placement.slot_experts[0], tokens[:, 0], 4).mean()
    assert plan.after_s == pytest.approx(found * FREE.row_s)
    assert found <= 1.02 * best


@given(seed=st.integers(0, 1000), ranks=st.sampled_from([2, 4]), spare=st.sampled_from([0, 4]))
def test_never_worse_than_what_there_is_or_the_mean_plan(seed: int, ranks: int, spare: int) -> None:
    tokens = steps(seed, FEW, 2, 12)  # with fewer the plan is chosen by unseen scenarios
    load, topology = Load.of_scenarios(tokens), Topology(ranks, ranks)
    current = Placement.linear(2, 12, ranks, 12 + spare)
    planner = LatencyOptimal(objective=FREE)
    plan, mean = planner.plan(load, topology, current), planner.plan(Load(load.tokens), topology, current)
    problem = FREE.problem(load, topology, current)
    assert plan.after_s <= plan.before_s * (1 + 1e-12)
    assert plan.after_s <= problem.slowest_s(mean.placement.slot_experts).sum() * (1 + 1e-9)
    assert plan.after_s >= problem.reach.sum() * (1 - 1e-9)
    for layer in plan.placement.slot_experts:
        assert set(layer.tolist()) == set(range(12))
        for rank in layer.reshape(ranks, -1):
            assert len(set(rank.tolist())) == len(rank), "no expert twice on a rank"


def test_one_mean_scenario_is_the_mean() -> None:
    tokens = steps(3, 1, 3, 16)
    topology, current = Topology(4, 4), Placement.linear(3, 16, 4)
    one, mean = (
        LatencyOptimal(objective=FREE).plan(load, topology, current)
        for load in (Load.of_scenarios(tokens), Load(tokens[0]))
    )
    assert (one.placement.slot_experts == mean.placement.slot_experts).all()
    assert one.after_s == mean.after_s


def test_equal_scenarios_give_the_time_of_the_mean() -> None:
    tokens = np.repeat(steps(4, 1, 2, 8), 5, axis=0)
    problems = [
        replace(FREE, touch_s=touch_s).problem(load, Topology(2, 2), Placement.linear(2, 8, 2, 10))
        for touch_s in (0.0, 1e-4)
        for load in (Load.of_scenarios(tokens), Load(tokens[0]))
    ]
    rows = problems[0].current.slot_experts
    for scenarios, mean in (problems[:2], problems[2:]):
        assert scenarios.slowest_s(rows) == pytest.approx(mean.slowest_s(rows))
        assert scenarios.balanced(rows) == pytest.approx(mean.balanced(rows))


def test_a_token_of_a_whole_step_streams_its_expert() -> None:
    tokens = np.array([[[1.0, 0.0]], [[0.0, 2.0]]])
    objective = Objective(row_s=0.0, expert_bytes=0.0, touch_s=1.0)
    for whole, seconds in ((True, 1.0), (False, (2 - np.exp(-1) - np.exp(-2)) / 2)):
        load = Load.of_scenarios(tokens, whole_steps=whole)
        problem = objective.problem(load, Topology(2, 2), Placement.linear(1, 2, 2))
        assert problem.slowest_s(problem.current.slot_experts)[0] == pytest.approx(seconds)


def test_dear_moves_are_not_made_and_cheap_ones_are() -> None:
    tokens = steps(6, 10, 4, 16)
    load, topology, current = Load.of_scenarios(tokens), Topology(4, 4), Placement.linear(4, 16, 4)
    moves = [
        len(LatencyOptimal(objective=Objective(row_s=1e-6, expert_bytes=size)).plan(load, topology, current).moves)
        for size in (0.0, 1e10, 1e13)
    ]
    assert moves[0] > moves[1] > moves[2] == 0


@pytest.mark.parametrize("budget", [0, 6, 20, 1000])
def test_a_budget_of_moves_holds_over_scenarios(budget: int) -> None:
    tokens = steps(10, FEW, 4, 16)
    load, topology, current = Load.of_scenarios(tokens), Topology(4, 4), Placement.linear(4, 16, 4)
    planner = LatencyOptimal(objective=FREE, max_moves=budget)
    plan, mean = planner.plan(load, topology, current), planner.plan(load.mean, topology, current)
    problem = FREE.problem(load, topology, current)
    assert len(plan.moves) <= budget
    assert plan.after_s <= plan.before_s
    if budget in (0, 1000):
        free = LatencyOptimal(objective=FREE).plan(load, topology, current)
        wanted = free.after_s if budget else plan.before_s
        assert plan.after_s <= wanted * (1 + 1e-12)
    assert plan.after_s <= problem.slowest_s(mean.placement.slot_experts).sum() * (1 + 1e-9)


def test_a_rank_that_is_gone_gets_nothing() -> None:
    tokens = steps(7, 8, 2, 8)
    topology = Topology(4, 4, speeds=(1.0, 0.0, 1.0, 0.5))
    current = Placement.linear(2, 8, 4, 16)
    plan = LatencyOptimal(objective=FREE).plan(Load.of_scenarios(tokens), topology, current)
    living = plan.placement.slot_experts.reshape(2, 4, -1)[:, [0, 2, 3]]
    assert all(set(layer.ravel().tolist()) == set(range(8)) for layer in living)
    assert plan.after_s <= Eplb(objective=FREE).plan(Load.of_scenarios(tokens), topology, current).after_s


def test_plans_report_scenarios_that_they_were_not_made_for() -> None:
    tokens = steps(8, 32, 4, 16)
    topology, current = Topology(4, 4), Placement.linear(4, 16, 4)
    plan = LatencyOptimal(objective=FREE).plan(Load.of_scenarios(tokens), topology, current)
    assert plan.unseen is not None
    assert plan.unseen.scenarios == 8
    assert plan.unseen.fitted >= plan.unseen.after >= plan.unseen.mean, "chosen by what was held out"


def test_the_same_load_gives_the_same_plan() -> None:
    tokens = steps(9, 16, 8, 16)
    load, topology, current = Load.of_scenarios(tokens), Topology(4, 4), Placement.linear(8, 16, 4, 20)
    one, two = (LatencyOptimal(objective=FREE).plan(load, topology, current) for _ in range(2))
    assert one.placement.slot_experts.tobytes() == two.placement.slot_experts.tobytes()


@pytest.mark.parametrize(
    ("scenarios", "weights", "told"),
    [
        (np.zeros((2, 3)), None, "scenarios has shape"),
        (np.full((2, 1, 4), np.nan), None, "must be finite"),
        (np.ones((2, 1, 4)), np.ones(3), "there are 2 scenarios"),
        (np.ones((2, 1, 4)), np.zeros(2), "not all 0"),
    ],
)
def test_wrong_scenarios_are_refused(
    scenarios: NDArray[np.float64], weights: NDArray[np.float64] | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Load(np.ones((1, 4)), scenarios=scenarios, weights=weights)
