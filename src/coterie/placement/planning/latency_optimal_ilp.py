"""Latency-optimal planning by integer programming: the best placement within a stated gap, with a proven lower bound.

It minimises the objective of :meth:`Problem.score`, layer by layer, with HiGHS. Faster planners are compared with it,
and it can plan maps offline. It takes seconds per layer. With equal shares over many ranks (288 slots on 32) the gap
may not close at all; the proof then states the remaining gap.

A budget of moves couples the layers. Each move is given a price, which is bisected. Among all placements found at any
price, the best combination of one placement per layer within the budget is chosen; the highest bound over the prices is
the lower bound.

Over scenarios (:attr:`Load.scenarios`) it minimises their expected time, for equal shares and small layers; larger
layers are refused. With the optimal split it plans for the mean step.

Wrong if the next window differs from this one, as every planner. A `gap` below the accuracy of the load wastes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_not_negative, check_one_of
from coterie.placement.base import Load, Plan, Progress, Proof, SearchProgress, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.planning.milp.program import LayerSolution, LayerSteps, Mask, ProgramLayer
from coterie.placement.planning.milp.solving import Search, best_shares, solve
from coterie.placement.planning.packing import living_ranks
from coterie.registry import needs
from coterie.types import Placement, Topology

PRICES = 8
"""Most prices per move that are tried to keep to a budget."""

LARGEST = 1024
"""Largest experts x ranks x scenarios of a layer that is solved over scenarios: above it the gap seldom closes."""

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
    """Most seconds per layer; with a budget of moves, per layer and price."""
    max_moves: int | None = None
    """Budget of moves over all layers; None: no limit."""
    warm_start: bool = True
    """Whether to start from the plan of latency_optimal; otherwise from the current placement."""
    threads: int = 1
    progress: Progress | None = field(default=None, repr=False, compare=False)
    """Callback at every layer and about twice a second; returning False ends the search with the best plan so far."""

    def __post_init__(self) -> None:
        check_one_of(("equal", "optimal"), split=self.split)
        check_not_negative(gap=self.gap, gap_moves=self.gap_moves)
        check(self.time_limit_s > 0, f"time_limit_s={self.time_limit_s} must be above 0")
        check_at_least(0, max_moves=self.max_moves)
        check_at_least(1, threads=self.threads)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        if self.split == "optimal":
            load = load.mean
        problem = self.objective.problem(load, topology, current, shares)
        _check_size(problem)
        starts = [self._heuristic(load, topology, current)] if self.warm_start else []
        return self.solve(problem, starts=starts)

    def solve(self, problem: Problem, *, starts: Sequence[NDArray[np.integer]] = ()) -> Plan:
        """Solve a problem; return the plan with its proof.

        Each layer starts from the best of `starts`, placements [layer, slot], and the current placement; `warm_start`
        applies to :meth:`plan` only. If the gain is not above the cost of planning, the plan keeps the placement in
        force; the proof is that of the placement found.
        """
        living_ranks(problem)  # more slots than experts are refused
        check(
            problem.steps is None or self.split != "optimal",
            "split='optimal' is solved for the mean step; make the problem of load.mean",
        )
        _check_size(problem)
        return _Planning(self, problem, starts).solution()

    def _heuristic(self, load: Load, topology: Topology, current: Placement) -> NDArray[np.int32]:
        from coterie.placement.planning.latency_optimal import LatencyOptimal

        planner = LatencyOptimal(objective=self.objective, split=self.split)
        return planner.plan(load, topology, current).placement.slot_experts


class _Planning:
    """One run: the layers, the placements found for each layer at any price, and the search times."""

    def __init__(self, ilp: LatencyOptimalIlp, problem: Problem, starts: Sequence[NDArray[np.integer]]) -> None:
        self.began = perf_counter()
        self.ilp, self.problem = ilp, problem
        self.living = np.flatnonzero(problem.alive)
        self.layers = [self._layer(index, 0.0) for index in range(problem.current.num_layers)]
        maps = [problem.current.slot_experts, *starts]
        self.sound = True  # whether the current placement is valid
        self.points = [self._starts(index, maps) for index in range(len(self.layers))]
        self.seconds = np.zeros(len(self.layers))
        self.stopped = False

    def solution(self) -> Plan:
        chosen, budget = self._at(0), self.ilp.max_moves
        bounds = np.array([candidate.bound for candidate in chosen])
        total_bound = float(bounds.sum())
        if budget is not None and sum(map(self._moves, range(len(chosen)), chosen)) > budget:
            total_bound = max(total_bound, self._priced_bound(budget))
            chosen = self._cheapest(budget)
        return self._report(chosen, bounds, total_bound)

    def _layer(self, index: int, price: float) -> ProgramLayer:
        problem, objective, living = self.problem, self.problem.objective, self.living
        unit, share, steps = problem.unit[index, living], problem.share[index].T, None
        if problem.steps is not None:
            seconds = problem.steps.replica_s(index, problem.share.shape[1])[living]
            steps = LayerSteps(seconds, problem.steps.weights)
            unit, share = _expected(seconds @ steps.weights)
        return ProgramLayer(
            unit,
            share,
            problem.load_in[index, living],
            problem.topology.rank_speeds[living],
            problem.current.slots_per_rank,
            float(problem.floor[index]),
            objective.horizon,
            objective.exposed,
            objective.exposed * objective.move_price,
            price,
            steps,
        )

    def _starts(self, index: int, maps: Sequence[NDArray[np.integer]]) -> list[LayerSolution]:
        """Return the known valid placements of the layer; the current one is repaired if it is not valid."""
        layer = self.layers[index]
        candidates = []
        for number, slots in enumerate(maps):
            holds, doubled = self._holds(slots[index])
            if doubled or not holds.any(axis=0).all():
                if number:
                    continue
                holds, self.sound = _repaired(layer, holds), False
            shares = best_shares(layer, holds) if self.ilp.split == "optimal" else None
            candidates.append(LayerSolution(holds, shares, layer.excess(holds, shares), 0.0))
        return candidates

    def _holds(self, slots: NDArray[np.integer]) -> tuple[Mask, bool]:
        """Return which experts each rank holds [living rank, expert], and whether a rank holds one of them twice."""
        by_rank = slots.reshape(self.problem.current.num_ranks, -1)[self.living]
        holds = np.zeros((len(by_rank), self.problem.current.num_experts), bool)
        np.put_along_axis(holds, np.asarray(by_rank, np.int64), True, axis=1)
        return holds, bool(holds.sum() < by_rank.size)

    def _moves(self, index: int, candidate: LayerSolution) -> int:
        return int((candidate.holds & ~self.layers[index].held).sum())

    def _at(self, turn: int, price: float = 0.0) -> list[LayerSolution]:
        """Solve every layer at a price of `price` seconds per move; new placements are added to `points`."""
        return [self._solve(turn, index, price) for index in range(len(self.layers))]

    def _solve(self, turn: int, index: int, price: float) -> LayerSolution:
        layer, plain = self._layer(index, price), self.layers[index]
        start = min(
            (
                candidate._replace(excess=layer.excess(candidate.holds, candidate.shares), bound=0.0)
                for candidate in self.points[index]
            ),
            key=lambda candidate: candidate.excess,
        )
        base = layer.horizon * layer.floor
        search = Search(self._gap_s(index, base + start.excess), self.ilp.time_limit_s, self.ilp.threads)

        def tell(excess: float, bound: float) -> bool:
            if self.ilp.progress is not None:
                at = SearchProgress(turn, index, len(self.layers), base + excess, base + bound)
                self.stopped = self.stopped or self.ilp.progress(at) is False
            return not self.stopped

        if start.excess <= 0 or not tell(start.excess, 0.0):
            return start
        began = perf_counter()
        candidate = solve(layer, self.ilp.split, start, search, tell)
        self.seconds[index] += perf_counter() - began
        self.points[index].append(candidate._replace(excess=plain.excess(candidate.holds, candidate.shares)))
        return candidate

    def _gap_s(self, index: int, objective: float) -> float:
        layer = self.layers[index]
        cheapest = float(layer.load_in[layer.load_in > 0].min(initial=np.inf))
        per_move = cheapest * (layer.each_price or layer.slowest_price) if np.isfinite(cheapest) else 0.0
        return max(self.ilp.gap * objective, self.ilp.gap_moves * per_move)

    def _priced_bound(self, budget: int) -> float:
        """Bisect the price of a move; return the best lower bound over all plans within the budget."""
        low, high = 0.0, max(candidate.excess for points in self.points for candidate in points) + 1e-12
        best = 0.0
        for turn in range(1, PRICES + 1):
            price = (low * high) ** 0.5 if low else high / 8
            candidates = self._at(turn, price)
            best = max(best, sum(candidate.bound for candidate in candidates) - price * budget)
            moves = sum(map(self._moves, range(len(candidates)), candidates))
            if self.stopped or moves == budget:
                break
            low, high = (price, high) if moves > budget else (low, price)
        return best

    def _cheapest(self, budget: int) -> list[LayerSolution]:
        """Choose one point per layer with the least sum and at most `budget` moves (dynamic programming over moves)."""
        spent = np.zeros(budget + 1)
        picks = []
        for index, points in enumerate(self.points):
            options = np.full((len(points), budget + 1), np.inf)
            for at, candidate in enumerate(points):
                moves = self._moves(index, candidate)
                if moves <= budget:
                    options[at, moves:] = spent[: budget + 1 - moves] + candidate.excess
            picks.append(options.argmin(axis=0))
            spent = options.min(axis=0)
        if not np.isfinite(spent[budget]):
            least = sum(
                min(self._moves(index, candidate) for candidate in points) for index, points in enumerate(self.points)
            )
            raise ConfigError(
                f"max_moves={budget} must be at least {least}: so many bring every expert to a living rank, once each"
            )
        chosen, left = [], budget
        for index in range(len(self.points) - 1, -1, -1):
            candidate = self.points[index][picks[index][left]]
            left -= self._moves(index, candidate)
            chosen.append(candidate)
        return chosen[::-1]

    def _report(self, chosen: list[LayerSolution], bounds: Array, total_bound: float) -> Plan:
        problem, living = self.problem, self.living
        slots = np.array(problem.current.slot_experts)
        shares = np.zeros(slots.shape)
        for index, candidate in enumerate(chosen):
            by_rank = slots[index].reshape(problem.current.num_ranks, -1)
            by_rank[living] = np.nonzero(candidate.holds)[1].reshape(len(living), -1)
            if candidate.shares is not None:
                split = shares[index].reshape(by_rank.shape)
                split[living] = candidate.shares[candidate.holds].reshape(len(living), -1)
        base = problem.objective.horizon * problem.floor
        excess = np.array([candidate.excess for candidate in chosen])
        wanted = np.array([self._gap_s(index, total) for index, total in enumerate(base + excess)])
        proof = Proof(
            base + excess,
            base + np.minimum(bounds, excess),
            excess - bounds <= wanted + TOLERANCE * excess + ROUNDING * base,
            self.seconds,
            float(base.sum()) + min(total_bound, float(excess.sum())),
        )
        moved = [self._moves(index, candidate) for index, candidate in enumerate(chosen)]
        reasons = tuple(
            f"{moves} moves, at most {gap:.2%} from the best" for moves, gap in zip(moved, proof.gap, strict=True)
        )
        kept = None if any(moved) else f"no other placement is better by more than {proof.total_gap:.2%}"
        given = None if self.ilp.split == "equal" else shares
        gain = problem.score(problem.current.slot_experts, problem.shares).total_s - problem.score(slots, given).total_s
        saved, planning, took = float(gain.sum()), problem.objective.planning_s, perf_counter() - self.began
        if saved <= planning and self.sound:
            reason = kept or f"moves save {saved:.3g} s over the horizon, which does not pay planning_s={planning:.3g}"
            return replace(problem.keep(reason, took, reasons), proof=proof)
        plan = problem.plan(
            slots, given, split=self.ilp.split, planning_s=took, skip_reason=kept, layer_reasons=reasons
        )
        return replace(plan, proof=proof)


def _check_size(problem: Problem) -> None:
    if problem.steps is None:
        return
    scenarios, experts = problem.steps.tokens.shape[1:]
    ranks = int(problem.alive.sum())
    check(
        experts * ranks * scenarios <= LARGEST,
        f"{experts} experts on {ranks} ranks in {scenarios} scenarios are too many to solve exactly: their product "
        f"must be at most {LARGEST}. Plan with latency_optimal, or for the mean step (load.mean)",
    )


def _expected(seconds: Array) -> tuple[Array, Array]:
    """Compute `unit` and `share` of a layer from expected seconds [rank, expert, replicas - 1]."""
    unit = seconds[:, :, 0]
    parts = np.divide(seconds, unit[:, :, None], out=np.zeros(seconds.shape), where=unit[:, :, None] > 0)
    return unit, parts.max(axis=0)


def _repaired(layer: ProgramLayer, holds: Mask) -> Mask:
    """Return a valid placement close to one with dead ranks or with an expert twice on a rank."""
    holds = holds.copy()
    seconds = layer.work / np.maximum(holds.sum(axis=0), 1)
    for expert in np.argsort(-layer.work, kind="stable"):
        if holds[:, expert].any():
            continue
        busy = holds @ seconds / layer.speeds
        room = holds.sum(axis=1) < layer.slots
        spare = holds & (holds.sum(axis=0) > 1)[None, :]  # replicas that can be dropped if no rank has room
        rank = int(np.argmin(np.where(room if room.any() else spare.any(axis=1), busy, np.inf)))
        if not room.any():
            holds[rank, np.flatnonzero(spare[rank])[0]] = False
        holds[rank, expert] = True
    for rank in range(len(holds)):
        missing = layer.slots - int(holds[rank].sum())
        holds[rank, np.flatnonzero(~holds[rank])[:missing]] = True  # any expert will do: the search improves it
    return holds
