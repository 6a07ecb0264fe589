"""Rounds over scenarios: planned and scored over the newest steps, and as before where windows have none."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.placement.base import Load
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.placement.triggers.rebalancing import Rebalancer, RebalancingDecision, RebalancingSettings
from coterie.types import Placement, Topology
from v3_prices import v3_prices

LAYERS, EXPERTS, RANKS, STEPS = 2, 16, 4, 10
TOPOLOGY, LINEAR = Topology(RANKS), Placement.linear(LAYERS, EXPERTS, RANKS)
TASTES = np.random.default_rng(3).dirichlet(np.full(EXPERTS, 0.4), (2, LAYERS))


def steps(count: int, seed: int, tastes: np.ndarray = TASTES) -> np.ndarray:
    """[step, layer, expert] tokens; a step is of one of two subjects."""
    rng = np.random.default_rng(seed)
    return np.array([rng.poisson(20_000 * tastes[step % len(tastes)]) for step in range(count)], np.float64)


def window_of(found: np.ndarray, scenarios: bool) -> Load:
    total = found.sum(axis=0)
    return Load(total, len(found), scenarios=found if scenarios else None)


def rebalancer(planning_s: float = 1e-4) -> Rebalancer:
    settings = RebalancingSettings(min_interval=STEPS, first_interval=50.0)
    return Rebalancer(LatencyOptimal, v3_prices(planning_s=planning_s), TOPOLOGY, LINEAR, settings)


def drive(one: Rebalancer, windows: list[np.ndarray], scenarios: bool) -> list[RebalancingDecision]:
    found = []
    for window in windows:
        found.append(one.observe(window_of(window, scenarios)))
        one.landed()
    return found


def slowest(placement: Placement, found: np.ndarray) -> float:
    return float(np.mean([placement.rank_load(step).max(axis=1).sum() for step in found]))


def test_rounds_are_planned_for_steps_and_hold_on_others() -> None:
    windows = [steps(STEPS, seed) for seed in range(12)]
    over, mean = rebalancer(), rebalancer()
    drive(over, windows, True)
    drive(mean, windows, False)
    unseen = steps(60, 100)
    assert slowest(over.placement, unseen) < 0.97 * slowest(mean.placement, unseen)


def test_rounds_are_scored_over_the_next_steps() -> None:
    """The saving of the first round, by hand."""
    one = rebalancer()
    windows = [steps(STEPS, seed) for seed in range(2)]
    plan = one.observe(window_of(windows[0], True)).plan
    assert plan is not None
    assert plan.unseen is not None
    one.landed()
    one.observe(window_of(windows[1], True))
    by_hand = (slowest(LINEAR, windows[1]) - slowest(plan.placement, windows[1])) * one.objective.row_s * STEPS
    assert one.rounds[0].realised_s == pytest.approx(by_hand)


def test_what_a_round_leaves_uneven_is_no_reason_to_plan_again() -> None:
    """No map is even in every step: the next windows keep it without planning, until the steps are others."""
    one = rebalancer(planning_s=0.01)
    calm = drive(one, [steps(STEPS, seed) for seed in range(16)], True)
    assert calm[0].plan is not None
    assert sum(decision.planned for decision in calm) <= 3
    assert any("as even as after the last round" in decision.reason for decision in calm)
    later = drive(one, [steps(STEPS, seed, np.roll(TASTES, 5, axis=2)) for seed in range(16)], True)
    assert any(decision.plan is not None for decision in later)


def test_a_plan_that_only_fits_its_sample_is_not_carried_out() -> None:
    """Steady traffic, noisy windows, free moves: there is always a plan that fits the newest steps better."""
    rng = np.random.default_rng(11)
    tastes = rng.dirichlet(np.full(EXPERTS, 0.4), (40, LAYERS))
    one = rebalancer(planning_s=0.0)
    found = drive(one, [20_000 * tastes[rng.integers(40, size=STEPS)] for _ in range(16)], True)
    moved = [decision for decision in found if decision.plan is not None]
    assert found[0].plan is not None
    assert len(moved) <= 6
    assert any("steps held out balancedness would be" in decision.reason for decision in found)


def test_kept_steps_are_bounded() -> None:
    one = rebalancer()
    drive(one, [steps(40, seed) for seed in range(4)], True)
    assert one.recent.around(Load(np.ones((LAYERS, EXPERTS)))).num_scenarios == one.recent.most


def test_a_window_without_steps_leaves_the_kept_ones() -> None:
    one = rebalancer()
    one.observe(window_of(steps(STEPS, 0), True))
    one.observe(window_of(steps(STEPS, 1), False))
    assert one.recent.around(Load(np.ones((LAYERS, EXPERTS)))).num_scenarios == STEPS


def test_the_same_windows_give_the_same_decisions() -> None:
    windows = [steps(STEPS, seed) for seed in range(6)]
    one, other = rebalancer(), rebalancer()
    for a, b in zip(drive(one, windows, True), drive(other, windows, True), strict=True):
        assert (a.reason, a.interval, a.gain_s) == (b.reason, b.interval, b.gain_s)
    assert one.placement.slot_experts.tobytes() == other.placement.slot_experts.tobytes()
