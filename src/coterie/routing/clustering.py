"""Clusters of signatures, one for each worker: balanced K-means by cosine distance.

Each cluster takes at most its capacity, and the total distance is minimal under that limit. The Hungarian method finds
this too, but needs an N x N table for N signatures. Instead, every signature goes to the nearest centroid first, which
is optimal for the sizes that result. Then overfull clusters push out one signature at a time along the cheapest chain
of clusters that ends in one with room. Each push keeps the assignment optimal for its sizes (successive shortest
paths), so the last one is optimal; the chain is searched among K clusters, not N signatures. The tests compare it with
the Hungarian method and allow no loss.

Balanced clusters are right where workers should get equal load from equal traffic. Plain K-means (`balanced=False`) is
a baseline: its popular clusters overload their workers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import check, check_at_least
from coterie.routing.fleet import checked_speeds

GRAM_REQUESTS = 4096
"""Largest number of signatures whose pairwise inner products are all kept, so that K-means need not read signatures
again. With more, K-means runs on a random sample of this size, then `FULL_ROUNDS` rounds on all."""
FULL_ROUNDS = 4
"""Rounds of K-means over all signatures, after those over a sample."""
_NONE = np.int64(-1)
_SLACK = 1e-12
"""Slack for rounding errors of distances."""

Labels = NDArray[np.int64]


class Clusters(NamedTuple):
    labels: Labels
    """[request] worker whose cluster holds the request."""
    centroids: NDArray[np.float32]
    """[worker, index in kept layers] centroid, scaled to length 1; all 0 for a worker without requests."""
    distance: float
    """Sum of the cosine distances of requests to their centroids."""


def capacities(requests: int, workers: int, speeds: NDArray[np.floating] | None = None) -> NDArray[np.int64]:
    """Return [worker] the most requests each may get: equal shares, or in proportion to speed, rounded up."""
    check_at_least(1, workers=workers)
    shares = checked_speeds(speeds, workers)
    return np.asarray(np.ceil(requests * shares / shares.sum() - 1e-9), np.int64)


def assign(costs: NDArray[np.floating], limits: NDArray[np.integer]) -> Labels:
    """Return [request] worker such that the sum of costs [request, worker] is least and no worker exceeds its limit."""
    check(
        costs.ndim == 2 and costs.shape[1] == len(limits),
        f"costs {costs.shape} must be [request, worker] for {len(limits)} limits",
    )
    check(
        limits.sum() >= len(costs) and limits.min(initial=0) >= 0,
        f"limits={limits.tolist()} must be 0 or more and hold all {len(costs)} requests",
    )
    check(np.isfinite(costs).all(), "costs must be finite")
    start = costs.argmin(axis=1).astype(np.int64)
    return np.asarray(_assign(np.ascontiguousarray(costs, np.float32), np.asarray(limits, np.int64), start), np.int64)


def cluster(
    signatures: NDArray[np.float32],
    workers: int,
    rng: Generator,
    *,
    speeds: NDArray[np.floating] | None = None,
    balanced: bool = True,
    restarts: int = 2,
    iterations: int = 20,
) -> Clusters:
    """Return the best clusters of `restarts` runs of K-means from K-means++ seeds."""
    count = len(signatures)
    check(count >= workers, f"{count} signatures cannot make {workers} clusters: at least {workers} are needed")
    limits = capacities(count, workers, speeds)
    if count > GRAM_REQUESTS and workers <= GRAM_REQUESTS:
        sample = signatures[np.sort(rng.choice(count, GRAM_REQUESTS, replace=False))]
        start = cluster(sample, workers, rng, speeds=speeds, balanced=balanced, restarts=restarts)
        direct = partial(_similar_directly, signatures)
        labels, distance = _rounds(signatures @ start.centroids.T, direct, limits, balanced, FULL_ROUNDS)
    else:
        similar = partial(_similar_by_products, signatures @ signatures.T)
        runs = [
            _rounds(similar(_seeds(signatures, workers, rng), workers), similar, limits, balanced, iterations)
            for _ in range(restarts)
        ]
        labels, distance = min(runs, key=itemgetter(1))
    return Clusters(labels, centroids_of(signatures, labels, workers), distance)


def centroids_of(signatures: NDArray[np.float32], labels: Labels, workers: int) -> NDArray[np.float32]:
    """Return [worker, index in kept layers] the sum of each cluster's signatures, scaled to length 1."""
    sums = np.zeros((workers, signatures.shape[1]), np.float32)
    _sum_rows(np.ascontiguousarray(signatures, np.float32), labels, sums)
    return np.asarray(sums / _above_0(np.sqrt(np.einsum("rc,rc->r", sums, sums)))[:, None], np.float32)


def best_columns(values: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return [row] a column of its own for each row, such that the sum of `values` [row, column] is greatest."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    return np.asarray(linear_sum_assignment(values, maximize=True)[1], np.int64)


def _rounds(
    near: NDArray[np.float32],
    similar: Callable[[Labels, int], NDArray[np.float32]],
    limits: NDArray[np.int64],
    balanced: bool,
    rounds: int,
) -> tuple[Labels, float]:
    """Run K-means from the similarities `near` [request, worker] to the first centroids; return labels and distance.

    Stops after `rounds`, or when the distance falls by less than 1e-5 per request.
    """
    best = np.zeros(len(near), np.int64), np.inf
    for _ in range(rounds):
        labels = assign(-near, limits) if balanced else _nearest(near)
        near = similar(labels, len(limits))
        distance = float(len(labels) - near[np.arange(len(labels)), labels].sum(dtype=np.float64))
        if distance > best[1] - 1e-5 * len(labels):
            break
        best = labels, distance
    return best


def members_of(labels: Labels, workers: int) -> NDArray[np.float32]:
    """Return [worker, request] 1 if the request is in the worker's cluster, else 0; a negative label is no cluster."""
    members = np.zeros((workers, len(labels)), np.float32)
    placed = np.flatnonzero(labels >= 0)
    members[labels[placed], placed] = 1.0
    return members


def _above_0(lengths: NDArray[np.floating]) -> NDArray[np.floating]:
    """Replace lengths of 0 by 1, to divide by."""
    return np.where(lengths > 0, lengths, 1.0)


def _similar_by_products(products: NDArray[np.float32], labels: Labels, workers: int) -> NDArray[np.float32]:
    """Return similarities [request, worker] to the clusters' centroids, from inner products [request, request]."""
    members = members_of(labels, workers)
    dots = products @ members.T
    lengths = np.sqrt(np.maximum(np.einsum("rw,wr->w", dots, members), 0.0))
    return np.asarray(dots / _above_0(lengths), np.float32)


def _similar_directly(signatures: NDArray[np.float32], labels: Labels, workers: int) -> NDArray[np.float32]:
    return signatures @ centroids_of(signatures, labels, workers).T


def _seeds(signatures: NDArray[np.float32], workers: int, rng: Generator) -> Labels:
    """Return [request] the worker that it seeds, or -1. Distant requests are likelier to become seeds (K-means++)."""
    labels = np.full(len(signatures), _NONE)
    chosen = int(rng.integers(len(signatures)))
    far = np.full(len(signatures), np.inf)
    for worker in range(workers):
        labels[chosen] = worker
        far = np.minimum(far, np.maximum(1.0 - signatures @ signatures[chosen], 0.0))
        far[chosen] = 0.0
        weight = np.where(labels < 0, far + 1e-9, 0.0)  # 1e-9: equal signatures must still seed every worker
        if worker + 1 < workers:
            chosen = int(rng.choice(len(signatures), p=weight / weight.sum()))
    return labels


def _nearest(near: NDArray[np.float32]) -> Labels:
    """Return [request] the nearest centroid; an empty cluster gets the request farthest from its own centroid."""
    labels = np.asarray(near.argmax(axis=1), np.int64)
    for worker in np.flatnonzero(np.bincount(labels, minlength=near.shape[1]) == 0):
        own = near[np.arange(len(labels)), labels].copy()
        own[np.bincount(labels, minlength=near.shape[1])[labels] < 2] = np.inf
        labels[own.argmin()] = worker
    return labels


@njit(fastmath=True)
def _sum_rows(rows: NDArray[np.float32], labels: Labels, sums: NDArray[np.float32]) -> None:
    for row in range(len(rows)):
        worker = labels[row]
        for index in range(rows.shape[1]):
            sums[worker, index] += rows[row, index]


@njit()
def _assign(costs: NDArray[np.float32], limits: NDArray[np.int64], labels: Any) -> Any:
    requests, workers = costs.shape
    sizes = np.zeros(workers, np.int64)
    first, after, before = np.full(workers, _NONE), np.full(requests, _NONE), np.full(requests, _NONE)
    for request in range(requests):
        _link(request, labels[request], first, after, before)
        sizes[labels[request]] += 1
    price, who = np.full((workers, workers), np.inf), np.full((workers, workers), _NONE)
    for a in range(workers):
        for b in range(workers):
            _cheapest(a, b, costs, first, after, price, who)
    distance, parent = np.empty(workers), np.empty(workers, np.int64)
    while True:
        excess = False
        for worker in range(workers):
            overfull = sizes[worker] > limits[worker]
            excess = excess or overfull
            distance[worker] = 0.0 if overfull else np.inf
            parent[worker] = _NONE
        if not excess:
            return labels
        changed, rounds = True, 0
        while changed and rounds < workers:
            changed, rounds = False, rounds + 1
            for a in range(workers):
                if distance[a] < np.inf:
                    for b in range(workers):
                        if distance[a] + price[a, b] < distance[b] - _SLACK:
                            distance[b], parent[b], changed = distance[a] + price[a, b], a, True
        target: Any = _NONE
        for worker in range(workers):
            if sizes[worker] < limits[worker] and (target < 0 or distance[worker] < distance[target]):
                target = worker
        while parent[target] >= 0:
            source = parent[target]
            request = who[source, target]
            _unlink(request, source, first, after, before)
            _link(request, target, first, after, before)
            labels[request] = target
            sizes[source] -= 1
            sizes[target] += 1
            for b in range(workers):
                if who[source, b] == request:
                    _cheapest(source, b, costs, first, after, price, who)
                extra = np.float64(costs[request, b]) - np.float64(costs[request, target])
                if b != target and extra < price[target, b]:
                    price[target, b], who[target, b] = extra, request
            target = source


@njit()
def _cheapest(
    a: int, b: int, costs: NDArray[np.float32], first: Any, after: Any, price: NDArray[np.float64], who: Any
) -> None:
    """Find the request that is cheapest to move from cluster a to b; set its extra cost `price` and its index `who`."""
    price[a, b], who[a, b] = np.inf, _NONE
    request = first[a]
    while a != b and request >= 0:
        extra = np.float64(costs[request, b]) - np.float64(costs[request, a])
        if extra < price[a, b]:
            price[a, b], who[a, b] = extra, request
        request = after[request]


@helper()
def _link(request: int, worker: int, first: Any, after: Any, before: Any) -> None:
    head = first[worker]
    after[request], before[request], first[worker] = head, _NONE, request
    if head >= 0:
        before[head] = request


@helper()
def _unlink(request: int, worker: int, first: Any, after: Any, before: Any) -> None:
    if before[request] >= 0:
        after[before[request]] = after[request]
    else:
        first[worker] = after[request]
    if after[request] >= 0:
        before[after[request]] = before[request]
