"""Latency-optimal planning by integer programming: the best placement within a stated gap, with a proven lower bound.

It minimises the objective of :meth:`Problem.score`, layer by layer, with HiGHS. Faster planners are compared with it,
and it can plan maps offline. It takes seconds per layer. With equal shares over many ranks (288 slots on 32) the gap
may not close at all; the proof then states the remaining gap, and a layer may take longer than its time limit, because
HiGHS does not stop while it simplifies a program. If the load has scenarios, it plans for the mean step.

Columns of a layer's program: `T`, the slowest rank's processing above the floor; `M`, the slowest rank's load time; and

* equal split: ``z[expert, rank, n]`` is 1 if the expert has n replicas and one of them is on the rank, ``y[expert, n]``
  is 1 if it has n replicas;
* optimal split: ``z[expert, rank]`` is 1 if the rank holds the expert, ``x[expert, rank] <= z`` is its share of the
  expert's tokens. Seconds are assumed proportional to the share, which is too low for reading weights: the bound stays
  valid, and the placement is evaluated with its true cost.

Given a known placement, no rank of a better placement is slower than that placement's excess allows, since movement
costs at least 0: columns that would take longer are left out.

Wrong if the next window differs from this one, as every planner. A `gap` below the accuracy of the load wastes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_not_negative, check_one_of
from coterie.placement.base import Load, Plan, Progress, Proof, SearchProgress, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.placement.planning.milp import INF, ConstraintRows, minimise
from coterie.placement.planning.packing import living_ranks
from coterie.placement.splits.shares import optimal_shares
from coterie.registry import needs
from coterie.types import Placement, Topology

Slots = NDArray[np.int32]

TOLERANCE = 1e-5
"""Gap that the solver's tolerances leave, as a share of the objective above its floor."""

ROUNDING = 1e-12
"""Gap that rounding leaves at the floor, as a share of the floor."""


@planners.register("latency_optimal_ilp")
@dataclass(frozen=True, slots=True)
class LatencyOptimalIlp:
    """Planner that finds the optimal placement within a gap, by HiGHS."""

    objective: Objective = needs(PRICES_HINT)
    split: Literal["equal", "optimal"] = "equal"
    """How replicas share an expert's tokens: `equal`, or `optimal`; changing shares costs nothing. If replicas read
    weights (`touch_s`), `optimal` searches as if replicas divided that time too: the bound holds, the gap may stay
    open."""
    gap: float = 0.01
    """Gap between a layer's objective and its bound, as a share of the objective, at which its search ends."""
    gap_moves: float = 0.0
    """The same gap in units of the cheapest move; the larger of the two gaps applies."""
    time_limit_s: float = 60.0
    """Most seconds per layer."""
    progress: Progress | None = field(default=None, repr=False, compare=False)
    """Callback at every layer and about twice a second; returning False ends the search with the best plan so far."""

    def __post_init__(self) -> None:
        check_one_of(("equal", "optimal"), split=self.split)
        check_not_negative(gap=self.gap, gap_moves=self.gap_moves)
        check(self.time_limit_s > 0, f"time_limit_s={self.time_limit_s} must be above 0")

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        problem = self.objective.problem(load.mean, topology, current, shares)
        heuristic = LatencyOptimal(objective=self.objective, split=self.split).plan(load.mean, topology, current)
        return self.solve(problem, starts=[heuristic.placement.slot_experts])

    def solve(self, problem: Problem, *, starts: Sequence[Slots] = ()) -> Plan:
        """Solve a problem; return the plan with its proof.

        Each layer starts from the best of the valid placements `starts` [layer, slot] and the current placement. If the
        gain is not above the cost of planning, the plan keeps the placement in force; the proof is that of the
        placement found.
        """
        began, stopped = perf_counter(), False
        living_ranks(problem)  # more slots than experts are refused
        check(problem.steps is None, "the integer program is of the mean step; make the problem of load.mean")
        known = [*starts, *([problem.current.slot_experts] if problem.sound else [])]
        check(known, "the current placement is not valid, and no start is given")
        slots = self._best(problem, known)
        base, start_s = problem.objective.horizon * problem.floor, self._total_s(problem, slots)
        better, bounds, gap_s = slots.copy(), np.zeros(len(slots)), self._gap_s(problem, start_s)
        for layer, excess in enumerate((start_s - base).tolist()):

            def tell(excess: float, bound: float, layer: int = layer) -> bool:
                nonlocal stopped
                at = SearchProgress(layer, len(slots), base[layer] + excess, base[layer] + bound)
                stopped = stopped or (self.progress is not None and self.progress(at) is False)
                return not stopped

            if excess > 0 and tell(excess, 0.0):
                program = _Program(problem, self.split, layer, excess)
                better[layer], bounds[layer] = program.solve(slots[layer], gap_s[layer], self.time_limit_s, tell)
        return self._report(problem, self._best(problem, [slots, better]), bounds, began)

    def _shares(self, problem: Problem, slots: Slots) -> Array | None:
        return optimal_shares(problem, slots) if self.split == "optimal" else None

    def _total_s(self, problem: Problem, slots: Slots) -> Array:
        return problem.score(slots, self._shares(problem, slots)).total_s

    def _best(self, problem: Problem, options: Sequence[Slots]) -> Slots:
        """Return the best of the placements in each layer."""
        best = np.stack([self._total_s(problem, slots) for slots in options]).argmin(axis=0)
        return np.asarray(np.stack(options)[best, np.arange(len(best))], np.int32)

    def _gap_s(self, problem: Problem, total_s: Array) -> Array:
        """Return the gap [layer] at which a search ends, in seconds."""
        objective, load_in = problem.objective, problem.load_in[:, problem.alive]
        cheapest = np.where(load_in > 0, load_in, np.inf).min(axis=(1, 2))  # [layer]
        per_move = np.where(np.isfinite(cheapest), cheapest, 0.0) * objective.exposed * (objective.move_price or 1.0)
        return np.maximum(self.gap * total_s, self.gap_moves * per_move)

    def _report(self, problem: Problem, slots: Slots, bounds: Array, began: float) -> Plan:
        shares, planning = self._shares(problem, slots), problem.objective.planning_s
        score, before = problem.score(slots, shares), problem.score(problem.current.slot_experts, problem.shares)
        base = problem.objective.horizon * problem.floor
        excess, wanted = score.total_s - base, self._gap_s(problem, score.total_s)
        closed = excess - bounds <= wanted + TOLERANCE * excess + ROUNDING * base
        proof = Proof(score.total_s, base + np.minimum(bounds, excess), closed)
        reasons = tuple(
            f"{moves} moves, at most {gap:.2%} from the best" for moves, gap in zip(score.moves, proof.gap, strict=True)
        )
        kept = None if score.moves.any() else f"no other placement is better by more than {proof.total_gap:.2%}"
        saved, took = float((before.total_s - score.total_s).sum()), perf_counter() - began
        if saved <= planning and problem.sound:
            reason = kept or f"moves save {saved:.3g} s over the horizon, which does not pay planning_s={planning:.3g}"
            return replace(problem.keep(reason, took, reasons), proof=proof)
        plan = problem.plan(slots, shares, split=self.split, planning_s=took, skip_reason=kept, layer_reasons=reasons)
        return replace(plan, proof=proof)


class _Program:
    """The program of one layer; columns are `z`, then `y` or `x`, then `T` and `M`. Ranks are the living ones."""

    def __init__(self, problem: Problem, split: str, layer: int, known: float) -> None:
        """`known` is the excess over horizon x floor of a known placement; worse placements are excluded."""
        self.problem, self.equal, self.layer, objective = problem, split == "equal", layer, problem.objective
        unit, self.load_in = problem.unit[layer, problem.alive], problem.load_in[layer, problem.alive]
        share = problem.share[layer] if self.equal else np.ones((1, unit.shape[1]))  # [replicas - 1, expert]
        speeds, self.floor = problem.topology.rank_speeds[problem.alive], float(problem.floor[layer])
        self.scale = float((unit * speeds[:, None]).min(axis=0).sum() / speeds.sum()) or 1.0
        slack = known / objective.horizon if objective.horizon else np.inf
        self.slowest = self.floor + slack * (1 + 1e-9) + 1e-9 * self.scale
        seconds = unit[:, None] * share
        # [place]: a rank for one of `count` replicas of an expert; with the optimal split, of any number.
        self.rank, count, self.expert = np.nonzero((seconds <= self.slowest) | (not self.equal))
        self.seconds, self.count = seconds[self.rank, count, self.expert], count + 1
        self.level = count * unit.shape[1] + self.expert
        """[place] index of `y`, counted over all experts and numbers of replicas."""
        self.slow = len(self.rank) + (share.size if self.equal else len(self.rank))
        """Column of `T`; that of `M` follows."""
        self.cheapest = float(self.load_in[self.load_in > 0].min(initial=np.inf))
        self.cheapest = self.cheapest if np.isfinite(self.cheapest) else 1.0
        per_move = self.cheapest * objective.exposed * (1.0 + objective.move_price)
        self.worth = per_move or objective.horizon * self.scale or 1.0  # seconds per unit of the solver's objective

    def solve(
        self, start: NDArray[np.int32], gap_s: float, time_limit_s: float, tell: Callable[[float, float], bool]
    ) -> tuple[NDArray[np.int32], float]:
        """Return the best placement [slot], and a lower bound on the excess in seconds; `start` [slot] is valid."""
        objective, alive, places = self.problem.objective, self.problem.alive, len(self.rank)
        cost, upper = np.zeros(self.slow + 2), np.ones(self.slow + 2)
        cost[:places] = objective.exposed * objective.move_price * self.load_in[self.rank, self.expert]
        cost[self.slow :] = objective.horizon * self.scale, objective.exposed * self.cheapest
        upper[self.slow :] = (self.slowest - self.floor) / self.scale, INF
        by_rank = start.reshape(len(alive), -1)
        holds = np.zeros(self.load_in.shape, bool)
        np.put_along_axis(holds, by_rank[alive].astype(np.int64), True, axis=1)
        replicas = holds.sum(axis=0)
        chosen = holds[self.rank, self.expert] & ((replicas[self.expert] == self.count) | (not self.equal))
        levels = replicas == np.arange(1, self.problem.share.shape[1] + 1)[:, None]  # [replicas - 1, expert]
        begin = np.concatenate([chosen, levels.ravel()] if self.equal else [chosen]).astype(float)
        solution = minimise(
            self._rows(),
            cost / self.worth,
            upper,
            len(begin),
            begin,
            gap=gap_s / self.worth,
            time_limit_s=time_limit_s,
            tell=lambda excess, bound: tell(excess * self.worth, max(0.0, bound * self.worth)),
        )
        bound = max(0.0, solution.bound * self.worth * (1 - 1e-6))  # less the solver's tolerance
        if solution.values is None:
            return start, bound
        on, placed = solution.values[:places] > 0.5, by_rank.copy()
        holds[:] = False
        holds[self.rank[on], self.expert[on]] = True
        placed[alive] = np.nonzero(holds)[1].reshape(len(holds), -1)
        return placed.ravel(), bound

    def _rows(self) -> ConstraintRows:
        (ranks, experts), places, rows = self.load_in.shape, np.arange(len(self.rank)), ConstraintRows()
        other = np.arange(len(places), self.slow)  # columns of y or x
        if self.equal:
            count = np.repeat(np.arange(1.0, len(other) // experts + 1), experts)
            level = np.concatenate([self.level, np.arange(len(other))])
            values = np.concatenate([np.ones(len(places)), -count])
            rows.add(level, np.concatenate([places, other]), values, 0.0, 0.0, len(other))
            rows.add(np.arange(len(other)) % experts, other, 1.0, 1.0, 1.0, experts)
        else:
            most = np.minimum(1.0, self.slowest / np.maximum(self.seconds, 1e-300))
            values = np.concatenate([np.ones(len(places)), -most])
            rows.add(np.tile(places, 2), np.concatenate([other, places]), values, -INF, 0.0, len(places))
            rows.add(self.expert, other, 1.0, 1.0, 1.0, experts)
        slots, busy = self.problem.current.slots_per_rank, places if self.equal else other
        rows.add(self.rank, places, 1.0, slots, slots, ranks)
        for columns, values, column, most in (
            (places, self.load_in[self.rank, self.expert] / self.cheapest, self.slow + 1, 0.0),
            (busy, self.seconds / self.scale, self.slow, self.floor / self.scale),
        ):
            row = np.concatenate([self.rank, np.arange(ranks)])
            with_column = np.concatenate([columns, np.full(ranks, column)])
            rows.add(row, with_column, np.concatenate([values, -np.ones(ranks)]), -INF, most, ranks)
        return rows
