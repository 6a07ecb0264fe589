"""The objective's arrays against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.placement.base import HOST, Load
from coterie.placement.eplb import Eplb
from coterie.placement.objective import Objective, Problem, settle
from coterie.traces.drifting import zipf_drift
from coterie.types import Link, Placement, Topology


def random_problem(seed: int, *, touch: bool, exchange: bool, known: bool, dead: bool) -> tuple[Problem, Load]:
    """Two nodes of two ranks, six experts in three slots a rank; maps may hold an expert twice on a rank."""
    rng = default_rng(seed)
    layers, experts, ranks, per_rank = 2, 6, 4, 3
    sources = rng.integers(0, 40, (ranks, layers, experts)).astype(float)
    load = Load(sources.sum(axis=0), 2.0, sources if known else None)
    speeds = (1.0, 0.5, 0.0 if dead else 2.0, 1.0)
    current = Placement(random_map(rng, layers, experts, ranks * per_rank), ranks, experts)
    prices = Objective(
        row_s=1e-6, touch_s=3e-6 if touch else 0.0, row_bytes=4096.0 if exchange else 0.0, enough=0.9, move_price=0.5,
        exposed=0.5, horizon=50.0,
    )  # fmt: skip
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
                tokens = load.tokens[layer, expert] / load.steps
                alone = prices.touch_s * (1 - np.exp(-tokens)) + prices.row_s * tokens
                n = min(replicas[expert], problem.share.shape[2])
                split = prices.touch_s * (1 - np.exp(-tokens / n)) + prices.row_s * tokens / n
                part = split / alone if alone else 1 / n
                expected += unit * part * n / replicas[expert]
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


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_no_placement_is_below_the_reach(seed: int, touch: bool, full: bool) -> None:
    rng = default_rng(seed)
    slots = 6 if full else 8
    load = Load(rng.integers(0, 60, (1, 6)).astype(float))
    current = Placement(random_map(rng, 1, 6, slots), 2, 6)
    problem = Objective(touch_s=1e-6 if touch else 0.0).problem(load, Topology(2, speeds=(1.0, 0.7)), current)
    for _ in range(30):
        rows = random_map(rng, 1, 6, slots)
        if Placement(rows, 2, 6).duplicates == 0:
            assert problem.rank_s(rows).max() >= problem.reach[0] * (1 - 1e-12)


def test_full_ranks_reach_the_longest_beside_the_shortest() -> None:
    current = Placement.linear(1, 4, 2)
    problem = Objective(row_s=1.0, enough=0.5).problem(Load(np.array([[10.0, 1.0, 2.0, 3.0]])), Topology(2), current)
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
    problem = Objective(expert_bytes=0.0).problem(
        Load(np.ones((1, 4))), Topology(2, intra=at_once), Placement.linear(1, 4, 2)
    )
    assert problem.score(np.array([[2, 3, 0, 1]], np.int32)).moves[0] == 4


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2", "qwen3-30b-a3b"])
def test_prices_of_a_model_tell_what_it_tells(name: str, ranks: int) -> None:
    """In prefill, time saved by moving load between ranks is what the step model says."""
    spec, topology, tokens = get_model(name), Topology(ranks), 65_536
    model = step_model(spec, "h200", topology=topology)
    objective = Objective.of(model, tokens, row_bytes=0.0)
    load = zipf_drift(3, spec.num_experts, default_rng(0), exponent=0.7, tokens=tokens * spec.top_k).after
    linear = Placement.linear(3, spec.num_experts, ranks)
    plan = Eplb(objective=objective).plan(Load(load), topology, linear)
    whole = np.round(load).astype(np.int64)
    before, after = (model.moe_s(whole, tokens // ranks, map_).sum() for map_ in (linear, plan.placement))
    assert plan.saving_s == pytest.approx(before - after, rel=0.1)


def test_one_expert_on_every_rank() -> None:
    problem = Objective().problem(Load(np.array([[3.0]])), Topology(2), Placement.linear(1, 1, 2, 2))
    assert problem.rank_s(problem.current.slot_experts).tolist() == [[1.5 * Objective().row_s] * 2]
