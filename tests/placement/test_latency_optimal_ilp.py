"""latency_optimal_ilp against every placement there is, where there are few; bounds and interruption."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from coterie.errors import ConfigError
from coterie.placement import Eplb, LatencyOptimal, Load, Objective, Plan, Problem, Score
from coterie.placement.base import SearchProgress
from coterie.placement.planning.latency_optimal_ilp import LatencyOptimalIlp
from coterie.placement.planning.over_scenarios import improve_equal
from coterie.placement.scenarios import steps_of_requests
from coterie.traces.load import zipf_drift
from coterie.types import Placement, Topology
from v3_prices import v3_prices


def exact(problem: Problem, split: Any = "equal", gap: float = 0.0, **settings: Any) -> Plan:
    """Solve a problem from the current placement, or from any valid one if that is not valid."""
    starts = [] if problem.sound else [placements(problem)[0][None]]
    return LatencyOptimalIlp(problem.objective, split, gap, **settings).solve(problem, starts=starts)


def placements(problem: Problem) -> list[np.ndarray]:
    """Every [slot] map of one layer: no expert twice on a rank, each on a living one, dead ranks as they are."""
    current = problem.current
    ways = list(combinations(range(current.num_experts), current.slots_per_rank))
    dead = current.slot_experts.reshape(-1, current.num_ranks, current.slots_per_rank)[0]
    found = []
    for choice in product(*(ways if alive else [tuple(dead[rank])] for rank, alive in enumerate(problem.alive))):
        living = np.concatenate([choice[rank] for rank in np.flatnonzero(problem.alive)])
        if len(np.unique(living)) == current.num_experts:
            found.append(np.array(choice, np.int32).reshape(-1))
    return found


def best_split(problem: Problem, slots: np.ndarray) -> np.ndarray:
    """[slot] shares that make the slowest rank fastest, by another solver."""
    per_rank = problem.current.slots_per_rank
    alive = np.repeat(problem.alive, per_rank)
    rank = np.arange(len(slots)) // per_rank
    unit = problem.unit[0, rank, slots]
    scale = unit.max() or 1.0
    busy = (rank[None, :] == np.arange(problem.current.num_ranks)[:, None]) * unit / scale
    whole = slots[None, :] == np.arange(problem.current.num_experts)[:, None]
    result = linprog(
        np.append(np.zeros(len(slots)), 1.0),
        A_ub=np.column_stack([busy, -np.ones(len(busy))]),
        b_ub=np.zeros(len(busy)),
        A_eq=np.column_stack([whole, np.zeros(len(whole))]),
        b_eq=np.ones(len(whole)),
        bounds=[(0, float(one)) for one in alive] + [(0, None)],
    )
    return np.asarray(result.x[:-1])


def pick(problem: Problem, layers: list[int]) -> Problem:
    """The problem with these layers, any of them as often as wanted."""
    current = replace(problem.current, slot_experts=problem.current.slot_experts[layers])
    arrays = {name: getattr(problem, name)[layers] for name in ("unit", "share", "load_in", "source", "even", "reach")}
    steps = None if problem.steps is None else problem.steps.of_layers(np.array(layers))
    return replace(problem, current=current, steps=steps, **arrays)


def all_scores(problem: Problem, split: Any) -> Score:
    """Score every placement of a problem of one layer, as if each were a layer."""
    slots = np.array(placements(problem))
    shares = np.array([best_split(problem, one) for one in slots]) if split == "optimal" else None
    return pick(problem, [0] * len(slots)).score(slots, shares)


def brute_force(problem: Problem, split: Any) -> float:
    return float(all_scores(problem, split).total_s.min())


@st.composite
def problems(draw: st.DrawFn, largest: int) -> Problem:
    """One layer of 2 or 3 ranks, up to `largest` slots in all, of every kind there is."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    ranks = draw(st.sampled_from([2, 3]))
    per_rank = draw(st.integers(2, largest // ranks))
    gone = ranks == 3 and draw(st.booleans())
    living = ranks - gone
    experts = draw(st.integers(per_rank, min(6, living * per_rank)))
    speeds = rng.choice([1.0, 0.5, 0.8], ranks) if draw(st.booleans()) else np.ones(ranks)
    speeds[rng.integers(ranks)] *= not gone
    topology = Topology(ranks, ranks_per_node=draw(st.sampled_from([ranks, 1, 2])), speeds=tuple(speeds))
    tokens = np.round(rng.pareto(1.0, (1, experts)) * 300, 1) * draw(st.sampled_from([0, 1, 1, 1]))
    sources = None
    if draw(st.booleans()):
        sources = tokens[None] * rng.dirichlet(np.ones(ranks), experts).T[:, None, :]
    objective = v3_prices(
        touch_s=draw(st.sampled_from([0.0, 2e-5])),
        row_bytes=draw(st.sampled_from([0.0, 14336.0])),
        horizon=draw(st.sampled_from([2.0, 10.0, 100.0])),
        exposed=draw(st.sampled_from([1.0, 0.5])),
        target_balance=draw(st.sampled_from([1.0, 0.9])),
        move_price=draw(st.sampled_from([0.0, 1.0])),
    )
    held = [rng.permutation(experts)[:per_rank] for _ in range(ranks)]
    slots = np.concatenate(held).astype(np.int32)
    for expert in np.setdiff1d(np.arange(experts), slots):  # a map must have them all, if on a rank that is gone
        twice = np.flatnonzero(np.bincount(slots, minlength=experts)[slots] > 1)
        slots[twice[0]] = expert
    load = Load(tokens, sources=sources)
    return objective.problem(load, topology, Placement(slots[None], ranks, experts))


@settings(deadline=None, max_examples=25)
@given(problems(largest=9))
def test_equal_split_is_the_best_of_all_placements(problem: Problem) -> None:
    plan = exact(problem)
    report = plan.proven
    best = brute_force(problem, "equal")
    assert plan.placement.duplicates == 0 or not problem.alive.all()
    assert problem.score(plan.placement.slot_experts).total_s[0] == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert report.objective_s[0] == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert report.bound_s[0] <= best * (1 + 1e-9) + 1e-15
    assert report.closed.all()


ORACLE = {
    "no spare slots": (6, v3_prices(expert_bytes=0.0)),
    "spare slots": (9, v3_prices(expert_bytes=0.0)),
    "moves priced": (9, v3_prices(horizon=20.0, move_price=0.2)),
    "streaming": (9, v3_prices(expert_bytes=0.0, touch_s=2e-5)),
}


@pytest.mark.parametrize("kind", ORACLE)
def test_the_search_over_scenarios_is_close_to_the_best(kind: str) -> None:
    slots, objective = ORACLE[kind]
    ratios = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        requests = rng.poisson(2000 * rng.dirichlet(np.full(6, 0.3), (12, 1)))
        load = Load.of_scenarios(steps_of_requests(requests, 3, 6, rng))
        topology, current = Topology(3), Placement.linear(1, 6, 3, slots)
        problem = objective.problem(load, topology, current)
        rows = improve_equal(problem, current.slot_experts)
        ratios.append(float(problem.score(rows).total_s[0]) / brute_force(problem, "equal"))
    assert max(ratios) < 1.0001


def test_scenarios_are_planned_by_their_mean_step() -> None:
    load = Load.of_scenarios(np.random.default_rng(0).pareto(1.0, (5, 1, 6)))
    planner, topology, current = LatencyOptimalIlp(v3_prices(expert_bytes=0.0)), Topology(3), Placement.linear(1, 6, 3)
    plan = planner.plan(load, topology, current)
    assert np.array_equal(
        plan.placement.slot_experts, planner.plan(load.mean, topology, current).placement.slot_experts
    )
    with pytest.raises(ConfigError, match="mean step"):
        planner.solve(planner.objective.problem(load, topology, current))


def test_a_placement_that_is_not_valid_needs_a_start() -> None:
    problem = v3_prices().problem(
        Load(np.ones((1, 4))), Topology(3, speeds=(1.0, 0.0, 1.0)), Placement.linear(1, 4, 3, 6)
    )
    assert not problem.sound
    with pytest.raises(ConfigError, match="no start"):
        LatencyOptimalIlp(v3_prices()).solve(problem)


@settings(deadline=None, max_examples=12)
@given(problems(largest=6))
def test_optimal_split_is_the_best_of_all_placements(problem: Problem) -> None:
    plan = exact(problem, "optimal")
    report = plan.proven
    best = brute_force(problem, "optimal")
    scored = problem.score(plan.placement.slot_experts, plan.shares).total_s[0]
    assert report.bound_s[0] <= min(best, scored) * (1 + 1e-9) + 1e-15
    if not problem.objective.touch_s:
        assert scored == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert report.objective_s[0] >= report.bound_s[0]
    assert len(plan.moves) == 0 or scored == pytest.approx(report.objective_s[0], rel=1e-6)


@pytest.mark.parametrize("split", ["equal", "optimal"])
def test_keeps_what_is_in_force_where_planning_costs_more_than_it_gains(split: Any) -> None:
    problem = drifted(1, 7, 9, 3, v3_prices(horizon=50.0), Topology(3))
    plan = exact(problem, split)
    report = plan.proven
    assert len(plan.moves)
    gain = float(problem.score(problem.current.slot_experts).total_s.sum() - report.objective_s.sum())
    for planning_s, moves in ((0.99 * gain, len(plan.moves)), (1.01 * gain, 0)):
        dear = replace(problem, objective=replace(problem.objective, planning_s=planning_s))
        decided = exact(dear, split)
        assert len(decided.moves) == moves
        assert (decided.skip_reason is not None) == (not moves)
    assert "does not pay planning_s" in str(decided.skip_reason)
    assert decided.saving_s == 0
    again = problem.onward(np.arange(1), plan.placement.slot_experts, plan.shares)
    assert exact(again, split).saving_s == pytest.approx(0, abs=1e-6 * plan.after_s)


def drifted(layers: int, experts: int, slots: int, ranks: int, objective: Objective, topology: Topology) -> Problem:
    drift = zipf_drift(layers, experts, np.random.default_rng(3), exponent=0.8, tokens=32768.0)
    first = Placement.linear(layers, experts, ranks, slots)
    current = Eplb(v3_prices()).plan(Load(drift.before), Topology(ranks), first).placement
    return objective.problem(Load(drift.after), topology, current)


def test_it_can_be_stopped_and_keeps_what_it_has() -> None:
    problem = drifted(3, 64, 72, 4, v3_prices(horizon=100.0), Topology(4))
    seen: list[SearchProgress] = []

    def once(progress: SearchProgress) -> bool:
        seen.append(progress)
        return progress.layer < 1

    plan = exact(problem, time_limit_s=1.0, progress=once)
    report = plan.proven
    assert {progress.layer for progress in seen} == {0, 1}
    assert np.array_equal(plan.placement.slot_experts[1:], problem.current.slot_experts[1:])
    assert (report.bound_s <= report.objective_s).all()
    assert not report.closed[1:].any()


def test_what_progress_raises_comes_out() -> None:
    problem = drifted(1, 64, 72, 8, v3_prices(horizon=100.0), Topology(8))

    def fail(_: SearchProgress) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exact(problem, progress=fail)


@pytest.mark.parametrize("split", ["equal", "optimal"])
def test_starts_from_the_heuristic_and_is_never_worse(split: Any) -> None:
    objective = v3_prices(horizon=200.0)
    topology = Topology(4, ranks_per_node=2, speeds=(1.0, 1.0, 0.8, 1.0))
    load = Load(zipf_drift(3, 32, np.random.default_rng(3), exponent=0.8, tokens=32768.0).after)
    problem = objective.problem(load, topology, Placement.linear(3, 32, 4, 40))

    def scored(plan: Plan) -> np.ndarray:
        return problem.score(plan.placement.slot_experts, None if split == "equal" else plan.shares).total_s

    fast = LatencyOptimal(objective=objective, split=split).plan(load, topology, problem.current)
    ilp = LatencyOptimalIlp(objective, split, gap=0.02, time_limit_s=2.0)
    assert (scored(ilp.plan(load, topology, problem.current)) <= scored(fast) * (1 + 1e-6)).all()
    plan = ilp.solve(problem, starts=[fast.placement.slot_experts])
    report = plan.proven
    assert scored(plan) == pytest.approx(report.objective_s, rel=1e-6)
    assert (report.bound_s <= scored(fast)).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "even"}, "split='even' must be"),
        ({"gap": -0.1}, "gap=-0.1 must be"),
        ({"gap_moves": np.nan}, "gap_moves=nan must be"),
        ({"time_limit_s": 0}, "time_limit_s=0 must be above 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatencyOptimalIlp(v3_prices(), **wrong)  # type: ignore[arg-type]


def test_more_slots_a_rank_than_experts_are_refused() -> None:
    current = Placement(np.array([[0, 1, 1, 0, 1, 0]], np.int32), 2, 2)
    with pytest.raises(ConfigError, match=r"3 .*num_experts=2"):
        LatencyOptimalIlp(v3_prices()).plan(Load(np.ones((1, 2))), Topology(2), current)
