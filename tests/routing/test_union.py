"""Union-minimising clusters against brute force and against cosine clusters."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.routing.clustering import assign, capacities, cluster
from coterie.routing.union import (
    _union,
    cluster_profiles,
    expected_distinct_of,
    expected_distinct_saving,
    tangents,
    union_clusters,
)


def activations(
    rng: np.random.Generator, requests: int, groups: int = 5, layers: int = 3, experts: int = 12
) -> np.ndarray:
    """[request, expert index] activation probabilities of top-3 requests in groups."""
    taste = rng.dirichlet(np.full(experts, 0.4), (groups, layers))
    own = rng.dirichlet(np.full(experts, 0.5), (requests, layers))
    p = np.minimum(3 * (0.6 * taste[rng.integers(groups, size=requests)] + 0.4 * own), 1.0)
    return np.asarray(p.reshape(requests, -1), np.float32)


def test_expected_distinct_is_that_of_drawn_steps() -> None:
    """A step draws its requests from the cluster, and every request's token draws its experts."""
    rng = np.random.default_rng(0)
    p = activations(rng, 12, layers=1)
    labels = np.arange(12) % 2
    drawn = []
    for _ in range(4000):
        worker = rng.integers(2)
        step = rng.choice(np.flatnonzero(labels == worker), 4)
        drawn.append((rng.random((4, p.shape[1])) < p[step]).any(axis=0).sum())
    error = np.std(drawn) / np.sqrt(len(drawn))
    assert expected_distinct_of(p, labels, 4) == pytest.approx(np.mean(drawn), abs=4 * error)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
def test_power_of_any_batch(batch: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((size, 2100)).astype(np.float32)  # past a block
    plus, minus = rng.random(2100).astype(np.float32), rows[0]
    scratch = np.empty(1024, np.float32), np.empty(1024, np.float32)
    union = _union(rows.sum(axis=0), plus, minus, size, np.int64(batch), *scratch)  # type: ignore[arg-type]  # a compiled argument
    mean = (rows.sum(axis=0, dtype=np.float64) + plus - minus) / size
    assert union == pytest.approx(size * (1 - (1 - mean) ** batch).sum(), rel=1e-4)


@given(st.integers(0, 200), st.integers(2, 20))
def test_tangents_lie_above_and_touch(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    p = activations(rng, 12)
    labels = np.arange(12) % 3
    slopes, offsets = tangents(cluster_profiles(p, labels, 3), batch)
    costs = p @ slopes.T + offsets
    touching = costs[np.arange(12), labels].mean()
    assert touching == pytest.approx(expected_distinct_of(p, labels, batch), rel=1e-4)
    for _ in range(5):
        other = rng.integers(3, size=12)
        assert expected_distinct_of(p, other, batch) <= costs[np.arange(12), other].mean() * (1 + 1e-5)


def test_small_cases_reach_the_optimum() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        p = activations(rng, 6, groups=3)
        best = min(expected_distinct_of(p, np.array(labels), 4) for labels in set(permutations([0, 0, 1, 1, 2, 2])))
        clusters = union_clusters(p, 3, 4, rng, restarts=5)
        assert clusters.distinct == pytest.approx(best, rel=1e-5)


def test_no_swap_is_left() -> None:
    rng = np.random.default_rng(1)
    p = activations(rng, 40)
    clusters = union_clusters(p, 4, 8, rng, restarts=1)
    for i in range(40):
        for j in range(i):
            if clusters.labels[i] != clusters.labels[j]:
                swapped = clusters.labels.copy()
                swapped[[i, j]] = swapped[[j, i]]
                assert expected_distinct_of(p, swapped, 8) >= clusters.distinct * (1 - 1e-6)


def test_moves_are_tried_where_there_is_room() -> None:
    rng = np.random.default_rng(2)
    p = activations(rng, 22)
    clusters = union_clusters(p, 4, 8, rng, restarts=3)  # limits of 6: two places are free
    sizes = np.bincount(clusters.labels, minlength=4)
    assert sizes.max() <= 6
    for i in range(22):
        for worker in np.flatnonzero(sizes < 6):
            moved = clusters.labels.copy()
            moved[i] = worker
            assert expected_distinct_of(p, moved, 8) >= clusters.distinct * (1 - 1e-6)


def test_better_than_its_starts_and_than_cosine() -> None:
    rng = np.random.default_rng(3)
    p = activations(rng, 120, groups=7, layers=4, experts=24)
    rows = p / np.linalg.norm(p, axis=1, keepdims=True)
    start = cluster(rows, 8, rng, restarts=4).labels
    clusters = union_clusters(p, 8, 12, rng, starts=(start,), restarts=0)
    assert clusters.distinct < expected_distinct_of(p, start, 12)
    assert expected_distinct_saving(p, clusters.labels, 12) > expected_distinct_saving(p, start, 12) > 0
    np.testing.assert_allclose(clusters.profiles, [p[clusters.labels == w].mean(axis=0) for w in range(8)], rtol=1e-4)


def test_effort_bounds_the_search_and_none_leaves_the_descent() -> None:
    p = activations(np.random.default_rng(4), 80)
    without, with_swaps = (
        union_clusters(p, 5, 8, np.random.default_rng(0), restarts=1, effort=effort) for effort in (0.0, 1e9)
    )
    assert with_swaps.distinct <= without.distinct


def test_requests_not_seen_gain_too() -> None:
    rng = np.random.default_rng(5)
    p = activations(rng, 400, groups=8, layers=6, experts=24)
    clusters = union_clusters(p[:200], 8, 16, rng, restarts=3)
    slopes, _ = tangents(clusters.profiles, 16)
    labels = assign(p[200:] @ slopes.T, capacities(200, 8))
    alone = expected_distinct_saving(p[200:], rng.permutation(np.arange(200) % 8), 16)
    assert expected_distinct_saving(p[200:], labels, 16) > alone + 0.05


def test_unequal_speeds_and_the_seed() -> None:
    p = activations(np.random.default_rng(6), 60)
    first, again = (
        union_clusters(p, 3, 8, np.random.default_rng(1), speeds=np.array([1.0, 1.0, 2.0]), restarts=2)
        for _ in range(2)
    )
    assert np.bincount(first.labels).tolist() == [15, 15, 30]
    np.testing.assert_array_equal(first.labels, again.labels)


def test_what_cannot_work_is_refused() -> None:
    rng = np.random.default_rng(7)
    p = activations(rng, 6)
    with pytest.raises(ConfigError, match="at least 7 requests"):
        union_clusters(p, 7, 4, rng)
    with pytest.raises(ConfigError, match="batch=0"):
        union_clusters(p, 2, 0, rng)
    with pytest.raises(ConfigError, match="restarts"):
        union_clusters(p, 2, 4, rng, restarts=0)
    with pytest.raises(ConfigError, match="within the limits"):
        union_clusters(p, 2, 4, rng, starts=(np.zeros(6, np.int64),))
