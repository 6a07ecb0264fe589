"""The 0-1 program of co-clustering, solved exactly by HiGHS; a reference for the fast algorithms.

Columns: x[item, rank] and y[expert, rank] are 1 if the item or expert is on the rank; z[item, expert, rank] <= x, y is
1 if the activations of the pair are local on the rank; d[rank] >= |tokens - even share|. With r ranks there are r!
equivalent copies of every solution, so the hottest expert of the first layer is fixed to rank 0, the next to rank 0
or 1, and so on.

For small cases only: some dozens of items and experts. Above that, z alone is too large to solve within minutes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_share
from coterie.placement.co_clustering import Items, cost
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie.placement.planning.milp.program import INF, ConstraintRows, Index
from coterie.placement.planning.milp.solving import Search, minimise
from coterie.placement.planning.packing import room_of

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]


class Exact(NamedTuple):
    """The best co-clusters found, solved per group of layers, with their cost and a lower bound."""

    expert_ranks: Ranks
    """[layer, expert] rank of the expert."""
    ranks: Ranks
    """[group, item] rank of the item."""
    cost: Array
    """[group] cost of these co-clusters."""
    bound: Array
    """[group] lower bound on the cost of any co-clusters."""


def solve_exactly(
    items: Items, num_experts: int, num_ranks: int, theta: float, *, time_limit_s: float = 60.0, gap: float = 1e-6
) -> Exact:
    """Minimise :func:`~coterie.placement.co_clustering.cost`; `gap` is the accepted gap as a share."""
    check_share(theta=theta)
    items.check_fits(items.num_layers, num_experts)
    parts = [items.layers(slice(at, at + items.layers_each)) for at in range(0, items.num_layers, items.layers_each)]
    groups = [_solve(part, num_experts, num_ranks, theta, time_limit_s, gap) for part in parts]
    return Exact(*(np.concatenate(side) for side in zip(*groups, strict=True)))


def _solve(items: Items, num_experts: int, num_ranks: int, theta: float, time_limit_s: float, gap: float) -> Exact:
    """Solve one group of layers; an item has the same rank in all of them."""
    settings = AlternatingSettings(theta=theta)
    placed, labels = alternate(items, num_experts, num_ranks, np.random.default_rng(0), settings)
    program = _Program(items, num_experts, num_ranks, theta)
    start = program.columns_of(*program.in_order(placed, labels[0]))
    limits = Search(gap * float(program.cost @ start), time_limit_s, 1)
    solved = minimise(program.rows, program.cost, program.upper, program.whole, limits, start)
    placed, label = program.ranks_of(solved.values)
    # The program counts local activations only; the constant it leaves out is the cost if all were remote.
    constant = (1 - theta) * float(items.frequency @ items.weights.sum(axis=(1, 2)))
    costs = cost(items, placed, label[None], num_ranks, theta)
    return Exact(placed, label[None], costs, np.minimum(np.array([solved.bound + constant]), costs))


class _Program:
    def __init__(self, items: Items, num_experts: int, num_ranks: int, theta: float) -> None:
        self.items, self.num_ranks = items, num_ranks
        count, layers = items.experts.shape[:2]
        self.shape = (layers, num_experts)
        active = items.weights > 0
        item, layer, _ = np.nonzero(active)
        self.pairs = item, items.experts[active].astype(np.int64) + layer * num_experts  # experts of all layers
        activations = (items.weights * items.frequency[:, None, None])[active]
        self.first_expert = count * num_ranks
        self.first_pair = self.first_expert + layers * num_experts * num_ranks
        self.first_excess = self.first_pair + len(item) * num_ranks
        columns = self.first_excess + num_ranks
        self.whole: Index = np.arange(self.first_pair)
        self.cost = np.zeros(columns)
        self.cost[self.first_pair : self.first_excess] = -(1 - theta) * np.repeat(activations, num_ranks)
        self.cost[self.first_excess :] = theta * layers
        self.upper = np.ones(columns)
        self.upper[self.first_excess :] = INF
        self.rows = ConstraintRows()
        self._add_places(num_experts)
        self._add_pairs()
        self._add_balance()
        self._break_symmetry()

    def _add_places(self, num_experts: int) -> None:
        count, ranks, layers = len(self.items), self.num_ranks, self.shape[0]
        placed = np.arange(layers * num_experts * ranks)
        self.rows.add(np.repeat(np.arange(count), ranks), np.arange(count * ranks), 1.0, 1.0, 1.0, count)
        columns = placed + self.first_expert
        self.rows.add(placed // ranks, columns, 1.0, 1.0, 1.0, layers * num_experts)
        held = placed // (num_experts * ranks) * ranks + placed % ranks  # layer and rank
        room = np.tile(room_of(num_experts, ranks), layers).astype(float)
        self.rows.add(held, columns, 1.0, room, room, layers * ranks)

    def _add_pairs(self) -> None:
        item, expert = self.pairs
        size, ranks = len(item), self.num_ranks
        row, rank = np.arange(size * ranks), np.tile(np.arange(ranks), size)
        pair, values = row + self.first_pair, np.repeat([1.0, -1.0], len(row))
        for first, side in ((0, item), (self.first_expert, expert)):
            columns = np.concatenate([pair, first + np.repeat(side, ranks) * ranks + rank])
            self.rows.add(np.tile(row, 2), columns, values, -INF, 0.0, len(row))
        # A pair is local on at most one rank: redundant for whole numbers, but a far tighter relaxation.
        self.rows.add(np.repeat(np.arange(size), ranks), pair, 1.0, -INF, 1.0, size)

    def _add_balance(self) -> None:
        count, ranks = len(self.items), self.num_ranks
        even = float(self.items.frequency.sum()) / ranks
        at, excess, tokens = np.arange(count * ranks), np.arange(ranks), np.repeat(self.items.frequency, ranks)
        row, columns = np.concatenate([at % ranks, excess]), np.concatenate([at, self.first_excess + excess])
        for sign in (1.0, -1.0):
            values = np.concatenate([sign * tokens, -np.ones(ranks)])
            self.rows.add(row, columns, values, -INF, sign * even, ranks)

    def _break_symmetry(self) -> None:
        """Fix the hottest expert of the first layer to rank 0, the next to one of the first two ranks, and so on."""
        if self.shape[1] % self.num_ranks:
            return  # ranks with different numbers of experts are not interchangeable
        for place, expert in enumerate(self._hottest()[: self.num_ranks - 1]):
            shut = np.arange(place + 1, self.num_ranks)
            columns = self.first_expert + expert * self.num_ranks + shut
            self.rows.add(shut - place - 1, columns, 1.0, 0.0, 0.0, len(shut))

    def _hottest(self) -> Index:
        return np.argsort(-self.items.load(self.shape[1])[0], kind="stable")

    def in_order(self, placed: Ranks, label: Ranks) -> tuple[Ranks, Ranks]:
        """Renumber the ranks of co-clusters so that they satisfy the symmetry-breaking rows."""
        if self.shape[1] % self.num_ranks:
            return placed, label
        number = np.argsort(list(dict.fromkeys(placed[0, self._hottest()].tolist())))
        return number[placed], number[label]

    def columns_of(self, placed: Ranks, label: Ranks) -> Array:
        ranks, (item, expert) = self.num_ranks, self.pairs
        values = np.zeros(len(self.cost))
        flat = placed.ravel()
        values[np.arange(len(label)) * ranks + label] = 1.0
        values[self.first_expert + np.arange(len(flat)) * ranks + flat] = 1.0
        local = np.flatnonzero(flat[expert] == label[item])
        values[self.first_pair + local * ranks + label[item[local]]] = 1.0
        tokens = np.bincount(label, self.items.frequency, ranks)
        values[self.first_excess :] = np.abs(tokens - self.items.frequency.sum() / ranks)
        return values

    def ranks_of(self, values: Array) -> tuple[Ranks, Ranks]:
        ranks = self.num_ranks
        label = values[: self.first_expert].reshape(-1, ranks).argmax(axis=1)
        placed = values[self.first_expert : self.first_pair].reshape(*self.shape, ranks).argmax(axis=2)
        return placed, label
