"""The fewest moves that pay where replicas may share tokens freely: fixed weights, or a split anew in every step.

With the best split, a map seldom needs new replicas where the load is: it needs a chain of replicas that leads there.
So a stale map is first re-split, which moves nothing, and then given one link after the other out of its bottleneck:
at 32 ranks and 288 slots about five moves a layer, where equal replicas need forty.

It minimises ``horizon x max(processing, floor) + exposed x (slowest rank's loading + move_price x all loading)``, layer
by layer, against what is in force: a layer that gains nothing keeps its shares bit for bit. Moves are chosen one at a
time, and the best beginning of the sequence is kept: not always the fewest moves there are. Where an expert's seconds
differ between ranks by more than their speed, what a move gives is estimated as if they did not; the result is still
never worse than the re-split alone. Wrong for engines that only split equally.

Over scenarios (:func:`plan_per_step`) tokens are split anew in each of them. The search starts, in each layer, at the
best of the current placement, the plan for equal shares over the scenarios and the plan for the best split of the mean
step, and is never worse than that on the scenarios it is given. Whether it also helps on others is seen on some that
are held out; if not, the start is the plan.
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
from coterie.placement.objective.steps import Steps
from coterie.placement.planning import over_scenarios
from coterie.placement.planning._free_moves import search_layers
from coterie.placement.splits.shares import affine, optimal_shares

Array = NDArray[np.float64]
Slots = NDArray[np.int32]

ROUNDS, LEAST = 2, 1e-4
"""Most searches of a layer over scenarios, each from where the one before ended, and the share of its objective that a
move must save there."""

SAME = 1e-9
"""Relative slack for rounding errors."""


class FreeSplit(NamedTuple):
    """A map, how its replicas share tokens, and why."""

    slot_experts: Slots
    """[layer, slot]"""
    shares: Array
    """[layer, slot]"""
    reasons: tuple[str, ...]
    """[layer]"""


class _Map(NamedTuple):
    slot_experts: Slots
    """[layer, slot]"""
    shares: Array
    """[layer, slot]"""


class _Path(NamedTuple):
    """Moves found for each layer, in order."""

    slots: NDArray[np.int64]
    """[layer, move]"""
    experts: NDArray[np.int64]
    """[layer, move]"""
    totals: Array
    """[layer, moves made] objective in seconds; infinite where one cannot stop."""
    counts: NDArray[np.int64]
    """[layer]"""


def improve_split(problem: Problem, max_moves: int | None = None) -> FreeSplit:
    """Re-split the current map, and move what pays for itself; at most `max_moves`, where they save most.

    Experts that no living rank holds are loaded in any case, past `max_moves` if need be.
    """
    check_at_least(0, max_moves=max_moves)
    path = _search(problem, problem.current.slot_experts)
    moved, shares = _once(problem, path, max_moves)
    current, lost = problem.current.slot_experts, np.isinf(path.totals[:, 0])
    went = (moved != current).any(axis=1)
    while True:
        # The search is no proof: from where it ended it may find more. Where a layer is even enough there is none.
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


def _once(problem: Problem, path: _Path, max_moves: int | None) -> _Map:
    """One search's moves, or the re-split alone, or what is in force: the best of them in each layer."""
    current, in_force = problem.current.slot_experts, _in_force(problem)
    moved = _follow(current, path, _lengths(path, max_moves))
    still, shares = optimal_shares(problem, current), optimal_shares(problem, moved)
    whole = np.isfinite(path.totals[:, 0])  # every expert is on a living rank as things are
    back = whole & (problem.score(moved, shares).total_s >= problem.score(current, still).total_s)
    moved[back], shares[back] = current[back], still[back]
    now, then = problem.score(current, in_force).total_s, problem.score(moved, shares).total_s
    kept = whole & (then >= now * (1.0 - SAME))
    moved[kept], shares[kept] = current[kept], in_force[kept]
    return _Map(moved, shares)


def _search(problem: Problem, start: NDArray[np.integer], steps: Steps | None = None) -> _Path:
    """Moves from `start` [layer, slot], for the scenarios `steps`; without them for the mean step."""
    rows, objective = np.array(start, np.int64), problem.objective
    layers, most = rows.shape
    path = _Path(
        np.zeros((layers, most), np.int64),
        np.zeros((layers, most), np.int64),
        np.full((layers, most + 1), np.inf),
        np.zeros(layers, np.int64),
    )
    none, tail = np.empty((0, 0, 0)), (0.0, 1.0, 0.0)
    if steps is None:
        unit, fixed = affine(problem)
        lines, floor = (unit[:, None], fixed[:, None]), problem.floor[:, None]
        scenarios = none, np.ones(1), np.empty(0), none, False
    else:
        lines, floor = (np.empty((0, 0, 0, 0)), none), np.ascontiguousarray(steps.reach) / objective.target_balance
        scenarios = steps.tokens, steps.weights, steps.touch, steps.per_token, steps.whole
        tail = objective.tail, objective.tail_share, LEAST
    prices = np.array([objective.horizon, objective.exposed, objective.move_price, *tail])
    ranks = problem.alive, problem.topology.rank_speeds, problem.load_in
    side_by_side(search_layers, layers, rows, *lines, *scenarios, *ranks, floor, prices, *path)
    return path


def _follow(start: NDArray[np.integer], path: _Path, lengths: NDArray[np.int64]) -> Slots:
    """[layer, slot] after so many moves of each layer's path."""
    moved = np.array(start, np.int32)
    for layer, length in enumerate(lengths):
        for slot, expert in zip(path.slots[layer, :length], path.experts[layer, :length], strict=True):
            moved[layer, slot] = expert  # one at a time: a slot may be written twice
    return moved


def _lengths(path: _Path, max_moves: int | None) -> NDArray[np.int64]:
    """[layer] how many of its moves to make: those that save most a move, as far as `max_moves` goes."""
    totals = [row[: count + 1] for row, count in zip(path.totals, path.counts, strict=True)]
    best = np.array([int(np.argmin(row)) for row in totals], np.int64)
    if max_moves is None or best.sum() <= max_moves:
        return best
    lengths = np.array([int(np.argmax(np.isfinite(row))) for row in totals], np.int64)
    left = max_moves - int(lengths.sum())
    while left > 0:
        rate, layer, further = 0.0, -1, 0
        for index, row in enumerate(totals):
            made = int(lengths[index])
            ahead = np.arange(made + 1, min(int(best[index]), made + left) + 1)
            if ahead.size:
                rates = (row[made] - row[ahead]) / (ahead - made)
                if rates.max() > rate:
                    rate, layer, further = float(rates.max()), index, int(ahead[np.argmax(rates)])
        if layer < 0:
            break
        left -= further - int(lengths[layer])
        lengths[layer] = further
    return lengths


def _reasons(
    problem: Problem, moved: Slots, shares: Array, path: _Path, kept: NDArray[np.bool_], max_moves: int | None
) -> tuple[str, ...]:
    before = problem.layer_balance(problem.rank_s(problem.current.slot_experts, problem.shares))
    busy = problem.rank_s(moved, shares)
    after, reached = problem.layer_balance(busy), busy.max(axis=1) <= problem.floor * (1.0 + SAME)
    lost = np.isinf(path.totals[:, 0])
    reasons = []
    for layer, moves in enumerate(np.bincount(problem.moves(moved).layer, minlength=len(moved))):
        change = f"balance {before[layer]:.3f} → {after[layer]:.3f}"
        better = path.totals[layer, : path.counts[layer] + 1].min() < path.totals[layer, 0]
        if kept[layer]:
            why = "even enough" if reached[layer] else "no re-split and no move pays"
            reasons.append(f"{why}: balance {before[layer]:.3f}")
        elif lost[layer]:
            reasons.append(f"{moves} moves, some for experts that no living rank had: {change}")
        elif moves:
            reasons.append(f"{moves} moves and re-split: {change}")
        elif reached[layer]:
            reasons.append(f"re-split is enough: {change}")
        elif better and max_moves is not None:
            reasons.append(f"re-split alone, max_moves={max_moves} save more elsewhere: {change}")
        else:
            reasons.append(f"re-split alone, no move pays: {change}")
    return tuple(reasons)


# Tokens split anew in every scenario.


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
    start = best_per_layer(problem, starts)
    if equal is None:
        return PerStep(improve_steps(problem, start), None)
    searched, unseen = _held_out(problem, starts, equal)
    return PerStep(improve_steps(problem, start, equal.shrinkage) if searched else start, unseen)


def best_per_layer(problem: Problem, rows: Sequence[Slots]) -> Slots:
    """[layer, slot] whichever is best in each layer, the first of equals."""
    totals = np.array([problem.score(placement, per_step=True).total_s for placement in rows])
    return np.asarray(np.stack(rows)[totals.argmin(axis=0), np.arange(totals.shape[1])], np.int32)


def improve_steps(problem: Problem, start: Slots, shrinkage: float = 0.0) -> Slots:
    """[layer, slot] from a start in which every expert is on a living rank and none twice on one; never worse."""
    most = max(over_scenarios.SHRINKAGES)  # 1 would leave the mean alone
    steps = over_scenarios.shrunk(over_scenarios.scenarios_of(problem), min(shrinkage, most))
    best = start
    for _ in range(ROUNDS):
        path = _search(problem, best, steps)
        before, best = best, best_per_layer(problem, (best, _follow(best, path, _lengths(path, None))))
        if np.array_equal(before, best):
            break
    return best


def _held_out(problem: Problem, starts: Starts, equal: Unseen) -> tuple[bool, Unseen]:
    """Whether the search helps on scenarios that it does not see, and the balancedness there."""
    layers, fitted, unseen = over_scenarios.hold_out(problem)
    mean, current = starts.mean[layers], starts.current[layers]
    rows = mean if equal.shrinkage == 1.0 else over_scenarios.improve_equal(fitted, current, equal.shrinkage)
    start = best_per_layer(fitted, (current, mean, rows))
    further = improve_steps(fitted, start, equal.shrinkage)
    seconds = [float(unseen.slowest_s(placement, per_step=True).sum()) for placement in (start, further)]
    searched = seconds[1] < seconds[0]
    chosen = further if searched else start
    seen = equal._replace(
        before=unseen.balanced(unseen.current.slot_experts, per_step=problem.shares is not None),
        mean=unseen.balanced(mean, per_step=True),
        after=unseen.balanced(chosen, per_step=True),
        fitted=fitted.balanced(chosen, per_step=True),
    )
    return searched, seen
