"""Scenarios of a load as plain arrays, and the times of a layer in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit, side_by_side
from coterie.placement.base import Load
from coterie.placement.objective._arrays import Array
from coterie.placement.objective.flows.splitting import split_steps, touched
from coterie.types import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Scenarios and the cost of their tokens on each rank. Make them with :meth:`of`."""

    tokens: Array
    """[layer, scenario, expert] tokens."""
    weights: Array
    """[scenario] probabilities, which add up to 1."""
    touch: Array
    """[rank] seconds to read the weights of an expert."""
    per_token: Array
    """[layer, rank, expert] seconds of a token, including its exchange."""
    whole: bool
    """Whether tokens are counts of single steps; see :attr:`Load.whole_steps`."""
    even: Array
    """[layer, scenario] seconds if all ranks were equally busy."""
    reach: Array
    """[layer, scenario] lower bound on the seconds of any placement."""

    @property
    def prices(self) -> tuple[Array, Array, bool]:
        """The prices that compiled loops take."""
        return self.touch, self.per_token, self.whole

    @classmethod
    def of(
        cls, load: Load, topology: Topology, row_s: float, touch_s: float, exchange: Array, each: Array, replicas: int
    ) -> Steps | None:
        """Make the arrays of a load's scenarios; None if the load has none.

        `exchange` [rank, layer, expert] is the seconds to exchange all of an expert's tokens of the mean step if their
        sources are known, else empty. `each` [rank] is the seconds for a token from a random rank. `replicas` is the
        most replicas of an expert.
        """
        if load.scenarios is None or load.weights is None:
            return None
        speeds = topology.rank_speeds
        pace = np.divide(1.0, speeds, out=np.zeros(len(speeds)), where=speeds > 0)
        sent = np.broadcast_to(each[None, :, None], (load.num_layers, len(speeds), load.num_experts))
        if exchange.size:
            mean = load.tokens / load.steps
            known = np.moveaxis(exchange, 0, 1)  # [layer, rank, expert]
            sent = np.divide(known, mean[:, None], out=np.zeros(known.shape), where=mean[:, None] > 0)
        per_token = np.ascontiguousarray(row_s * pace[None, :, None] + sent)
        tokens = np.ascontiguousarray(np.moveaxis(load.scenarios, 0, 1))
        even, reach = np.empty((2, *tokens.shape[:2]))
        prices = touch_s * pace, per_token, load.whole_steps
        side_by_side(bound_steps, len(tokens), tokens, *prices, speeds, replicas, even, reach)
        return cls(tokens, load.weights, *prices, even, reach)

    def rank_s(self, slot_experts: NDArray[np.int32], shares: Array | None, alive: NDArray[np.bool_]) -> Array:
        """Return the seconds [layer, scenario, rank] with these `shares` [layer, slot]; None: equal shares."""
        given = np.empty((0, 0)) if shares is None else shares
        busy = np.empty((*self.tokens.shape[:2], len(alive)))
        side_by_side(assess_steps, len(busy), slot_experts, given, self.tokens, *self.prices, alive, busy)
        return busy

    def split_rank_s(self, slot_experts: NDArray[np.integer], speeds: Array) -> Array:
        """Return the seconds [layer, scenario, rank], each scenario with shares that minimise its slowest rank."""
        busy = np.empty((*self.tokens.shape[:2], len(speeds)))
        rows = np.ascontiguousarray(slot_experts, np.int64)
        side_by_side(split_steps, len(busy), rows, self.tokens, *self.prices, speeds, speeds > 0, busy)
        return busy

    def of_layers(self, layers: NDArray[np.integer]) -> Steps:
        return replace(
            self,
            tokens=self.tokens[layers],
            per_token=self.per_token[layers],
            even=self.even[layers],
            reach=self.reach[layers],
        )


# Compiled loops over scenarios: seconds of the ranks in each scenario, and lower bounds for any placement.


@njit()
def assess_steps(
    chosen: NDArray[np.int64],
    slot_experts: NDArray[np.int32],
    given: Array,
    tokens: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    alive: NDArray[np.bool_],
    busy: Array,
) -> None:
    """Fill `busy` [layer, scenario, rank] with the seconds of the chosen layers.

    `given` [layer, slot] are the shares, or empty for equal shares; `tokens` is [layer, scenario, expert]; `touch` is
    the seconds [rank] to read an expert's weights; `per_token` is in seconds [layer, rank, expert].
    """
    ranks, experts = per_token.shape[1:]
    per_rank = slot_experts.shape[1] // ranks
    replicas = np.zeros(experts)
    for layer in chosen:
        row = slot_experts[layer]
        replicas[:] = 0.0
        for slot in range(len(row)):
            if alive[slot // per_rank]:
                replicas[row[slot]] += 1.0
        for scenario in range(tokens.shape[1]):
            known, times = tokens[layer, scenario], busy[layer, scenario]
            for rank in range(ranks):
                times[rank] = 0.0
                if not alive[rank]:
                    continue
                for slot in range(rank * per_rank, (rank + 1) * per_rank):
                    expert = row[slot]
                    part = known[expert] * (given[layer, slot] if len(given) else 1.0 / replicas[expert])
                    times[rank] += per_token[layer, rank, expert] * part
                    if touch[rank] > 0.0:
                        times[rank] += touch[rank] * touched(part, whole)


@njit()
def bound_steps(
    chosen: NDArray[np.int64],
    tokens: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    speeds: Array,
    replicas: int,
    even: Array,
    reach: Array,
) -> None:
    """Fill `even` and `reach` [layer, scenario] (seconds) of the chosen layers; an expert has at most `replicas`."""
    ranks, experts = per_token.shape[1:]
    work, least = np.empty(experts), np.empty(experts)
    pace, quickest, touch_s = 0.0, np.inf, 0.0
    for rank in range(ranks):
        pace += speeds[rank]
        if speeds[rank] > 0.0:
            if quickest == np.inf:
                touch_s = touch[rank] * speeds[rank]  # seconds to read weights at speed 1: the same on all ranks
            quickest = min(quickest, touch[rank])
    for layer in chosen:
        for expert in range(experts):
            work[expert], least[expert] = np.inf, np.inf
            for rank in range(ranks):
                if speeds[rank] > 0.0:
                    work[expert] = min(work[expert], per_token[layer, rank, expert] * speeds[rank])
                    least[expert] = min(least[expert], per_token[layer, rank, expert])
        for scenario in range(tokens.shape[1]):
            total, longest = 0.0, 0.0
            for expert in range(experts):
                known = tokens[layer, scenario, expert]
                part = known / replicas
                total += known * work[expert]
                alone = part * least[expert]
                if quickest > 0.0:
                    total += touched(known, whole) * touch_s
                    alone += touched(part, whole) * quickest
                longest = max(longest, alone)
            even[layer, scenario] = total / pace
            reach[layer, scenario] = max(total / pace, longest)
