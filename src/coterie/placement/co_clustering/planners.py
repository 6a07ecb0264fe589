"""Planners that place experts on the ranks of the items that activate them: `sem_moe` and `co_cluster`.

Both fit to items (:class:`~coterie.placement.co_clustering.base.Items`), not to the load alone. Their placement is
useful only with a schedule that sends items to their ranks: `cluster` returns both. With round-robin tokens the local
activation rate is 1 ÷ ranks for every placement.

A cluster gets the rank that already holds most of its experts, so that few experts move. Apart from that, the planners
ignore the cost of moving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from coterie.errors import check_at_least, check_not_negative
from coterie.placement.base import Load, Plan, planners
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie.placement.co_clustering.base import ITEMS_HINT, CoClusters, Items, Ranks, local_activations
from coterie.placement.co_clustering.descent import descend_ranks
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.packing import fill_spare, living_ranks, pack_even, plan_for_living
from coterie.registry import needs
from coterie.types import Placement, Topology

SAME = "experts are beside their items already"


class Clustered(NamedTuple):
    """Ranks of experts and items, counted over living ranks only."""

    expert_ranks: Ranks
    """[layer, expert] rank of the expert."""
    ranks: Ranks
    """[group, item] rank of the item."""


class _CoClustering(ABC):
    """Base of both planners: makes plans from clusters."""

    __slots__ = ()
    objective: Objective
    items: Items

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        found = self._clustered(problem, load.tokens)
        return plan_for_living(problem, _slots(self.items, problem, found), started, SAME)

    def cluster(self, load: Load, topology: Topology, current: Placement) -> CoClusters:
        """Return the placement of :meth:`plan` with the matching ranks of items."""
        problem = self.objective.problem(load, topology, current)
        found = self._clustered(problem, load.tokens)
        placement = plan_for_living(problem, _slots(self.items, problem, found), perf_counter(), SAME).placement
        local, total = local_activations(self.items, found.expert_ranks, found.ranks)
        ranks = np.flatnonzero(problem.alive)[found.ranks]
        return CoClusters(placement, ranks, local / np.where(total > 0, total, 1.0))

    @abstractmethod
    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:
        """Cluster experts and items; `tokens` [layer, expert] is the load."""


@planners.register("sem_moe")
@dataclass(frozen=True, slots=True, eq=False)
class SemMoe(_CoClustering):
    """Sem-MoE's alternating algorithm: assign experts to ranks by their items, then items by their experts, repeatedly.

    It balances the tokens of items, not the load of experts: the load of ranks may be far from balanced.
    """

    objective: Objective = needs(PRICES_HINT)
    items: Items = needs(ITEMS_HINT)
    settings: AlternatingSettings = field(default_factory=AlternatingSettings)
    seed: int = 0
    """Seed of the starting clusters and of the random swaps."""

    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:  # noqa: ARG002
        ranks = _check(self.items, problem)
        rng = default_rng(self.seed)
        found = alternate(self.items, problem.current.num_experts, ranks, rng, self.settings)
        return _numbered(self.items, problem, Clustered(*found))


@planners.register("co_cluster")
@dataclass(frozen=True, slots=True, eq=False)
class CoCluster(_CoClustering):
    """Minimise remote activations, with bounds on the tokens of items and on the load of experts per rank.

    A local search from several starts, all but one from the alternating algorithm. It swaps experts and reassigns items
    to their best ranks for each swap. Fit it to hundreds of requests or more: from a few dozen it fits mostly noise, in
    the load of ranks as well.
    """

    objective: Objective = needs(PRICES_HINT)
    items: Items = needs(ITEMS_HINT)
    load_slack: float = 0.1
    """Share by which a rank's load may exceed an even share in every layer; packing by load may raise it. A lower
    value costs local activations: on unseen requests of gpt-oss-20b, 0.01 loses 9% of them and 0.5 gains 2%."""
    shrink: float = 4.0
    """Tokens of an item at which its activations count half; rarer items count less."""
    starts: int = 2
    """Number of starts from the alternating algorithm; one more start is packed by load."""
    seed: int = 0
    """Seed of the starts."""

    def __post_init__(self) -> None:
        check_not_negative(load_slack=self.load_slack, shrink=self.shrink)
        check_at_least(0, starts=self.starts)

    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:
        ranks, experts = _check(self.items, problem), problem.current.num_experts
        speeds = problem.topology.rank_speeds[problem.alive]
        packed = np.stack([pack_even(row, speeds) for row in tokens])
        reached = np.stack([np.bincount(at, row, ranks) for at, row in zip(packed, tokens, strict=True)])
        even = tokens.sum(axis=1, keepdims=True) * speeds / speeds.sum()
        most = np.maximum((1 + self.load_slack) * even, reached)
        few = AlternatingSettings(starts=1, iterations=6)
        rng = default_rng(self.seed)
        starts = [alternate(self.items, experts, ranks, rng, few)[0] for _ in range(self.starts)]
        trust = self.items.frequency / np.maximum(self.items.frequency + self.shrink, 1e-300)
        found = descend_ranks(self.items, tokens, most, [packed, *starts], trust)
        return _numbered(self.items, problem, Clustered(*found))


def _check(items: Items, problem: Problem) -> int:
    """Check the items against the problem and return the number of living ranks."""
    items.check_fits(problem.current.num_layers, problem.current.num_experts)
    return living_ranks(problem)


def _numbered(items: Items, problem: Problem, found: Clustered) -> Clustered:
    """Number clusters by the ranks that hold most of their experts now; unchanged if ranks differ in speed."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    speeds = problem.topology.rank_speeds[problem.alive]
    if np.ptp(speeds) > 0:
        return found
    current, size = problem.current, len(speeds)
    held = current.slot_experts.reshape(current.num_layers, current.num_ranks, -1)[:, problem.alive]
    expert_ranks, ranks = found.expert_ranks.copy(), found.ranks.copy()
    for group in range(items.groups):
        overlap = np.zeros((size, size))  # [cluster, rank] experts of the cluster that the rank holds
        layers = range(group * items.layers_each, (group + 1) * items.layers_each)
        for layer in layers:
            for rank in range(size):
                overlap[:, rank] += np.bincount(found.expert_ranks[layer, np.unique(held[layer, rank])], minlength=size)
        number = linear_sum_assignment(-overlap)[1]
        for layer in layers:
            expert_ranks[layer] = number[found.expert_ranks[layer]]
        ranks[group] = number[found.ranks[group]]
    return Clustered(expert_ranks, ranks)


def _slots(items: Items, problem: Problem, found: Clustered) -> NDArray[np.int32]:
    """Return experts [layer, slot of a living rank]; a spare slot gets the expert its rank's items activate most."""
    current, living = problem.current, int(problem.alive.sum())
    worth = np.zeros((current.num_layers, current.num_experts, living))
    if living * current.slots_per_rank > current.num_experts:
        for layer in range(current.num_layers):
            at = found.ranks[layer // items.layers_each]
            tokens = items.frequency[:, None] * items.weights[:, layer]
            np.add.at(worth[layer], (items.experts[:, layer], at[:, None]), tokens)
    return fill_spare(found.expert_ranks, worth, current.slots_per_rank, living)
