"""Plan for the steps that come, not for their mean: latency-optimal over the scenarios of a load.

The search starts from where the experts are, and from the plan for the mean step where that is better. Scenarios are a
sample, and a plan can fit a sample: so a part of them is held out, plans for the rest are made with several shares of
the mean step mixed into every scenario (shrinkage), and the share whose plans do best on what was held out is taken for
all. A share of 1 is the plan for the mean, which is taken unless another is clearly better. This is done on some of the
layers, evenly spread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.placement.base import HELD_OUT, Unseen
from coterie.placement.objective import Problem
from coterie.placement.objective.steps import Steps
from coterie.placement.planning.search.steps.descent import search_steps

Slots = NDArray[np.int32]

SHRINKAGES = (0.5, 0.25, 0.0)
"""Shares of the mean tried, besides 1, each from the plan for the one before."""

LEAST = 3e-5
"""Share of a layer's objective that an action must gain. On GLM-5.2's domains and 32 ranks, balancedness of chunks that
no plan has seen is .706 with 3e-4 and .714 with this."""

LEAST_MOVING, MANY = 1e-3, 8
"""The same where moves have a price: a service that runs is not stirred for what may be chance. On more than so many
ranks an action changes less of a layer, and the least gain falls with their number."""

MARGIN = 0.003
"""Share by which a plan must do better than the mean's on what was held out, or the mean's is taken: few scenarios are
held out, and some may be made of the same requests as others."""

FEWEST = 8
"""Scenarios below which none is held out."""

LAYERS_TRIED = 6
"""Layers on which the shrinkage is chosen."""


class ChosenShrinkage(NamedTuple):
    """The shrinkage to plan with, and what was seen on the scenarios held out."""

    shrinkage: float
    unseen: Unseen | None


class HoldOut(NamedTuple):
    """Some layers, and the problems of the scenarios to plan for and of those held out."""

    layers: NDArray[np.int64]
    fitted: Problem
    unseen: Problem


def improve_equal(
    problem: Problem, start: Slots, shrinkage: float = 0.0, wanted: NDArray[np.bool_] | None = None
) -> Slots:
    """[layer, slot] from a start in which every expert is on a living rank and none twice on one.

    Only `wanted` layers are improved, all unless given.
    """
    steps = shrunk(scenarios_of(problem), shrinkage)
    objective = problem.objective
    rows = np.array(start, np.int32)
    numbers = numbers_of(problem)
    arguments = (
        rows,
        np.ones(len(rows), np.bool_) if wanted is None else wanted,
        steps.tokens,
        steps.weights,
        steps.touch,
        steps.per_token,
        problem.load_in,
        problem.alive,
        steps.whole,
        np.minimum(problem.floor, objective.over_scenarios(steps.reach, steps.weights) / objective.target_balance),
        numbers,
        problem.uniform_ranks,
    )
    side_by_side(search_steps, len(rows), *arguments)
    return rows


def moves_are_free(problem: Problem) -> bool:
    return not problem.objective.exposed or not problem.load_in.any()


def numbers_of(problem: Problem) -> NDArray[np.float64]:
    """What a search weighs: horizon, exposed, move_price, the tail's weight and share, and the least gain."""
    objective, least = problem.objective, LEAST
    if not moves_are_free(problem):
        least = LEAST_MOVING * min(1.0, MANY / problem.current.num_ranks)
    return np.array(
        [objective.horizon, objective.exposed, objective.move_price, objective.tail, objective.tail_share, least]
    )


def choose(problem: Problem, start: Slots, mean: Slots) -> ChosenShrinkage:
    """The shrinkage whose plans do best on held-out scenarios; `mean` [layer, slot] is the plan for the mean step.

    Plans for the shares are made one from another, so all but the first take few actions.
    """
    if len(scenarios_of(problem).weights) < FEWEST:
        return ChosenShrinkage(0.0, None)
    layers, fitted, unseen = hold_out(problem)
    tried, rows = {1.0: mean[layers]}, start[layers]
    for share in SHRINKAGES:
        tried[share] = rows = improve_equal(fitted, rows, share)
    seconds = {share: float(unseen.slowest_s(rows).sum()) for share, rows in tried.items()}
    best = min(tried, key=lambda share: (seconds[share], share))
    if seconds[best] > (1.0 - MARGIN) * seconds[1.0]:
        best = 1.0
    unseen_balance = Unseen(
        before=unseen.balanced(unseen.current.slot_experts),
        mean=unseen.balanced(tried[1.0]),
        after=unseen.balanced(tried[best]),
        fitted=fitted.balanced(tried[best]),
        shrinkage=best,
        scenarios=len(scenarios_of(unseen).weights),
    )
    return ChosenShrinkage(best, unseen_balance)


def hold_out(problem: Problem) -> HoldOut:
    """Some layers of a problem, a part of its scenarios held out."""
    count = problem.current.num_layers
    layers = np.unique(np.linspace(0, count - 1, min(LAYERS_TRIED, count)).round().astype(np.int64))
    out = np.arange(len(scenarios_of(problem).weights)) % HELD_OUT == HELD_OUT - 1
    some = problem.onward(layers, problem.current.slot_experts[layers], None)
    return HoldOut(layers, _part(some, ~out), _part(some, out))


def shrunk(steps: Steps, share: float) -> Steps:
    """Every scenario with a share of the mean mixed in."""
    if not share:
        return steps
    mean = np.einsum("lse,s->le", steps.tokens, steps.weights)
    return replace(steps, tokens=(1.0 - share) * steps.tokens + share * mean[:, None])


def _part(problem: Problem, chosen: NDArray[np.bool_]) -> Problem:
    """The problem of some scenarios."""
    steps = scenarios_of(problem)
    weights = steps.weights[chosen]
    kept = replace(
        steps,
        tokens=np.ascontiguousarray(steps.tokens[:, chosen]),
        weights=weights / weights.sum(),
        even=steps.even[:, chosen],
        reach=steps.reach[:, chosen],
    )
    even, reach = (problem.objective.over_scenarios(one, kept.weights) for one in (kept.even, kept.reach))
    return replace(problem, steps=kept, even=even, reach=reach)


def scenarios_of(problem: Problem) -> Steps:
    assert problem.steps is not None, "the problem has scenarios"
    return problem.steps
