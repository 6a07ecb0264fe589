"""Balanced assignment against the Hungarian method, and K-means built on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from coterie.errors import ConfigError
from coterie.routing.clustering import assign, best_columns, capacities, centroids_of, cluster


def signatures(
    rng: np.random.Generator, requests: int, groups: int = 6, cells: int = 40, skew: float = 1.0, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    centres = np.random.default_rng(first).random((groups, cells)) ** 6
    label = rng.choice(groups, requests, p=rng.dirichlet(np.full(groups, skew)))
    rows = centres[label] * rng.gamma(3.0, 1.0, (requests, cells))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), label


def total(costs: np.ndarray, labels: np.ndarray) -> float:
    return float(costs[np.arange(len(costs)), labels].astype(np.float64).sum())


def hungarian(costs: np.ndarray, limits: np.ndarray) -> float:
    columns = np.repeat(np.arange(len(limits)), limits)
    rows, chosen = linear_sum_assignment(costs[:, columns])
    return total(costs, columns[chosen[np.argsort(rows)]])


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3), st.booleans(), st.integers(0, 10_000))
def test_assignment_is_optimal(requests: int, workers: int, room: int, ties: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 4, (requests, workers)) if ties else rng.random((requests, workers)) + rng.random(workers)
    costs = drawn.astype(np.float32)
    limits = rng.multinomial(requests + room, rng.dirichlet(np.ones(workers)))
    labels = assign(costs, limits)
    assert (np.bincount(labels, minlength=workers) <= limits).all()
    assert total(costs, labels) == pytest.approx(hungarian(costs, limits), abs=1e-4)


def test_assignment_has_no_loss_against_the_hungarian_method_at_its_size() -> None:
    rows, _ = signatures(np.random.default_rng(0), 800, groups=12, skew=0.5)
    costs = 1.0 - rows @ rows[:16].T
    limits = capacities(800, 16)
    assert total(costs, assign(costs, limits)) <= hungarian(costs, limits) * (1 + 1e-6)


def test_capacities_follow_speeds() -> None:
    assert capacities(10, 4).tolist() == [3, 3, 3, 3]
    assert capacities(12, 4).tolist() == [3, 3, 3, 3]
    assert capacities(12, 3, np.array([1.0, 1.0, 2.0])).tolist() == [3, 3, 6]
    assert capacities(7, 3, np.array([1.0, 2.0, 3.0])).sum() >= 7
    with pytest.raises(ConfigError, match="above 0"):
        capacities(4, 2, np.array([1.0, 0.0]))


def test_clusters_are_balanced_and_plain_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    rows, _ = signatures(rng, 300, skew=0.4)
    balanced, plain = (cluster(rows, 6, np.random.default_rng(0), balanced=b, restarts=4) for b in (True, False))
    assert np.bincount(balanced.labels, minlength=6).max() <= 50
    assert np.bincount(plain.labels, minlength=6).max() > 50
    assert np.bincount(plain.labels, minlength=6).min() > 0
    assert plain.distance < balanced.distance, "a limit costs something"
    np.testing.assert_allclose(np.linalg.norm(balanced.centroids, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(balanced.centroids, centroids_of(rows, balanced.labels, 6))
    near = rows @ balanced.centroids.T
    assert balanced.distance == pytest.approx(len(rows) - total(near, balanced.labels), rel=1e-4)


def test_equal_domains_are_found_again() -> None:
    rng = np.random.default_rng(2)
    rows, label = signatures(rng, 1, skew=1e9)
    centres = np.random.default_rng(0).random((6, 40)) ** 6
    label = np.repeat(np.arange(6), 20)
    rows = (centres[label] * rng.gamma(20.0, 1.0, (120, 40))).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    clusters = cluster(rows, 6, rng, restarts=6)
    for group in range(6):
        assert len(set(clusters.labels[label == group].tolist())) == 1


def test_faster_workers_take_more() -> None:
    rows, _ = signatures(np.random.default_rng(3), 120)
    clusters = cluster(rows, 3, np.random.default_rng(0), speeds=np.array([1.0, 1.0, 2.0]))
    assert np.bincount(clusters.labels).tolist() == [30, 30, 60]


def test_copies_of_one_signature_still_fill_every_worker() -> None:
    rows = np.tile(np.array([[1.0, 0.0]], np.float32), (9, 1))
    for balanced in (True, False):
        clusters = cluster(rows, 3, np.random.default_rng(0), balanced=balanced)
        assert np.bincount(clusters.labels, minlength=3).min() > 0
        assert clusters.distance == pytest.approx(0.0, abs=1e-5)


def test_many_signatures_stay_within_limits() -> None:
    rows, _ = signatures(np.random.default_rng(4), 8_000, groups=40, cells=64, skew=0.5)
    small = cluster(rows[:400], 64, np.random.default_rng(0))
    clusters = cluster(rows, 64, np.random.default_rng(0), restarts=1)
    assert np.bincount(clusters.labels, minlength=64).max() <= capacities(8_000, 64).max()
    assert clusters.distance / 8_000 < 1.2 * small.distance / 400 + 0.05


@given(st.integers(0, 100))
def test_the_best_columns_undo_a_permutation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.random((7, 12)) ** 3
    old /= np.linalg.norm(old, axis=1, keepdims=True)
    order = rng.permutation(7)
    np.testing.assert_array_equal(old[order][best_columns(old @ old[order].T)], old)


def test_what_cannot_work_is_refused() -> None:
    rows, _ = signatures(np.random.default_rng(8), 5)
    with pytest.raises(ConfigError, match="5 signatures cannot make 6"):
        cluster(rows, 6, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="hold all 5"):
        assign(np.zeros((5, 2)), np.array([2, 2]))
    with pytest.raises(ConfigError, match="finite"):
        assign(np.full((5, 2), np.nan), np.array([3, 2]))
