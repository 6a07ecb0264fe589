"""Attention-DP: assign requests to ranks by score, in rounds that keep the ranks' loads even.

Where attention is data parallel, a request has one rank for all layers. It should be the rank that holds most of its
experts, but a rank that many requests prefer would be overloaded. So requests are assigned in rounds: a round has as
many turns as there are ranks, each rank gets its share of the turns, and a request takes the best rank that has a turn
left. When no rank has a turn left, the next round begins.

With equal loads each rank has one turn a round, as in Sem-MoE's algorithm. With unequal loads the turns go to the least
loaded ranks, one by one, as if every turn brought a mean request: a rank that is three requests ahead gets no turn
until the others have caught up.

It is wrong where requests differ so much in work that the last turn of a round decides the balance: turns count
requests, and their work only affects the next round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import check

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RequestSchedule(NamedTuple):
    """Rank of each request, and the reasons."""

    ranks: Ints
    """[request] rank chosen."""
    rounds: Ints
    """[request] round in which the request was assigned, from 0."""
    scores: Floats
    """[request, rank] scores that the ranks were chosen by; higher is better."""
    open_ranks: NDArray[np.bool_]
    """[request, rank] whether the rank had a turn left when the request was assigned."""
    load: Floats
    """[rank] load including these requests."""
    turns: Ints
    """[rank] turns left in the last round, to be passed to the next call."""

    def reason(self, request: int) -> str:
        """Return the reason for a request's rank, as text."""
        rank, scores = int(self.ranks[request]), self.scores[request]
        best = int(np.argmax(scores))
        where = f"rank {rank} (score {scores[rank]:.3g}) in round {self.rounds[request]}"
        if scores[rank] == scores[best]:
            return f"{where}: the highest score"
        masked = int((~self.open_ranks[request]).sum())
        return f"{where}: rank {best} (score {scores[best]:.3g}) had no turn left; {masked} ranks were masked"


def schedule_requests(
    scores: ArrayLike, load: ArrayLike | None = None, work: ArrayLike | None = None, turns: ArrayLike | None = None
) -> RequestSchedule:
    """Assign requests, in the order given, to ranks by `scores` [request, rank]; ties go to the less loaded rank.

    `load` [rank] is the ranks' present load, `work` [request] what each request adds, in the same unit; by default the
    load is 0 and each request adds 1. `turns` [rank] are the turns left by an earlier call.
    """
    values = np.array(scores, np.float64)
    check(
        values.ndim == 2 and values.shape[1],
        f"scores has shape {values.shape}; it must be [request, rank] with at least one rank",
    )
    check(np.isfinite(values).all(), "scores must be finite numbers")
    requests, ranks = values.shape
    loads = _amounts("load", load, ranks, 0.0)
    works = _amounts("work", work, requests, 1.0)
    left = _amounts("turns", turns, ranks, 0.0).astype(np.int64)
    mean = float(works.mean()) if works.any() else 1.0
    chosen, rounds = np.empty(requests, np.int64), np.empty(requests, np.int64)
    masks = np.empty((requests, ranks), np.bool_)
    number = 0
    for request in range(requests):
        if not left.any():
            left = _turns_of_round(loads, mean)
            number += request > 0
        masks[request] = left > 0
        masked = np.where(masks[request], values[request], -np.inf)
        tied = np.flatnonzero(masked == masked.max())
        rank = int(tied[np.argmin(loads[tied])])
        chosen[request], rounds[request] = rank, number
        left[rank] -= 1
        loads[rank] += works[request]
    return RequestSchedule(chosen, rounds, values, masks, loads, left)


def _turns_of_round(load: Floats, work: float) -> Ints:
    """Return [rank] the turns of a round: as many as ranks, each to the rank least loaded with its turns so far."""
    turns, filled = np.zeros(len(load), np.int64), load.copy()
    for _ in range(len(load)):
        rank = int(np.argmin(filled))
        turns[rank] += 1
        filled[rank] += work
    return turns


def _amounts(name: str, given: ArrayLike | None, count: int, default: float) -> Floats:
    values = np.full(count, default) if given is None else np.array(given, np.float64)
    check(
        values.shape == (count,) and ((values >= 0) & (values < np.inf)).all(),
        f"{name}={values.tolist()} must be {count} finite numbers of at least 0",
    )
    return values
