"""Plan few moves if replicas may share tokens freely: by fixed weights, or by optimal shares in every step.

With optimal shares, a map seldom needs new replicas of hot experts: it needs a chain of replicas from the busy ranks to
the idle ones. So a stale map first gets new shares, which moves nothing. Then replicas that lead out of its bottleneck
are added one after another: at 32 ranks and 288 slots about five moves per layer, where equal shares need forty.

It minimises ``horizon x max(processing, floor) + exposed x (slowest rank's loading + move_price x all loading)``, layer
by layer, compared with the placement and shares in force; a layer that gains nothing keeps its shares bit for bit.
Moves are chosen one at a time, and the best prefix of the sequence is kept; this need not be the fewest moves possible.
If an expert's seconds on its ranks differ by more than the ranks' speeds, the gain of a move is an estimate; the result
is still never worse than new shares alone. Wrong for engines that only split equally.

Over scenarios (:func:`plan_per_step`), shares are solved in each scenario. The search of a layer starts from the best
of the current placement, the plan for equal shares over the scenarios and the plan for optimal shares of the mean step;
its result is never worse on the given scenarios. Held-out scenarios show whether the search also helps on unseen steps;
if not, the start is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.errors import check_at_least
from coterie.placement.base import Unseen
from coterie.placement.objective import Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.objective.steps import Steps
from coterie.placement.planning import over_scenarios
from coterie.placement.planning._free_moves import search_layers
from coterie.placement.planning.search.layers import spend
from coterie.placement.planning.search.state import Prices
from coterie.placement.splits.shares import affine, optimal_shares

Slots = NDArray[np.int32]

ROUNDS, LEAST = 2, 1e-4
"""ROUNDS: most searches of a layer over scenarios, each from the result of the one before. LEAST: saving that a move
needs in these searches, as a share of the layer's objective."""

SAME = 1e-9
"""Relative slack for rounding errors."""


class FreeSplit(NamedTuple):
    """A map with its shares and the reason per layer."""

    slot_experts: Slots
    """[layer, slot] expert in each slot."""
    shares: Array
    """[layer, slot] share of the expert's tokens."""
    reasons: tuple[str, ...]
    """[layer] change and its reason, in words."""


class _Path(NamedTuple):
    """Moves found for each layer, in order."""

    slots: NDArray[np.int64]
    """[layer, move] slot that is overwritten."""
    experts: NDArray[np.int64]
    """[layer, move] expert that is loaded."""
    totals: Array
    """[layer, moves made] objective in seconds; infinite if the map after these moves is not valid."""
    counts: NDArray[np.int64]
    """[layer] number of moves."""


def improve_split(problem: Problem, max_moves: int | None = None) -> FreeSplit:
    """Choose new shares for the current map and moves that pay for themselves, at most `max_moves` in all.

    Experts that no living rank holds are always loaded, beyond `max_moves` if necessary.
    """
    check_at_least(0, max_moves=max_moves)
    path = _search(problem, problem.current.slot_experts)
    moved, shares = _once(problem, path, max_moves)
    current, lost = problem.current.slot_experts, np.isinf(path.totals[:, 0])
    went = (moved != current).any(axis=1)
    while True:
        # The search is a heuristic: started again from its result it may find more, unless the layer is at its floor.
        score = problem.score(moved, shares)
        left = np.flatnonzero(went & (score.processing_s > problem.floor * (1.0 + SAME)))
        if not len(left):
            break
        rest = problem.onward(left, moved[left], shares[left])
        spare = None if max_moves is None else max(0, max_moves - int(score.moves.sum()))
        further, split = _once(rest, _search(rest, rest.current.slot_experts), spare)
        went[:] = False
        went[left] = (further != moved[left]).any(axis=1)
        moved[left], shares[left] = further, split
    kept = ~lost & (moved == current).all(axis=1) & (shares == _in_force(problem)).all(axis=1)
    return FreeSplit(moved, shares, _reasons(problem, moved, shares, path, kept, max_moves))


def _in_force(problem: Problem) -> Array:
    return problem.equal_shares(problem.current.slot_experts) if problem.shares is None else problem.shares


def _once(problem: Problem, path: _Path, max_moves: int | None) -> tuple[Slots, Array]:
    """Return experts and shares [layer, slot]: in each layer the best of the moves of one search, new shares alone, and
    the map and shares in force."""
    current, in_force = problem.current.slot_experts, _in_force(problem)
    moved = _follow(current, path, _lengths(path, max_moves))
    still, shares = optimal_shares(problem, current), optimal_shares(problem, moved)
    whole = np.isfinite(path.totals[:, 0])  # every expert is on a living rank now
    back = whole & (problem.score(moved, shares).total_s >= problem.score(current, still).total_s)
    moved[back], shares[back] = current[back], still[back]
    now, then = problem.score(current, in_force).total_s, problem.score(moved, shares).total_s
    kept = whole & (then >= now * (1.0 - SAME))
    moved[kept], shares[kept] = current[kept], in_force[kept]
    return moved, shares


def _search(problem: Problem, start: NDArray[np.integer], steps: Steps | None = None) -> _Path:
    """Search moves from `start` [layer, slot], for the scenarios `steps` (None: for the mean step)."""
    rows = np.array(start, np.int64)
    layers, most = rows.shape
    path = _Path(
        np.zeros((layers, most), np.int64),
        np.zeros((layers, most), np.int64),
        np.full((layers, most + 1), np.inf),
        np.zeros(layers, np.int64),
    )
    none = np.empty((0, 0, 0))
    if steps is None:
        unit, fixed = affine(problem)
        lines, floor = (unit[:, None], fixed[:, None]), problem.floor[:, None]
        scenarios = none, np.ones(1), np.empty(0), none, False
    else:
        lines, floor = (
            (np.empty((0, 0, 0, 0)), none),
            np.ascontiguousarray(steps.reach) / problem.objective.target_balance,
        )
        scenarios = steps.tokens, steps.weights, *steps.prices
    prices = Prices.of(problem, 0.0 if steps is None else LEAST)
    ranks = problem.alive, problem.topology.rank_speeds, problem.load_in
    side_by_side(search_layers, layers, rows, *lines, *scenarios, *ranks, floor, prices, *path)
    return path


def _follow(start: NDArray[np.integer], path: _Path, lengths: NDArray[np.int64]) -> Slots:
    """Return experts [layer, slot] after the first `lengths` [layer] moves of each layer's path."""
    moved = np.array(start, np.int32)
    for layer, length in enumerate(lengths):
        for slot, expert in zip(path.slots[layer, :length], path.experts[layer, :length], strict=True):
            moved[layer, slot] = expert  # one at a time: a slot may be written twice
    return moved


def _lengths(path: _Path, max_moves: int | None) -> NDArray[np.int64]:
    """Return the number of moves per layer [layer], those with the largest saving per move within `max_moves`."""
    best = np.array([int(np.argmin(row[: count + 1])) for row, count in zip(path.totals, path.counts, strict=True)])
    if max_moves is None or best.sum() <= max_moves:
        return best
    first = np.isfinite(path.totals).argmax(axis=1)  # moves until every expert is on a living rank
    moves = first[:, None] + np.arange(path.totals.shape[1])
    totals = np.take_along_axis(path.totals, np.minimum(moves, path.slots.shape[1]), axis=1)
    return np.asarray(first + spend(path.counts + 1 - first, totals, moves.astype(np.float64), moves, max_moves))


def _reasons(
    problem: Problem, moved: Slots, shares: Array, path: _Path, kept: NDArray[np.bool_], max_moves: int | None
) -> tuple[str, ...]:
    before = problem.layer_balance(problem.rank_s(problem.current.slot_experts, problem.shares))
    busy = problem.rank_s(moved, shares)
    after, reached = problem.layer_balance(busy), busy.max(axis=1) <= problem.floor * (1.0 + SAME)
    lost = np.isinf(path.totals[:, 0])
    reasons = []
    for layer, moves in enumerate(np.bincount(problem.moves(moved).layer, minlength=len(moved))):
        better = path.totals[layer, : path.counts[layer] + 1].min() < path.totals[layer, 0]
        cases = {  # the first that holds is the reason
            "even enough": kept[layer] and reached[layer],
            "no re-split and no move pays": kept[layer],
            f"{moves} moves, some for experts that no living rank had": lost[layer],
            f"{moves} moves and re-split": moves > 0,
            "re-split is enough": reached[layer],
            f"re-split alone, max_moves={max_moves} save more elsewhere": better and max_moves is not None,
            "re-split alone, no move pays": True,
        }
        change = "" if kept[layer] else f" → {after[layer]:.3f}"
        reasons.append(f"{next(why for why, holds in cases.items() if holds)}: balance {before[layer]:.3f}{change}")
    return tuple(reasons)


# Optimal shares in every scenario.


def plan_per_step(
    problem: Problem, starts: tuple[Slots, Slots, Slots], equal: Unseen | None
) -> tuple[Slots, Unseen | None]:
    """Plan a placement for optimal shares in every step; return it and the balancedness on held-out scenarios.

    `starts` are placements [layer, slot]: the one in force, repaired if it is not valid; the plan for optimal shares of
    the mean step; the plan for equal shares over the scenarios, whose held-out result is `equal`.
    """
    start = best_per_layer(problem, starts)
    if equal is None or len(over_scenarios.scenarios_of(problem).weights) < over_scenarios.FEWEST:
        return improve_steps(problem, start), None
    searched, unseen = _held_out(problem, starts[0], starts[1], equal)
    return improve_steps(problem, start, equal.shrinkage) if searched else start, unseen


def best_per_layer(problem: Problem, rows: Sequence[Slots]) -> Slots:
    """Return the best of several placements [layer, slot] in each layer; the first wins a tie."""
    totals = np.array([problem.score(placement, per_step=True).total_s for placement in rows])
    return np.asarray(np.stack(rows)[totals.argmin(axis=0), np.arange(totals.shape[1])], np.int32)


def improve_steps(problem: Problem, start: Slots, shrinkage: float = 0.0) -> Slots:
    """Improve a valid start over the scenarios, with optimal shares in each; return [layer, slot], never worse.

    A start is valid if every expert is on a living rank and none twice on a rank.
    """
    most = max(over_scenarios.SHRINKAGES)  # a shrinkage of 1 would leave only the mean step
    steps = over_scenarios.shrunk(over_scenarios.scenarios_of(problem), min(shrinkage, most))
    best = start
    for _ in range(ROUNDS):
        path = _search(problem, best, steps)
        before, best = best, best_per_layer(problem, (best, _follow(best, path, _lengths(path, None))))
        if np.array_equal(before, best):
            break
    return best


def _held_out(problem: Problem, current: Slots, mean: Slots, equal: Unseen) -> tuple[bool, Unseen]:
    """Return whether the search helps on held-out scenarios, and the balancedness on them."""
    layers, fitted, unseen = over_scenarios.hold_out(problem)
    current, mean = current[layers], mean[layers]
    rows = mean if equal.shrinkage == 1.0 else over_scenarios.improve_equal(fitted, current, equal.shrinkage)
    start = best_per_layer(fitted, (current, mean, rows))
    further = improve_steps(fitted, start, equal.shrinkage)
    before, after = (float(unseen.slowest_s(rows, per_step=True).sum()) for rows in (start, further))
    chosen = further if after < before else start
    return after < before, equal._replace(
        before=unseen.balanced(unseen.current.slot_experts, per_step=problem.shares is not None),
        mean=unseen.balanced(mean, per_step=True),
        after=unseen.balanced(chosen, per_step=True),
        fitted=fitted.balanced(chosen, per_step=True),
        scenarios=len(over_scenarios.scenarios_of(unseen).weights),
    )
