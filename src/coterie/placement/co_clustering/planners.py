"""Planners that place experts beside the items that activate them: `sem_moe` and `co_cluster`.

Both fit to items (:class:`~coterie.placement.co_clustering.base.Items`), not to the load alone. Their placement pays
only with a schedule that sends items to their ranks: `cluster` gives both. With tokens dealt in turn, the local
activation rate is 1 ÷ ranks wherever experts are.

Ranks are numbered as the current placement has most of the experts, so that re-grouping moves as little as it can; else
they do not look at what moving costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

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
    """[layer, expert]"""
    ranks: Ranks
    """[group, item]"""


class _CoClustering(ABC):
    """What both planners do with their clusters."""

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
        """The placement of :meth:`plan`, with the ranks of items that belong to it."""
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
    """Sem-MoE's alternating algorithm: experts to items, items to experts, in turn.

    It evens out the tokens of items, not the load of experts: ranks may be far apart in load.
    """

    objective: Objective = needs(PRICES_HINT)
    items: Items = needs(ITEMS_HINT)
    settings: AlternatingSettings = field(default_factory=AlternatingSettings)
    seed: int = 0
    """Seed of the starting clusters and of the swaps drawn."""

    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:  # noqa: ARG002
        ranks = _check(self.items, problem)
        rng = default_rng(self.seed)
        found = alternate(self.items, problem.current.num_experts, ranks, rng, self.settings)
        return _numbered(self.items, problem, Clustered(*found))


@planners.register("co_cluster")
@dataclass(frozen=True, slots=True, eq=False)
class CoCluster(_CoClustering):
    """Fewest remote activations, with the tokens of items and the load of experts held even.

    Several starts, of which the alternating algorithm gives all but one; each goes down by swaps of experts that count
    what the items would answer. Fit it to hundreds of requests or more: what it learns from a few dozen is mostly
    chance, in the load of ranks too.
    """

    objective: Objective = needs(PRICES_HINT)
    items: Items = needs(ITEMS_HINT)
    load_slack: float = 0.1
    """Share by which a rank's load may exceed an even one in every layer, or what packing reaches if that is more. Less
    costs local activations: on unseen requests of gpt-oss-20b 0.01 costs 9% of them, 0.5 gains 2%."""
    shrink: float = 4.0
    """Tokens of an item at which half of its activations count."""
    starts: int = 2
    """Starts from the alternating algorithm; one more is packed by load."""
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
    """Living ranks."""
    items.check_fits(problem.current.num_layers, problem.current.num_experts)
    return living_ranks(problem)


def _numbered(items: Items, problem: Problem, found: Clustered) -> Clustered:
    """Clusters numbered by the ranks that hold most of their experts now; as they are where ranks differ in speed."""
    speeds = problem.topology.rank_speeds[problem.alive]
    if np.ptp(speeds) > 0:
        return found
    current, size = problem.current, len(speeds)
    held = current.slot_experts.reshape(current.num_layers, current.num_ranks, -1)[:, problem.alive]
    expert_ranks, ranks = found.expert_ranks.copy(), found.ranks.copy()
    for group in range(items.groups):
        overlap = np.zeros((size, size))  # experts of a cluster that a rank has
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
    """[layer, slot of a living rank]; spare slots get what their rank's items activate most."""
    current, living = problem.current, int(problem.alive.sum())
    worth = np.zeros((current.num_layers, current.num_experts, living))
    if living * current.slots_per_rank > current.num_experts:
        for layer in range(current.num_layers):
            at = found.ranks[layer // items.layers_each]
            tokens = items.frequency[:, None] * items.weights[:, layer]
            np.add.at(worth[layer], (items.experts[:, layer], at[:, None]), tokens)
    return fill_spare(found.expert_ranks, worth, current.slots_per_rank, living)
