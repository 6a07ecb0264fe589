"""Scenarios of a load as plain arrays, and the time of a layer over the scenarios: mean and tail."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.placement.base import Load
from coterie.placement.objective._steps import assess_steps, bound_steps, fill_replicas
from coterie.placement.objective.flows.splitting import split_steps
from coterie.types import Topology

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Scenarios and the cost of their tokens on each rank. Make them with :meth:`of`."""

    tokens: Array
    """[layer, scenario, expert] tokens."""
    weights: Array
    """[scenario] probabilities, which add up to 1."""
    whole: bool
    """Whether tokens are counts of single steps; see :attr:`Load.whole_steps`."""
    touch: Array
    """[rank] seconds to read the weights of an expert."""
    per_token: Array
    """[layer, rank, expert] seconds of a token, including its exchange."""
    even: Array
    """[layer, scenario] seconds if all ranks were equally busy."""
    reach: Array
    """[layer, scenario] lower bound on the seconds of any placement."""

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
        steps = cls(tokens, load.weights, load.whole_steps, touch_s * pace, per_token, even, reach)
        bounds = tokens, steps.touch, per_token, steps.whole, speeds, replicas, even, reach
        side_by_side(bound_steps, len(tokens), *bounds)
        return steps

    def rank_s(self, slot_experts: NDArray[np.int32], shares: Array | None, alive: NDArray[np.bool_]) -> Array:
        """Return the seconds [layer, scenario, rank] with these `shares` [layer, slot]; None: equal shares."""
        busy = np.empty((*self.tokens.shape[:2], len(alive)))
        given = np.empty((0, 0)) if shares is None else shares
        prices = self.touch, self.per_token, self.whole
        side_by_side(assess_steps, len(busy), slot_experts, given, self.tokens, *prices, alive, busy)
        return busy

    def split_rank_s(self, slot_experts: NDArray[np.integer], speeds: Array) -> Array:
        """Return the seconds [layer, scenario, rank], each scenario with shares that minimise its slowest rank."""
        busy = np.empty((*self.tokens.shape[:2], len(speeds)))
        rows = np.ascontiguousarray(slot_experts, np.int64)
        prices = self.touch, self.per_token, self.whole
        side_by_side(split_steps, len(busy), rows, self.tokens, *prices, speeds, speeds > 0, busy)
        return busy

    def replica_s(self, layer: int, replicas: int) -> Array:
        """Return the seconds [rank, expert, count - 1, scenario] of one of `count` equal replicas, up to `replicas`."""
        scenarios, experts = self.tokens.shape[1:]
        seconds = np.empty((len(self.touch), experts, replicas, scenarios))
        fill_replicas(self.tokens[layer], self.touch, self.per_token[layer], self.whole, seconds)
        return seconds

    def of_layers(self, layers: NDArray[np.integer]) -> Steps:
        return replace(
            self,
            tokens=self.tokens[layers],
            per_token=self.per_token[layers],
            even=self.even[layers],
            reach=self.reach[layers],
        )

    def balance(self, rank_s: Array, alive: NDArray[np.bool_]) -> float:
        """Return the balancedness of seconds [layer, scenario, rank], averaged over layers and scenarios."""
        living = rank_s[..., alive]
        peak = living.max(axis=2)
        even = np.divide(living.mean(axis=2), peak, out=np.ones(peak.shape), where=peak > 0)
        return float((even @ self.weights).mean())


def over_scenarios(step_s: Array, weights: Array, tail: float, tail_share: float) -> Array:
    """Combine seconds [layer, scenario] into [layer]: (1 - tail) x mean + tail x mean of the worst `tail_share`."""
    mean = step_s @ weights
    if not tail:
        return np.asarray(mean)
    return np.asarray((1.0 - tail) * mean + tail * worst_mean(step_s, weights, tail_share))


def worst_mean(step_s: Array, weights: Array, share: float) -> Array:
    """Return the mean [layer] of the slowest `share` of the scenarios [layer, scenario] (CVaR).

    The scenario at the quantile counts in part, so that the weights add up to `share` exactly.
    """
    order = np.argsort(-step_s, axis=1, kind="stable")
    value, weight = np.take_along_axis(step_s, order, axis=1), weights[order]
    before = np.cumsum(weight, axis=1) - weight
    part = np.clip(share - before, 0.0, weight)
    return np.asarray((value * part).sum(axis=1) / share)
