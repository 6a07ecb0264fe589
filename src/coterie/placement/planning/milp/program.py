"""One layer's placement as a mixed-integer program for HiGHS.

Seconds are scaled: processing to the even rank's, movement to the cheapest load. Columns, besides which expert is
where: `T`, the slowest rank's processing above the floor; `M`, the slowest rank's arrivals; `N[rank, price]`, how many
experts arrive there over links of one price.

* Equal split: ``z[expert, rank, n]`` says that the expert has n replicas and one of them is on the rank. Numbers past
  those that matter are one last level, which gets the time of the most replicas there may be: a bound stays a bound.
* Scenarios: ``y[scenario]`` is the slowest rank's processing in each, and `T` what they count together. The tail is
  Rockafellar and Uryasev's: an edge, and what each scenario takes past it.
* Optimal split: ``p[expert, rank]`` holds it, ``x[expert, rank] <= p`` is its share of the expert's tokens. Seconds are
  taken to be shared alike, which streaming is not: a bound stays a bound there too, and what is found gets its price.

From a known placement follows that no rank of a better one is slower than `slowest`, since movement costs nothing at
best. So an expert has at least so many replicas, and a set of ranks with more work of its own than it can do in that
time must give some away, to at least one whole new replica outside: the cuts of
:class:`~coterie.placement.planning.milp.solving.Cuts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from coterie.placement.objective._arrays import parts_taken
from coterie.placement.objective.steps import over_scenarios

# One layer as the exact search sees it.

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSteps:
    """Scenarios of a layer, living ranks only."""

    seconds: Array
    """[rank, expert, replicas - 1, scenario] of each of so many equal replicas."""
    weights: Array
    """[scenario]"""
    tail: float
    tail_share: float

    def slowest(self, holds: Mask) -> float:
        """Seconds of the slowest rank over the scenarios, as the objective counts them."""
        rank, expert = np.nonzero(holds)
        step_s = np.zeros((len(holds), len(self.weights)))
        np.add.at(step_s, rank, self.seconds[rank, expert, holds.sum(axis=0)[expert] - 1])
        return float(over_scenarios(step_s.max(axis=0)[None], self.weights, self.tail, self.tail_share)[0])


@dataclass(frozen=True, slots=True, eq=False)
class ProgramLayer:
    """One layer's arrays, living ranks only, in seconds; expected ones where there are scenarios."""

    unit: Array
    """[rank, expert] a step if the rank got all of the expert's tokens."""
    share: Array
    """[expert, replicas - 1] of `unit` that each of so many equal replicas takes; of the rank where that is most."""
    load_in: Array
    """[rank, expert] to load it there; 0 where it is."""
    speeds: Array
    """[rank]"""
    slots: int
    """Slots per rank."""
    floor: float
    """Seconds of a step below which nothing is gained."""
    horizon: float
    slowest_price: float
    """Price per second of the slowest rank's arrivals."""
    each_price: float
    """Price per second of any rank's arrivals."""
    move_price: float
    """Seconds that each move costs besides: the multiplier of a budget of moves."""
    steps: LayerSteps | None = None
    """None: the mean step is the only scenario."""

    @property
    def replica_s(self) -> Array:
        """[rank, expert, replicas - 1] expected seconds of each of so many equal replicas."""
        if self.steps is None:
            return np.asarray(self.unit[:, :, None] * self.share)
        return np.asarray(self.steps.seconds @ self.steps.weights)

    @property
    def held(self) -> Mask:
        return np.asarray(self.load_in == 0)

    @property
    def work(self) -> Array:
        """[expert] seconds on a rank of speed 1 where it is cheapest."""
        return np.asarray((self.unit * self.speeds[:, None]).min(axis=0))

    def excess(self, holds: Mask, shares: Array | None) -> float:
        """Seconds of the objective above horizon x floor, which no placement avoids."""
        arrivals = np.where(holds, self.load_in, 0.0).sum(axis=1)
        moves = float((holds & ~self.held).sum())
        slowest = self._slowest(holds, shares) if self.steps is None else self.steps.slowest(holds)
        waited = self.horizon * max(slowest - self.floor, 0.0) + self.slowest_price * float(arrivals.max())
        return waited + self.each_price * float(arrivals.sum()) + self.move_price * moves

    def _slowest(self, holds: Mask, shares: Array | None) -> float:
        if shares is None:
            count = holds.sum(axis=0)
            parts = np.where(holds, self.share[np.arange(len(count)), count - 1], 0.0)
        else:
            parts = parts_taken(self.share.T, shares)
        return float((self.unit * parts).sum(axis=1).max())


class LayerSolution(NamedTuple):
    """What the search of one layer ended with; seconds are above horizon x floor."""

    holds: Mask
    """[rank, expert]"""
    shares: Array | None
    """[rank, expert] share of the expert's tokens; None for equal shares."""
    excess: float
    bound: float


SMALL = 0.02
"""Share of an even rank's time: replica counts whose replicas take less than this are one level of the equal split."""


class _Places(NamedTuple):
    """The columns that put an expert on a rank."""

    expert: Index
    rank: Index
    level: Index
    """Which number of replicas it stands for, counted over all experts; the expert itself in the optimal split."""
    seconds: Array
    """Seconds of the rank in the equal split; in the optimal split, if it took the whole expert."""
    outward: Array
    """Most work that leaves the other ranks by it."""


class Program:
    """The mixed-integer program of one layer."""

    def __init__(self, layer: ProgramLayer, split: str, known: float, apart: Mask) -> None:
        """`known`: excess of some placement; none that is worse need be found. `apart`: experts that get no last level
        for several numbers of replicas."""
        self.layer, self.split, self.apart = layer, split, apart
        self.work, self.replica_s = layer.work, layer.replica_s
        self.scale = float(self.work.sum() / layer.speeds.sum()) or 1.0
        prices = np.unique(layer.load_in[layer.load_in > 0])
        self.prices = prices if len(prices) else np.ones(1)
        per_move = self.prices[0] * (layer.slowest_price + layer.each_price) + layer.move_price
        self.worth = float(per_move) or layer.horizon * self.scale or 1.0  # what the solver calls 1
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
        self.columns = self.first_step + (0 if layer.steps is None else 2 * len(layer.steps.weights) + 1)
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
        """Numbers of replicas the expert may have, from and to: those that matter singly, then the rest at once."""
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
        one = np.ones(1)
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
            self._rows.add(places.expert, shares, one, 1.0, 1.0, experts)
            best = -np.sort(-most.reshape(experts, -1), axis=1)  # as many replicas as it takes to do all in time
            least = (np.cumsum(best, axis=1) < 1 - 1e-9).sum(axis=1) + 1.0
            self._rows.add(places.expert, index, one, np.minimum(least, best.shape[1]), INF, experts)
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
        self._rows.add(self.owner, levels + self.first_level, one, 1.0, 1.0, experts)
        many = np.flatnonzero(self.most[places.level] > 1)
        row = np.arange(len(many))
        if len(many):
            self._rows.add(
                np.concatenate([row, row]),
                np.concatenate([many, places.level[many] + self.first_level]),
                np.repeat([1.0, -1.0], len(many)),
                -INF,
                0.0,
                len(many),
            )

    def _add_ranks(self) -> None:
        layer, places, one = self.layer, self.places, np.ones(1)
        ranks = len(layer.unit)
        index, rank = np.arange(len(places.expert)), np.arange(ranks)
        self._rows.add(places.rank, index, one, layer.slots, layer.slots, ranks)
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
        """The slowest rank of every scenario, what it takes past the tail's edge, and what they count together."""
        layer, places = self.layer, self.places
        ranks, count = len(layer.unit), len(steps.weights)
        each, one = np.arange(count), np.ones(count)
        slowest, edge = self.first_step + each, self.first_step + count
        past = edge + 1 + each
        taken = steps.seconds[places.rank, places.expert, self.most[places.level] - 1] / self.scale  # [place, scenario]
        self._rows.add(
            np.concatenate([(places.rank[:, None] * count + each).ravel(), np.arange(ranks * count)]),
            np.concatenate([np.repeat(np.arange(len(taken)), count), np.tile(slowest, ranks)]),
            np.concatenate([taken.ravel(), -np.ones(ranks * count)]),
            -INF,
            0.0,
            ranks * count,
        )
        self._rows.add(
            np.tile(each, 3),
            np.concatenate([slowest, np.full(count, edge), past]),
            np.concatenate([one, -one, -one]),
            -INF,
            0.0,
            count,
        )
        columns = np.concatenate([slowest, [edge], past, [self.slow]])
        lean, steep = (1.0 - steps.tail) * steps.weights, steps.tail / steps.tail_share * steps.weights
        values = np.concatenate([lean, [steps.tail], steep, [-1.0]])
        self._rows.add(np.zeros(len(columns), np.int64), columns, values, -INF, layer.floor / self.scale, 1)

    @property
    def whole(self) -> Index:
        """Columns that are whole numbers."""
        return np.concatenate([np.arange(len(self.places.expert)), np.arange(self.first_level, self.slow)])

    def lp(self) -> Any:
        """The relaxation, as HiGHS takes it."""
        layer = self.layer
        lp = highspy.HighsLp()
        cost, upper = np.zeros(self.columns), np.ones(self.columns)
        each = np.tile(layer.each_price * self.prices + layer.move_price, len(layer.unit)) / self.worth
        cost[self.first_count : self.slow] = each
        cost[self.slow] = layer.horizon * self.scale / self.worth
        cost[self.slow + 1] = layer.slowest_price * self.prices[0] / self.worth
        upper[self.first_count : self.slow] = layer.slots
        upper[self.slow] = (self.slowest - layer.floor) / self.scale
        upper[self.slow + 1 :] = INF
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(self.columns), upper
        self._rows.into(lp, self.columns)
        return lp

    def columns_of(self, holds: Mask) -> Array:
        """[column] the whole-number ones of a placement; the others are left at 0."""
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
        """[expert] whether its level stands for several numbers of replicas."""
        used = (values[self.first_level : self.first_count] > 0.5) & (self.least < self.most)
        experts = np.zeros(self.layer.unit.shape[1], bool)
        experts[self.owner[used]] = True
        return experts

    def holds_of(self, values: Array) -> Mask:
        places = self.places
        on = values[: len(places.expert)] > 0.5
        holds = np.zeros(self.layer.unit.shape, bool)
        holds[places.rank[on], places.expert[on]] = True
        return holds


# Rows of a program for HiGHS.

INF = highspy.kHighsInf


class ConstraintRows:
    """Rows of the program as they are collected."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Index, Index, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def add(self, row: Index, column: Index, value: Array, low: Array | float, high: Array | float, rows: int) -> None:
        """`rows` rows at once; `row` counts from 0 among them."""
        self._parts.append((row + self.count, column, np.broadcast_to(value, column.shape)))
        self._bounds.append((np.broadcast_to(low, rows).astype(float), np.broadcast_to(high, rows).astype(float)))
        self.count += rows

    def into(self, lp: Any, columns: int) -> None:
        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = coo_array((value, (row, column)), (self.count, columns)).tocsc()
        lp.num_row_, lp.num_col_ = self.count, columns
        lp.row_lower_, lp.row_upper_ = (np.concatenate(side) for side in zip(*self._bounds, strict=True))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = matrix.indptr
        lp.a_matrix_.index_ = matrix.indices
        lp.a_matrix_.value_ = matrix.data
