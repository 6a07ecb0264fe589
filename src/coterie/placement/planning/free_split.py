"""The fewest moves that pay where replicas may share tokens freely.

With the best split, a map seldom needs new replicas where the load is: it needs a chain of replicas that leads there.
So a stale map is first re-split, which moves nothing, and then given one link after the other out of its bottleneck:
at 32 ranks and 288 slots about five moves a layer, where equal replicas need forty.

It minimises ``horizon x max(processing, floor) + exposed x (slowest rank's loading + move_price x all loading)``, layer
by layer, against what is in force: a layer that gains nothing keeps its shares bit for bit. Moves are chosen one at a
time, and the best beginning of the sequence is kept: not always the fewest moves there are. Where an expert's seconds
differ between ranks by more than their speed, what a move gives is estimated as if they did not; the result is still
never worse than the re-split alone. Wrong for engines that only split equally.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.errors import check_at_least
from coterie.placement.objective import Problem
from coterie.placement.planning._free_moves import search_layers
from coterie.placement.splits.shares import affine, optimal_shares

Array = NDArray[np.float64]

SAME = 1e-9
"""Relative slack for rounding errors."""


class FreeSplit(NamedTuple):
    """A map, how its replicas share tokens, and why."""

    slot_experts: NDArray[np.int32]
    """[layer, slot]"""
    shares: Array
    """[layer, slot]"""
    reasons: tuple[str, ...]
    """[layer]"""


class _Map(NamedTuple):
    slot_experts: NDArray[np.int32]
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


def improve(problem: Problem, max_moves: int | None = None) -> FreeSplit:
    """Re-split the current map, and move what pays for itself; at most `max_moves`, where they save most.

    Experts that no living rank holds are loaded in any case, past `max_moves` if need be.
    """
    check_at_least(0, max_moves=max_moves)
    path = _search(problem)
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
        further, split = _once(rest, _search(rest), spare)
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
    lengths = _lengths(path, max_moves)
    moved = np.array(current, np.int32)
    for layer, length in enumerate(lengths):
        for slot, expert in zip(path.slots[layer, :length], path.experts[layer, :length], strict=True):
            moved[layer, slot] = expert  # one at a time: a slot may be written twice
    still, shares = optimal_shares(problem, current), optimal_shares(problem, moved)
    whole = np.isfinite(path.totals[:, 0])  # every expert is on a living rank as things are
    back = whole & (problem.score(moved, shares).total_s >= problem.score(current, still).total_s)
    moved[back], shares[back] = current[back], still[back]
    now, then = problem.score(current, in_force).total_s, problem.score(moved, shares).total_s
    kept = whole & (then >= now * (1.0 - SAME))
    moved[kept], shares[kept] = current[kept], in_force[kept]
    return _Map(moved, shares)


def _search(problem: Problem) -> _Path:
    rows = problem.current.slot_experts.astype(np.int64)
    layers, most = rows.shape
    objective = problem.objective
    path = _Path(
        np.zeros((layers, most), np.int64),
        np.zeros((layers, most), np.int64),
        np.full((layers, most + 1), np.inf),
        np.zeros(layers, np.int64),
    )
    prices = np.array([objective.horizon, objective.exposed, objective.move_price])
    speeds, (unit, fixed) = problem.topology.rank_speeds, affine(problem)
    arguments = rows, problem.alive, speeds, unit, fixed, problem.load_in, problem.floor, prices, *path
    side_by_side(search_layers, layers, *arguments)
    return path


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
    problem: Problem,
    moved: NDArray[np.int32],
    shares: Array,
    path: _Path,
    kept: NDArray[np.bool_],
    max_moves: int | None,
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
