"""Latency-optimal online planner: starting from the current placement, make only moves that pay for themselves.

Each layer minimises ``horizon x max(processing, floor) + exposed movement``, starting from its current placement. Slots
are swapped between ranks, given to an expert that needs a replica, or taken from an expert that does not; a ring of
ranks that pass experts on takes one move per rank. A layer whose gain is below the cost of its moves keeps its
placement, and so do all layers if their total gain is below the cost of planning. The search of a layer stops once it
is within :attr:`Objective.target_balance` of the lower bound, because the last moves gain least.

If the load has scenarios, their expected time is minimised instead of the time of the mean step:
:mod:`~coterie.placement.planning.over_scenarios`.

The search proves nothing: `latency_optimal_ilp` computes the distance to the optimum. Wrong if the next window differs
from this one; the drift estimator tells how long a plan lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.errors import check_at_least, check_one_of
from coterie.placement.base import Load, Plan, Unseen, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.eplb import Eplb
from coterie.placement.planning.flashlb import FlashLb
from coterie.placement.planning.over_scenarios import FEW, choose, improve_equal, moves_are_free, plan_few
from coterie.placement.planning.packing import living_ranks, on_living
from coterie.placement.planning.search.layers import AT_TARGET, CHANGED, KEPT, REPAIRED, search, spend
from coterie.placement.planning.search.state import Prices, is_small
from coterie.registry import needs
from coterie.types import Placement, Topology
from coterie.units import counted, shown_s

Split = Literal["equal", "weighted", "optimal"]

LONGEST_TRAIL = 96
"""Most placements of a layer's search that are kept if there is a budget of moves."""

FAR = 1.05
"""A layer slower than this multiple of its floor is also tried with EPLB's placement."""


CLEARLY = 1.03
"""If moves have a cost, a plan from the current placement is replaced by a plan from another start only if its
objective exceeds that of the other start by this factor."""


class _Layers(NamedTuple):
    """A placement with the saving and outcome of each layer."""

    slot_experts: NDArray[np.int32]
    """[layer, slot] expert in each slot."""
    saved_s: NDArray[np.float64]
    """[layer] seconds saved over the horizon, after the cost of movement."""
    outcomes: NDArray[np.int64]
    """[layer] AT_TARGET, KEPT, CHANGED or REPAIRED."""


@planners.register("latency_optimal")
@dataclass(frozen=True, slots=True)
class LatencyOptimal:
    """Online planner that makes only moves that pay for themselves."""

    objective: Objective = needs(PRICES_HINT)
    split: Split = "equal"
    """How replicas share an expert's tokens. With `weighted` and `optimal`, shares change before experts move.
    If the load has scenarios, `optimal` solves the shares of each scenario, and the plan's shares are those of the mean
    step; `weighted`, and `optimal` with a budget of moves, plan for the mean step."""
    max_moves: int | None = None
    """Most moves over all layers, spent where they save most per second of movement. Repairs (of an expert on no living
    rank, or two slots of an expert on one rank) are made regardless of this limit, and count towards it."""

    def __post_init__(self) -> None:
        check_one_of(("equal", "weighted", "optimal"), split=self.split)
        check_at_least(0, max_moves=self.max_moves)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        if self.split == "weighted" or (self.split == "optimal" and self.max_moves is not None):
            load = load.mean
        problem = self.objective.problem(load, topology, current, shares)
        living_ranks(problem)  # more slots than experts are refused
        if self.split != "equal":
            return self._plan_split(problem, load, started)
        layers, unseen = self._equal_plan(problem, load)
        reasons, skip = _reasons(layers.outcomes, layers.saved_s), self._skip_reason(layers)
        took = perf_counter() - started
        if skip is None:
            plan = problem.plan(layers.slot_experts, planning_s=took, layer_reasons=reasons)
            return replace(plan, unseen=unseen)
        gain = 0.0 if shares is None else _gain_s(problem, current.slot_experts, None)
        if gain <= self.objective.planning_s:
            return replace(problem.keep(skip, took, reasons), unseen=unseen)
        reason = f"equal shares alone save {shown_s(gain)} over the horizon, no move pays"
        return problem.plan(current.slot_experts, planning_s=took, skip_reason=reason, layer_reasons=reasons)

    def _equal_plan(self, problem: Problem, load: Load, anew: bool = True) -> tuple[_Layers, Unseen | None]:
        """Find the placement for equal shares, over the scenarios if the load has any.

        `anew` allows plans for few scenarios that ignore the current placement.
        """
        if problem.steps is None:
            return self._other_start(problem, load, self._search(problem)), None
        average = self.objective.problem(load.mean, problem.topology, problem.current, problem.shares)
        mean = self._other_start(average, load.mean, self._search(average))
        if self.max_moves is None:
            return self._over_scenarios(problem, load, mean, anew)
        steps, unseen = replace(self, max_moves=None)._equal_plan(problem, load, anew=False)
        return self._within_budget(problem, self.max_moves, mean, steps), unseen

    @staticmethod
    def _within_budget(problem: Problem, budget: int, mean: _Layers, steps: _Layers) -> _Layers:
        """Choose per layer: the current placement, plan for the mean step or plan over scenarios, within budget."""
        current = problem.current
        # The plan for the mean step has the repairs.
        first = current.slot_experts if problem.sound else mean.slot_experts
        rows = np.stack([first, mean.slot_experts, steps.slot_experts])  # [option, layer, slot]
        scores = [problem.score(option) for option in rows]
        _, seconds, totals, moves = (np.stack(part, axis=1) for part in zip(*scores, strict=True))
        layers = np.arange(current.num_layers)
        chosen = spend(np.full(len(layers), len(rows)), totals, seconds, moves, min(budget, first.size))
        taken = rows[chosen, layers].astype(np.int32)
        outcomes = np.where((taken == current.slot_experts).all(axis=1), KEPT, CHANGED)
        outcomes[(mean.outcomes == REPAIRED) & (outcomes == CHANGED)] = REPAIRED
        before = problem.score(current.slot_experts, problem.shares).total_s
        return _Layers(taken, before - totals[layers, chosen], outcomes)

    def _over_scenarios(self, problem: Problem, load: Load, mean: _Layers, anew: bool) -> tuple[_Layers, Unseen | None]:
        """Plan over scenarios; keep the current placement in layers where no move pays."""
        current = problem.current
        if 1 < load.num_scenarios < FEW:
            rows, unseen = plan_few(problem, _valid(problem, mean), anew)
        else:
            rows, unseen = self._searched(problem, load, mean)
        before, after = problem.score(current.slot_experts, problem.shares), problem.score(rows)
        saved = before.total_s - after.total_s
        keep = (saved <= 0) & problem.sound
        rows = np.where(keep[:, None], current.slot_experts, rows).astype(np.int32)
        outcomes = np.where((rows == current.slot_experts).all(axis=1), KEPT, CHANGED)
        outcomes[(outcomes == KEPT) & (before.processing_s <= problem.floor)] = AT_TARGET
        outcomes[(mean.outcomes == REPAIRED) & (outcomes == CHANGED)] = REPAIRED
        return _Layers(rows, np.where(keep, 0.0, saved), outcomes), unseen

    def _searched(self, problem: Problem, load: Load, mean: _Layers) -> tuple[NDArray[np.int32], Unseen | None]:
        """Search over scenarios from the current placement and from the plan for the mean step; keep the better."""
        current, start = problem.current, _valid(problem, mean)
        spare, free = current.num_slots > current.num_experts, moves_are_free(problem)
        if free and (spare or not is_small(current.num_slots, current.num_ranks)):
            start = self._or_greedy(problem, load, start)
        rows = other = mean.slot_experts
        unseen = choose(problem, start, rows)
        shrinkage = 0.0 if unseen is None else unseen.shrinkage
        if shrinkage < 1.0:
            rows = improve_equal(problem, start, shrinkage)
            if spare and not free:
                other = self._or_greedy(problem, load, other)
            worse = problem.score(rows).total_s > problem.score(other).total_s * (1.0 if free else CLEARLY)
            if worse.any():
                again = improve_equal(problem, other, shrinkage, worse)
                rows = np.where(worse[:, None], again, rows)
        return rows, unseen

    def _or_greedy(self, problem: Problem, load: Load, start: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return [layer, slot] the greedy placement in layers where it is better, movement included, else `start`.

        From a placement with useless replicas, giving away single slots does not improve much. In a large layer, a
        better start also does better on unseen steps (balancedness up to 0.01 higher with two experts per rank),
        because the search does not change slots that make no difference to its own scenarios.
        """
        fresh = on_living(problem, FlashLb(objective=self.objective).slots_for(problem, load))
        better = problem.score(fresh).total_s < problem.score(start).total_s
        return np.where(better[:, None], fresh, start).astype(np.int32)

    def _plan_split(self, problem: Problem, load: Load, started: float) -> Plan:
        from coterie.placement.planning.free_split import improve_split  # its solver is not needed for equal shares

        if problem.steps is not None:
            return self._plan_per_step(problem, load, started)
        start, spent = self._repaired(problem, load)
        split = improve_split(start, None if self.max_moves is None else max(0, self.max_moves - spent))
        gain, planning = _gain_s(problem, split.slot_experts, split.shares), self.objective.planning_s
        took = perf_counter() - started
        if gain <= planning and not spent and not problem.lost:
            return problem.keep(_not_worth(gain, planning), took, split.reasons)
        plan = problem.plan(
            split.slot_experts, split.shares, split=self.split, planning_s=took, layer_reasons=split.reasons
        )
        if len(plan.moves):
            return plan
        return replace(plan, skip_reason=f"re-splitting alone saves {shown_s(gain)} over the horizon, no move pays")

    def _plan_per_step(self, problem: Problem, load: Load, started: float) -> Plan:
        """Make the plan for optimal shares that are solved in every scenario."""
        from coterie.placement.planning.free_split import plan_per_step
        from coterie.placement.splits.shares import optimal_shares

        current, shares, planning = problem.current, problem.shares, self.objective.planning_s
        mean = replace(self, objective=replace(self.objective, planning_s=0.0)).plan(
            load.mean, problem.topology, current, shares
        )
        equal, seen = self._equal_plan(problem, load)
        starts = _valid(problem, equal), mean.placement.slot_experts, equal.slot_experts
        rows, unseen = plan_per_step(problem, starts, seen)
        before = problem.score(current.slot_experts, shares, per_step=shares is not None)
        saved = before.total_s - problem.score(rows, per_step=True).total_s
        gain, moved = float(saved.sum()), (rows != current.slot_experts).any(axis=1)
        reasons = _reasons(np.where(moved, CHANGED, KEPT), saved)
        took = perf_counter() - started
        if gain <= planning and problem.sound:
            # Shares in force are solved in every scenario already.
            plan = problem.keep(_not_worth(gain, planning), took, reasons, None if shares is None else "optimal")
        else:
            given = optimal_shares(problem, rows)
            plan = problem.plan(rows, given, split="optimal", planning_s=took, layer_reasons=reasons)
            if not len(plan.moves):
                reason = f"a split in every step alone saves {shown_s(gain)} over the horizon, no move pays"
                plan = replace(plan, skip_reason=reason)
        return replace(plan, unseen=unseen)

    def _repaired(self, problem: Problem, load: Load) -> tuple[Problem, int]:
        """Return the problem after removing duplicates of an expert on one rank, and the moves this takes."""
        if not problem.current.duplicates:
            return problem, 0
        lenient = replace(self, objective=replace(self.objective, target_balance=1e-9), split="equal", max_moves=None)
        rows = lenient._search(lenient.objective.problem(load, problem.topology, problem.current)).slot_experts
        repaired = Placement(rows, problem.current.num_ranks, problem.current.num_experts)
        return self.objective.problem(load, problem.topology, repaired), int(problem.score(rows).moves.sum())

    def _other_start(self, problem: Problem, load: Load, searched: _Layers) -> _Layers:
        """Use EPLB's placement in layers far above their floor if it is better, movement included.

        From a placement whose spare slots are all on one rank, swaps and replicas may not improve much.
        """
        spare = living_ranks(problem) * problem.current.slots_per_rank - problem.current.num_experts
        ours = problem.score(searched.slot_experts)
        far = ours.processing_s > problem.floor * FAR
        if self.max_moves is not None or not spare or not far.any():
            return searched
        fresh = Eplb(objective=self.objective).plan(load, problem.topology, problem.current).placement.slot_experts
        theirs = problem.score(fresh)
        better = far & (theirs.total_s < ours.total_s)
        return _Layers(
            np.where(better[:, None], fresh, searched.slot_experts).astype(np.int32),
            searched.saved_s + np.where(better, ours.total_s - theirs.total_s, 0.0),
            np.where(better & (searched.outcomes != REPAIRED), CHANGED, searched.outcomes),
        )

    def _search(self, problem: Problem) -> _Layers:
        current = problem.current
        layers, trail = current.num_layers, self.max_moves is not None
        steps = LONGEST_TRAIL if trail else 1
        kept, outcomes = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
        trails = np.empty((layers, steps, current.num_slots), np.int16)
        totals, seconds = np.empty((layers, steps)), np.empty((layers, steps))
        moves = np.empty((layers, steps), np.int64)
        rows = np.ascontiguousarray(current.slot_experts, np.int32)
        side_by_side(
            search,
            layers,
            rows,
            problem.unit,
            problem.share,
            problem.load_in,
            problem.alive,
            problem.floor,
            Prices.of(problem),
            problem.uniform_ranks,
            trail,
            kept,
            trails,
            totals,
            seconds,
            moves,
            outcomes,
        )
        most = None if self.max_moves is None else min(self.max_moves, rows.size)  # a slot takes one move at most
        chosen = kept - 1 if most is None else spend(kept, totals, seconds, moves, most)
        each = np.arange(layers)
        slots = trails[each, chosen].astype(np.int32)
        saved = problem.score(current.slot_experts, problem.shares).total_s - totals[each, chosen]
        outcomes[(outcomes == CHANGED) & (slots == rows).all(axis=1)] = KEPT
        return _Layers(slots, saved, outcomes)

    def _skip_reason(self, layers: _Layers) -> str | None:
        """Return the reason for keeping the current placement of all layers; None if the plan pays."""
        outcomes, planning, gain = layers.outcomes, self.objective.planning_s, float(layers.saved_s.sum())
        if (outcomes == REPAIRED).any():
            return None
        if (outcomes == AT_TARGET).all():
            return f"every layer has at least {self.objective.target_balance:.1%} of the best balance there is"
        if not (outcomes == CHANGED).any():
            return f"no move pays for itself within {counted(self.objective.horizon, 'step')}"
        would = f"{counted(self.objective.horizon, 'step')} would save {shown_s(gain)} after movement"
        return f"{would}, which does not pay planning_s={planning:.3g}" if gain <= planning else None


def _reasons(outcomes: NDArray[np.int64], saved_s: NDArray[np.float64]) -> tuple[str, ...]:
    """Return the reason of each layer in words."""
    words = {
        AT_TARGET: "even enough",
        KEPT: "no move pays for itself",
        REPAIRED: "repaired; saves {} over the horizon",
        CHANGED: "saves {} over the horizon, movement paid",
    }
    return tuple(words[int(outcome)].format(shown_s(float(s))) for outcome, s in zip(outcomes, saved_s, strict=True))


def _not_worth(gain: float, planning: float) -> str:
    return f"re-splitting and moves save {shown_s(gain)} over the horizon, planning takes {shown_s(planning)}"


def _valid(problem: Problem, repaired: _Layers) -> NDArray[np.int32]:
    """Return the current placement if it is valid, else the repaired one."""
    return np.ascontiguousarray(problem.current.slot_experts if problem.sound else repaired.slot_experts, np.int32)


def _gain_s(problem: Problem, slot_experts: NDArray[np.int32], shares: NDArray[np.float64] | None) -> float:
    """Return the seconds saved over the horizon, after movement, against the placement and shares in force."""
    before = problem.score(problem.current.slot_experts, problem.shares)
    return float((before.total_s - problem.score(slot_experts, shares).total_s).sum())
