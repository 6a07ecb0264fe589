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
from coterie.placement.objective.steps import Steps
from coterie.placement.planning import over_scenarios
from coterie.placement.planning._free_moves import search_layers
from coterie.placement.splits.shares import affine, optimal_shares

Array = NDArray[np.float64]
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


class _Map(NamedTuple):
    slot_experts: Slots
    """[layer, slot] expert in each slot."""
    shares: Array
    """[layer, slot] share of the expert's tokens."""


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


def _once(problem: Problem, path: _Path, max_moves: int | None) -> _Map:
    """Return in each layer the best of: the moves of one search, new shares alone, and the map and shares in force."""
    current, in_force = problem.current.slot_experts, _in_force(problem)
    moved = _follow(current, path, _lengths(path, max_moves))
    still, shares = optimal_shares(problem, current), optimal_shares(problem, moved)
    whole = np.isfinite(path.totals[:, 0])  # every expert is on a living rank now
    back = whole & (problem.score(moved, shares).total_s >= problem.score(current, still).total_s)
    moved[back], shares[back] = current[back], still[back]
    now, then = problem.score(current, in_force).total_s, problem.score(moved, shares).total_s
    kept = whole & (then >= now * (1.0 - SAME))
    moved[kept], shares[kept] = current[kept], in_force[kept]
    return _Map(moved, shares)


def _search(problem: Problem, start: NDArray[np.integer], steps: Steps | None = None) -> _Path:
    """Search moves from `start` [layer, slot], for the scenarios `steps` (None: for the mean step)."""
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
    """Return experts [layer, slot] after the first `lengths` [layer] moves of each layer's path."""
    moved = np.array(start, np.int32)
    for layer, length in enumerate(lengths):
        for slot, expert in zip(path.slots[layer, :length], path.experts[layer, :length], strict=True):
            moved[layer, slot] = expert  # one at a time: a slot may be written twice
    return moved


def _lengths(path: _Path, max_moves: int | None) -> NDArray[np.int64]:
    """Return the number of moves per layer [layer], those with the largest saving per move within `max_moves`."""
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


# Optimal shares in every scenario.


class Starts(NamedTuple):
    """Placements [layer, slot] to start from."""

    current: Slots
    """Placement in force, repaired if it is not valid."""
    mean: Slots
    """Plan for optimal shares of the mean step."""
    equal: Slots
    """Plan for equal shares over the scenarios."""


class PerStep(NamedTuple):
    """A placement, and the balancedness of such plans on held-out scenarios."""

    slot_experts: Slots
    """[layer, slot] expert in each slot."""
    unseen: Unseen | None


def plan_per_step(problem: Problem, starts: Starts, equal: Unseen | None) -> PerStep:
    """Plan a placement for optimal shares in every step; `equal` is the held-out result of the equal-share plan."""
    start = best_per_layer(problem, starts)
    if equal is None:
        return PerStep(improve_steps(problem, start), None)
    searched, unseen = _held_out(problem, starts, equal)
    return PerStep(improve_steps(problem, start, equal.shrinkage) if searched else start, unseen)


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


def _held_out(problem: Problem, starts: Starts, equal: Unseen) -> tuple[bool, Unseen]:
    """Return whether the search helps on held-out scenarios, and the balancedness on them."""
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
