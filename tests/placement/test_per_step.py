"""Plans for a split in every step: against all placements of tiny cases, and what holds for any."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.placement import LatencyOptimal, Load, Objective
from coterie.placement.planning.free_split import improve_steps
from coterie.placement.scenarios import steps_of_requests
from coterie.types import Placement, Topology
from v3_prices import v3_prices

FREE = Objective(row_s=1e-6, expert_bytes=0.0)
"""Moves cost nothing."""


def steps(seed: int, scenarios: int, layers: int, experts: int) -> NDArray[np.float64]:
    """Steps of a few requests, each with experts of its own."""
    rng = np.random.default_rng(seed)
    footprints = rng.poisson(400 * rng.dirichlet(np.full(experts, 0.3), (12, layers)))
    return steps_of_requests(footprints, 3, scenarios, rng)


def every_map(ranks: int, each: int, experts: int) -> NDArray[np.int32]:
    """[map, slot], order within a rank aside."""
    ways = product(combinations(range(experts), each), repeat=ranks)
    return np.array([np.concatenate(way) for way in ways if len(set().union(*way)) == experts], np.int32)


def test_close_to_the_best_of_all_placements() -> None:
    maps, ratios = every_map(3, 2, 5), []
    for seed in range(8):
        known, topology = steps(seed, 6, 1, 5), Topology(3)
        load = Load.of_scenarios(known)
        current = Placement(maps[seed * 7 : seed * 7 + 1], 3, 5)
        everywhere = Load.of_scenarios(np.repeat(known, len(maps), axis=1))
        all_maps = FREE.problem(everywhere, topology, Placement(maps, 3, 5))
        best = float(all_maps.slowest_s(maps, per_step=True).min())
        plan = LatencyOptimal(objective=FREE, split="optimal").plan(load, topology, current)
        assert plan.split == "optimal"
        ratios.append(plan.after_s / best)
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.1


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000), spare=st.sampled_from([0, 4]), touch_s=st.sampled_from([0.0, 2e-5]), gone=st.booleans()
)
def test_never_worse_than_its_start(seed: int, spare: int, touch_s: float, gone: bool) -> None:
    load = Load.of_scenarios(steps(seed, 6, 2, 8))
    topology = Topology(4, speeds=(1.0, 0.0, 1.0, 0.5) if gone else ())
    objective = v3_prices(horizon=20.0, touch_s=touch_s, move_price=0.2)
    current = Placement.linear(2, 8, 4, 8 + spare + 4 * gone)
    equal = LatencyOptimal(objective=objective).plan(load, topology, current).placement
    problem = objective.problem(load, topology, current)
    found = improve_steps(problem, equal.slot_experts)
    before, after = (problem.score(rows, per_step=True).total_s for rows in (equal.slot_experts, found))
    assert (after <= before * (1 + 1e-12)).all()
    for row in found.reshape(2, 4, -1):
        living = row[problem.alive]
        assert set(living.ravel().tolist()) == set(range(8))
        assert all(len(set(rank.tolist())) == len(rank) for rank in living), "no expert twice on a rank"
    plan = LatencyOptimal(objective=objective, split="optimal").plan(load, topology, current)
    planned = problem.score(plan.placement.slot_experts, per_step=True).total_s.sum()
    assert planned <= before.sum() * (1 + 1e-9)


def test_replicas_that_help_the_split_are_not_those_that_help_equal_shares() -> None:
    load = Load.of_scenarios(steps(1, 48, 3, 16))
    topology, current = Topology(4), Placement.linear(3, 16, 4, 20)
    planners = {split: LatencyOptimal(objective=FREE, split=split) for split in ("equal", "optimal")}
    equal, optimal = (planners[split].plan(load, topology, current) for split in planners)
    problem = FREE.problem(load, topology, current)
    rows = equal.placement.slot_experts
    assert optimal.after_s < problem.slowest_s(rows, per_step=True).sum() < equal.after_s
    assert optimal.unseen is not None
    assert optimal.unseen.scenarios == 12
    assert optimal.unseen.after > optimal.unseen.mean
    assert np.bincount(optimal.placement.slot_experts[0], optimal.shares[0]) == pytest.approx(np.ones(16))
    again = planners["optimal"].plan(load, topology, optimal.placement, optimal.shares)
    assert again.before_s == pytest.approx(optimal.after_s), "the split is in force"
    assert again.after_s <= again.before_s


def test_what_gains_less_than_planning_costs_is_kept() -> None:
    load, topology, current = Load.of_scenarios(steps(2, 8, 2, 8)), Topology(4), Placement.linear(2, 8, 4, 12)
    planner = LatencyOptimal(objective=v3_prices(planning_s=1e6), split="optimal")
    plan = planner.plan(load, topology, current)
    assert plan.skip_reason is not None
    assert plan.split == "equal"
    shares = planner.objective.problem(load, topology, current).equal_shares(current.slot_experts)
    kept = planner.plan(load, topology, current, shares)
    assert kept.split == "optimal", "in force before, and so after"
    assert kept.saving_s == 0
    dear = LatencyOptimal(objective=v3_prices(expert_bytes=1e15), split="optimal").plan(load, topology, current)
    assert len(dear.moves) == 0
    assert "no move pays" in str(dear.skip_reason)
    assert dear.after_s < dear.before_s
