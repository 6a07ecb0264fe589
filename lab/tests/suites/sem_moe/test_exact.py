"""The exact program of co-clusters against brute force, and the alternating algorithm against the exact program."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from coterie.placement import Items
from coterie.placement.co_clustering import cost
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie_lab.suites.sem_moe.exact import solve_exactly


def some_items(
    rng: Generator, count: int, experts: int, layers: int = 1, *, one_rank: bool = False, themes: int = 0
) -> Items:
    """Items whose activations are drawn; with `themes`, items of a theme prefer the same experts."""
    tokens = np.ceil(rng.lognormal(2.0, 1.0, count))
    share = rng.gamma(0.5, 1.0, (count, layers, experts)) + 1e-6
    if themes:
        prefers = rng.integers(0, themes, (layers, experts))[None] == rng.integers(0, themes, count)[:, None, None]
        share *= np.where(prefers, 1.0, 0.05)
    counts = np.minimum(2 * share / share.sum(axis=2, keepdims=True), 1.0) * tokens[:, None, None]
    return Items.of_counts(counts, tokens, one_rank=one_rank)


def brute_force(items: Items, experts: int, ranks: int, theta: float) -> float:
    """The least cost of all placements of one layer and all ranks of items."""
    least = np.inf
    for placed in set(permutations(np.repeat(np.arange(ranks), experts // ranks).tolist())):
        for label in product(range(ranks), repeat=len(items)):
            found = cost(items, np.array([placed]), np.array([label]), ranks, theta)
            least = min(least, float(found[0]))
    return least


@pytest.mark.parametrize("theta", [0.0, 0.4, 1.0])
def test_the_exact_program_finds_what_brute_force_finds(theta: float) -> None:
    items = some_items(default_rng(3), 5, 4)
    found = solve_exactly(items, 4, 2, theta)
    assert found.cost == pytest.approx([brute_force(items, 4, 2, theta)])
    assert found.bound == pytest.approx(found.cost, abs=1e-4)


def test_the_exact_program_keeps_the_ranks_of_requests_in_all_layers() -> None:
    items = some_items(default_rng(4), 4, 4, layers=2, one_rank=True)
    found = solve_exactly(items, 4, 2, 0.5)
    assert found.ranks.shape == (1, 4)
    assert found.cost == pytest.approx(cost(items, found.expert_ranks, found.ranks, 2, 0.5))
    apart = Items(items.frequency, items.experts, items.weights)
    assert found.cost[0] >= solve_exactly(apart, 4, 2, 0.5).cost.sum() - 1e-9, "a rank per layer is freer"


def test_the_alternating_algorithm_is_near_the_optimum_on_average() -> None:
    over = []
    for seed in range(8):
        items = some_items(default_rng(seed), 10, 6, themes=2 * (seed % 2))
        best = solve_exactly(items, 6, 2, 0.5).cost
        found = alternate(items, 6, 2, default_rng(0), AlternatingSettings(theta=0.5, starts=4))
        over.append(float(cost(items, *found, 2, 0.5)[0] / best[0]))
    assert min(over) >= 1 - 1e-6, "nothing is below the optimum"
    assert np.mean(over) < 1.05
