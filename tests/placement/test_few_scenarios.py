"""Plans for few scenarios: what they are chosen from, and that unseen scenarios decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.placement import Eplb, FlashLb, LatencyOptimal, Load, Objective, Plan, Problem
from coterie.placement.planning.over_scenarios import FEW, candidates, plan_few
from coterie.types import Placement, Topology

PAID = Objective(row_s=1e-6, expert_bytes=0.0)
"""A move costs the latency of its link."""
FREE = replace(PAID, exposed=0.0)

Array = NDArray[np.float64]


def themes(seed: int, scenarios: int, experts: int = 16, layers: int = 2, kinds: int = 3) -> Array:
    """[scenario, layer, expert] tokens of steps of one theme each; themes come in turn and have hot experts."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(experts, 0.4), (kinds, layers))
    return rng.poisson(500 * taste[np.arange(scenarios) % kinds]).astype(np.float64)


def problem_of(load: Load, ranks: int, slots: int, objective: Objective = FREE) -> Problem:
    current = Placement.linear(load.num_layers, load.num_experts, ranks, slots)
    return objective.problem(load, Topology(ranks, ranks), current)


def plan(load: Load, ranks: int = 4, slots: int = 16, objective: Objective = FREE) -> Plan:
    current = Placement.linear(load.num_layers, load.num_experts, ranks, slots)
    return LatencyOptimal(objective=objective).plan(load, Topology(ranks, ranks), current)


@pytest.mark.parametrize("slots", [16, 20])
def test_one_scenario_repeated_is_the_mean(slots: int) -> None:
    tokens = themes(1, 1)
    repeated, mean = plan(Load.of_scenarios(np.repeat(tokens, 5, axis=0)), slots=slots), plan(Load(tokens[0]), 4, slots)
    assert repeated.after_s == pytest.approx(mean.after_s, rel=0.01)
    assert repeated.unseen is not None
    assert repeated.unseen.after == pytest.approx(repeated.unseen.fitted), "what was held out is what was planned for"


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    scenarios=st.integers(2, 20),
    ranks=st.sampled_from([2, 4]),
    spare=st.sampled_from([0, 4]),
    paid=st.booleans(),
)
def test_every_candidate_is_valid_and_the_chosen_one_is_among_them(
    seed: int, scenarios: int, ranks: int, spare: int, paid: bool
) -> None:
    load = Load.of_scenarios(themes(seed, scenarios, experts=8))
    problem = problem_of(load, ranks, 8 + spare, PAID if paid else FREE)
    start = problem.current.slot_experts
    made = candidates(problem, start)
    for candidate in made:
        placement = Placement(candidate.slot_experts, ranks, 8)
        assert not placement.duplicates
        assert (placement.replicas >= 1).all()
    chosen, unseen = plan_few(problem, start)
    assert any(np.array_equal(chosen, candidate.slot_experts) for candidate in made)
    assert unseen is not None
    assert unseen.scenarios == scenarios
    fits = [problem.slowest_s(candidate.slot_experts).sum() for candidate in made[-4:]]
    assert fits[-1] <= fits[0] * (1 + 1e-9), "the search starts from the greedy plan"


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), scenarios=st.integers(2, 8), kinds=st.integers(1, 4), paid=st.booleans())
def test_the_chosen_is_best_on_scenarios_it_was_not_made_for(seed: int, scenarios: int, kinds: int, paid: bool) -> None:
    tokens = themes(seed, scenarios, kinds=kinds)
    load = Load.of_scenarios(tokens)
    problem = problem_of(load, 4, 20, PAID if paid else FREE)
    start, held = problem.current.slot_experts, []
    for out in range(scenarios):
        kept = Load.of_scenarios(np.delete(tokens, out, axis=0), whole_steps=True)
        one = Load.of_scenarios(tokens[out : out + 1], whole_steps=True)
        unseen = problem_of(one, 4, 20, problem.objective)
        made = candidates(problem_of(kept, 4, 20, problem.objective), start)
        held.append([unseen.score(candidate.slot_experts).total_s.sum() for candidate in made])
    means, chosen = np.mean(held, axis=0), plan_few(problem, start)[0]
    of_chosen = [
        mean
        for mean, candidate in zip(means, candidates(problem, start), strict=True)
        if np.array_equal(candidate.slot_experts, chosen)
    ]
    assert min(of_chosen) <= means[1:].min() * (1 + 1e-9)


def test_themes_that_share_no_expert_are_told_from_noise() -> None:
    """Three themes that come again are planned for; scenarios of pure noise leave nothing to gain over the mean."""
    again, noise = plan(Load.of_scenarios(themes(2, 12))), plan(Load.of_scenarios(themes(2, 12, kinds=12)))
    assert again.unseen is not None
    assert noise.unseen is not None
    assert again.unseen.after > again.unseen.mean + 0.05
    assert noise.unseen.after < again.unseen.after


@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("scenarios", [5, 13, 26])
def test_as_even_as_eplb_and_the_greedy_on_unseen_scenarios(scenarios: int, spare: int) -> None:
    points = []
    for seed in range(6):
        tokens = themes(seed, scenarios + 12, experts=32, kinds=6)
        fit, unseen = Load.of_scenarios(tokens[:scenarios]), Load.of_scenarios(tokens[scenarios:])
        problem, current = problem_of(unseen, 8, 32 + spare), Placement.linear(2, 32, 8, 32 + spare)
        plans = [
            planner(objective=FREE).plan(fit, Topology(8, 8), current) for planner in (Eplb, FlashLb, LatencyOptimal)
        ]
        points.append([problem.balanced(one.placement.slot_experts) for one in plans])
    even, greedy, ours = np.mean(points, axis=0)
    assert ours >= max(even, greedy) - 0.003


def test_weights_of_nothing_leave_one_scenario() -> None:
    tokens = themes(3, 4)
    weighted = plan(Load.of_scenarios(tokens, np.array([1.0, 0.0, 0.0, 0.0])))
    assert weighted.unseen is None
    assert weighted.after_s <= plan(Load(tokens[0])).after_s * 1.01


@pytest.mark.parametrize("split", ["equal", "optimal"])
@pytest.mark.parametrize("scenarios", [2, 3, 9])
def test_few_scenarios_plan_alike_for_both_splits(scenarios: int, split: str) -> None:
    load, current = Load.of_scenarios(themes(4, scenarios)), Placement.linear(2, 16, 4, 20)
    made = LatencyOptimal(objective=FREE, split=split).plan(load, Topology(4, 4), current)  # type: ignore[arg-type]
    assert made.after_s <= made.before_s


@pytest.mark.parametrize("scenarios", [2, 9, FEW - 1])
def test_the_same_load_gives_the_same_plan(scenarios: int) -> None:
    load = Load.of_scenarios(themes(5, scenarios))
    assert (
        plan(load, slots=20).placement.slot_experts.tobytes() == plan(load, slots=20).placement.slot_experts.tobytes()
    )
