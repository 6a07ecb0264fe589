"""Placement advice from loads: made where it pays, scored on the next window, never applied by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.control import Advice, AdviceSettings, ControlEvent, LoadSeen, LoopShape, PlacementAdvisor
from coterie.errors import ConfigError
from coterie.placement import Objective, read_map
from coterie.placement.triggers.actions import ActionSettings
from coterie.types import Placement, Topology

RANKS, LAYERS, EXPERTS, STEPS = 4, 2, 16, 1000
SHAPE = LoopShape("made", LAYERS, EXPERTS, 2, RANKS)
OBJECTIVE = Objective(row_s=1e-6, expert_bytes=1e6, row_bytes=1e3)
SETTINGS = AdviceSettings(window_s=10.0, cooldown_s=50.0, actions=ActionSettings(min_saving_s=0.0, interval_s=10.0))


def skewed(rng: np.random.Generator, hot: int) -> np.ndarray:
    """[layer, expert] tokens of one worker's STEPS steps, most of them for four experts that follow each other."""
    share = np.ones(EXPERTS)
    share[(hot + np.arange(4)) % EXPERTS] = 12.0
    return rng.poisson(share / share.sum() * 64 * STEPS, (LAYERS, EXPERTS)).astype(np.float64)


def advisor_of(settings: AdviceSettings = SETTINGS) -> PlacementAdvisor:
    placement = Placement.linear(LAYERS, EXPERTS, RANKS, EXPERTS + RANKS)
    return PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, placement, settings)


def feed(
    advisor: PlacementAdvisor, rng: np.random.Generator, windows: int, hot: int, first: int = 0
) -> list[ControlEvent]:
    events: list[ControlEvent] = []
    for window in range(first, first + windows):
        for worker in range(RANKS):
            assert advisor.observe(LoadSeen(10.0 * window, f"w{worker}", skewed(rng, hot), STEPS, 9.0))
        events += advisor.tick(10.0 * (window + 1))
    return events


def test_a_plan_that_pays_is_advised_scored_on_the_next_window_and_not_applied(tmp_path: Path) -> None:
    rng, advisor = np.random.default_rng(0), advisor_of()
    advisor.tick(0.0)
    before = advisor.placement
    events = feed(advisor, rng, 1, hot=0)
    made = advisor.advice
    assert [event.kind for event in events if event.kind.startswith("plan")] == ["plan_made"]
    assert made is not None
    assert made.plan is not None
    assert made.gain_pct > 10
    assert made.gain_next_pct is None
    assert max(made.rank_s_after) < max(made.rank_s_before)
    feed(advisor, rng, 1, hot=0, first=1)
    scored = advisor.advice
    assert scored is not None
    assert scored.gain_next_pct == pytest.approx(made.gain_pct, abs=3), "the same traffic gains as much"
    assert advisor.placement is before

    path = tmp_path / "map.json"
    path.write_text("an older map")
    made.write(path)
    assert (read_map(path, "vllm").placement.slot_experts == made.plan.placement.slot_experts).all()
    assert [one.name for one in tmp_path.iterdir()] == ["map.json"]
    weighted = made._replace(plan=replace(made.plan, split="weighted"))
    with pytest.raises(ConfigError, match="split 'weighted' must be equal: vLLM"):
        weighted.write(path)
    assert not advisor.applied(made.id + 1)
    assert advisor.applied(made.id)
    assert advisor.placement is made.plan.placement


def test_even_load_is_kept_with_a_reason_and_no_map() -> None:
    placement = Placement.linear(LAYERS, EXPERTS, RANKS)
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, placement, SETTINGS)
    kinds = []
    for window in range(6):
        for worker in range(RANKS):
            advisor.observe(LoadSeen(10.0 * window, f"w{worker}", np.full((LAYERS, EXPERTS), 900.0), STEPS, 9.0))
        kinds += [event.kind for event in advisor.tick(10.0 * window)]
    assert "plan_kept" in kinds
    assert "plan_made" not in kinds
    assert advisor.advice is not None
    assert advisor.advice.reason
    with pytest.raises(ConfigError, match="no map to write"):
        advisor.advice.write("nowhere.json")


def test_a_plan_that_gains_nothing_on_the_next_window_is_withdrawn() -> None:
    rng, advisor = np.random.default_rng(2), advisor_of()
    advisor.tick(0.0)
    feed(advisor, rng, 1, hot=0)
    made = advisor.advice
    assert made is not None
    assert made.plan is not None
    # The load that suits the advised placement least: all of it on the experts of one of its ranks.
    slots = made.plan.placement.slot_experts.reshape(LAYERS, RANKS, -1)
    tokens = np.ones((LAYERS, EXPERTS))
    for layer in range(LAYERS):
        tokens[layer, slots[layer, 0]] = 4000.0
    for worker in range(RANKS):
        advisor.observe(LoadSeen(15.0, f"w{worker}", tokens, STEPS, 9.0))
    told = [event.reason for event in advisor.tick(20.0) if event.kind == "plan_kept"]
    assert any("withdrawn" in reason for reason in told)


def test_a_plan_that_nobody_applies_is_made_anew_after_the_cooldown() -> None:
    rng, advisor = np.random.default_rng(3), advisor_of()
    advisor.tick(0.0)
    feed(advisor, rng, 1, hot=0)
    first = advisor.advice
    feed(advisor, rng, 3, hot=0, first=1)
    assert isinstance(first, Advice)
    assert isinstance(advisor.advice, Advice)
    assert advisor.advice.id == first.id, "it stands"
    feed(advisor, rng, 3, hot=0, first=4)
    assert advisor.advice.id > first.id


def test_a_window_of_few_steps_is_too_little() -> None:
    advisor = advisor_of()
    advisor.tick(0.0)
    advisor.observe(LoadSeen(1.0, "w0", np.ones((LAYERS, EXPERTS)), 3, 1.0))
    assert [event.kind for event in advisor.tick(10.0)] == ["too_little"]
    assert advisor.tick(20.0) == [], "told once"
    assert advisor.advice is None


def test_more_time_than_there_was_is_refused() -> None:
    advisor = advisor_of()
    advisor.tick(0.0)
    tokens = np.ones((LAYERS, EXPERTS))
    accepted = [advisor.observe(LoadSeen(1.0, "w0", tokens, 5, 9.0)) for _ in range(4)]
    assert accepted == [True, True, False, False]


@pytest.mark.parametrize(("replicas", "expected"), [(0, False), (4, True)])
def test_settings_bound_replicas(replicas: int, expected: bool) -> None:
    settings = replace(SETTINGS, actions=replace(SETTINGS.actions, extra_slots=replicas))
    placement = Placement.linear(LAYERS, EXPERTS, RANKS)
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, placement, settings)
    advisor.tick(0.0)
    rng = np.random.default_rng(4)
    for worker in range(RANKS):  # every rank asks for the experts of the next
        advisor.observe(LoadSeen(1.0, f"w{worker}", skewed(rng, 4 * worker + 4), STEPS, 9.0))
    advisor.tick(10.0)
    assert advisor.advice is not None
    kinds = {action.kind for action in advisor.advice.actions}
    assert ("replicate" in kinds) == expected


def reported(order: list[int], ranks: dict[str, int]) -> PlacementAdvisor:
    """An advisor after one window in which worker w asks for the experts of rank w + 1, reported in this order."""
    advisor = advisor_of()
    assert advisor.bind(ranks) == {}
    advisor.tick(0.0)
    for worker in order:
        tokens = skewed(np.random.default_rng(worker), 4 * worker + 4)
        assert advisor.observe(LoadSeen(1.0, f"w{worker}", tokens, STEPS, 9.0))
    advisor.tick(10.0)
    return advisor


def test_a_worker_is_the_rank_that_it_states_in_whatever_order_workers_report() -> None:
    ranks = {f"w{worker}": worker for worker in range(RANKS)}
    inorder, permuted = reported([0, 1, 2, 3], ranks), reported([2, 0, 3, 1], ranks)
    for rank in range(RANKS):
        asked = skewed(np.random.default_rng(rank), 4 * rank + 4) / STEPS
        np.testing.assert_allclose(permuted.tracker.worker(rank), asked)
    assert inorder.advice is not None
    assert permuted.advice is not None
    assert inorder.advice.actions
    assert list(inorder.advice.actions) == list(permuted.advice.actions)
    assert permuted.advice.plan is not None
    assert inorder.advice.rank_s_before == permuted.advice.rank_s_before, "sources by rank are the same"


def test_without_any_stated_rank_workers_are_numbered_as_they_report() -> None:
    advisor = reported([2, 0, 3, 1], {})
    np.testing.assert_allclose(advisor.tracker.worker(0), skewed(np.random.default_rng(2), 12) / STEPS)


def test_a_worker_without_a_rank_beside_some_with_one_is_no_rank() -> None:
    """Its load counts for the group: for no rank of it, so that nothing is advised by the demand of ranks."""
    advisor = reported([3, 0, 1, 2], {"w0": 0, "w1": 1, "w2": 2})
    assert not advisor.tracker.worker(3).any()
    assert advisor.advice is not None
    assert not advisor.advice.actions


def test_a_rank_outside_the_group_or_claimed_twice_is_said_and_nobodys() -> None:
    advisor = advisor_of()
    wrong = advisor.bind({"w0": 0, "w1": 1, "w2": 1, "w3": 4})
    assert set(wrong) == {"w1", "w2", "w3"}
    assert wrong["w1"] == "worker 'w1' claims placement_rank=1: another worker claims it too"
    assert wrong["w3"] == "worker 'w3' claims placement_rank=4: the group has ranks 0 … 3"
    assert advisor.bind({"w0": 0, "w1": 1, "w2": 1, "w3": 4}) == {}, "said once"
    for worker in range(RANKS):
        assert advisor.observe(LoadSeen(1.0, f"w{worker}", np.full((LAYERS, EXPERTS), 900.0), STEPS, 9.0))
    assert [bool(advisor.tracker.worker(rank).any()) for rank in range(RANKS)] == [True, False, False, False]


def test_ranks_that_change_leave_no_demand_behind() -> None:
    advisor = advisor_of()
    advisor.tick(0.0)
    advisor.observe(LoadSeen(1.0, "w0", np.full((LAYERS, EXPERTS), 900.0), STEPS, 9.0))
    advisor.bind({"w0": 3})
    assert not any(advisor.tracker.worker(rank).any() for rank in range(RANKS))
    advisor.observe(LoadSeen(2.0, "w0", np.full((LAYERS, EXPERTS), 900.0), STEPS, 9.0))
    assert advisor.tracker.worker(3).any()
