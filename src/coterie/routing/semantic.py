"""Semantic (after Sem-MoE): the data-parallel rank that holds most of the experts the request is expected to use.

Workers are the ranks of one expert-parallel group with data-parallel attention: a request's rank computes its attention
in every layer, and an activation whose expert is on that rank crosses no link. The score is the share of the request's
footprint whose experts are elsewhere.

Affinity alone would send all requests of one kind to one rank, and the slowest rank decides a step. So ranks are chosen
in rounds: a rank that got a request is masked until every living rank has got one (:attr:`Fleet.in_round`); if the
ranks that are left are full, a new round begins. Equal numbers are not equal load where requests differ in length, so
a rank that runs far more requests than the mean is masked too.

It is wrong where the exchange costs little: on NVLink it is 2 to 3% of a decode step, and `latency_aware` saves more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_at_least
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best
from coterie.types import Placement


@routers.register("semantic")
@dataclass(frozen=True, slots=True)
class Semantic:
    placement: Placement = needs("where the experts live, on ranks that are the fleet's workers (a Placement)")
    most: float = 1.25
    """A rank with more running requests per speed than this multiple of the mean over living ranks gets no more."""
    _indices: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """Expert indices that ranks hold, concatenated in rank order; an expert appears once per rank that holds it."""
    _starts: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """[rank] position in `_indices` at which the rank's experts begin."""

    def __post_init__(self) -> None:
        check_at_least(1, most=self.most)
        rank, index = np.nonzero(self.placement.held.reshape(self.placement.num_ranks, -1))
        object.__setattr__(self, "_indices", index)
        object.__setattr__(self, "_starts", np.searchsorted(rank, np.arange(self.placement.num_ranks)))

    def route(self, request: Request, fleet: Fleet) -> Decision:
        ranks, local = self.placement.num_ranks, self._local(request)
        check(len(fleet) == ranks, f"the placement has {ranks} ranks; the fleet has {len(fleet)} workers")
        scores = fleet.in_flight / fleet.speeds if local is None else 1.0 - local
        worker, scores = best(np.where(self._masked(fleet), np.inf, scores), fleet)
        among = f"of {int(np.isfinite(scores).sum())} ranks left in this round"
        unknown = f"nothing is known of its experts: the least busy {among}"
        known = None if local is None else f"{local[worker]:.0%} of its activations are local, the most {among}"
        return Decision(worker, scores, known or unknown)

    def _local(self, request: Request) -> NDArray[np.float64] | None:
        """Return [rank] the share of the footprint whose experts the rank holds; None if it is missing or all 0."""
        use = request.footprint
        if use is None:
            return None
        expected = (self.placement.num_layers, self.placement.num_experts)
        check(use.shape == expected, f"footprint has shape {use.shape}; the placement is for {expected}")
        total = float(use.sum())
        # Every rank holds some expert, so no segment is empty, which reduceat would not sum to 0.
        held = np.add.reduceat(use.reshape(-1)[self._indices], self._starts, dtype=np.float64)
        return held / total if total > 0 else None

    def _masked(self, fleet: Fleet) -> NDArray[np.bool_]:
        """Return [rank] whether it must not be chosen now. At least one open rank is left, if there is any."""
        may = fleet.open
        load = fleet.in_flight / fleet.speeds
        mean = float(load[fleet.alive].mean()) if fleet.alive.any() else 0.0
        light = may & (load <= max(self.most * mean, mean + 1.0))
        may = light if light.any() else may
        left = may & ~fleet.in_round
        return ~(left if left.any() else may)
