"""The fewest moves that pay where replicas may share tokens freely.

With the best split, a map seldom needs new replicas where the load is: it needs a chain of replicas that leads there.
So a stale map is first re-split, which moves nothing, and then given one link after the other out of its bottleneck:
at 32 ranks and 288 slots about five moves a layer, where equal replicas need forty.

It minimises ``horizon x max(processing, floor) + exposed x (slowest rank's loading + move_price x all loading)``, layer
by layer. Moves are chosen one at a time, and the best beginning of the sequence is kept: not always the fewest moves
there are. Where an expert's seconds differ between ranks by more than their speed, what a move gives is estimated as if
they did not; the result is still never worse than the re-split alone. Wrong for engines that only split equally.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement._free_moves import search_layers
from coterie.placement._layers import over_layers
from coterie.placement.objective import Problem
from coterie.placement.splits import optimal_shares

Array = NDArray[np.float64]


class FreeSplit(NamedTuple):
    """A map, how its replicas share tokens, and why."""

    slot_experts: NDArray[np.int32]
    """[layer, slot]"""
    shares: Array
    """[layer, slot]"""
    reasons: tuple[str, ...]
    """[layer]"""


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
    if max_moves is not None and max_moves < 0:
        raise ConfigError(f"max_moves={max_moves} must be at least 0, or None")
    current = problem.current.slot_experts
    path = _search(problem)
    lengths = _lengths(path, max_moves)
    moved = np.array(current, np.int32)
    for layer, length in enumerate(lengths):
        for slot, expert in zip(path.slots[layer, :length], path.experts[layer, :length], strict=True):
            moved[layer, slot] = expert  # one at a time: a slot may be written twice
    still, shares = optimal_shares(problem, current), optimal_shares(problem, moved)
    kept, found = problem.score(current, still), problem.score(moved, shares)
    whole = np.isfinite(path.totals[:, 0])  # every expert is on a living rank as things are
    back = whole & (found.total_s >= kept.total_s)
    moved[back], shares[back] = current[back], still[back]
    return FreeSplit(moved, shares, _reasons(problem, moved, shares, path, max_moves))


def _search(problem: Problem) -> _Path:
    rows = problem.current.slot_experts.astype(np.int64)
    layers, most = rows.shape
    objective = problem.objective
    path = _Path(
        np.zeros((layers, most), np.int64), np.zeros((layers, most), np.int64),
        np.full((layers, most + 1), np.inf), np.zeros(layers, np.int64),
    )  # fmt: skip
    prices = np.array([objective.horizon, objective.exposed, objective.move_price])
    speeds = problem.topology.rank_speeds

    def work(chosen: NDArray[np.int64]) -> None:
        search_layers(rows, chosen, problem.alive, speeds, problem.unit, problem.load_in, problem.floor, prices, *path)

    over_layers(work, layers)
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
    problem: Problem, moved: NDArray[np.int32], shares: Array, path: _Path, max_moves: int | None
) -> tuple[str, ...]:
    before = _balance(problem, problem.rank_s(problem.current.slot_experts))
    busy = problem.rank_s(moved, shares)
    after, enough = _balance(problem, busy), busy.max(axis=1) <= problem.floor * (1.0 + 1e-9)
    lost = np.isinf(path.totals[:, 0])
    reasons = []
    for layer, moves in enumerate(np.bincount(problem.moves(moved).layer, minlength=len(moved))):
        change = f"balance {before[layer]:.3f} → {after[layer]:.3f}"
        better = path.totals[layer, : path.counts[layer] + 1].min() < path.totals[layer, 0]
        if lost[layer]:
            reasons.append(f"{moves} moves, some for experts that no living rank had: {change}")
        elif moves:
            reasons.append(f"{moves} moves and re-split: {change}")
        elif enough[layer]:
            reasons.append(f"re-split is enough: {change}")
        elif better and max_moves is not None:
            reasons.append(f"re-split alone, max_moves={max_moves} save more elsewhere: {change}")
        else:
            reasons.append(f"re-split alone, no move pays: {change}")
    return tuple(reasons)


def _balance(problem: Problem, rank_s: Array) -> Array:
    """[layer] even ÷ slowest."""
    slowest = rank_s.max(axis=1)
    return np.where(slowest > 0, problem.even / np.where(slowest > 0, slowest, 1.0), 1.0)
