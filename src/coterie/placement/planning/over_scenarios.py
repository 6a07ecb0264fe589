"""Latency-optimal planning over the scenarios of a load, rather than for their mean step.

The search starts from the current placement, and from the plan for the mean step if that is better. Scenarios are a
sample, and a plan can overfit a sample. So some scenarios are held out, and plans for the rest are made with several
shares of the mean step mixed into every scenario (shrinkage). The share whose plans do best on the held-out scenarios
is used for all layers. A share of 1 is the plan for the mean step, which is used unless another is clearly better. The
share is chosen on some of the layers, evenly spread.

A search fits few scenarios so closely that simpler plans may do better on unseen ones. The plan is then one of several
candidates, and every scenario is held out once to choose it (:func:`plan_few`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.placement.base import HELD_OUT, Load, Unseen
from coterie.placement.objective import Problem
from coterie.placement.objective.steps import Steps
from coterie.placement.planning.eplb import Eplb
from coterie.placement.planning.flashlb import FlashLb
from coterie.placement.planning.packing import on_living
from coterie.placement.planning.search.state import Prices
from coterie.placement.planning.search.steps.descent import search_steps

Slots = NDArray[np.int32]

SHRINKAGES = (0.5, 0.25, 0.0)
"""Shares of the mean step tried, besides 1; each search starts from the plan for the share before."""

LEAST = 3e-5
"""Least gain of an action, as a share of a layer's objective. On GLM-5.2's domains and 32 ranks, balancedness on unseen
chunks is .706 with 3e-4 and .714 with this value."""

LEAST_MOVING, MANY = 1e-3, 8
"""Least gain of an action if moves have a cost: higher, so that a running service does not move experts for noise. On
more than MANY ranks an action changes less of a layer, so the least gain falls in proportion to 1 / ranks."""

MARGIN = 0.003
"""Share by which a plan must beat the plan for the mean step on held-out scenarios to be used: few scenarios are held
out, and some may share requests with the others."""

FEWEST = 8
"""Fewest scenarios of which one part is held out."""

LAYERS_TRIED = 6
"""Number of layers on which the shrinkage is chosen."""

FEW = 32
"""Fewer scenarios than this are few: :func:`plan_few` plans for them."""

FOLDS = 8
"""Most parts into which few scenarios are divided; each part is held out once."""

CERTAIN = 2.0
"""Standard errors by which EPLB's plan must be better to be chosen from few scenarios. It gives up 3 to 10 points where
scenarios share hot experts, and gains less than 1 elsewhere. Chosen at the least difference, as the other candidates
are, it costs 0.6 points with 5 chunks of GLM-5.2's domains."""

EVEN_MEAN = 1
"""Number of EPLB's plan among the placement in force and the candidates."""


class ScenarioPlan(NamedTuple):
    """A plan to choose from if scenarios are few."""

    shrinkage: float
    """Share of the mean step mixed into every scenario."""
    slot_experts: Slots


def improve_equal(
    problem: Problem, start: Slots, shrinkage: float = 0.0, wanted: NDArray[np.bool_] | None = None
) -> Slots:
    """Improve a start over the scenarios, at equal shares; return experts [layer, slot].

    In the start every expert must be on a living rank, and none twice on a rank. Only `wanted` layers are improved
    (default: all).
    """
    steps = shrunk(scenarios_of(problem), shrinkage)
    objective, rows = problem.objective, np.array(start, np.int32)
    least = LEAST if moves_are_free(problem) else LEAST_MOVING * min(1.0, MANY / problem.current.num_ranks)
    side_by_side(
        search_steps,
        len(rows),
        rows,
        np.ones(len(rows), np.bool_) if wanted is None else wanted,
        np.ascontiguousarray(np.moveaxis(steps.tokens, 1, 2)),
        steps.weights,
        *steps.prices,
        problem.load_in,
        problem.alive,
        np.minimum(problem.floor, steps.reach @ steps.weights / objective.target_balance),
        Prices.of(problem, least),
        problem.uniform_ranks,
    )
    return rows


def moves_are_free(problem: Problem) -> bool:
    return not problem.objective.exposed or not problem.load_in.any()


def choose(problem: Problem, start: Slots, mean: Slots) -> Unseen | None:
    """Choose the shrinkage with the best plans on held-out scenarios; `mean` [layer, slot] is the mean step's plan.

    Returns None if there are too few scenarios to hold some out. Each plan starts from the plan of the share before, so
    all but the first take few actions.
    """
    if len(scenarios_of(problem).weights) < FEWEST:
        return None
    layers, fitted, unseen = hold_out(problem)
    tried, rows = {1.0: mean[layers]}, start[layers]
    for share in SHRINKAGES:
        tried[share] = rows = improve_equal(fitted, rows, share)
    seconds = {share: float(unseen.slowest_s(rows).sum()) for share, rows in tried.items()}
    best = min(tried, key=lambda share: (seconds[share], share))
    if seconds[best] > (1.0 - MARGIN) * seconds[1.0]:
        best = 1.0
    return Unseen(
        before=unseen.balanced(unseen.current.slot_experts),
        mean=unseen.balanced(tried[1.0]),
        after=unseen.balanced(tried[best]),
        fitted=fitted.balanced(tried[best]),
        shrinkage=best,
        scenarios=len(scenarios_of(unseen).weights),
    )


def hold_out(
    problem: Problem, fold: int = HELD_OUT - 1, folds: int = HELD_OUT
) -> tuple[NDArray[np.int64], Problem, Problem]:
    """Select some layers of a problem and hold out every `folds`-th scenario, beginning with scenario `fold`.

    Returns these layers, the problem of the scenarios to plan for, and the problem of the held-out ones.
    """
    count = problem.current.num_layers
    layers = np.unique(np.linspace(0, count - 1, min(LAYERS_TRIED, count)).round().astype(np.int64))
    out = np.arange(len(scenarios_of(problem).weights)) % folds == fold
    some = problem.onward(layers, problem.current.slot_experts[layers], None)
    return layers, _part(some, ~out), _part(some, out)


def plan_few(problem: Problem, start: Slots, anew: bool = True) -> tuple[Slots, Unseen | None]:
    """Return the candidate [layer, slot] that does best on scenarios it was not made for, movement included.

    Every scenario is held out once, unless only one has a weight; then the closest search is used, and nothing is known
    of unseen scenarios. EPLB's plan must be better than the others by CERTAIN standard errors over the parts held out.
    """
    weights, results, sizes = scenarios_of(problem).weights, [], []
    parts = np.arange(len(weights)) % FOLDS
    for fold in range(FOLDS):
        size = float(weights[parts == fold].sum())
        if size and (weights[parts != fold] > 0).any():
            layers, fitted, unseen = hold_out(problem, fold, FOLDS)
            rows = [
                unseen.current.slot_experts,
                *(made.slot_experts for made in candidates(fitted, start[layers], anew)),
            ]
            results.append(
                [(unseen.score(row).total_s.sum(), unseen.balanced(row), fitted.balanced(row)) for row in rows]
            )
            sizes.append(size)
    made = candidates(problem, start, anew)
    if not results:
        return made[-1].slot_experts, None
    seconds, after, fits = np.moveaxis(np.array(results), 2, 0)  # [part, placement in force and candidates]
    best = 2 + int(np.average(seconds, axis=0, weights=sizes)[2:].argmin())
    gains = seconds[:, best] - seconds[:, EVEN_MEAN]
    gain = np.average(gains, weights=sizes)
    error = np.sqrt(np.average((gains - gain) ** 2, weights=sizes) / (len(gains) - 1))
    best = EVEN_MEAN if gain > CERTAIN * error else best
    before, mean, held = np.average(after, axis=0, weights=sizes)[[0, EVEN_MEAN, best]].tolist()
    fit, chosen = float(np.average(fits[:, best], weights=sizes)), made[best - 1]
    return chosen.slot_experts, Unseen(before, mean, held, fit, chosen.shrinkage, len(weights))


def candidates(problem: Problem, start: Slots, anew: bool = True) -> list[ScenarioPlan]:
    """Make the plans to choose from if scenarios are few.

    These are EPLB's plan for the mean step, searches from `start` [layer, slot] if moves have a cost, the greedy plan
    and searches from it. The greedy plan puts the hot experts of a scenario on different ranks, and a search leaves
    what makes no difference to its own scenarios as it was. It moves nearly all experts, more than a budget allows:
    without `anew` it is left out if moves have a cost.
    """
    steps = scenarios_of(problem)
    load = Load.of_scenarios(np.moveaxis(steps.tokens, 1, 0), steps.weights, whole_steps=steps.whole)
    even, greedy = (
        on_living(problem, planner(objective=problem.objective).slots_for(problem, load)) for planner in (Eplb, FlashLb)
    )
    made, free = [ScenarioPlan(1.0, even)], moves_are_free(problem)
    if not free:
        made += _searches(problem, start)
    return [*made, ScenarioPlan(0.0, greedy), *_searches(problem, greedy)] if anew or free else made


def _searches(problem: Problem, rows: Slots) -> list[ScenarioPlan]:
    """Search with every shrinkage, each time from the plan of the one before."""
    made = []
    for share in SHRINKAGES:
        rows = improve_equal(problem, rows, share)
        made.append(ScenarioPlan(share, rows))
    return made


def shrunk(steps: Steps, share: float) -> Steps:
    """Mix a share of the mean step into every scenario."""
    if not share:
        return steps
    mean = np.einsum("lse,s->le", steps.tokens, steps.weights)
    return replace(steps, tokens=(1.0 - share) * steps.tokens + share * mean[:, None])


def _part(problem: Problem, chosen: NDArray[np.bool_]) -> Problem:
    """Restrict a problem to the chosen scenarios."""
    steps = scenarios_of(problem)
    weights = steps.weights[chosen]
    kept = replace(
        steps,
        tokens=np.ascontiguousarray(steps.tokens[:, chosen]),
        weights=weights / weights.sum(),
        even=steps.even[:, chosen],
        reach=steps.reach[:, chosen],
    )
    even, reach = kept.even @ kept.weights, kept.reach @ kept.weights
    return replace(problem, steps=kept, even=even, reach=reach)


def scenarios_of(problem: Problem) -> Steps:
    assert problem.steps is not None, "the problem has scenarios"
    return problem.steps
