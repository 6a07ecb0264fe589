"""Placements for engines that split tokens over replicas anew in every step: which replicas make that split best.

The plan for equal shares over the scenarios and the plan for the best split of the mean step are both placements to
start from; the better of them and of what is there is taken in each layer. From there slots are swapped and given away
while the expected time under the best split of every scenario falls: never worse than where it starts on the scenarios
it is given. Whether that also helps on others is seen on some that are held out; if not, the start is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.placement.base import Unseen
from coterie.placement.objective import Problem
from coterie.placement.planning import over_scenarios
from coterie.placement.planning._step_moves import search_per_step

Array = NDArray[np.float64]
Slots = NDArray[np.int32]


class Starts(NamedTuple):
    """Placements [layer, slot] to start from."""

    current: Slots
    """The one in force, repaired where it must not stay."""
    mean: Slots
    """For the best split of the mean step."""
    equal: Slots
    """For equal shares over the scenarios."""


class PerStep(NamedTuple):
    """A placement, and what such plans do on scenarios they were not made for."""

    slot_experts: Slots
    """[layer, slot]"""
    unseen: Unseen | None


def plan_per_step(problem: Problem, starts: Starts, equal: Unseen | None) -> PerStep:
    """The placement for a split in every step; `equal` is what the plan for equal shares saw on held-out scenarios."""
    start = best_of(problem, starts)
    if equal is None:
        return PerStep(improve(problem, start), None)
    searched, unseen = _held_out(problem, starts, equal)
    return PerStep(improve(problem, start, equal.shrinkage) if searched else start, unseen)


def best_of(problem: Problem, rows: Sequence[Slots]) -> Slots:
    """[layer, slot] whichever is best in each layer, the first of equals."""
    totals = np.array([problem.score(one, per_step=True).total_s for one in rows])
    return np.asarray(np.stack(rows)[totals.argmin(axis=0), np.arange(totals.shape[1])], np.int32)


def improve(problem: Problem, start: Slots, shrinkage: float = 0.0) -> Slots:
    """[layer, slot] from a start in which every expert is on a living rank and none twice on one; never worse."""
    most = max(over_scenarios.SHRINKAGES)  # 1 would leave the mean alone
    steps = over_scenarios.shrunk(over_scenarios.steps_of(problem), min(shrinkage, most))
    numbers, rows = over_scenarios.numbers_of(problem), np.array(start, np.int64)
    arguments = (
        rows,
        steps.tokens,
        steps.weights,
        steps.touch,
        steps.per_token,
        problem.load_in,
        problem.topology.rank_speeds,
        problem.alive,
        steps.whole,
        problem.floor,
        numbers,
    )
    side_by_side(search_per_step, len(rows), *arguments)
    return best_of(problem, (start, rows.astype(np.int32)))


def _held_out(problem: Problem, starts: Starts, equal: Unseen) -> tuple[bool, Unseen]:
    """Whether the search helps on scenarios that it does not see, and the balancedness there."""
    layers, fitted, unseen = over_scenarios.hold_out(problem)
    mean, current = starts.mean[layers], starts.current[layers]
    rows = mean if equal.shrinkage == 1.0 else over_scenarios.improve(fitted, current, equal.shrinkage)
    start = best_of(fitted, (current, mean, rows))
    further = improve(fitted, start, equal.shrinkage)
    seconds = [float(unseen.slowest_s(one, per_step=True).sum()) for one in (start, further)]
    searched = seconds[1] < seconds[0]
    chosen = further if searched else start
    told = equal._replace(
        before=unseen.balanced(unseen.current.slot_experts, per_step=problem.shares is not None),
        mean=unseen.balanced(mean, per_step=True),
        after=unseen.balanced(chosen, per_step=True),
        fitted=fitted.balanced(chosen, per_step=True),
    )
    return searched, told
