"""The scenarios of a load as plain arrays, and the time of a layer over them: its mean, and what its tail adds."""

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
    """Scenarios, and what their tokens cost where. Make them with :meth:`of`."""

    tokens: Array
    """[layer, scenario, expert]"""
    weights: Array
    """[scenario] they add up to 1."""
    whole: bool
    """Whether tokens are counts of single steps; see :attr:`Load.whole_steps`."""
    touch: Array
    """[rank] seconds to stream an expert."""
    per_token: Array
    """[layer, rank, expert] seconds of a token, its exchange included."""
    even: Array
    """[layer, scenario] seconds if all ranks were equally busy."""
    reach: Array
    """[layer, scenario] seconds that no placement gets below."""

    @classmethod
    def of(
        cls, load: Load, topology: Topology, row_s: float, touch_s: float, exchange: Array, each: Array, replicas: int
    ) -> Steps | None:
        """None where the mean step is the only scenario.

        `exchange` [rank, layer, expert] seconds for all of an expert's tokens of the mean step where their sources are
        known, else empty; `each` [rank] seconds for a token from anywhere. An expert has at most so many `replicas`.
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
        """[layer, scenario, rank] seconds; equal replicas unless `shares` [layer, slot] says otherwise."""
        busy = np.empty((*self.tokens.shape[:2], len(alive)))
        given = np.empty((0, 0)) if shares is None else shares
        prices = self.touch, self.per_token, self.whole
        side_by_side(assess_steps, len(busy), slot_experts, given, self.tokens, *prices, alive, busy)
        return busy

    def split_rank_s(self, slot_experts: NDArray[np.integer], speeds: Array) -> Array:
        """[layer, scenario, rank] seconds, every scenario with the split that makes its slowest rank fastest."""
        busy = np.empty((*self.tokens.shape[:2], len(speeds)))
        rows = np.ascontiguousarray(slot_experts, np.int64)
        prices = self.touch, self.per_token, self.whole
        side_by_side(split_steps, len(busy), rows, self.tokens, *prices, speeds, speeds > 0, busy)
        return busy

    def replica_s(self, layer: int, replicas: int) -> Array:
        """[rank, expert, replicas - 1, scenario] seconds of each of up to so many equal replicas."""
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
        """Balancedness [layer, scenario, rank] seconds have over layers and scenarios."""
        living = rank_s[..., alive]
        peak = living.max(axis=2)
        even = np.divide(living.mean(axis=2), peak, out=np.ones(peak.shape), where=peak > 0)
        return float((even @ self.weights).mean())


def over_scenarios(step_s: Array, weights: Array, tail: float, tail_share: float) -> Array:
    """[layer] seconds from [layer, scenario]: the mean, and `tail` of what the worst `tail_share` takes beyond it."""
    mean = step_s @ weights
    if not tail:
        return np.asarray(mean)
    return np.asarray((1.0 - tail) * mean + tail * worst_mean(step_s, weights, tail_share))


def worst_mean(step_s: Array, weights: Array, share: float) -> Array:
    """[layer] mean of the worst `share` of the scenarios [layer, scenario] (CVaR); one on the edge counts in part."""
    order = np.argsort(-step_s, axis=1, kind="stable")
    value, weight = np.take_along_axis(step_s, order, axis=1), weights[order]
    before = np.cumsum(weight, axis=1) - weight
    part = np.clip(share - before, 0.0, weight)
    return np.asarray((value * part).sum(axis=1) / share)
