"""The moves a free split needs: against every map there is on tiny cases, and what holds for any."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.base import Load
from coterie.placement.objective import Objective, Problem
from coterie.placement.planning.eplb import rebalance
from coterie.placement.planning.free_split import FreeSplit, improve_split
from coterie.placement.splits.shares import optimal_shares
from coterie.traces.load import zipf_drift
from coterie.types import Placement, Topology
from v3_prices import v3_prices


def problem_of(
    rows: npt.ArrayLike, tokens: npt.ArrayLike, ranks: int, objective: Objective, topology: Topology | None = None
) -> Problem:
    placement = Placement(np.asarray(rows, np.int32), ranks, np.shape(tokens)[1])
    return objective.problem(Load(np.asarray(tokens, np.float64)), topology or Topology(ranks), placement)


def random_problem(seed: int, *, gone: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    ranks, each, layers = int(rng.integers(2, 7)), int(rng.integers(2, 6)), 3
    experts = int(rng.integers(each, (ranks - gone) * each + 1))
    tokens = rng.pareto(1.0, (layers, experts)) * 1000
    rows = np.stack([rng.permutation(np.arange(ranks * each) % experts) for _ in range(layers)])
    speeds = rng.choice([0.5, 1.0, 1.7], ranks) if rng.random() < 0.5 else np.ones(ranks)
    if gone:
        speeds[rng.integers(ranks)] = 0.0
    objective = v3_prices(
        row_bytes=float(rng.choice([0.0, 20_000.0])),
        horizon=float(rng.choice([0.1, 1.0, 1000.0])),
        target_balance=float(rng.choice([0.9, 1.0])),
        move_price=float(rng.choice([0.0, 0.5])),
    )
    sources = rng.dirichlet(np.full(ranks, 0.3), tokens.shape).transpose(2, 0, 1) * tokens
    load = Load(tokens, sources=sources if rng.random() < 0.5 else None)
    topology = Topology(ranks, ranks_per_node=int(rng.choice([2, 8])), speeds=tuple(speeds))
    return objective.problem(load, topology, Placement(rows.astype(np.int32), ranks, experts))


def check(problem: Problem, found: FreeSplit) -> None:
    current, ranks, experts = problem.current.slot_experts, problem.current.num_ranks, problem.current.num_experts
    slot_alive = np.repeat(problem.alive, problem.current.slots_per_rank)
    assert found.slot_experts.dtype == np.int32
    assert np.array_equal(found.slot_experts[:, ~slot_alive], current[:, ~slot_alive]), "ranks that are gone"
    assert (found.shares[:, ~slot_alive] == 0).all()
    assert len(found.reasons) == len(current)
    for old, row, share in zip(current, found.slot_experts, found.shares, strict=True):
        assert set(row[slot_alive]) == set(range(experts)), "every expert on a living rank"
        np.testing.assert_allclose(np.bincount(row, share, experts), 1.0, atol=1e-9)
        for before, after in zip(old.reshape(ranks, -1), row.reshape(ranks, -1), strict=True):
            twins = len(after) - len(set(after))
            assert twins <= len(before) - len(set(before)), "no second slot of an expert on a rank"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.one_of(st.none(), st.integers(0, 8)))
def test_any_result_is_a_map_no_worse_than_the_split_alone(seed: int, max_moves: int | None) -> None:
    problem = random_problem(seed)
    found = improve_split(problem, max_moves)
    check(problem, found)
    still = problem.score(problem.current.slot_experts, optimal_shares(problem, problem.current.slot_experts))
    score = problem.score(found.slot_experts, found.shares)
    assert (score.total_s <= still.total_s * (1 + 1e-9)).all()
    assert max_moves is None or score.moves.sum() <= max_moves
    again = improve_split(problem, max_moves)
    assert np.array_equal(found.slot_experts, again.slot_experts), "the same every time"
    assert np.array_equal(found.shares, again.shares)
    assert found.reasons == again.reasons


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_experts_of_a_rank_that_is_gone_are_loaded_elsewhere(seed: int) -> None:
    problem = random_problem(seed, gone=True)
    check(problem, improve_split(problem))
    check(problem, improve_split(problem, 0))


def every_map(ranks: int, each: int, experts: int) -> np.ndarray:
    """[map, slot], order within a rank aside."""
    ranges = [held for held in product(range(experts), repeat=each) if list(held) == sorted(set(held))]
    maps = (np.concatenate(held) for held in product(ranges, repeat=ranks))
    return np.array([row for row in maps if len(set(row)) == experts], np.int32)


@pytest.mark.parametrize("kind", ["alike", "mixed speeds", "two nodes"])
def test_close_to_the_best_of_all_maps(kind: str) -> None:
    ranks, each, experts = 3, 2, 4
    maps = every_map(ranks, each, experts)
    speeds = (1.0, 0.5, 2.0) if kind == "mixed speeds" else ()
    topology = Topology(ranks, ranks_per_node=2 if kind == "two nodes" else 8, speeds=speeds)
    objective = v3_prices(horizon=50.0, target_balance=0.95, move_price=0.1)
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(25):
        tokens = rng.pareto(1.0, (1, experts)) * 200
        start = maps[rng.integers(len(maps))][None]
        problem = problem_of(start, tokens, ranks, objective, topology)
        everywhere = problem_of(
            np.repeat(start, len(maps), axis=0), np.repeat(tokens, len(maps), axis=0), ranks, objective, topology
        )
        best = everywhere.score(maps, optimal_shares(everywhere, maps)).total_s.min()
        found = improve_split(problem)
        ratios.append(problem.score(found.slot_experts, found.shares).total_s[0] / best)
    assert min(ratios) >= 1 - 1e-9, "nothing is better than the best"
    assert np.mean(ratios) < 1.02
    assert np.max(ratios) < 1.25


def test_one_link_out_of_the_bottleneck_is_one_move() -> None:
    """Ranks 0 and 1 share expert 0, 2 and 3 share expert 3; one move joins them, and expert 3 makes room."""
    rows = [[0, 1, 4, 0, 2, 5, 3, 6, 7, 3, 6, 7]]
    tokens = [[7.0, 1.0, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0]]
    problem = problem_of(rows, tokens, 4, v3_prices(row_s=1.0, target_balance=0.99))
    found = improve_split(problem)
    assert len(problem.moves(found.slot_experts)) == 1
    assert problem.rank_s(found.slot_experts, found.shares).max() <= problem.floor[0] * (1 + 1e-9)
    assert found.reasons[0].startswith("1 moves and re-split")


def test_experts_change_places_where_no_slot_is_spare() -> None:
    problem = problem_of([[0, 1, 2, 3]], [[4.0, 4.0, 1.0, 1.0]], 2, v3_prices(row_s=1.0))
    found = improve_split(problem)
    assert len(problem.moves(found.slot_experts)) == 2
    np.testing.assert_allclose(problem.rank_s(found.slot_experts, found.shares), [[5.0, 5.0]])


def test_nothing_moves_where_the_split_is_enough_or_moves_cost_too_much() -> None:
    rows, tokens = [[0, 1, 0, 2]], [[6.0, 3.0, 1.0]]
    assert np.array_equal(improve_split(problem_of(rows, tokens, 2, v3_prices())).slot_experts, rows)
    dear = problem_of([[0, 1, 2, 3]], [[4.0, 4.0, 1.0, 1.0]], 2, v3_prices(horizon=1.0))
    found = improve_split(dear)
    assert np.array_equal(found.slot_experts, dear.current.slot_experts)
    assert "no move pays" in found.reasons[0]


def test_few_moves_go_where_they_save_most() -> None:
    rows = np.tile([0, 1, 2, 3, 0, 2], (2, 1))
    tokens = [[1.0, 3.0, 1.0, 1.0], [10.0, 90.0, 1.0, 1.0]]
    problem = problem_of(rows, tokens, 3, v3_prices(row_s=1.0))
    found = improve_split(problem, 1)
    assert problem.score(found.slot_experts, found.shares).moves.tolist() == [0, 1]
    assert "max_moves=1" in found.reasons[0]
    with pytest.raises(ConfigError, match="max_moves=-1"):
        improve_split(problem, -1)


def test_a_drifted_load_needs_few_moves() -> None:
    drift = zipf_drift(8, 256, np.random.default_rng(0))
    rows = rebalance(drift.before, 288, 32)
    problem = problem_of(rows, drift.after, 32, v3_prices(target_balance=0.984))
    found = improve_split(problem)
    check(problem, found)
    slowest = problem.rank_s(found.slot_experts, found.shares).max(axis=1)
    assert (slowest <= problem.floor * (1 + 1e-4)).all()
    assert len(problem.moves(found.slot_experts)) <= 65
