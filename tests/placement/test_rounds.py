"""Rounds: as few as König says, safe in every order, within the memory that staging has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.base import HOST, Load
from coterie.placement.migration.rounds import MigrationLimits, edge_rounds, schedule_moves
from coterie.placement.moves import moves_between
from coterie.placement.objective import settle
from coterie.placement.planning.eplb import Eplb
from coterie.types import Placement, Topology
from v3_prices import v3_prices

INF = float("inf")


@st.composite
def migrations(draw: st.DrawFn, dead_ranks: bool = True) -> tuple[Placement, Placement, Any, MigrationLimits]:
    """A placement, another one, a topology, and staging for one to all experts of a rank."""
    ranks = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 4))
    slots = ranks * per_rank
    layers = draw(st.integers(1, 3))
    dead = draw(st.integers(0, ranks - 1)) if dead_ranks and ranks > 1 and draw(st.booleans()) else None
    living = [s for s in range(slots) if dead is None or s // per_rank != dead]
    experts = draw(st.integers(1, len(living)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def row(of: Any) -> Any:
        out = rng.integers(0, experts, slots)
        out[rng.permutation(of)[:experts]] = rng.permutation(experts)
        return out

    old = np.array([row(np.arange(slots)) for _ in range(layers)], np.int32)
    new, _ = settle(old, np.array([row(living) for _ in range(layers)], np.int32), ranks)
    speeds = () if dead is None else tuple(0.0 if rank == dead else 1.0 for rank in range(ranks))
    topology = Topology(ranks, draw(st.integers(1, 5)), speeds=speeds)
    staging = draw(st.integers(1, per_rank))
    return (
        Placement(old, ranks, experts),
        Placement(new, ranks, experts),
        topology,
        MigrationLimits(10.0, 10.0 * staging + 5),
    )


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 6)), max_size=60))
@settings(deadline=None, max_examples=300)
def test_as_many_rounds_as_the_busiest_rank_has_moves(pairs: list[tuple[int, int]]) -> None:
    senders, receivers = [s for s, _ in pairs], [r for _, r in pairs]
    found = edge_rounds(senders, receivers)
    over_links = [(s, r, n) for s, r, n in zip(senders, receivers, found, strict=True) if s != r]
    sent = Counter((s, n) for s, _, n in over_links if s != HOST)
    got = Counter((r, n) for _, r, n in over_links)
    assert max([*sent.values(), *got.values()], default=1) == 1, "one each way, in every round"
    degree = Counter(("out", s) for s, _, _ in over_links if s != HOST) + Counter(("in", r) for _, r, _ in over_links)
    assert max(found, default=-1) + 1 == max([*degree.values(), 1 if pairs else 0], default=0), "König's bound is met"


@given(migrations())
@settings(deadline=None, max_examples=300)
def test_every_map_on_the_way_is_safe_and_within_memory(
    case: tuple[Placement, Placement, Any, MigrationLimits],
) -> None:
    current, target, topology, limits = case
    schedule = schedule_moves(current, target, topology, limits)
    alive = topology.rank_speeds > 0
    per_rank = current.slots_per_rank
    living = np.repeat(alive, per_rank)
    maps = {layer: tuple(row) for layer, row in enumerate(current.slot_experts.tolist())}
    refused = {refusal.layer for refusal in schedule.refusals}
    seen = 0
    for switch in schedule.switches:
        assert switch.before == maps[switch.layer], "a switch starts from where the last one ended"
        held_before = {e for s, e in enumerate(switch.before) if living[s]}
        assert held_before <= {e for s, e in enumerate(switch.after) if living[s]}, "no expert loses its last slot"
        staged = Counter(t.slot // per_rank for t in switch.transfers)
        assert max(staged.values()) * limits.expert_bytes <= limits.staging_bytes
        links = [(t.source, t.slot // per_rank) for t in switch.transfers if t.source != t.slot // per_rank]
        degree = Counter(("out", s) for s, _ in links if s != HOST) + Counter(("in", r) for _, r in links)
        assert len(switch.rounds) == max(degree.values(), default=1)
        for t in switch.transfers:
            assert t.id == seen
            seen += 1
            assert alive[t.slot // per_rank]
            if t.source == HOST:
                assert t.expert not in held_before
            else:
                assert alive[t.source]
                assert t.expert in switch.before[t.source * per_rank : (t.source + 1) * per_rank]
        maps[switch.layer] = switch.after
    for layer, row in maps.items():
        wanted = (current if layer in refused else target).slot_experts[layer]
        assert (np.array(row)[living] == wanted[living]).all(), "it ends where the plan leads"
        assert tuple(schedule.placement.slot_experts[layer]) == row
    if limits.staging_bytes >= 2 * limits.expert_bytes or per_rank == 1:
        assert not refused, "two experts of staging are always enough"
    if limits.staging_bytes >= limits.expert_bytes * per_rank:
        assert len({s.layer for s in schedule.switches}) == len(schedule.switches), "and a whole rank of it for one go"


def test_swaps_and_rings_with_little_staging() -> None:
    topology = Topology(2)
    current = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)
    both = Placement(np.array([[2, 3, 0, 1]], np.int32), 2, 4)
    one = schedule_moves(current, both, topology, MigrationLimits(10.0, 10.0))
    assert [sorted(t.slot for t in s.transfers) for s in one.switches] == [[0, 2], [1, 3]], "two swaps"
    two = schedule_moves(current, both, topology, MigrationLimits(10.0, 20.0))
    assert len(two.switches) == 1
    assert [len(switch.rounds) for switch in two.switches] == [2]
    ring = Placement(np.array([[3, 2, 0, 1]], np.int32), 2, 4)  # 0 → slot 2, 2 → slot 1, 1 → slot 3, 3 → slot 0
    cut = schedule_moves(current, ring, topology, MigrationLimits(10.0, 10.0))
    assert [len(switch.transfers) for switch in cut.switches] == [2, 2, 2], "four moves, and one more for each cut"
    assert cut.switches[-1].after == (3, 2, 0, 1)
    assert len(schedule_moves(current, ring, topology, MigrationLimits(10.0, 20.0)).switches) == 1


def test_a_ring_that_ends_inside_a_rank_is_refused_with_one_expert_of_staging() -> None:
    current = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)
    inside = Placement(np.array([[1, 0, 2, 3]], np.int32), 2, 4)
    refused = schedule_moves(current, inside, Topology(2), MigrationLimits(10.0, 10.0))
    assert not refused.switches
    assert (refused.placement.slot_experts == current.slot_experts).all()
    assert "slots [0, 1] change places in a ring that cannot be cut" in refused.refusals[0].reason
    assert schedule_moves(current, inside, Topology(2), MigrationLimits(10.0, 20.0)).moved_bytes == 0, (
        "copies inside a rank"
    )


def test_replicas_are_fetched_from_those_that_send_least() -> None:
    current = Placement(np.array([[0, 1, 0, 2, 3, 1, 4, 2]], np.int32), 4, 5)  # 0 on ranks 0 and 1
    target = Placement(np.array([[0, 1, 0, 2, 3, 0, 4, 0]], np.int32), 4, 5)
    schedule = schedule_moves(current, target, Topology(4))
    assert sorted(t.source for t in schedule.transfers) == [0, 1]
    assert [len(switch.rounds) for switch in schedule.switches] == [1], "from one of them alone it would take two"


def test_the_sources_are_the_plans() -> None:
    current = Placement(np.array([[0, 1, 0, 2, 3, 1, 4, 2]], np.int32), 4, 5)
    target = Placement(np.array([[0, 1, 0, 2, 3, 0, 4, 0]], np.int32), 4, 5)
    moves = moves_between(current, target.slot_experts, Topology(4), 44e6)
    for sources in ([0, 1], [1, 0], [1, 1]):
        given = replace(moves, source=np.array(sources))
        schedule = schedule_moves(current, target, Topology(4), moves=given)
        assert [t.source for t in sorted(schedule.transfers, key=lambda t: t.slot)] == sources
    with pytest.raises(ConfigError, match=r"expert 3 .*slot 5 .*layer 0"):
        schedule_moves(current, target, Topology(4), moves=replace(moves, expert=np.array([3, 0])))


@given(migrations())
@settings(deadline=None, max_examples=100)
def test_sources_are_near_and_send_alike(case: tuple[Placement, Placement, Any, MigrationLimits]) -> None:
    """Against the choice as it is said, written out."""
    current, target, topology, _ = case
    moves, per_rank = moves_between(current, target.slot_experts, topology, 10.0), current.slots_per_rank
    found = {
        (m[0], m[1]): m[2] for m in zip(*(x.tolist() for x in (moves.layer, moves.slot, moves.source)), strict=True)
    }
    expected = {}
    for layer, row in enumerate(current.slot_experts.tolist()):
        holders: dict[Any, Any] = {}
        for slot, expert in enumerate(row):
            if topology.rank_speeds[slot // per_rank] > 0:
                holders.setdefault(expert, []).append(slot // per_rank)
        sends: Counter[Any] = Counter()
        changed = [
            (len(holders.get(expert, ())), slot, expert)
            for slot, expert in enumerate(target.slot_experts[layer].tolist())
            if expert != row[slot] and topology.rank_speeds[slot // per_rank] > 0
        ]
        for _, slot, expert in sorted(changed):
            rank = slot // per_rank
            if rank in (having := holders.get(expert, [])):
                continue
            far = {h: topology.node_of(h) != topology.node_of(rank) for h in having}
            expected[layer, slot] = min(having, key=lambda h: (far[h], sends[h], h), default=HOST)
            sends[expected[layer, slot]] += 1
    assert found == expected


def test_a_plan_of_eplb_is_scheduled_whole(rng: np.random.Generator) -> None:
    layers, experts, ranks = 6, 32, 8
    load = Load(rng.gamma(0.5, 100.0, (layers, experts)))
    topology, current = Topology(ranks, 4), Placement.linear(layers, experts, ranks, 40)
    plan = Eplb(v3_prices()).plan(load, topology, current)
    schedule = schedule_moves(current, plan.placement, topology, MigrationLimits(44e6), plan.moves)
    over_links = [t for t in schedule.transfers if t.source != t.slot // current.slots_per_rank]
    assert len(over_links) == len(plan.moves)
    moves = plan.moves
    assert sorted((t.layer, t.slot, t.expert, t.source) for t in over_links) == sorted(
        zip(moves.layer.tolist(), moves.slot.tolist(), moves.expert.tolist(), moves.source.tolist(), strict=True)
    )
    assert schedule.moved_bytes == len(plan.moves) * 44e6
    # A plan counts what the busiest receiver waits; rounds also wait for senders and for the slowest of a round.
    assert plan.movement_s <= schedule.movement_s <= 3 * plan.movement_s


def test_layers_are_ready_one_after_the_other() -> None:
    current = Placement.linear(2, 4, 2)
    target = Placement(np.array([[2, 1, 0, 3], [2, 3, 0, 1]], np.int32), 2, 4)
    schedule = schedule_moves(current, target, Topology(2), MigrationLimits(450e9 * 1e-3))  # 1 ms a move, and 2 us
    each = 1e-3 + 2e-6
    assert schedule.ready_s == pytest.approx([each, 3 * each])
    assert schedule.movement_s == pytest.approx(3 * each)


def test_nothing_to_move() -> None:
    current = Placement.linear(2, 4, 2)
    schedule = schedule_moves(current, current, Topology(2))
    assert (schedule.switches, schedule.refusals) == ((), ())
    assert (schedule.movement_s, schedule.ready_s) == (0.0, [])


def test_bad_input() -> None:
    current = Placement.linear(1, 4, 2)
    with pytest.raises(ConfigError, match=r"staging_bytes=9 .*10"):
        MigrationLimits(10.0, 9.0)
    with pytest.raises(ConfigError, match=r"num_ranks=2 .*num_ranks=4"):
        schedule_moves(current, current, Topology(4))
    with pytest.raises(ConfigError, match=r"target .*\(1, 8\)"):
        schedule_moves(current, Placement.linear(1, 4, 2, 8), Topology(2))
    gone = Topology(2, speeds=(1.0, 0.0))
    away = Placement(np.array([[2, 3, 0, 1]], np.int32), 2, 4)
    found = schedule_moves(current, away, gone)
    assert "expert 0 would keep no slot on a living rank" in found.refusals[0].reason
