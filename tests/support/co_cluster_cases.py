"""Drawn items for co-clusters, and the least cost by brute force."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
from numpy.random import Generator

from coterie.placement import Items
from coterie.placement.co_clustering import cost


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
