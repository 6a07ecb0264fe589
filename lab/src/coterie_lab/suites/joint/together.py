"""Requests that arrive together, routed by the joint router in the two passes of the Dynamo article.

First each request goes to its best worker or, among workers nearly as good, to the one whose requests share the most
experts with it. Then a worker with more than twice the mean number of requests is cut to 1.5 times the mean; the
surplus goes to the workers with the fewest. Every request is assigned exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.routing import Decision, Fleet, Request
from coterie.routing.joint import Joint

NEARLY = 0.05
"""Workers whose score exceeds the best by at most this share compete by shared experts."""


def route_together(router: Joint, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
    """Return one decision per request, in order."""
    bits = [router.bits(request) for request in requests]
    weighed = [router.weigh(request, own, fleet) for request, own in zip(requests, bits, strict=True)]
    scores = [score.scores for score in weighed]
    room = np.where(fleet.alive, np.maximum(fleet.places - fleet.in_flight, 0), 0)
    if not room.any():
        room = np.where(fleet.alive, len(requests), 0)
    workers = _trimmed(_together(scores, bits, room), scores, fleet.alive, room)
    return [score.decision(request, worker) for score, request, worker in zip(weighed, requests, workers, strict=True)]


def _together(
    scores: list[NDArray[np.float64]], bits: list[NDArray[np.uint64] | None], room: NDArray[np.int64]
) -> list[int]:
    """Return [request] the best worker, or among those nearly as good the one whose requests share most experts.

    Ties go to the worker that got the fewest requests of this batch so far.
    """
    left, chosen = room.copy(), []
    held: dict[int, NDArray[np.uint64]] = {}
    for own, mine in zip(scores, bits, strict=True):
        allowed = np.where(left > 0, own, np.inf) if (left > 0).any() else own
        least = allowed.min()
        near = np.flatnonzero(allowed <= least + NEARLY * abs(least))
        shared = [
            0 if mine is None or worker not in held else int(np.bitwise_count(held[worker] & mine).sum())
            for worker in near.tolist()
        ]
        worker = int(near[np.lexsort((allowed[near], (room - left)[near], -np.array(shared)))[0]])
        chosen.append(worker)
        left[worker] -= 1
        if mine is not None:
            held[worker] = mine | held.get(worker, mine)
    return chosen


def _trimmed(
    chosen: list[int], scores: list[NDArray[np.float64]], alive: NDArray[np.bool_], room: NDArray[np.int64]
) -> list[int]:
    """Cut workers above twice the mean to 1.5 times the mean; surplus requests go to the workers with the fewest."""
    mean = len(chosen) / max(1, int(alive.sum()))
    keep = max(1, int(1.5 * mean))
    count = np.bincount(chosen, minlength=len(alive))
    result = list(chosen)
    for worker in np.flatnonzero(count > 2 * mean):
        mine = sorted(np.flatnonzero(np.equal(chosen, worker)), key=lambda at: scores[at][worker])
        for at in mine[keep:]:  # requests with the worst scores move
            others = np.flatnonzero(alive & (count < np.minimum(keep, room)))
            if not len(others):
                break  # no other worker has room
            other = int(others[np.lexsort((scores[at][others], count[others]))[0]])
            result[at] = other
            count[worker] -= 1
            count[other] += 1
    return result
