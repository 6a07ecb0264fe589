"""Controllers of a simulated group's placement: a planner at intervals, the live advisor, and the time of a change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.answers.plan.changes import AsItPays, Periodic, change_to
from coterie.control import AdviceSettings, LoopShape, PlacementAdvisor
from coterie.costs.movement import Contention
from coterie.costs.presets import step_model
from coterie.placement import Objective, planners
from coterie.placement.triggers.actions import ActionSettings
from coterie.placement.triggers.rebalancing import RebalancingSettings
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.group.serving import GroupPrices, GroupServedRun, ServeSettings, ServingGroup
from coterie.types import ModelSpec, Placement, Topology
from sim_checks import check_served

SPEC = ModelSpec("small", 3, 16, 2, 256, 512, 4, 2, 16, 1000, first_moe_layer=1)
RANKS, LAYERS, ROWS = 4, 2, 24
MODEL = step_model(SPEC, "h200", "bf16", Topology(RANKS))
LINEAR = Placement.linear(LAYERS, 16, RANKS)
PATHS = {path: Contention(1e-7, 0.1, 0.1, 1) for path in ("device", "host-to-device")}


def group_of(rng: np.random.Generator, hot: int, count: int = 400, placement: Placement = LINEAR) -> ServingGroup:
    """Requests of which most tokens ask for the `hot` first experts, which lie on the first ranks."""
    weights = np.where(np.arange(16) < hot, 8.0, 1.0)
    scores = np.log(weights) + rng.gumbel(size=(30 * ROWS, LAYERS, 16))
    ids = np.argsort(-scores, axis=2)[:, :, :2].astype(np.uint8)
    first, half = np.arange(30) * ROWS, np.full(30, ROWS // 2)
    records = Recordings(ids, 16, first, half, first + half, half)
    requests = FleetRequests(records, np.arange(count) % 30, rng.integers(8, 80, count), rng.integers(8, 24, count))
    arrival_s = np.cumsum(rng.exponential(4e-4, count))
    prices = GroupPrices.of(MODEL, ServeSettings(8, 128, 32))
    return ServingGroup(prices, placement, replace(requests, arrival_s=arrival_s))


def advisor_of(window_s: float) -> PlacementAdvisor:
    objective = Objective.of(MODEL, 64, horizon=1e6)
    often = RebalancingSettings(first_interval=10.0)
    rules = AdviceSettings(
        window_s=window_s,
        min_steps=16,
        cooldown_s=2 * window_s,
        rebalancing=often,
        actions=ActionSettings(min_saving_s=1.0),
    )
    return PlacementAdvisor(LoopShape("small", LAYERS, 16, 2, RANKS), Topology(RANKS), objective, LINEAR, rules)


def balance(run: GroupServedRun, at: int) -> float:
    return float(run.steps.balancedness[run.steps.in_use == at].mean())


def test_a_planner_moves_every_interval_and_evens_the_ranks_out() -> None:
    group = group_of(np.random.default_rng(0), hot=4)
    planner = planners.make("eplb", {"objective": Objective.of(MODEL, 64)})
    controller = Periodic(planner, LINEAR, Topology(RANKS), SPEC.expert_bytes("bf16"), 0.02, 0.005)
    run = group.serve(controller=controller)
    check_served(run, group.requests)
    assert run.done == 400
    assert len(run.changes) >= 3, "always, whether it pays or not"
    assert [landed.asked_s >= 0.02 * (at + 1) for at, landed in enumerate(run.changes)] == [True] * len(run.changes)
    assert all(landed.moved_bytes > 0 for landed in run.changes)
    assert controller.placement.held.any(axis=0).all()
    assert balance(run, 1) > balance(run, 0) + 0.1


def test_the_live_advisor_moves_only_where_it_pays() -> None:
    rng = np.random.default_rng(1)
    skewed, even = group_of(rng, hot=4), group_of(rng, hot=16)
    pays = AsItPays(advisor_of(0.02), PATHS, late_s=0.002)
    run = skewed.serve(controller=pays)
    check_served(run, skewed.requests)
    assert 1 <= len(run.changes) <= 4
    assert pays.advisor.placement is not LINEAR, "it was told that its plan is applied"
    assert run.changes[0].reason
    assert balance(run, 1) > balance(run, 0) + 0.1
    assert run.steps.moves_s.any(), "weights move beside steps"
    idle = AsItPays(advisor_of(0.02))
    assert even.serve(controller=idle).changes == []
    assert idle.advisor.advice is not None
    assert idle.advisor.placement is LINEAR


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 6), st.integers(4, 6))
def test_a_change_moves_what_differs(seed: int, before: int, after: int) -> None:
    """Bytes are those of experts that come to a rank from another; every layer that differs moves."""
    rng = np.random.default_rng(seed)

    def drawn(per_rank: int) -> Placement:
        rest = (per_rank - 4) * RANKS
        slots = [rng.permutation(np.r_[np.arange(16), rng.integers(0, 16, rest)]) for _ in range(LAYERS)]
        return Placement(np.array(slots, np.int32), RANKS, 16)

    current, target = drawn(before), drawn(after)
    change = change_to(current, target, Topology(RANKS), 1e6)
    assert (change.placement.slot_experts == target.slot_experts).all()
    arriving = target.held & ~current.held
    assert change.moved_bytes >= 1e6 * arriving.sum()
    assert set(np.flatnonzero(arriving.any(axis=(0, 2)))) <= set(change.layers)
    assert list(change.moved_s) == sorted(change.moved_s)
    assert change.exposed == 1.0
    assert 0 < change_to(current, target, Topology(RANKS), 1e6, PATHS).exposed < 1.0
