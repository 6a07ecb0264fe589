"""Clusters that minimise the distinct experts of decode steps, which set a step's time.

Let p be the mean probability, over a cluster's requests, of activating an expert index (a layer's expert). A step of B
of its requests touches that expert with probability ``1 - (1 - p)^B``, approximately: exactly if the step drew its
requests from the cluster with replacement. The sum over expert indices is a cluster's U. The search
minimises the sum over clusters of share x U, where share is the cluster's part of all requests.

U is concave in the cluster's sums, so its tangent is above it: assigning all requests at once by the tangents (one
balanced assignment, see :mod:`~coterie.routing.clustering`) never raises the sum. Such rounds run first. When they no
longer help, two requests of different clusters are swapped, and requests moved where there is room, whenever the exact
U falls; the pairs tried are those most promising by the tangents. Both find local minima, so use several starts.

This is right where decode time is that of streaming weights and B is close to the batches served. It is wrong for
prefill, which touches every expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import check, check_at_least
from coterie.routing.clustering import Labels, assign, capacities, members_of

EFFORT = 2e8
"""Most expert indices that all swaps together may read, which takes 0.1 to 0.2 s. Small problems need far fewer."""
_BLOCK = 1024
"""Number of expert indices raised to a power at a time, so that they stay in the L1 cache."""

_SWEEPS = 4
"""Number of sweeps that the effort should last for; it sets how many candidates of each cluster a sweep tries."""
_LOWER = 1.0 - 1e-7
"""Relative slack for rounding errors: a change must lower U to less than this factor."""

Probabilities = NDArray[np.float32]


class UnionClusters(NamedTuple):
    labels: Labels
    """[request] worker whose cluster holds the request."""
    profiles: NDArray[np.float32]
    """[worker, expert index] mean activation probabilities."""
    distinct: float
    """Expected number of distinct experts in a step, summed over layers; mean over requests."""


def cluster_profiles(p: NDArray[np.floating], labels: Labels, workers: int) -> NDArray[np.float32]:
    """Return [worker, expert index] mean activation probabilities of each cluster; all 0 for an empty cluster."""
    members = members_of(labels, workers)
    return np.asarray(members @ p / np.maximum(members.sum(axis=1, keepdims=True), 1.0), np.float32)


def expected_distinct_of(p: NDArray[np.floating], labels: Labels, batch: int) -> float:
    """Return the expected distinct experts of a step of `batch` requests of one cluster; mean over requests.

    p is [request, expert index].
    """
    workers = int(labels.max()) + 1
    shares = np.bincount(labels, minlength=workers) / len(labels)
    profiles = np.asarray(cluster_profiles(p, labels, workers), np.float64)
    return float(shares @ (1.0 - (1.0 - np.minimum(profiles, 1.0)) ** batch).sum(axis=1))


def expected_distinct_saving(p: NDArray[np.floating], labels: Labels, batch: int) -> float:
    """Return the share of a step's distinct experts that clusters save, compared with steps drawn from all requests."""
    return 1.0 - expected_distinct_of(p, labels, batch) / expected_distinct_of(p, np.zeros_like(labels), batch)


def tangents(profiles: NDArray[np.float32], batch: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the slopes [worker, expert index] and offsets [worker] of U at the profiles: `p @ slopes.T + offsets` is
    an upper bound of what a request with activation probabilities p adds to each worker's U."""
    missed = np.asarray((1.0 - np.minimum(profiles, 1.0)) ** (batch - 1), np.float32)
    slopes = np.float32(batch) * missed
    touched = (1.0 - missed * (1.0 - profiles)).sum(axis=1)
    return slopes, np.asarray(touched - np.einsum("wc,wc->w", slopes, profiles), np.float32)


def union_clusters(
    p: NDArray[np.floating],
    workers: int,
    batch: int,
    rng: Generator,
    *,
    speeds: NDArray[np.floating] | None = None,
    starts: tuple[Labels, ...] = (),
    restarts: int = 1,
    rounds: int = 30,
    effort: float = EFFORT,
) -> UnionClusters:
    """Return the best clusters found from `starts` and `restarts` random assignments; p is [request, expert index]."""
    check(
        p.ndim == 2 and len(p) >= workers,
        f"p {p.shape} must be [request, expert index] of at least {workers} requests, one for each worker",
    )
    check_at_least(1, batch=batch)
    check(starts or restarts >= 1, f"restarts={restarts} must be at least 1 where no start is given")
    limits = capacities(len(p), workers, speeds)
    rows = np.ascontiguousarray(p, np.float32)
    begin = [np.array(start, np.int64) for start in starts]
    for labels in begin:
        check(
            labels.shape == (len(p),) and (np.bincount(labels, minlength=workers) <= limits).all(),
            f"a start must label {len(p)} requests within the limits {limits.tolist()}",
        )
    spare = np.repeat(np.arange(workers), np.maximum(limits - 1, 0))  # every worker gets one request at least
    seats = np.concatenate([np.arange(workers), rng.permutation(spare)])[: len(p)]
    begin += [rng.permutation(seats) for _ in range(restarts)]
    distinct = partial(expected_distinct_of, rows, batch=batch)
    clusters = sorted((_descend(rows, labels, limits, batch, rounds) for labels in begin), key=distinct)
    for index, labels in enumerate(clusters):
        if effort > 0:
            clusters[index], effort = _swap(rows, labels, limits, batch, effort)
    best = min(clusters, key=distinct)
    return UnionClusters(best, cluster_profiles(rows, best, workers), distinct(best))


def _descend(rows: Probabilities, labels: Labels, limits: NDArray[np.int64], batch: int, rounds: int) -> Labels:
    """Assign all requests by the tangents of U, again and again until U no longer falls."""
    last = np.inf
    for _ in range(rounds):
        slopes, offsets = tangents(cluster_profiles(rows, labels, len(limits)), batch)
        costs = rows @ slopes.T + offsets
        # U of the labels, where the tangents touch it.
        total = float(costs[np.arange(len(rows)), labels].sum(dtype=np.float64))
        if total > last * (1 - 1e-6):
            break
        last = total
        labels = assign(costs, limits)
    return labels


def _swap(
    rows: Probabilities, labels: Labels, limits: NDArray[np.int64], batch: int, effort: float
) -> tuple[Labels, float]:
    """Swap and move requests by exact U until a sweep changes nothing or the effort is spent.

    Return the labels and the effort that is left.
    """
    workers = len(limits)
    pair_work = max(1, workers * (workers - 1) * rows.shape[1])
    tried = int(np.clip(np.sqrt(effort / _SWEEPS / pair_work), 2, limits.max()))
    labels = labels.copy()
    while effort > 0:
        profiles = cluster_profiles(rows, labels, workers)
        slopes, offsets = tangents(profiles, batch)
        first = _promising(rows @ slopes.T + offsets, labels, workers, tried)
        sums = np.asarray(profiles * np.bincount(labels, minlength=workers)[:, None], np.float32)
        effort -= pair_work * tried**2
        if not _sweep(rows, labels, sums, limits, first, np.int64(batch)):
            break
    return labels, effort


def _promising(costs: NDArray[np.float32], labels: Labels, workers: int, tried: int) -> NDArray[np.int64]:
    """Return [from, to, candidate] requests of cluster `from` whose move to `to` adds least to U; padded with -1."""
    extra = costs - costs[np.arange(len(labels)), labels][:, None]  # [request, worker]
    candidates = np.full((workers, workers, tried), np.int64(-1))
    for worker in range(workers):
        members = np.flatnonzero(labels == worker)
        order = np.argsort(extra[members], axis=0, kind="stable")[:tried]  # [candidate, to]
        candidates[worker, :, : len(order)] = members[order].T
    return candidates


@njit()
def _sweep(
    rows: Probabilities,
    labels: Labels,
    sums: NDArray[np.float32],
    limits: NDArray[np.int64],
    candidates: NDArray[np.int64],
    batch: Any,
) -> int:
    """Try the candidates once; apply each change that lowers U to `labels` and `sums`. Return the number of changes."""
    workers = len(limits)
    nobody = np.zeros(rows.shape[1], np.float32)
    bases, missed = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    sizes, unions, changes = np.zeros(workers, np.int64), np.empty(workers), 0
    for request in range(len(labels)):
        sizes[labels[request]] += 1
    for worker in range(workers):
        unions[worker] = _union(sums[worker], nobody, nobody, sizes[worker], batch, bases, missed)
    for a in range(workers):
        for b in range(workers):
            if a == b:
                continue
            if sizes[b] < limits[b]:
                for i in candidates[a, b]:
                    if i < 0 or labels[i] != a or sizes[b] >= limits[b] or sizes[a] < 2:
                        continue
                    less = _union(sums[a], nobody, rows[i], sizes[a] - 1, batch, bases, missed)
                    more = _union(sums[b], rows[i], nobody, sizes[b] + 1, batch, bases, missed)
                    if less + more < (unions[a] + unions[b]) * _LOWER:
                        _shift(sums[a], nobody, rows[i])
                        _shift(sums[b], rows[i], nobody)
                        unions[a], unions[b], labels[i] = less, more, b
                        sizes[a] -= 1
                        sizes[b] += 1
                        changes += 1
            for i in candidates[a, b]:
                for j in candidates[b, a]:
                    if a > b or i < 0 or j < 0 or labels[i] != a or labels[j] != b:
                        continue
                    ours = _union(sums[a], rows[j], rows[i], sizes[a], batch, bases, missed)
                    theirs = _union(sums[b], rows[i], rows[j], sizes[b], batch, bases, missed)
                    if ours + theirs < (unions[a] + unions[b]) * _LOWER:
                        _shift(sums[a], rows[j], rows[i])
                        _shift(sums[b], rows[i], rows[j])
                        unions[a], unions[b], labels[i], labels[j] = ours, theirs, b, a
                        changes += 1
    return changes


@njit()
def _union(
    sums: NDArray[np.float32],
    plus: NDArray[np.float32],
    minus: NDArray[np.float32],
    size: int,
    batch: int,
    bases: NDArray[np.float32],
    missed: NDArray[np.float32],
) -> float:
    """Return U x size of a cluster with request `plus` added and `minus` removed; `bases`, `missed` are scratch."""
    total, block = 0.0, len(bases)
    for start in range(0, len(sums), block):
        stop = min(start + block, len(sums))
        count = stop - start
        total += count - _missed(
            sums[start:stop],
            plus[start:stop],
            minus[start:stop],
            np.float32(1.0 / size),
            batch,
            bases[:count],
            missed[:count],
        )
    return total * size


@helper(fastmath=True)
def _missed(
    sums: NDArray[np.float32],
    plus: NDArray[np.float32],
    minus: NDArray[np.float32],
    inverse: Any,
    batch: int,
    bases: NDArray[np.float32],
    missed: NDArray[np.float32],
) -> float:
    """Return the expected number of experts that a step does not touch.

    Powers are computed in passes over all values: a loop that contains a power is not vectorised.
    """
    for index in range(len(bases)):
        bases[index] = np.float32(1.0) - (sums[index] + plus[index] - minus[index]) * inverse
    while batch & 1 == 0:
        _square(bases)
        batch >>= 1
    if batch == 1:
        return _sum(bases)
    for index in range(len(missed)):
        missed[index] = bases[index]
    while batch > 1:
        _square(bases)
        batch >>= 1
        if batch & 1:
            _multiply(missed, bases)
    return _sum(missed)


@njit(fastmath=True)
def _square(values: NDArray[np.float32]) -> None:
    for index in range(len(values)):
        values[index] *= values[index]


@helper(fastmath=True)
def _multiply(values: NDArray[np.float32], by: NDArray[np.float32]) -> None:
    for index in range(len(values)):
        values[index] *= by[index]


@njit(fastmath=True)
def _sum(values: NDArray[np.float32]) -> float:
    total = np.float32(0.0)
    for index in range(len(values)):
        total += values[index]
    return np.float64(total)


@njit(fastmath=True)
def _shift(sums: NDArray[np.float32], plus: NDArray[np.float32], minus: NDArray[np.float32]) -> None:
    for index in range(len(sums)):
        sums[index] += plus[index] - minus[index]
