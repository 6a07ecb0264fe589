"""Shares of replicas: the flow and the simplex method against a linear program, and what each split promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from coterie.errors import ConfigError
from coterie.placement.base import Load
from coterie.placement.objective import Problem
from coterie.placement.splits.shares import optimal_shares
from coterie.types import Placement, Topology
from v3_prices import v3_prices


def make(seed: int, *, gone: bool = False, mixed: bool = False, sourced: bool = False, layers: int = 2) -> Problem:
    """A random map, duplicates on a rank and all, of a random and skewed load."""
    rng = np.random.default_rng(seed)
    ranks, each = int(rng.integers(2, 7)), int(rng.integers(2, 6))
    alive = ranks - gone
    experts = int(rng.integers(1, alive * each + 1))
    tokens = rng.pareto(1.0, (layers, experts)) * 100 * (rng.random((layers, experts)) < 0.9)
    rows = np.stack([rng.permutation(np.arange(ranks * each) % experts) for _ in range(layers)])
    speeds = rng.choice([0.5, 1.0, 1.7], ranks) if mixed else np.ones(ranks)
    if gone:
        speeds[rng.integers(ranks)] = 0.0
    sources = rng.dirichlet(np.full(ranks, 0.3), tokens.shape).transpose(2, 0, 1) * tokens if sourced else None
    objective = v3_prices(row_bytes=20_000.0 if sourced else 0.0)
    topology = Topology(ranks, ranks_per_node=2, speeds=tuple(speeds))
    placement = Placement(rows.astype(np.int32), ranks, experts)
    return objective.problem(Load(tokens, sources=sources), topology, placement)


def least(problem: Problem, layer: int, row: NDArray[np.integer]) -> float:
    """The slowest rank's seconds of the best split, by HiGHS."""
    each, unit = problem.current.slots_per_rank, problem.unit[layer]
    scale = unit.max()
    if scale == 0:
        return 0.0
    slots = [slot for slot in range(len(row)) if problem.alive[slot // each]]
    busy = np.zeros((len(unit), len(slots) + 1))
    held = np.zeros((unit.shape[1], len(slots) + 1))
    busy[:, -1] = -1.0
    for column, slot in enumerate(slots):
        busy[slot // each, column] = unit[slot // each, row[slot]] / scale
        held[row[slot], column] = 1.0
    held = held[held.any(axis=1)]
    goal = np.zeros(len(slots) + 1)
    goal[-1] = 1.0
    found = linprog(goal, busy, np.zeros(len(busy)), held, np.ones(len(held)))
    assert found.success
    return float(found.fun * scale)


def check_shares(problem: Problem, rows: NDArray[np.integer], shares: NDArray[np.float64]) -> None:
    slot_alive = np.repeat(problem.alive, problem.current.slots_per_rank)
    assert (shares >= 0).all()
    assert (shares[:, ~slot_alive] == 0).all()
    for row, share in zip(rows, shares, strict=True):
        total = np.bincount(row, share, problem.current.num_experts)
        reachable = np.isin(np.arange(problem.current.num_experts), row[slot_alive])
        np.testing.assert_allclose(total, reachable, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
def test_optimal_matches_a_linear_program(seed: int, gone: bool, mixed: bool, sourced: bool) -> None:
    problem = make(seed, gone=gone, mixed=mixed, sourced=sourced)
    rows = problem.current.slot_experts
    shares = optimal_shares(problem, rows)
    check_shares(problem, rows, shares)
    slowest = problem.rank_s(rows, shares).max(axis=1)
    equal = problem.rank_s(rows, problem.equal_shares(rows)).max(axis=1)
    for layer, row in enumerate(rows):
        assert slowest[layer] == pytest.approx(least(problem, layer, row), rel=1e-9, abs=1e-15)
        assert slowest[layer] <= equal[layer] * (1 + 1e-12)
    assert np.array_equal(shares, optimal_shares(problem, rows)), "the same every time"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.booleans(), st.floats(1e-6, 1e6))
def test_the_unit_of_tokens_does_not_matter(seed: int, sourced: bool, factor: float) -> None:
    problem = make(seed, sourced=sourced)
    rows = problem.current.slot_experts
    scaled = replace(problem, unit=problem.unit * factor)
    slowest = problem.rank_s(rows, optimal_shares(problem, rows)).max(axis=1)
    np.testing.assert_allclose(problem.rank_s(rows, optimal_shares(scaled, rows)).max(axis=1), slowest, rtol=1e-9)


def test_an_even_map_is_left_alone() -> None:
    placement = Placement(np.array([[0, 1, 1, 0]], np.int32), 2, 2)
    problem = v3_prices().problem(Load(np.array([[5.0, 9.0]])), Topology(2), placement)
    np.testing.assert_array_equal(optimal_shares(problem, placement.slot_experts), [[0.5, 0.5, 0.5, 0.5]])


def test_a_chain_of_replicas_carries_what_no_single_one_could() -> None:
    """Rank 0 shares with 1 alone, 1 with 2 alone: what is too much on 0 goes to 1, and 1's own goes on to 2."""
    placement = Placement(np.array([[0, 1, 1, 2, 2, 3]], np.int32), 3, 4)
    problem = v3_prices(row_s=1.0).problem(Load(np.array([[4.0, 4.0, 4.0, 0.0]])), Topology(3), placement)
    rows = placement.slot_experts
    np.testing.assert_allclose(problem.rank_s(rows, optimal_shares(problem, rows)), [[4.0, 4.0, 4.0]])
    assert problem.rank_s(rows).max() == 6.0


def test_slow_ranks_get_less() -> None:
    placement = Placement(np.array([[0, 1, 0, 1]], np.int32), 2, 2)
    problem = v3_prices(row_s=1.0).problem(Load(np.array([[9.0, 0.0]])), Topology(2, speeds=(2.0, 1.0)), placement)
    shares = optimal_shares(problem, placement.slot_experts)
    np.testing.assert_allclose(shares[0, ::2], [2 / 3, 1 / 3])
    np.testing.assert_allclose(problem.rank_s(placement.slot_experts, shares), [[3.0, 3.0]])


def test_of_two_slots_on_one_rank_one_computes() -> None:
    placement = Placement(np.array([[0, 0, 0, 1]], np.int32), 2, 2)
    problem = v3_prices().problem(Load(np.array([[4.0, 4.0]])), Topology(2), placement)
    np.testing.assert_allclose(optimal_shares(problem, placement.slot_experts), [[0.0, 1.0, 0.0, 1.0]])


def test_weights_of_an_earlier_window_may_be_worse_than_equal_shares() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
    windows = [
        v3_prices().problem(Load(np.array([tokens])), Topology(2), placement)
        for tokens in ([10.0, 2.0, 8.0], [10.0, 8.0, 2.0])
    ]
    rows = placement.slot_experts
    shares = {
        "equal": windows[1].equal_shares(rows),
        "weighted": optimal_shares(windows[0], rows),
        "optimal": optimal_shares(windows[1], rows),
    }
    slowest = {name: windows[1].rank_s(rows, given).max() for name, given in shares.items()}
    assert slowest["optimal"] < slowest["equal"] < slowest["weighted"], "what was right then is wrong now"


def test_bad_input_is_named() -> None:
    problem = make(0)
    with pytest.raises(ConfigError, match="slot_experts has shape"):
        optimal_shares(problem, problem.current.slot_experts[:, :-1])
