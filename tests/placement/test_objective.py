"""The objective's arrays against plain Python."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from coterie.costs.exchange import row_trips_s
from coterie.costs.presets import step_model
from coterie.costs.step import PlacedStepModel
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.base import HOST, Load
from coterie.placement.objective import Objective, Problem, settle
from coterie.placement.planning.eplb import Eplb
from coterie.traces.load import zipf_drift
from coterie.types import Link, Placement, Topology
from v3_prices import v3_prices


def random_problem(seed: int, *, touch: bool, exchange: bool, known: bool, dead: bool) -> tuple[Problem, Load]:
    """Two nodes of two ranks, six experts in three slots a rank; maps may hold an expert twice on a rank."""
    rng = default_rng(seed)
    layers, experts, ranks, per_rank = 2, 6, 4, 3
    sources = rng.integers(0, 40, (ranks, layers, experts)).astype(float)
    load = Load(sources.sum(axis=0), 2.0, sources if known else None)
    speeds = (1.0, 0.5, 0.0 if dead else 2.0, 1.0)
    current = Placement(random_map(rng, layers, experts, ranks * per_rank), ranks, experts)
    prices = v3_prices(
        row_s=1e-6,
        touch_s=3e-6 if touch else 0.0,
        row_bytes=4096.0 if exchange else 0.0,
        target_balance=0.9,
        move_price=0.5,
        exposed=0.5,
        horizon=50.0,
    )
    return prices.problem(load, Topology(ranks, 2, speeds=speeds), current), load


def random_map(rng: np.random.Generator, layers: int, experts: int, slots: int) -> np.ndarray:
    rows = [np.append(rng.permutation(experts), rng.integers(0, experts, slots - experts)) for _ in range(layers)]
    return np.array([rng.permutation(row) for row in rows], np.int32)


def plain_unit(problem: Problem, load: Load, layer: int, rank: int, expert: int) -> float:
    prices, top = problem.objective, problem.topology
    tokens = load.tokens[layer, expert] / load.steps
    living = [r for r in range(top.num_ranks) if top.speeds[r] > 0]
    seconds = (prices.touch_s * (1 - np.exp(-tokens)) + prices.row_s * tokens) / top.speeds[rank]
    for source in range(top.num_ranks):
        if load.sources is None:
            rows = tokens / len(living) if source in living else 0.0
        else:
            rows = load.sources[source, layer, expert] / load.steps
        link = top.intra if top.node_of(source) == top.node_of(rank) else top.inter
        seconds += 0.0 if source == rank else 2 * prices.row_bytes * rows / link.bytes_per_s
    return float(seconds)


def plain_part(problem: Problem, load: Load, layer: int, expert: int, n: int) -> float:
    """Return the share of an expert's time that one of n replicas takes, mean over living ranks."""
    prices, top = problem.objective, problem.topology
    tokens = load.tokens[layer, expert] / load.steps
    whole = part = 0.0
    for rank in range(top.num_ranks):
        if top.speeds[rank] > 0:
            seconds = plain_unit(problem, load, layer, rank, expert)
            alone = (prices.touch_s * (1 - np.exp(-tokens)) + prices.row_s * tokens) / top.speeds[rank]
            few = (prices.touch_s * (1 - np.exp(-tokens / n)) + prices.row_s * tokens / n) / top.speeds[rank]
            whole, part = whole + seconds, part + few + (seconds - alone) / n
    return part / whole if whole else 1 / n


def plain_source(problem: Problem, layer: int, rank: int, expert: int) -> int:
    held = problem.current.slot_experts[layer].reshape(problem.topology.num_ranks, -1)
    hosts = [r for r in range(len(held)) if problem.alive[r] and expert in held[r]]
    near = [r for r in hosts if problem.topology.node_of(r) == problem.topology.node_of(rank)]
    return rank if rank in hosts else (near or hosts or [HOST])[0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_arrays_and_score_match_plain_python(seed: int, touch: bool, exchange: bool, known: bool, dead: bool) -> None:
    problem, load = random_problem(seed, touch=touch, exchange=exchange, known=known, dead=dead)
    prices, top = problem.objective, problem.topology
    rows = random_map(default_rng(seed + 1), 2, 6, 12)
    score, busy = problem.score(rows), problem.rank_s(rows)
    for layer in range(2):
        held = rows[layer].reshape(4, 3)
        replicas = [sum(int((held[r] == e).sum()) for r in range(4) if problem.alive[r]) for e in range(6)]
        movement, loads = [0.0] * 4, 0
        for rank in range(4):
            expected = 0.0
            for expert in held[rank] if problem.alive[rank] else []:
                unit = plain_unit(problem, load, layer, rank, expert)
                n = min(replicas[expert], problem.share.shape[1])
                expected += unit * plain_part(problem, load, layer, expert, n) * n / replicas[expert]
            assert busy[layer, rank] == pytest.approx(expected, rel=1e-9, abs=1e-15)
            for expert in set(held[rank]) if problem.alive[rank] else []:
                source = plain_source(problem, layer, rank, expert)
                assert problem.source[layer, rank, expert] == source
                if source != rank:
                    near = source != HOST and top.node_of(source) == top.node_of(rank)
                    link = top.host if source == HOST else top.intra if near else top.inter
                    movement[rank] += link.latency_s + prices.expert_bytes / link.bytes_per_s
                    loads += 1
        assert score.moves[layer] == loads
        priced = prices.exposed * (max(movement) + prices.move_price * sum(movement))
        total = prices.horizon * max(busy[layer].max(), problem.floor[layer]) + priced
        assert score.total_s[layer] == pytest.approx(total, rel=1e-9)


def all_maps(experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """[map, slot] every one that holds all experts, none twice on a rank, slots of a rank in order."""
    choices = product(combinations(range(experts), per_rank), repeat=ranks)
    rows = [sum(choice, ()) for choice in choices]
    return np.array([row for row in rows if len(set(row)) == experts], np.int32)


MAPS = {sizes: all_maps(*sizes) for sizes in [(6, 2, 3), (6, 2, 4), (4, 3, 2), (5, 3, 2), (3, 3, 2), (5, 2, 3)]}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(sorted(MAPS)), st.sampled_from([0.0, 1e-7, 1e-6, 1e-4]), st.booleans())
def test_no_placement_is_below_the_reach(seed: int, sizes: tuple[int, int, int], touch_s: float, sourced: bool) -> None:
    rng = default_rng(seed)
    experts, ranks, _ = sizes
    maps = MAPS[sizes]
    sources = rng.integers(0, 40, (ranks, 1, experts)) * rng.choice([0.1, 1.0, 5.0], (1, 1, experts))
    load = Load(sources.sum(axis=0), sources=sources if sourced else None)
    prices = v3_prices(touch_s=touch_s, row_bytes=float(rng.choice([0.0, 20_000.0])))
    topology = Topology(ranks, 2, speeds=tuple(rng.choice([1.0, 0.7, 2.0], ranks)))
    problem = prices.problem(load, topology, Placement(maps[:1], ranks, experts))
    least = min(float(problem.rank_s(row[None]).max()) for row in maps[rng.permutation(len(maps))[:400]])
    assert least >= problem.reach[0] * (1 - 1e-9)
    assert problem.reach[0] >= problem.even[0] * (1 - 1e-12)


def test_the_reach_counts_what_replicas_in_spare_slots_stream() -> None:
    """Eight even experts in twelve slots: every one streams, wherever it is."""
    problem = v3_prices(row_s=1e-6, touch_s=1e-3).problem(
        Load(np.full((1, 8), 100.0)), Topology(4), Placement.linear(1, 8, 4, 12)
    )
    assert problem.even[0] == pytest.approx(8 * 1.1e-3 / 4)
    assert problem.reach[0] == pytest.approx((12 * 1e-3 + 8 * 1e-4) / 4, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_equal_shares_that_are_given_cost_what_the_table_says(
    seed: int, touch: bool, exchange: bool, known: bool, dead: bool
) -> None:
    problem, _ = random_problem(seed, touch=touch, exchange=exchange, known=known, dead=dead)
    rows = random_map(default_rng(seed + 1), 2, 6, 12)
    np.testing.assert_allclose(problem.rank_s(rows, problem.equal_shares(rows)), problem.rank_s(rows), rtol=1e-12)


def test_shares_between_are_priced_on_straight_lines() -> None:
    placement = Placement(np.array([[0, 1, 0, 1, 0, 1]], np.int32), 3, 2)
    prices = v3_prices(row_s=1e-6, touch_s=1e-3)
    problem = prices.problem(Load(np.array([[50.0, 0.0]])), Topology(3), placement)
    for part in (1.0, 0.9, 0.5, 0.45, 1 / 3, 0.2, 0.0):
        shares = np.array([[part, 1.0, 1 - part, 0.0, 0.0, 0.0]])
        at = [0.0, 1 / 3, 1 / 2, 1.0]
        seconds = [0.0, *(prices.touch_s * (1 - np.exp(-50 * x)) + prices.row_s * 50 * x for x in at[1:])]
        expected = [np.interp(part, at, seconds), np.interp(1 - part, at, seconds), 0.0]
        np.testing.assert_allclose(problem.rank_s(placement.slot_experts, shares)[0], expected, rtol=1e-12)
    plain = v3_prices(row_s=1e-6).problem(Load(np.array([[50.0, 0.0]])), Topology(3), placement)
    for part in np.linspace(0, 1, 23):
        shares = np.array([[part, 1.0, 1 - part, 0.0, 0.0, 0.0]])
        busy = plain.rank_s(placement.slot_experts, shares)[0]
        np.testing.assert_allclose(busy, 5e-5 * np.array([part, 1 - part, 0.0]), rtol=1e-12, atol=1e-18)


def test_plans_start_from_the_shares_in_force() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
    load, prices = Load(np.array([[6.0, 5.0, 1.0]])), v3_prices(row_s=1.0)
    shares = np.array([[0.25, 1.0, 0.75, 1.0]])
    problem = prices.problem(load, Topology(2), placement, shares)
    assert problem.plan(placement.slot_experts).before_s == 6.5
    assert problem.plan(placement.slot_experts).after_s == 8.0, "equal shares"
    kept = problem.keep("enough")
    assert (kept.before_s, kept.after_s, kept.split) == (6.5, 6.5, "weighted")
    np.testing.assert_array_equal(kept.shares, shares)
    gone = prices.problem(
        load,
        Topology(2, speeds=(0.0, 1.0)),
        Placement(np.array([[0, 1, 2] * 2], np.int32), 2, 3),
        np.array([[0.25, 1.0, 0.5, 0.75, 0.0, 0.5]]),
    )
    np.testing.assert_array_equal(gone.shares, [[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([[0.5, 1.0, 0.5]], r"shares has shape \(1, 3\); the placement \(1, 4\)"),
        ([[0.5, 1.0, 0.4, 1.0]], "shares of layer 0, expert 0 add up to 0.9; it must be 1"),
        ([[1.5, 1.0, -0.5, 1.0]], r"shares\[0, 2\] is -0.5; it must be finite and not negative"),
        ([[0.5, np.nan, 0.5, 1.0]], r"shares\[0, 1\] is nan"),
    ],
)
def test_wrong_shares_are_named(shares: list[list[float]], said: str) -> None:
    placement = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
    with pytest.raises(ConfigError, match=said):
        v3_prices().problem(Load(np.ones((1, 3))), Topology(2), placement, np.array(shares))


def test_full_ranks_reach_the_longest_beside_the_shortest() -> None:
    current = Placement.linear(1, 4, 2)
    problem = v3_prices(row_s=1.0, target_balance=0.5).problem(
        Load(np.array([[10.0, 1.0, 2.0, 3.0]])), Topology(2), current
    )
    assert problem.even[0] == 8.0
    assert problem.reach[0] == 11.0
    assert problem.floor[0] == 22.0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_plan_keeps_in_place_what_stays_and_lists_what_moves(seed: int, dead: bool) -> None:
    problem, _ = random_problem(seed, touch=False, exchange=False, known=False, dead=dead)
    rows = random_map(default_rng(seed + 1), 2, 6, 12)
    settled, order = settle(problem.current.slot_experts, rows, 4)
    assert np.array_equal(np.take_along_axis(rows, order, axis=1), settled)
    for layer in range(2):
        for rank in range(4):
            block = slice(3 * rank, 3 * rank + 3)
            assert sorted(settled[layer, block]) == sorted(rows[layer, block])
    plan = problem.plan(rows)
    assert plan.movement_s == pytest.approx(problem.score(rows).movement_s.sum())
    fetched = set(
        zip(plan.moves.layer.tolist(), (plan.moves.slot // 3).tolist(), plan.moves.expert.tolist(), strict=True)
    )
    assert len(fetched) == problem.score(rows).moves.sum()


def test_moves_over_links_that_take_no_time_still_count() -> None:
    at_once = Link("at once", 1e12, 0.0)
    problem = v3_prices(expert_bytes=0.0).problem(
        Load(np.ones((1, 4))), Topology(2, intra=at_once), Placement.linear(1, 4, 2)
    )
    assert problem.score(np.array([[2, 3, 0, 1]], np.int32)).moves[0] == 4
    both = Placement(np.array([[0, 1, 2, 0, 1, 3]], np.int32), 2, 4)
    problem = v3_prices(expert_bytes=0.0).problem(Load(np.ones((1, 4))), Topology(2, intra=at_once), both)
    assert problem.source[0, :, :2].tolist() == [[0, 0], [1, 1]], "a rank's own copy is no move"
    assert not len(problem.moves(np.array([[1, 0, 2, 1, 0, 3]], np.int32)))


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2", "qwen3-30b-a3b"])
def test_prices_of_a_model_tell_what_it_tells(name: str, ranks: int) -> None:
    """In prefill, time saved by moving load between ranks is what the step model says."""
    spec, topology, tokens = get_model(name), Topology(ranks), 65_536
    model = step_model(spec, "h200", topology=topology)
    objective = Objective.of(model, tokens, row_bytes=0.0)
    layers = spec.num_moe_layers
    load = zipf_drift(layers, spec.num_experts, default_rng(0), exponent=0.7, tokens=tokens * spec.top_k).after
    linear = Placement.linear(layers, spec.num_experts, ranks)
    plan = Eplb(objective=objective).plan(Load(load), topology, linear)
    whole = np.round(load).astype(np.int64)
    before, after = (model.moe_s(whole, tokens // ranks, map_).sum() for map_ in (linear, plan.placement))
    assert plan.saving_s == pytest.approx(before - after, rel=0.1)


def test_one_expert_on_every_rank() -> None:
    problem = v3_prices().problem(Load(np.array([[3.0]])), Topology(2), Placement.linear(1, 1, 2, 2))
    assert problem.rank_s(problem.current.slot_experts).tolist() == [[1.5 * v3_prices().row_s] * 2]


def test_moves_come_over_the_fastest_links_of_a_matrix() -> None:
    """Ranks 0 and 1 hold expert 0; rank 2 is ten times nearer to rank 1, and rank 3 as near to both."""
    rates = np.full((4, 4), 50e9)
    rates[1, 2] = 500e9
    topology = Topology(4, bytes_per_s=tuple(map(tuple, rates)))
    current = Placement(np.array([[0, 1, 0, 2, 3, 4, 5, 1]], np.int32), 4, 6)
    problem = Objective(row_s=1e-6, expert_bytes=44e6).problem(Load(np.ones((1, 6))), topology, current)
    assert problem.source[0, :, 0].tolist() == [0, 1, 1, 0]
    assert problem.load_in[0, :, 0] == pytest.approx([0.0, 0.0, 2e-6 + 44e6 / 500e9, 2e-6 + 44e6 / 50e9])
    moves = problem.moves(np.array([[0, 1, 0, 2, 0, 4, 5, 0]], np.int32))
    assert moves.source.tolist() == [1, 0], "the second sends less in this layer"
    back = row_trips_s(topology, 1e6)
    assert back[1, 2] == back[2, 1] == pytest.approx(1e6 / 500e9 + 1e6 / 50e9), "there and back"
    assert not np.diag(back).any()
    with pytest.raises(ConfigError, match=r"bytes_per_s must be \[4\]\[4\]"):
        Topology(4, bytes_per_s=((1.0, 1.0), (1.0, 1.0)))


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8])
def test_a_matrix_of_the_links_by_node_changes_nothing(ranks_per_node: int) -> None:
    rng, plain = np.random.default_rng(0), Topology(8, ranks_per_node)
    matrix = replace(plain, bytes_per_s=tuple(map(tuple, np.minimum(plain.rates, 1e12))))
    current = Placement(np.sort(np.stack([rng.permutation(16) % 12 for _ in range(3)]), axis=1).astype(np.int32), 8, 12)
    load, objective = Load(rng.random((3, 12))), Objective(row_s=1e-6, expert_bytes=44e6, row_bytes=4096.0)
    one, other = (objective.problem(load, topology, current) for topology in (plain, matrix))
    assert np.array_equal(one.source, other.source)
    assert np.array_equal(one.load_in, other.load_in)
    assert np.array_equal(one.unit, other.unit)


@pytest.mark.parametrize(
    ("name", "ranks", "tokens"),
    [("glm-5.2", 8, 64), ("glm-5.2", 8, 8192), ("deepseek-v3", 32, 8192), ("gpt-oss-20b", 8, 64)],
)
def test_the_exchange_costs_what_it_costs_in_a_step(name: str, ranks: int, tokens: int) -> None:
    """Latency and price of a row are those of the step model's layer, around the mean rows of a rank."""
    model = step_model(get_model(name), "h200", topology=Topology(ranks))
    spec, objective = model.spec, Objective.of(model, tokens)
    current = Placement.linear(1, spec.num_experts, ranks)
    load = Load(np.full((1, spec.num_experts), tokens * spec.top_k / spec.num_experts))
    with_rows, without = (
        replace(objective, row_bytes=row_bytes).problem(load, model.topology, current)
        for row_bytes in (objective.row_bytes, 0.0)
    )
    row_s = (with_rows.unit - without.unit) / load.tokens[:, None]
    placed = PlacedStepModel(replace(model, spec=replace(spec, num_layers=spec.first_moe_layer + 1)), current)
    even = tokens * spec.top_k // ranks
    for rows in (even, even + even // 100):
        of_slots = np.zeros((1, spec.num_experts), np.int64)
        of_slots[0, 0] = rows
        step_s = 1e-6 * placed.layers_us(of_slots, np.full(ranks, tokens // ranks))[1, 0]
        assert objective.fixed_s + rows * row_s[0] == pytest.approx(np.full((ranks, spec.num_experts), step_s))
    saved = with_rows.slowest_s(current.slot_experts) - without.slowest_s(current.slot_experts)
    assert saved[0] == pytest.approx(step_s, rel=0.011), "with the latency"
