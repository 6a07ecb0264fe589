"""Planners that place experts on the ranks of the items that activate them: `sem_moe` and `co_cluster`.

Both fit to items (:class:`~coterie.placement.co_clustering.base.Items`), not to the load alone. Their placement is
useful only with a schedule that sends items to their ranks: `cluster` returns both. With round-robin tokens the local
activation rate is 1 ÷ ranks for every placement.

A cluster gets the rank that already holds most of its experts, so that few experts move. Apart from that, the planners
ignore the cost of moving.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from coterie.errors import check_at_least, check_not_negative
from coterie.placement.base import Load, planners
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie.placement.co_clustering.base import ITEMS_HINT, CoClusters, Items, Ranks, local_activations
from coterie.placement.co_clustering.descent import descend_ranks
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.packing import PlansAnew, Slots, fill_spare, living_ranks, on_living, pack_even
from coterie.registry import needs
from coterie.types import Placement, Topology


class Clustered(NamedTuple):
    """Ranks of experts and items, counted over living ranks only."""

    expert_ranks: Ranks
    """[layer, expert] rank of the expert."""
    ranks: Ranks
    """[group, item] rank of the item."""


class _CoClustering(PlansAnew):
    """Base of both planners: makes placements from clusters."""

    __slots__ = ()
    items: Items
    same: ClassVar[str] = "experts are beside their items already"

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        return _slots(self.items, problem, self._clustered(problem, load.tokens))

    def cluster(self, load: Load, topology: Topology, current: Placement) -> CoClusters:
        """Return the placement of :meth:`plan` with the matching ranks of items."""
        problem = self.objective.problem(load, topology, current)
        clusters = self._clustered(problem, load.tokens)
        placement = problem.plan(on_living(problem, _slots(self.items, problem, clusters))).placement
        local, total = local_activations(self.items, clusters.expert_ranks, clusters.ranks)
        ranks = np.flatnonzero(problem.alive)[clusters.ranks]
        return CoClusters(placement, ranks, local / np.where(total > 0, total, 1.0))

    @abstractmethod
    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:
        """Cluster experts and items; `tokens` [layer, expert] is the load."""


@planners.register("sem_moe")
@dataclass(frozen=True, slots=True, eq=False)
class SemMoe(_CoClustering):
    """Sem-MoE's alternating algorithm: assign experts to ranks by their items, then items by their experts, repeatedly.

    The load of experts divides a rank's score and sets the order of placement, no more: ranks may be far from even.
    The published text gives no weights. The default ignores affinity between experts: of six settings on calibration
    splits of four traces it was the most even (1.67 against 2.04 with 0.2) at the same rate of local activations.
    """

    objective: Objective = needs(PRICES_HINT)
    items: Items = needs(ITEMS_HINT)
    settings: AlternatingSettings = field(default_factory=lambda: AlternatingSettings(expert_expert=0.0))
    seed: int = 0
    """Seed of the starting clusters and of the random swaps."""

    def _clustered(self, problem: Problem, tokens: NDArray[np.float64]) -> Clustered:  # noqa: ARG002
        ranks = _check(self.items, problem)
        clusters = alternate(self.items, problem.current.num_experts, ranks, default_rng(self.seed), self.settings)
        return _numbered(self.items, problem, Clustered(*clusters))


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
        return _numbered(
            self.items, problem, Clustered(*descend_ranks(self.items, tokens, most, [packed, *starts], trust))
        )


def _check(items: Items, problem: Problem) -> int:
    """Check the items against the problem and return the number of living ranks."""
    items.check_fits(problem.current.num_layers, problem.current.num_experts)
    return living_ranks(problem)


def _numbered(items: Items, problem: Problem, clusters: Clustered) -> Clustered:
    """Number clusters by the ranks that hold most of their experts now; unchanged if ranks differ in speed."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    speeds = problem.topology.rank_speeds[problem.alive]
    if np.ptp(speeds) > 0:
        return clusters
    held = problem.current.held[problem.alive]  # [rank, layer, expert]
    expert_ranks, ranks = clusters.expert_ranks.copy(), clusters.ranks.copy()
    for group in range(items.groups):
        layers = slice(group * items.layers_each, (group + 1) * items.layers_each)
        in_cluster = 1.0 * (expert_ranks[layers] == np.arange(len(speeds))[:, None, None])  # [cluster, layer, expert]
        overlap = np.tensordot(in_cluster, held[:, layers], ((1, 2), (1, 2)))
        number = linear_sum_assignment(-overlap)[1]
        expert_ranks[layers], ranks[group] = number[expert_ranks[layers]], number[ranks[group]]
    return Clustered(expert_ranks, ranks)


def _slots(items: Items, problem: Problem, clusters: Clustered) -> Slots:
    """Return experts [layer, slot of a living rank]; a spare slot gets the expert its rank's items activate most."""
    current, living = problem.current, int(problem.alive.sum())
    worth = np.zeros((current.num_layers, current.num_experts, living))
    if living * current.slots_per_rank > current.num_experts:
        for layer in range(current.num_layers):
            at = clusters.ranks[layer // items.layers_each]
            tokens = items.frequency[:, None] * items.weights[:, layer]
            np.add.at(worth[layer], (items.experts[:, layer], at[:, None]), tokens)
    return fill_spare(clusters.expert_ranks, worth, current.slots_per_rank, living)
