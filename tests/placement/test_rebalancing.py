"""When to rebalance: intervals against drift and cost, hysteresis, backlog, and scores on the next window only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement.base import Load, Plan
from coterie.placement.objective import Objective
from coterie.placement.planning.eplb import Eplb
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.placement.triggers.rebalancing import Rebalancer, RebalancingSettings
from coterie.types import Link, Placement, Topology
from v3_prices import v3_prices

LAYERS, EXPERTS, RANKS, STEPS = 2, 32, 4, 10
TOPOLOGY = Topology(RANKS)


def slow_link(bytes_per_s: float) -> Topology:
    return Topology(RANKS, intra=Link("slow", bytes_per_s, 1e-6))


def loads(count: int, half_life: float, seed: int = 0, rows: float = 20_000.0) -> np.ndarray:
    """[window, layer, expert] tokens of STEPS steps each; half_life in windows."""
    rng = np.random.default_rng(seed)
    a = 2.0 ** (-1.0 / half_life)
    z = rng.normal(size=(LAYERS, EXPERTS))
    found = np.empty((count, LAYERS, EXPERTS))
    for window in found:
        popularity = np.exp(z)
        window[:] = rng.poisson(popularity / popularity.sum(axis=1, keepdims=True) * rows * STEPS)
        z = a * z + np.sqrt(1 - a * a) * rng.normal(size=z.shape)
    return found


def rebalancer(topology: Topology = TOPOLOGY, planning_s: float = 1e-3, **settings: float) -> Rebalancer:
    known = {"min_interval": STEPS, "first_interval": 50.0} | settings
    return Rebalancer(
        LatencyOptimal,
        v3_prices(planning_s=planning_s),
        topology,
        Placement.linear(LAYERS, EXPERTS, RANKS),
        RebalancingSettings(**known),
    )


def drive(one: Rebalancer, windows: np.ndarray) -> list[int]:
    """Windows after which a round was carried out; moves land at once."""
    acted = []
    for at, window in enumerate(windows):
        if one.observe(Load(window, STEPS)).plan is not None:
            acted.append(at)
            one.landed()
    return acted


def test_faster_drift_and_cheaper_rounds_shorten_the_interval() -> None:
    def settled(half_life: float, planning_s: float) -> float:
        one = rebalancer(planning_s=planning_s)
        drive(one, loads(50, half_life))
        return one.interval

    assert settled(8.0, 2e-3) < settled(400.0, 2e-3)
    assert settled(15.0, 5e-4) < settled(15.0, 8e-3)


def test_the_reason_prints_steps_with_thousands() -> None:
    one = rebalancer(first_interval=1_820.0)
    load = Load(loads(1, 1e9)[0], STEPS)
    assert " in 1,820 steps and cost " in one.observe(load).reason
    one.landed()
    assert one.observe(load).reason == f"next look in {one.interval - STEPS:,.0f} steps"


def test_a_steady_load_is_balanced_once_and_left_alone() -> None:
    steady = np.tile(loads(1, 1e9), (40, 1, 1))
    rng = np.random.default_rng(1)
    one = rebalancer()
    acted = drive(one, rng.poisson(steady).astype(float))
    assert acted[0] == 0
    assert len(acted) <= 3, "sampling noise is no reason to move"


def test_no_planning_where_an_even_load_would_not_pay_for_it() -> None:
    one = rebalancer(planning_s=100.0)
    decisions = [one.observe(Load(window, STEPS)) for window in loads(20, 5.0)]
    assert not any(decision.planned for decision in decisions)
    assert any("planning alone costs" in decision.reason for decision in decisions)
    assert one.placement.slot_experts.tolist() == Placement.linear(LAYERS, EXPERTS, RANKS).slot_experts.tolist()


def test_moves_that_cost_more_than_they_bring_are_not_made() -> None:
    dear = rebalancer(slow_link(1e6))  # 44 s an expert
    assert drive(dear, loads(30, 5.0)) == []


@dataclass(frozen=True)
class Flapping:
    """Always has another plan, which saves a little: the margin must say whether to follow."""

    objective: Objective = field(default=v3_prices())

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        return Eplb(objective=self.objective).plan(load, topology, current, shares)


def test_the_margin_holds_back_rounds_that_gain_little() -> None:
    def rounds(margin: float) -> int:
        one = Rebalancer(
            Flapping,
            v3_prices(planning_s=1e-4),
            slow_link(20e9),
            Placement.linear(LAYERS, EXPERTS, RANKS),
            RebalancingSettings(min_interval=STEPS, first_interval=50.0, margin=margin),
        )
        return len(drive(one, loads(30, 6.0)))

    assert rounds(0.0) > rounds(3.0)


def test_the_interval_changes_by_bounded_factors() -> None:
    one = rebalancer(factor=1.5)
    before = one.interval
    for window in loads(40, 8.0):
        one.observe(Load(window, STEPS))
        one.landed()
        assert before / 1.5 - 1e-9 <= one.interval <= before * 1.5 + 1e-9
        before = one.interval


def test_no_round_while_the_last_one_moves_and_what_is_left_over_is_measured() -> None:
    one = rebalancer(first_interval=20.0)
    windows = iter(loads(40, 5.0))
    first = one.observe(Load(next(windows), STEPS))
    assert first.plan is not None
    moves = len(first.plan.moves)
    old = one.placement
    one.landed(moves - 1)
    interval = one.interval
    reasons = [one.observe(Load(next(windows), STEPS)).reason for _ in range(6)]
    assert one.placement is old, "half a plan is no plan"
    assert all(f"1 of {moves} moves are still under way" in reason for reason in reasons)
    assert one.rounds[-1].carried_over == 1
    assert one.interval > interval
    assert one.rounds[-1].steps == 0, "a map that is not in force is not scored"
    one.landed()
    assert one.placement is first.plan.placement
    with pytest.raises(ConfigError, match="moves=1"):
        one.landed(1)


def test_plans_are_scored_on_the_windows_after_their_own() -> None:
    """The saving of the first round, by hand, on the window after it."""
    one = rebalancer(urgent=1e9)
    windows = loads(3, 5.0)
    plan = one.observe(Load(windows[0], STEPS)).plan
    assert plan is not None
    one.landed()
    assert one.rounds[-1].steps == 0
    one.observe(Load(windows[1], STEPS))
    by_hand = 0.0
    for sign, placement in ((1, Placement.linear(LAYERS, EXPERTS, RANKS)), (-1, plan.placement)):
        by_hand += sign * placement.rank_load(windows[1]).max(axis=1).sum() * one.objective.row_s
    assert one.rounds[-1].steps == STEPS
    assert one.rounds[-1].realised_s == pytest.approx(by_hand)
    assert one.rounds[-1].predicted_s == pytest.approx(plan.saving_s * STEPS), "no drift is known yet"


def test_trust_falls_where_plans_do_not_hold() -> None:
    """Every window is another load: what a plan promises does not come."""
    rng = np.random.default_rng(0)
    one = rebalancer(first_interval=10.0)
    scattered = np.concatenate([loads(1, 5.0, seed) for seed in range(40)])
    drive(one, scattered)
    holds = rebalancer(first_interval=10.0)
    drive(holds, rng.poisson(np.tile(loads(1, 1e9), (40, 1, 1))).astype(float))
    assert one.trust < 0.7 < holds.trust + 0.3
    assert sum(r.realised_s for r in one.rounds) < 0.6 * sum(r.predicted_s for r in one.rounds)


def test_a_jump_is_met_before_the_interval_is_over() -> None:
    """Steady under a long interval; then another load."""

    def after_the_jump(urgent: float) -> list[int]:
        one = rebalancer(first_interval=5000.0, factor=1.01, urgent=urgent)
        rng = np.random.default_rng(0)
        drive(one, rng.poisson(np.tile(loads(1, 1e9, 0), (15, 1, 1))).astype(float))
        return drive(one, rng.poisson(np.tile(loads(1, 1e9, 1), (15, 1, 1))).astype(float))

    assert after_the_jump(4.0)[0] < 12
    assert after_the_jump(1e9) == []


def test_a_dead_rank_is_planned_around_whatever_it_saves() -> None:
    topology = Topology(RANKS)
    placement = Placement.linear(LAYERS, EXPERTS, RANKS, 48)
    one = Rebalancer(LatencyOptimal, v3_prices(planning_s=1e3), topology, placement)
    window = Load(np.full((LAYERS, EXPERTS), 100.0), STEPS)
    assert one.observe(window).plan is None
    one.replace(placement, Topology(RANKS, speeds=(1.0, 1.0, 0.0, 1.0)))
    decision = one.observe(window)
    assert decision.plan is not None
    assert "no living rank" in decision.reason
    held = decision.plan.placement.slot_experts.reshape(LAYERS, RANKS, -1)[:, [0, 1, 3]]
    assert all(len(np.unique(layer)) == EXPERTS for layer in held)


@pytest.mark.parametrize("touch_s", [0.0, 1e-4])
def test_shares_on_a_constant_load_are_changed_once(touch_s: float) -> None:
    """What is gained is gained against the shares in force, so the next rounds find nothing."""
    objective = v3_prices(planning_s=1e-6, touch_s=touch_s)
    window, earlier = loads(1, 1e9)[0], Load(loads(1, 1e9, seed=1)[0])
    placement = Eplb(v3_prices()).plan(earlier, TOPOLOGY, Placement.linear(LAYERS, EXPERTS, RANKS, 40)).placement
    one = Rebalancer(
        lambda objective: LatencyOptimal(objective, split="optimal"),
        objective,
        slow_link(1e3),
        placement,
        RebalancingSettings(min_interval=STEPS, first_interval=STEPS),
    )
    decisions = [one.observe(Load(window, STEPS)) for _ in range(30)]
    assert [at for at, decision in enumerate(decisions) if decision.plan is not None] == [0]
    assert decisions[0].plan is not None
    assert len(decisions[0].plan.moves) == 0
    assert decisions[0].plan.saving_s > 0
    assert sum(decision.planned for decision in decisions) > 1, "the planner was asked again"


def test_a_constant_load_is_moved_once_and_shared_once() -> None:
    one = Rebalancer(
        lambda objective: LatencyOptimal(objective, split="optimal"),
        v3_prices(planning_s=1e-6, target_balance=0.98),
        TOPOLOGY,
        Placement.linear(LAYERS, EXPERTS, RANKS, 40),
        RebalancingSettings(min_interval=STEPS, first_interval=1000.0),
    )
    assert drive(one, np.tile(loads(1, 1e9), (30, 1, 1))) == [0]


def test_where_tokens_come_from_is_forecast() -> None:
    """All of an expert's tokens come from the node that it is not on; without sources nobody would know.

    Where they came from by chance, other tokens come next time: then nothing moves either.
    """
    objective = v3_prices(row_s=1e-9, row_bytes=14336.0)
    two_nodes = Topology(2, ranks_per_node=1)
    sources = np.zeros((2, 1, 4))
    sources[0, 0, [2, 3]] = sources[1, 0, [0, 1]] = 100_000.0

    def moved(windows: Sequence[NDArray[np.float64] | None]) -> Placement:
        one = Rebalancer(LatencyOptimal, objective, two_nodes, Placement.linear(1, 4, 2))
        for window in windows:
            one.observe(Load(sources.sum(axis=0), STEPS, window))
            one.landed()
        return one.placement

    assert set(moved([sources, None] * 15).slot_experts[0, :2]) == {2, 3}
    assert set(moved([None] * 30).slot_experts[0, :2]) == {0, 1}
    assert set(moved([sources, sources[::-1]] * 15).slot_experts[0, :2]) == {0, 1}


def test_the_same_windows_give_the_same_decisions() -> None:
    one, other = rebalancer(), rebalancer()
    for window in loads(20, 6.0):
        a, b = one.observe(Load(window, STEPS)), other.observe(Load(window, STEPS))
        assert (a.reason, a.interval, a.gain_s) == (b.reason, b.interval, b.gain_s)
        one.landed()
        other.landed()
    assert one.placement.slot_experts.tobytes() == other.placement.slot_experts.tobytes()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="min_interval=10"):
        RebalancingSettings(min_interval=10, first_interval=5)
    with pytest.raises(ConfigError, match="factor=1"):
        RebalancingSettings(factor=1)
    with pytest.raises(ConfigError, match="margin=-1"):
        RebalancingSettings(margin=-1)
    with pytest.raises(ConfigError, match="learning=0"):
        RebalancingSettings(learning=0)
