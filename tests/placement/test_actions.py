"""Replicate, swap: what is saved is what was predicted, limits hold, and every decision says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.exchange import row_trips_s
from coterie.errors import ConfigError
from coterie.placement.holdings import held_by, remote_share
from coterie.placement.triggers.actions import PUBLISHED, ActionManager, ActionSettings
from coterie.types import Link, Placement, Topology

EAGER = ActionSettings(min_mismatch=0.0, min_saving_s=0.0)


def total_cost(manager: Any, demand: Any, held: Any) -> Any:
    """Link seconds of the window, by a plain loop: each activation goes to the nearest rank that has its expert."""
    row_s, total = row_trips_s(manager.topology, manager.row_bytes), 0.0
    for rank, layer, expert in np.ndindex(demand.shape):
        total += demand[rank, layer, expert] * min(row_s[rank, h] for h in np.flatnonzero(held[:, layer, expert]))
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[ActionManager, Any, Any]:
    ranks, layers, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    demand = rng.gamma(0.4, 50.0, (ranks, layers, ranks * per_rank)) * (rng.random((ranks, layers, 1)) < 0.9)
    whole = draw(st.booleans())
    rows = [rng.permutation(ranks * per_rank) for _ in range(layers)]
    held = held_by(Placement(np.array(rows if not whole else [rows[0]] * layers, np.int32), ranks, ranks * per_rank))
    chosen = ActionSettings(
        decay=0.99,
        min_mismatch=draw(st.sampled_from([0.0, 0.1, 0.8])),
        replicate_top=draw(st.integers(0, 5)),
        swap_top=draw(st.integers(0, 3)),
        max_copies=draw(st.integers(1, 3)),
        extra_slots=draw(st.integers(0, 3)),
        max_actions=draw(st.integers(0, 4)),
        min_saving_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        whole_experts=whole,
    )
    topology = Topology(ranks, draw(st.integers(1, 4)), inter=Link("slow", 50e9, 0.0))
    return ActionManager(topology, settings=chosen), demand, held


@given(cases())
@settings(deadline=None, max_examples=150)
def test_savings_are_real_and_limits_hold(case: tuple[ActionManager, Any, Any]) -> None:
    manager, demand, held = case
    chosen, before = manager.settings, held.copy()
    found = manager.cycle(demand, held, at_s=60.0)
    assert (held == before).all(), "what was given is not changed"
    saved = sum(event.saving_s for event in found.actions) * chosen.window_steps
    assert total_cost(manager, demand, held) - total_cost(manager, demand, found.held) == pytest.approx(saved)
    ranks, layers, experts = demand.shape
    units = 1 if chosen.whole_experts else layers
    assert len(found.actions) <= chosen.max_actions * units
    assert found.held.any(axis=0).all(), "every expert keeps a home"
    assert found.held.sum(axis=2).max() <= experts // ranks + chosen.extra_slots
    assert found.held.sum(axis=0).max() <= max(chosen.max_copies, int(held.sum(axis=0).max()))
    grown = int(found.held.sum() - held.sum())
    per = layers if chosen.whole_experts else 1
    assert grown == per * sum(event.kind == "replicate" for event in found.actions), "a swap is neutral"
    for event in found.events:
        assert event.reason
        assert event.at_s == 60.0
        if event.kind == "skip":
            assert event.moved_bytes == event.seconds == 0.0
        else:
            assert event.saving_s * chosen.window_steps >= chosen.min_saving_s / units
            assert event.moved_bytes == manager.expert_bytes * per * (2 if event.kind == "swap" else 1)
            assert event.seconds > 0
            assert event.target != event.source
    assert manager.cycle(demand, held, at_s=60.0).events == found.events


def test_a_swap_counts_what_the_partner_loses() -> None:
    """Rank 0 wants expert 1 a little more than what it has; rank 1, which has it, wants it far more."""
    held = held_by(Placement.linear(1, 2, 2))
    demand = np.array([[[10.0, 30.0]], [[0.0, 500.0]]])
    only_swaps = ActionSettings(min_mismatch=0.0, min_saving_s=0.0, replicate_top=0)
    found = ActionManager(Topology(2), settings=only_swaps).cycle(demand, held)
    assert not found.actions
    (skip,) = [event for event in found.events if event.expert == 1]
    assert skip.reason.startswith("saves -")
    wanted = np.array([[[10.0, 30.0]], [[25.0, 20.0]]])
    (swap,) = ActionManager(Topology(2), row_bytes=450.0, settings=only_swaps).cycle(wanted, held).actions
    assert (swap.kind, swap.expert, swap.given, swap.target, swap.source) == ("swap", 1, 0, 0, 1)
    assert swap.saving_s == pytest.approx((30 - 10 + 25 - 20) * 2e-9 / 100)


def test_every_skip_has_its_reason(rng: np.random.Generator) -> None:
    held = held_by(Placement.linear(1, 8, 2))
    demand = np.zeros((2, 1, 8))
    demand[0, 0, :4] = 95.0
    demand[0, 0, 4] = 20.0
    found = ActionManager(Topology(2)).cycle(demand, held)
    assert found.events[0].reason == "rank 0 lacks 0.050 of its demand, less than 0.1"
    demand[0, 0, 4:] = [400, 300, 200, 100]
    reasons = {}
    for name, chosen in (
        ("copies", ActionSettings(max_copies=1)),
        ("slots", ActionSettings(extra_slots=0, swap_top=0)),
        ("saving", ActionSettings(min_saving_s=1.0)),
        ("limit", ActionSettings(max_actions=1)),
        ("stale", EAGER),
    ):
        events = ActionManager(Topology(2), settings=chosen).cycle(demand, held).events
        reasons[name] = " / ".join(event.reason for event in events if event.kind == "skip")
    assert "it has 1 copies, the limit" in reasons["copies"]
    assert "rank 0 has all its 4 slots in use" in reasons["slots"]
    assert "us a window, less than 1e+06" in reasons["saving"]
    assert "1 actions are the limit of a cycle; " in reasons["limit"]
    assert "an earlier action of this cycle changed what is where" in reasons["stale"]
    nothing = ActionManager(Topology(2), settings=EAGER).cycle(np.zeros((2, 1, 8)), held)
    assert nothing.events[-1].reason == "no rank asks for an expert that it lacks"
    even = rng.random(8)
    assert (
        not ActionManager(Topology(2), settings=ActionSettings(replicate_top=0, min_saving_s=1e-12))
        .cycle(np.stack([even, even])[:, None], held)
        .actions
    ), "ranks that ask for the same have nothing to swap"


def test_the_published_settings() -> None:
    chosen = PUBLISHED
    assert (chosen.decay, chosen.min_mismatch, chosen.replicate_top, chosen.swap_top) == (0.99, 0.1, 5, 3)
    assert (chosen.max_copies, chosen.extra_slots, chosen.interval_s, chosen.max_actions) == (3, 8, 60.0, 4)
    assert (chosen.min_saving_s, chosen.whole_experts) == (10e-6, True)
    assert chosen.window_steps == pytest.approx(100)
    held = held_by(Placement.linear(3, 16, 4))
    demand = np.random.default_rng(1).gamma(0.3, 4000.0, (4, 3, 16))
    whole = ActionManager(Topology(4), settings=chosen).cycle(demand, held)
    assert len(whole.actions) == 4
    assert all(event.layers == (0, 1, 2) for event in whole.actions)
    single = ActionManager(Topology(4)).cycle(demand, held)
    assert len(single.actions) == 12, "as many bytes"
    assert remote_share(demand, single.held) < remote_share(demand, whole.held) < remote_share(demand, held)


def test_bad_input() -> None:
    manager, held = ActionManager(Topology(2)), held_by(Placement.linear(1, 4, 2))
    demand = np.ones((2, 1, 4))
    with pytest.raises(ConfigError, match=r"\[rank, layer, expert\]"):
        manager.cycle(demand[:, :, :3], held)
    with pytest.raises(ConfigError, match=r"topology\.num_ranks=3"):
        ActionManager(Topology(3)).cycle(demand, held)
    with pytest.raises(ConfigError, match=r"demand .*finite"):
        manager.cycle(demand * np.nan, held)
    with pytest.raises(ConfigError, match="expert 0 of layer 0"):
        manager.cycle(demand, held & (np.arange(4) > 0))
    with pytest.raises(ConfigError, match="rank"):
        ActionManager(Topology(2, speeds=(1.0, 0.0))).cycle(demand, held)
    with pytest.raises(ConfigError, match=r"decay=1\.0"):
        ActionSettings(decay=1.0)
    with pytest.raises(ConfigError, match="max_copies=0"):
        ActionSettings(max_copies=0)
    differing = held_by(Placement(np.array([[0, 1], [1, 0]], np.int32), 2, 2))
    with pytest.raises(ConfigError, match="whole_experts"):
        ActionManager(Topology(2), settings=PUBLISHED).cycle(np.ones((2, 2, 2)), differing)
