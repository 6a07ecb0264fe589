"""One layer's placement as a mixed-integer program for HiGHS.

Seconds are scaled: processing by the time of a balanced rank, movement by the cheapest load. Columns, besides the
placement: `T`, the slowest rank's processing above the floor; `M`, the slowest rank's load time; `N[rank, price]`, the
number of experts that arrive on a rank over links of one price.

* Equal split: ``z[expert, rank, n]`` is 1 if the expert has n replicas and one of them is on the rank. Large n whose
  replicas take little time are lumped into one last level with the time of the largest n: the bound stays valid.
* Scenarios: ``y[scenario]`` is the slowest rank's processing in a scenario, and `T` their expected value.
* Optimal split: ``p[expert, rank]`` is 1 if the rank holds the expert, ``x[expert, rank] <= p`` is its share of the
  expert's tokens. Seconds are assumed proportional to the share, which is too low for reading weights: the bound stays
  valid, and the placement found is evaluated with its true cost.

Given a known placement, no rank of a better placement is slower than `slowest`, since movement costs at least 0. This
gives each expert a least number of replicas. A set of ranks whose own experts need more than that time must also give
work to at least one new replica outside the set: the cuts of
:class:`~coterie.placement.planning.milp.solving.Cuts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from coterie.placement.objective._arrays import Array, parts_taken

# Input and result of the exact search of one layer.

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSteps:
    """Scenarios of a layer, living ranks only."""

    seconds: Array
    """[rank, expert, replicas - 1, scenario] seconds of each replica if the expert has this many equal replicas."""
    weights: Array
    """[scenario] probabilities."""

    def slowest(self, holds: Mask) -> float:
        """Return the expected seconds of the slowest rank over the scenarios."""
        rank, expert = np.nonzero(holds)
        step_s = np.zeros((len(holds), len(self.weights)))
        np.add.at(step_s, rank, self.seconds[rank, expert, holds.sum(axis=0)[expert] - 1])
        return float(step_s.max(axis=0) @ self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramLayer:
    """Arrays of one layer, living ranks only, in seconds; expected seconds if there are scenarios."""

    unit: Array
    """[rank, expert] seconds of a step if the rank got all of the expert's tokens."""
    share: Array
    """[expert, replicas - 1] part of `unit` that each of this many equal replicas takes; with scenarios, the largest
    over ranks."""
    load_in: Array
    """[rank, expert] seconds to load the expert; 0 if the rank holds it."""
    speeds: Array
    """[rank] speed of the rank."""
    slots: int
    """Slots per rank."""
    floor: float
    """Seconds of a step below which a faster placement counts as no gain."""
    horizon: float
    slowest_price: float
    """Cost per second of the slowest rank's load time."""
    each_price: float
    """Cost per second of the load time summed over all ranks."""
    move_price: float
    """Additional cost of each move in seconds: the Lagrange multiplier of a budget of moves."""
    steps: LayerSteps | None = None
    """Scenarios; None: the mean step is the only scenario."""

    @property
    def replica_s(self) -> Array:
        """[rank, expert, replicas - 1] expected seconds of each replica if the expert has this many equal replicas."""
        if self.steps is None:
            return np.asarray(self.unit[:, :, None] * self.share)
        return np.asarray(self.steps.seconds @ self.steps.weights)

    @property
    def held(self) -> Mask:
        return np.asarray(self.load_in == 0)

    @property
    def work(self) -> Array:
        """[expert] seconds x speed of all the expert's tokens on its cheapest rank."""
        return np.asarray((self.unit * self.speeds[:, None]).min(axis=0))

    def excess(self, holds: Mask, shares: Array | None) -> float:
        """Return the seconds of the objective above horizon x floor, the part that no placement avoids."""
        arrivals = np.where(holds, self.load_in, 0.0).sum(axis=1)
        moves = float((holds & ~self.held).sum())
        slowest = self._slowest(holds, shares) if self.steps is None else self.steps.slowest(holds)
        waited = self.horizon * max(slowest - self.floor, 0.0) + self.slowest_price * float(arrivals.max())
        return waited + self.each_price * float(arrivals.sum()) + self.move_price * moves

    def _slowest(self, holds: Mask, shares: Array | None) -> float:
        if shares is not None:
            parts = parts_taken(self.share.T, shares)
        else:
            parts = np.where(holds, self.share[np.arange(holds.shape[1]), holds.sum(axis=0) - 1], 0.0)
        return float((self.unit * parts).sum(axis=1).max())


class LayerSolution(NamedTuple):
    """Result of the search of one layer; `excess` and `bound` are seconds above horizon x floor."""

    holds: Mask
    """[rank, expert] whether the rank holds the expert."""
    shares: Array | None
    """[rank, expert] share of the expert's tokens; None for equal shares."""
    excess: float
    bound: float


SMALL = 0.02
"""Numbers of replicas whose replicas take less than this share of a balanced rank's time are lumped into one level."""


class _Places(NamedTuple):
    """Columns that put an expert on a rank."""

    expert: Index
    rank: Index
    level: Index
    """Index of the level (number of replicas), counted over all experts; the expert itself in the optimal split."""
    seconds: Array
    """Seconds that the column adds to its rank; in the optimal split, at a share of 1."""
    outward: Array
    """Most work that the column can take from other ranks."""


class Program:
    """The mixed-integer program of one layer."""

    def __init__(self, layer: ProgramLayer, split: str, known: float, apart: Mask) -> None:
        """Build the program. `known` is the excess of a known placement; the program excludes worse placements.
        `apart` [expert] marks experts without a lumped level."""
        self.layer, self.split, self.apart = layer, split, apart
        self.work, self.replica_s = layer.work, layer.replica_s
        self.scale = float(self.work.sum() / layer.speeds.sum()) or 1.0
        prices = np.unique(layer.load_in[layer.load_in > 0])
        self.prices = prices if len(prices) else np.ones(1)
        per_move = self.prices[0] * (layer.slowest_price + layer.each_price) + layer.move_price
        self.worth = float(per_move) or layer.horizon * self.scale or 1.0  # seconds per unit of the solver's objective
        slack = known / layer.horizon if layer.horizon else np.inf
        self.slowest = layer.floor + slack * (1 + 1e-9) + 1e-9 * self.scale
        self._rows = ConstraintRows()
        self._place()
        places, ranks = len(self.places.expert), len(layer.unit)
        self.first_share = places
        self.first_level = places * (2 if split == "optimal" else 1)
        self.first_count = self.first_level + (len(self.least) if split == "equal" else 0)
        self.slow = self.first_count + ranks * len(self.prices)
        self.first_step = self.slow + 2
        self.columns = self.first_step + (0 if layer.steps is None else len(layer.steps.weights))
        self._add_replicas()
        self._add_ranks()
        if layer.steps is None:
            self._add_slowest()
        else:
            self._add_steps(layer.steps)

    def _place(self) -> None:
        layer, slowest = self.layer, self.slowest
        ranks, experts = layer.unit.shape
        if self.split == "optimal":
            expert, rank = (side.ravel() for side in np.meshgrid(np.arange(experts), np.arange(ranks), indexing="ij"))
            seconds = layer.unit[rank, expert]
            outward = np.minimum(self.work[expert], slowest * layer.speeds[rank])
            self.places = _Places(expert, rank, expert, seconds, outward)
            self.least = self.most = self.owner = np.zeros(0, np.int64)
            return
        levels = [(e, *level) for e in range(experts) for level in self._levels(e)]
        self.owner, self.least, self.most = np.array(levels, np.int64).T
        level, rank = (side.ravel() for side in np.meshgrid(np.arange(len(levels)), np.arange(ranks), indexing="ij"))
        expert = self.owner[level]
        seconds = self.replica_s[rank, expert, self.most[level] - 1]
        fits = seconds <= slowest
        level, rank, expert, seconds = level[fits], rank[fits], expert[fits], seconds[fits]
        outward = self.work[expert] * layer.share[expert, self.least[level] - 1]
        self.places = _Places(expert, rank, level, seconds, outward)

    def _levels(self, expert: int) -> list[tuple[int, int]]:
        """Return the expert's levels as (least, most) replicas: single numbers first, then one level for the rest."""
        layer = self.layer
        most = min(layer.share.shape[1], len(layer.unit))
        each = self.replica_s[:, expert, :most].min(axis=0)
        fits = each <= self.slowest
        least = int(np.argmax(fits)) + 1 if fits.any() else most
        matter = int((each > SMALL * self.scale).sum()) + 1
        last = most if self.apart[expert] else min(most, max(least, matter, int(layer.held[:, expert].sum())))
        return [(n, n) for n in range(least, last + 1)] + ([(last + 1, most)] if last < most else [])

    def _add_replicas(self) -> None:
        places, experts = self.places, self.layer.unit.shape[1]
        index = np.arange(len(places.expert))
        if self.split == "optimal":
            shares = index + self.first_share
            most = np.minimum(1.0, self.slowest / np.maximum(places.seconds, 1e-300))
            self._rows.add(
                np.concatenate([index, index]),
                np.concatenate([shares, index]),
                np.concatenate([np.ones(len(index)), -most]),
                -INF,
                0.0,
                len(index),
            )
            self._rows.add(places.expert, shares, 1.0, 1.0, 1.0, experts)
            best = -np.sort(-most.reshape(experts, -1), axis=1)  # the fewest replicas that can take all tokens in time
            least = (np.cumsum(best, axis=1) < 1 - 1e-9).sum(axis=1) + 1.0
            self._rows.add(places.expert, index, 1.0, np.minimum(least, best.shape[1]), INF, experts)
            return
        count = len(self.least)
        levels = np.arange(count)
        single = self.least == self.most
        below, above = np.where(single, 0.0, -INF), np.where(single, 0.0, INF)
        for bound, low, high in ((self.least, np.zeros(count), above), (self.most, below, np.zeros(count))):
            self._rows.add(
                np.concatenate([places.level, levels]),
                np.concatenate([index, levels + self.first_level]),
                np.concatenate([np.ones(len(index)), -bound.astype(float)]),
                low,
                high,
                count,
            )
        self._rows.add(self.owner, levels + self.first_level, 1.0, 1.0, 1.0, experts)
        many = np.flatnonzero(self.most[places.level] > 1)
        self._rows.add(
            np.tile(np.arange(len(many)), 2),
            np.concatenate([many, places.level[many] + self.first_level]),
            np.repeat([1.0, -1.0], len(many)),
            -INF,
            0.0,
            len(many),
        )

    def _add_ranks(self) -> None:
        layer, places = self.layer, self.places
        ranks = len(layer.unit)
        index, rank = np.arange(len(places.expert)), np.arange(ranks)
        self._rows.add(places.rank, index, 1.0, layer.slots, layer.slots, ranks)
        seconds = layer.load_in[places.rank, places.expert]
        self.arriving = np.flatnonzero(seconds > 0)
        price = np.searchsorted(self.prices, seconds[self.arriving])
        group = places.rank[self.arriving] * len(self.prices) + price
        groups = np.arange(ranks * len(self.prices))
        counts = groups + self.first_count
        self._rows.add(
            np.concatenate([group, groups]),
            np.concatenate([self.arriving, counts]),
            np.concatenate([np.ones(len(group)), -np.ones(len(groups))]),
            0.0,
            0.0,
            len(groups),
        )
        relative = np.tile(self.prices / self.prices[0], ranks)
        self._rows.add(
            np.concatenate([groups // len(self.prices), rank]),
            np.concatenate([counts, np.full(ranks, self.slow + 1)]),
            np.concatenate([relative, -np.ones(ranks)]),
            -INF,
            0.0,
            ranks,
        )

    def _add_slowest(self) -> None:
        layer, places = self.layer, self.places
        ranks = len(layer.unit)
        busy = np.arange(len(places.expert)) + (self.first_share if self.split == "optimal" else 0)
        self._rows.add(
            np.concatenate([places.rank, np.arange(ranks)]),
            np.concatenate([busy, np.full(ranks, self.slow)]),
            np.concatenate([places.seconds / self.scale, -np.ones(ranks)]),
            -INF,
            layer.floor / self.scale,
            ranks,
        )

    def _add_steps(self, steps: LayerSteps) -> None:
        """Add rows for the slowest rank of every scenario, and their expected time."""
        layer, places = self.layer, self.places
        ranks, count = len(layer.unit), len(steps.weights)
        each = np.arange(count)
        slowest = self.first_step + each
        taken = steps.seconds[places.rank, places.expert, self.most[places.level] - 1] / self.scale  # [place, scenario]
        self._rows.add(
            np.concatenate([(places.rank[:, None] * count + each).ravel(), np.arange(ranks * count)]),
            np.concatenate([np.repeat(np.arange(len(taken)), count), np.tile(slowest, ranks)]),
            np.concatenate([taken.ravel(), -np.ones(ranks * count)]),
            -INF,
            0.0,
            ranks * count,
        )
        columns, values = np.append(slowest, self.slow), np.append(steps.weights, -1.0)
        self._rows.add(np.zeros(count + 1, np.int64), columns, values, -INF, layer.floor / self.scale, 1)

    @property
    def whole(self) -> Index:
        """Indices of the integer columns."""
        return np.concatenate([np.arange(len(self.places.expert)), np.arange(self.first_level, self.slow)])

    def lp(self) -> Any:
        """Return the linear relaxation as a HiGHS model."""
        layer = self.layer
        cost, upper = np.zeros(self.columns), np.ones(self.columns)
        per_move = layer.each_price * self.prices + layer.move_price
        cost[self.first_count : self.slow] = np.tile(per_move, len(layer.unit)) / self.worth
        cost[self.slow] = layer.horizon * self.scale / self.worth
        cost[self.slow + 1] = layer.slowest_price * self.prices[0] / self.worth
        upper[self.first_count : self.slow] = layer.slots
        upper[self.slow] = (self.slowest - layer.floor) / self.scale
        upper[self.slow + 1 :] = INF
        return self._rows.lp(cost, upper)

    def columns_of(self, holds: Mask) -> Array:
        """Return the column values [column] of a placement; continuous columns are left at 0."""
        layer, places = self.layer, self.places
        values = np.zeros(self.columns)
        on = holds[places.rank, places.expert]
        if self.split == "equal":
            replicas = holds.sum(axis=0)[self.owner]
            chosen = (self.least <= replicas) & (replicas <= self.most)
            values[self.first_level : self.first_count] = chosen
            on = on & chosen[places.level]
        values[: len(on)] = on
        came = np.where(holds, layer.load_in, 0.0)
        for at, price in enumerate(self.prices):
            values[self.first_count + at : self.slow : len(self.prices)] = (came == price).sum(axis=1)
        return values

    def lumped(self, values: Array) -> Mask:
        """Return [expert] whether the expert's level in a solution is a lumped one."""
        used = (values[self.first_level : self.first_count] > 0.5) & (self.least < self.most)
        return np.isin(np.arange(self.layer.unit.shape[1]), self.owner[used])

    def holds_of(self, values: Array) -> Mask:
        places = self.places
        on = values[: len(places.expert)] > 0.5
        holds = np.zeros(self.layer.unit.shape, bool)
        holds[places.rank[on], places.expert[on]] = True
        return holds


# Constraint rows of a program for HiGHS.

INF = highspy.kHighsInf


class ConstraintRows:
    """Collected constraint rows of a program."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Index, Index, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def add(
        self, row: Index, column: Index, value: Array | float, low: Array | float, high: Array | float, rows: int
    ) -> None:
        """Add `rows` rows with entries (row, column, value) and bounds; `row` counts from 0 among the new rows."""
        self._parts.append((row + self.count, column, np.broadcast_to(value, column.shape)))
        self._bounds.append((np.broadcast_to(low, rows).astype(float), np.broadcast_to(high, rows).astype(float)))
        self.count += rows

    def lp(self, cost: Array, upper: Array) -> Any:
        """Return the HiGHS model that minimises cost x columns, with columns from 0 to `upper`."""
        from scipy.sparse import coo_array  # slow to import

        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = coo_array((value, (row, column)), (self.count, len(cost))).tocsc()
        lp = highspy.HighsLp()
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(cost)), upper
        lp.num_row_, lp.num_col_ = matrix.shape
        lp.row_lower_, lp.row_upper_ = (np.concatenate(side) for side in zip(*self._bounds, strict=True))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        return lp
