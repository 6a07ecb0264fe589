"""The online planner against brute force, and its contract."""

from __future__ import annotations

from itertools import pairwise, product

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from coterie.errors import ConfigError
from coterie.placement.base import HOST, Load, Plan, planners
from coterie.placement.objective import Problem
from coterie.placement.planning.eplb import Eplb
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.traces.load import zipf_drift
from coterie.types import Placement, Topology, balancedness
from v3_prices import v3_prices


def all_rows(experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """[placement, slot] every one without duplicates on a rank, slots of a rank in order."""
    blocks = [c for c in product(range(experts), repeat=per_rank) if all(a < b for a, b in pairwise(c))]
    rows = [sum(choice, ()) for choice in product(blocks, repeat=ranks)]
    return np.array([row for row in rows if len(set(row)) == experts], np.int32)


def best_total(problem: Problem, rows: np.ndarray) -> float:
    """Return the best total of one layer by trying all placements."""
    unit, share = (np.broadcast_to(a[0], (len(rows), *a[0].shape)) for a in (problem.unit, problem.share))
    many = Problem(
        problem.objective,
        problem.topology,
        problem.current,
        problem.alive,
        np.ascontiguousarray(unit),
        np.ascontiguousarray(share),
        np.repeat(problem.load_in, len(rows), axis=0),
        np.repeat(problem.source, len(rows), axis=0),
        np.repeat(problem.even, len(rows)),
        np.repeat(problem.reach, len(rows)),
    )
    return float(many.score(rows).total_s.min())


CASES = [(5, 3, all_rows(5, 3, 2)), (6, 2, all_rows(6, 2, 3)), (5, 2, all_rows(5, 2, 3))]


def tiny(seed: int, case: int) -> tuple[float, float, float]:
    """The planner's objective, the optimum and that of keeping."""
    experts, ranks, rows = CASES[case]
    rng = default_rng(seed)
    load = Load(np.round(rng.lognormal(3.0, 1.0, (1, experts))) + 1)
    current = Placement(rows[rng.integers(len(rows))][None], ranks, experts)
    prices = v3_prices(
        row_s=1e-6,
        touch_s=rng.choice([0.0, 1e-5]),
        horizon=rng.choice([3.0, 30.0, 3000.0]),
        target_balance=rng.choice([1.0, 0.95]),
        move_price=rng.choice([0.0, 0.3]),
    )
    topology = Topology(ranks, 2, speeds=tuple(rng.choice([1.0, 0.6], ranks)))
    problem = prices.problem(load, topology, current)
    plan = LatencyOptimal(prices).plan(load, topology, current)
    kept = float(problem.score(current.slot_experts).total_s[0])
    return float(problem.score(plan.placement.slot_experts).total_s[0]), best_total(problem, rows), kept


def test_close_to_the_optimum_on_tiny_cases_and_never_worse_than_keeping() -> None:
    found = np.array([tiny(seed, seed % len(CASES)) for seed in range(150)])
    over = found[:, 0] / found[:, 1] - 1
    assert over.min() >= -1e-9, "below the optimum: one of the two is wrong"
    assert (found[:, 0] <= found[:, 2] * (1 + 1e-9)).all()
    assert (over < 1e-9).mean() > 0.5
    assert over.mean() < 0.03


def drifted(ranks: int, slots: int, layers: int = 6, experts: int = 64) -> tuple[Placement, Load]:
    drift = zipf_drift(layers, experts, default_rng(0))
    linear = Placement.linear(layers, experts, ranks, slots)
    return Eplb(v3_prices()).plan(Load(drift.before), Topology(ranks, ranks), linear).placement, Load(drift.after)


LONG = v3_prices(horizon=1e6, target_balance=0.98, move_price=1.0)


def check(plan: Plan, current: Placement, topology: Topology) -> None:
    placement, alive = plan.placement, topology.rank_speeds > 0
    held = placement.slot_experts.reshape(current.num_layers, current.num_ranks, -1)
    for layer in range(current.num_layers):
        assert set(held[layer, alive].ravel()) == set(range(current.num_experts)), "an expert on no living rank"
        for rank in np.flatnonzero(alive):
            assert len(set(held[layer, rank])) == held.shape[2], "an expert twice on a rank"
    was = current.slot_experts.reshape(held.shape)
    assert np.array_equal(held[:, ~alive], was[:, ~alive]), "planned on a rank that is gone"


@pytest.mark.parametrize(("ranks", "slots"), [(8, 80), (4, 64), (16, 80)])
def test_even_enough_with_few_moves(ranks: int, slots: int) -> None:
    current, load = drifted(ranks, slots)
    topology = Topology(ranks, ranks)
    plan = LatencyOptimal(LONG).plan(load, topology, current)
    check(plan, current, topology)
    reach = LONG.problem(load, topology, current).floor
    assert plan.balance_after > plan.balance_before
    if slots > 64:
        assert (plan.placement.rank_load(load.tokens).max(axis=1) * LONG.row_s <= reach * 1.02).all()
        assert balancedness(plan.placement.rank_load(load.tokens)) > 0.96
    eplb = Eplb(v3_prices()).plan(load, topology, current)
    assert len(plan.moves) < len(eplb.moves) / 2


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_contract_on_any_map_speed_and_dead_rank(seed: int) -> None:
    rng = default_rng(seed)
    ranks, per_rank, experts = 4, 5, 12
    rows = np.array([rng.permutation(np.append(np.arange(experts), rng.integers(0, experts, 8))) for _ in range(3)])
    current = Placement(rows.astype(np.int32), ranks, experts)
    speeds = (*rng.choice([0.0, 0.5, 1.0], p=[0.2, 0.4, 0.4], size=3), 1.0)
    if sum(s > 0 for s in speeds) * per_rank < experts:
        speeds = (1.0, 0.5, 0.0, 1.0)
    topology = Topology(ranks, 2, speeds=speeds)
    sources = rng.integers(0, 50, (ranks, 3, experts)).astype(float)
    load = Load(sources.sum(axis=0), sources=sources if seed % 2 else None)
    prices = v3_prices(
        row_s=1e-6, touch_s=seed % 3 * 1e-6, row_bytes=seed % 2 * 7e3, horizon=float(rng.choice([0.0, 10.0, 1e5]))
    )
    planner = LatencyOptimal(prices)
    plan = planner.plan(load, topology, current)
    check(plan, current, topology)
    again = planner.plan(load, topology, current)
    assert again.placement.slot_experts.tobytes() == plan.placement.slot_experts.tobytes()
    assert len(plan.layer_reasons) == 3
    problem = prices.problem(load, topology, current)
    untouched = [reason for reason in plan.layer_reasons if not reason.startswith("repaired")]
    gain = problem.score(current.slot_experts).total_s - problem.score(plan.placement.slot_experts).total_s
    for layer, reason in enumerate(plan.layer_reasons):
        assert reason.startswith("repaired") or gain[layer] >= -1e-12, "a layer that does not pay for itself"
    assert plan.skip_reason is None or (len(plan.moves) == 0 and len(untouched) == 3)


def test_threads_do_not_change_the_plan() -> None:
    current, load = drifted(8, 80)
    plans = []
    before = numba.get_num_threads()
    for threads in {1, before}:
        numba.set_num_threads(threads)
        plans.append(LatencyOptimal(LONG).plan(load, Topology(8), current).placement.slot_experts.tobytes())
    numba.set_num_threads(before)
    assert len(set(plans)) == 1


def test_a_dead_ranks_experts_come_from_the_host() -> None:
    current = Placement.linear(2, 6, 3, 12)
    rows = np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]] * 2, np.int32)
    current = Placement(rows, 3, 6)
    topology = Topology(3, speeds=(1.0, 0.0, 1.0))
    plan = LatencyOptimal(v3_prices(horizon=0.0)).plan(Load(np.ones((2, 6))), topology, current)
    check(plan, current, topology)
    assert plan.skip_reason is None
    assert (plan.moves.source == HOST).any()


def test_fetches_from_its_own_node_where_it_can() -> None:
    current, load = drifted(8, 80)
    two_nodes = Topology(8, 4)
    plan = LatencyOptimal(LONG).plan(load, two_nodes, current)
    blind = LatencyOptimal(LONG).plan(load, Topology(8, 8), current)
    problem = LONG.problem(load, two_nodes, current)
    ours, theirs = problem.moves(plan.placement.slot_experts), problem.moves(blind.placement.slot_experts)
    assert ours.seconds.sum() < theirs.seconds.sum()


def test_moves_experts_to_where_their_tokens_are() -> None:
    sources = np.zeros((2, 1, 4))
    sources[0, 0, [2, 3]] = sources[1, 0, [0, 1]] = 1000.0
    load, current = Load(sources.sum(axis=0), sources=sources), Placement.linear(1, 4, 2)
    prices = v3_prices(row_s=1e-9, row_bytes=14336.0, horizon=1e6)
    plan = LatencyOptimal(prices).plan(load, Topology(2, 1), current)
    assert set(plan.placement.slot_experts[0, :2]) == {2, 3}
    nowhere = LatencyOptimal(prices).plan(Load(load.tokens), Topology(2, 1), current)
    assert len(nowhere.moves) == 0


@pytest.mark.parametrize("budget", [0, 5, 20, 60])
def test_max_moves_is_kept_and_spent_well(budget: int) -> None:
    current, load = drifted(16, 80)
    plan = LatencyOptimal(LONG, max_moves=budget).plan(load, Topology(16, 16), current)
    assert len(plan.moves) <= budget
    if budget:
        less = LatencyOptimal(LONG, max_moves=budget // 2).plan(load, Topology(16, 16), current)
        assert plan.after_s < less.after_s
    else:
        assert plan.skip_reason


def test_says_why_it_keeps_the_map() -> None:
    current, load = drifted(8, 80)
    top = Topology(8)
    assert "no move pays" in str(LatencyOptimal(v3_prices(horizon=0.001)).plan(load, top, current).skip_reason)
    dear = LatencyOptimal(v3_prices(horizon=1000.0, planning_s=1e9)).plan(load, top, current)
    assert str(dear.skip_reason).startswith("1,000 steps would save ")
    assert "planning_s=1e+09" in str(dear.skip_reason)
    assert dear.placement.slot_experts.tobytes() == current.slot_experts.tobytes()
    even = LatencyOptimal(v3_prices(target_balance=0.1)).plan(load, top, current)
    assert "every layer has at least 10.0%" in str(even.skip_reason)


def test_registered_and_checked() -> None:
    assert planners["latency_optimal"] is LatencyOptimal
    with pytest.raises(ConfigError, match="split='even'"):
        LatencyOptimal(v3_prices(), split="even")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_moves=-1"):
        LatencyOptimal(v3_prices(), max_moves=-1)


@pytest.mark.parametrize("hot", [0.3, 0.8])
def test_not_behind_eplb_where_all_spare_slots_are_on_one_rank(hot: float) -> None:
    tokens = np.full((2, 64), (1 - hot) / 63)
    tokens[:, 5] = hot
    current, load, topology = Placement.linear(2, 64, 8, 72), Load(tokens * 1e6), Topology(8)
    problem = v3_prices().problem(load, topology, current)
    ours, theirs = (
        problem.score(planner.plan(load, topology, current).placement.slot_experts).total_s.sum()
        for planner in (LatencyOptimal(v3_prices()), Eplb(v3_prices()))
    )
    assert ours <= theirs * (1 + 1e-9)


def test_other_splits_repair_what_is_held_twice_and_say_when_nothing_moves() -> None:
    load, topology = Load(np.array([[5.0, 3.0, 2.0]])), Topology(2)
    twice = Placement(np.array([[0, 0, 1, 2]], np.int32), 2, 3)
    plan = LatencyOptimal(v3_prices(horizon=1.0), split="optimal").plan(load, topology, twice)
    assert plan.placement.duplicates == 0
    stale = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
    priced = LatencyOptimal(v3_prices(horizon=1.0, touch_s=1e-6), split="optimal")
    kept = priced.plan(Load(np.array([[6.0, 5.0, 1.0]])), topology, stale)
    assert len(kept.moves) == 0
    assert kept.skip_reason is not None
    assert kept.after_s <= kept.before_s


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_planning_again_from_a_plan_with_free_shares_changes_nothing(seed: int) -> None:
    rng = default_rng(seed)
    ranks, each = int(rng.integers(2, 7)), int(rng.integers(2, 6))
    experts = int(rng.integers(each, ranks * each + 1))
    tokens = rng.pareto(1.0, (3, experts)) * 1000
    rows = np.stack([rng.permutation(np.arange(ranks * each) % experts) for _ in range(3)])
    prices = v3_prices(
        touch_s=float(rng.choice([0.0, 1e-5, 1e-4])),
        horizon=float(rng.choice([0.1, 1.0, 1000.0])),
        target_balance=float(rng.choice([0.9, 1.0])),
        move_price=float(rng.choice([0.0, 0.5])),
    )
    topology = Topology(ranks, 2, speeds=tuple(rng.choice([0.5, 1.0], ranks)))
    planner, load = LatencyOptimal(prices, split="optimal"), Load(tokens)
    plan = planner.plan(load, topology, Placement(rows.astype(np.int32), ranks, experts))
    again = planner.plan(load, topology, plan.placement, plan.shares)
    assert len(again.moves) == 0
    assert again.before_s == pytest.approx(plan.after_s, rel=1e-12)
    assert 0 <= again.saving_s <= 1e-6 * again.before_s


def test_shares_in_force_are_what_other_shares_and_moves_are_held_against() -> None:
    stale = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
    load, topology, prices = Load(np.array([[6.0, 5.0, 1.0]])), Topology(2), v3_prices(row_s=1.0, horizon=1e-6)
    best, worst = np.array([[1 / 6, 1.0, 5 / 6, 1.0]]), np.array([[1.0, 1.0, 0.0, 1.0]])
    for split in ("equal", "optimal"):
        kept = LatencyOptimal(prices, split=split).plan(load, topology, stale, best)
        assert (kept.before_s, kept.after_s) == (6.0, 6.0)
        np.testing.assert_array_equal(kept.shares, best)
        assert kept.split == "weighted"
        shared = LatencyOptimal(prices, split=split).plan(load, topology, stale, worst)
        assert shared.before_s == 11.0
        assert shared.after_s == pytest.approx(8.0 if split == "equal" else 6.0)
        assert "alone save" in str(shared.skip_reason)
        dear = v3_prices(row_s=1.0, horizon=1e-6, planning_s=1.0)
        assert LatencyOptimal(dear, split=split).plan(load, topology, stale, worst).saving_s == 0


def test_more_slots_than_experts_are_refused() -> None:
    wide = Placement(np.array([[0, 0, 0, 1, 1, 1]], np.int32), 2, 2)
    with pytest.raises(ConfigError, match=r"3 .*num_experts=2"):
        LatencyOptimal(v3_prices()).plan(Load(np.array([[1.0, 2.0]])), Topology(2), wide)
