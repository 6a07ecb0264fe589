"""Written plans are confirmed by the maps that workers report, or said not to be taken; advice starts from what is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.control import AdviceSettings, ControlEvent, LoadSeen, LoopShape, PlacementAdvisor
from coterie.control.written import ReportedMap, differing
from coterie.placement import Objective
from coterie.placement.holdings import held_by, placed
from coterie.placement.triggers.actions import ActionSettings
from coterie.types import Placement, Topology

RANKS, LAYERS, EXPERTS, STEPS, WAIT_S = 4, 2, 16, 1000, 60.0
SHAPE = LoopShape("made", LAYERS, EXPERTS, 2, RANKS)
START = Placement.linear(LAYERS, EXPERTS, RANKS, EXPERTS + RANKS)
OBJECTIVE = Objective(row_s=1e-6, expert_bytes=1e6, row_bytes=1e3)
SETTINGS = AdviceSettings(window_s=10.0, cooldown_s=50.0, actions=ActionSettings(min_saving_s=0.0, interval_s=10.0))


def window(advisor: PlacementAdvisor, number: int) -> list[ControlEvent]:
    """A window of loads that are most for the first four experts, the same on all ranks."""
    share = np.ones(EXPERTS)
    share[:4] = 12.0
    rng = np.random.default_rng(number)
    for worker in range(RANKS):
        tokens = rng.poisson(share / share.sum() * 64 * STEPS, (LAYERS, EXPERTS)).astype(np.float64)
        assert advisor.observe(LoadSeen(10.0 * number, f"w{worker}", tokens, STEPS, 9.0))
    return advisor.tick(10.0 * (number + 1))


def report(
    advisor: PlacementAdvisor, placement: Placement, version: int, now_s: float = 30.0, *workers: int
) -> list[ControlEvent]:
    """Workers, all of them unless given, report a map; a rank's slots lie in another order than planned."""
    rows = placement.slot_experts.reshape(placement.num_layers, placement.num_ranks, -1)[:, :, ::-1]
    turned = Placement(rows.reshape(placement.slot_experts.shape).copy(), placement.num_ranks, placement.num_experts)
    events = []
    for worker in workers or range(RANKS):
        events += advisor.follow(f"w{worker}", ReportedMap(version, turned), now_s)
    return events


def advised(*, reporting: bool = True) -> tuple[PlacementAdvisor, Placement]:
    """An advisor with a plan that was scored, and the plan's placement."""
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, START, SETTINGS)
    advisor.bind({f"w{worker}": worker for worker in range(RANKS)})
    advisor.tick(0.0)
    if reporting:
        assert report(advisor, START, 1) == [], "nothing new"
    for number in range(2):
        window(advisor, number)
    made = advisor.advice
    assert made is not None
    assert made.plan is not None
    assert made.gain_next_pct is not None
    return advisor, made.plan.placement


def write(advisor: PlacementAdvisor) -> ControlEvent:
    assert advisor.advice is not None
    (event,) = advisor.written(advisor.advice.id, "map.json", WAIT_S, 25.0)
    assert event.kind == "plan_written"
    return event


def kinds(events: list[ControlEvent]) -> list[str]:
    return [event.kind for event in events]


def same(a: Placement, b: Placement) -> bool:
    return not differing(a, b).any()


def test_a_plan_is_applied_only_when_all_that_report_have_it() -> None:
    advisor, planned = advised()
    write(advisor)
    assert advisor.advice is not None
    assert advisor.advice.state == "pending"
    assert same(advisor.placement, START)
    assert report(advisor, planned, 2, 30.0, 2, 0, 3) == [], "worker 1 has not loaded it yet"
    assert advisor.written(advisor.advice.id, "map.json", WAIT_S, 25.0) == [], "once"
    (event,) = report(advisor, planned, 2, 31.0, 1)
    assert event.kind == "plan_confirmed"
    assert "version 2 of worker 'w1'" in event.reason
    assert event.values["version"] == 2
    assert same(advisor.placement, planned)
    assert advisor.ended is not None
    assert (advisor.ended.state, advisor.ended.map_version) == ("applied", 2)
    assert advisor.rebalancer.pending == 0
    assert same(advisor.rebalancer.placement, planned)


def test_layers_may_land_one_by_one() -> None:
    advisor, planned = advised()
    write(advisor)
    halfway = START.slot_experts.copy()
    halfway[0] = planned.slot_experts[0]
    assert report(advisor, Placement(halfway, RANKS, EXPERTS), 2) == []
    assert kinds(report(advisor, planned, 3)) == ["plan_confirmed"]


def test_another_new_map_means_that_the_plan_was_not_taken_and_advice_starts_from_that_map() -> None:
    advisor, _ = advised()
    write(advisor)
    other = Placement(START.slot_experts[:, ::-1].copy(), RANKS, EXPERTS)
    (event,) = report(advisor, other, 2, 30.0, 3)
    assert event.kind == "plan_not_taken"
    assert "worker 'w3' reports another map, version 2: layers 0, 1 on ranks" in event.reason
    assert same(advisor.placement, other)
    assert same(advisor.rebalancer.placement, other)
    assert advisor.ended is not None
    assert advisor.ended.state == "not_taken"
    assert report(advisor, other, 2) == [], "the others report the same"
    window(advisor, 2)
    made = advisor.advice
    assert made is not None
    assert made.plan is not None
    assert same(advisor.placement, other), "and the next plan is from there"


def test_a_plan_that_nobody_reports_in_time_was_not_taken() -> None:
    advisor, planned = advised()
    write(advisor)
    report(advisor, planned, 2, 30.0, 0, 1)
    assert "plan_not_taken" not in kinds(window(advisor, 2))
    (event,) = [one for one in advisor.tick(25.0 + WAIT_S) if one.kind == "plan_not_taken"]
    assert "in 60 s no map like it was reported" in event.reason
    assert "worker 'w2'" in event.reason
    assert "worker 'w0'" not in event.reason
    assert "layers 0, 1 on ranks" in event.reason
    late = report(advisor, planned, 2, 30.0, 2)
    assert kinds(late) in ([], ["map_followed"]), "a map that comes late is in force all the same"
    assert same(advisor.placement, planned)


def test_where_no_worker_reports_maps_a_written_plan_counts_at_once() -> None:
    advisor, planned = advised(reporting=False)
    event = write(advisor)
    assert event.reason.endswith("was written to map.json; no worker reports its map")
    assert event.values["applied"] == 1.0
    assert advisor.placement is planned
    assert advisor.ended is not None
    assert advisor.ended.state == "applied"


def test_advice_follows_maps_that_nobody_planned_and_a_plan_from_another_map_is_withdrawn() -> None:
    advisor, _ = advised()
    other = Placement(START.slot_experts[:, ::-1].copy(), RANKS, EXPERTS)
    assert kinds(report(advisor, other, 2)) == ["map_followed", "plan_kept"], "once for all ranks"
    assert same(advisor.placement, other)
    more = Placement.linear(LAYERS, EXPERTS, RANKS, EXPERTS + 2 * RANKS)  # the engine has other slots than assumed
    assert kinds(report(advisor, more, 3)) == ["map_followed"]
    for number in range(2, 4):
        window(advisor, number)
    assert advisor.advice is not None
    assert advisor.advice.plan is not None
    assert advisor.advice.plan.placement.num_slots == EXPERTS + 2 * RANKS


@pytest.mark.parametrize(
    "wrong",
    [
        Placement.linear(LAYERS + 1, EXPERTS, RANKS),
        Placement.linear(LAYERS, EXPERTS + RANKS, RANKS),
        Placement.linear(LAYERS, EXPERTS, RANKS // 2),
    ],
)
def test_a_map_of_another_shape_is_named_and_ignored(wrong: Placement) -> None:
    advisor, planned = advised()
    write(advisor)
    (event,) = report(advisor, wrong, 9, 30.0, 1)
    assert event.kind == "ignored"
    assert event.reason.startswith("map 9 of worker 'w1': (")
    assert kinds(report(advisor, planned, 2)) == ["plan_confirmed"], "what it reported before still counts"


def test_maps_of_workers_outside_the_group_or_gone_do_not_count() -> None:
    advisor, planned = advised()
    write(advisor)
    other = Placement(START.slot_experts[:, ::-1].copy(), RANKS, EXPERTS)
    assert advisor.follow("prefill", ReportedMap(1, other), 30.0) == []
    report(advisor, planned, 2, 30.0, 0, 1, 2)
    advisor.bind({f"w{worker}": worker for worker in range(3)})  # w3, which had not loaded it, has left
    assert kinds(advisor.tick(26.0)) == ["plan_confirmed"]


@given(st.integers(0, 2**32 - 1))
def test_placed_holds_what_is_asked_and_moves_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = np.stack([np.concatenate([np.arange(8), rng.integers(0, 8, 4)]) for _ in range(2)])
    current = Placement(rng.permuted(slots, axis=1).astype(np.int32), 4, 8)
    held = held_by(current).copy()
    for _ in range(int(rng.integers(0, 4))):
        layer, rank, expert = rng.integers(0, (2, 4, 8))
        if not held[rank, layer, expert] and held[rank, layer].sum() < current.slots_per_rank:
            held[rank, layer, expert] = True
    after = placed(current, held)
    assert after is not None
    np.testing.assert_array_equal(held_by(after), held)
    added = int(held.sum() - held_by(current).sum())
    assert int((after.slot_experts != current.slot_experts).sum()) == added
    full = held.copy()
    full[0, 0] = True
    assert placed(current, full) is None, "8 experts do not fit into 3 slots"


def crossed(planner: str, asks: tuple[int, ...] = (1, 0, 2, 3), expert_bytes: float = 1e3) -> PlacementAdvisor:
    """Six windows in which each rank asks for the experts that rank `asks` holds: nothing to balance."""
    start = Placement.linear(LAYERS, EXPERTS, RANKS)
    objective = Objective(row_s=1e-9, expert_bytes=expert_bytes, row_bytes=1e4)
    actions = replace(SETTINGS.actions, max_actions=16, swap_top=8)
    settings = replace(SETTINGS, planner=planner, actions=actions)
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), objective, start, settings)
    advisor.bind({f"w{worker}": worker for worker in range(RANKS)})
    advisor.tick(0.0)
    report(advisor, start, 1)
    rng = np.random.default_rng(5)
    for number in range(6):
        for worker in range(RANKS):
            tokens = rng.uniform(1.0, 40.0, (LAYERS, EXPERTS)) * STEPS
            tokens[:, 4 * asks[worker] + np.arange(4)] = 400.0 * STEPS
            assert advisor.observe(LoadSeen(10.0 * number, f"w{worker}", tokens, STEPS, 9.0))
        advisor.tick(10.0 * (number + 1))
    return advisor


@pytest.mark.parametrize(
    ("planner", "asks", "source"),
    [("round_robin", (1, 0, 2, 3), "actions"), ("latency_optimal", (1, 2, 3, 0), "planner")],
)
def test_of_plan_and_actions_the_one_that_takes_less_time_is_advised_and_goes_the_same_way(
    planner: str, asks: tuple[int, ...], source: str
) -> None:
    """round_robin does not see where tokens are; swaps of pairs do not turn a circle of ranks, and a plan does."""
    advisor = crossed(planner, asks)
    made = advisor.advice
    assert made is not None
    assert made.plan is not None
    assert made.plan.after_s < made.plan.before_s
    assert {action.kind for action in made.actions} == {"swap"}, "no slot is free for a replica"
    assert made.source == source
    assert ("moves of single actions gain" in made.reason) == (source == "actions")
    write(advisor)
    assert kinds(report(advisor, made.plan.placement, 2)) == ["plan_confirmed"]
    assert same(advisor.placement, made.plan.placement)
    assert same(advisor.rebalancer.placement, made.plan.placement)


def test_actions_that_cost_more_than_they_gain_are_only_listed() -> None:
    advisor = crossed("round_robin", expert_bytes=1e15)
    assert advisor.advice is not None
    assert advisor.advice.plan is None
    assert advisor.advice.actions
