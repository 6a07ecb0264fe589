"""Best split of a layer's tokens over its replicas, for one load or separately for every scenario.

If reading weights costs nothing, the split of a scenario is a linear program and is solved exactly. Otherwise each
replica that gets a token pays for reading its weights, and the choice of these replicas is part of the problem. The
split is then found by local search. It starts from the best of three splits: the optimum of a straight-line cost, equal
shares, and every expert on a single rank. It moves shares off the slowest rank, one at a time, as long as this helps.
The result is never worse than equal shares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.objective.flows.chains import NONE, TWIN, Indices, Split, least_limit, link, new_split, separable
from coterie.placement.objective.flows.simplex import solve_shares

MOST_FIXED = 0.999
"""Largest fixed part of an expert's seconds, as a share: the cost of a slot must grow with its tokens."""

SAME = 1e-9
"""Relative slack for rounding errors."""


@helper()
def touched(tokens: float, whole: bool) -> float:
    """Return the probability that a step reads the weights of a slot with this many tokens.

    In a `whole` step, `tokens` is a count or a share of one; otherwise it is the mean of a Poisson distribution.
    """
    return min(tokens, 1.0) if whole else float(-np.expm1(-tokens))


class Step(NamedTuple):
    """Prices of one scenario of a layer."""

    tokens: Array
    """[expert] tokens."""
    per_token: Array
    """[rank, expert] seconds of a token."""
    touch: Array
    """[rank] seconds to read the weights of an expert."""
    whole: bool
    """Whether tokens are counts of a single step; see `Load.whole_steps`."""
    speeds: Array
    """[rank] speed; 0 if the rank is dead."""
    alive: NDArray[np.bool_]


class SplitScratch(NamedTuple):
    """Working arrays of one split."""

    split: Split
    search: Indices
    """[4, rank] rows REACHED, LEFT, ENTERED and QUEUE of :mod:`.chains`."""
    unit: Array
    """[rank, expert] seconds of all the expert's tokens, without the fixed part, on a straight line."""
    fixed: Array
    """[expert] fixed cost of a slot, as a multiple of `unit`."""
    share: Array
    """[slot] best shares so far."""
    busy: Array
    """[rank] seconds with these shares."""


@helper()
def new_step_scratch(slots: int, experts: int, ranks: int) -> SplitScratch:
    return SplitScratch(
        new_split(slots, experts, ranks),
        np.empty((4, ranks), np.int64),
        np.empty((ranks, experts)),
        np.empty(experts),
        np.empty(slots),
        np.empty(ranks),
    )


@helper()
def split_best(
    row: Indices, alive: NDArray[np.bool_], speeds: Array, unit: Array, fixed: Array, split: Split, search: Indices
) -> float:
    """Split tokens so that the slowest rank takes the least time, at affine costs; return its seconds."""
    link(row, alive, unit, fixed, split)
    work = speed = 0.0  # leaves out experts that are on no living rank
    for rank in range(len(speeds)):
        work += split.busy[rank] * speeds[rank]
        speed += speeds[rank]
    limit = least_limit(split, unit, speeds, work / speed, search)
    if not separable(split, unit, speeds):
        limit = solve_shares(split, unit, fixed)
    return limit


@helper()
def split_step(row: Indices, step: Step, scratch: SplitScratch) -> float:
    """Find the best split of one scenario (`scratch.share`, `scratch.busy`); return the slowest rank's seconds."""
    split, streams = scratch.split, _streams(step)
    draw_lines(step, scratch.unit, scratch.fixed)
    split_best(row, step.alive, step.speeds, scratch.unit, scratch.fixed, split, scratch.search)
    if streams:
        _price(step, split)
    slowest = _keep(split, scratch, np.inf)
    if streams:
        for slot in range(len(row)):
            if split.after[slot] != TWIN:
                split.share[slot] = 1.0 / split.copies[row[slot]]
        _price(step, split)
        slowest = _keep(split, scratch, slowest)
        _gather(step, split)
        slowest = _keep(split, scratch, slowest)
        slowest = _polish(step, split, scratch)
    return slowest


@helper()
def _streams(step: Step) -> bool:
    return bool(step.touch.max() > 0.0)


@helper()
def draw_lines(step: Step, unit: Array, fixed: Array) -> None:
    """Fill `unit` and `fixed`: the cost of a share as a line through a sole replica and one of two equal replicas."""
    ranks, experts = unit.shape
    if not _streams(step):
        for rank in range(ranks):
            for expert in range(experts):
                unit[rank, expert] = step.per_token[rank, expert] * step.tokens[expert]
        fixed[:] = 0.0
        return
    for expert in range(experts):
        alone = halved = still = 0.0
        for rank in range(ranks):
            if step.alive[rank]:
                alone += _slot_s(step, rank, expert, 1.0)
                halved += _slot_s(step, rank, expert, 0.5)
        if alone > 0.0:
            still = min(max(2.0 * halved / alone - 1.0, 0.0), MOST_FIXED)
        fixed[expert] = still / (1.0 - still)
        for rank in range(ranks):
            unit[rank, expert] = _slot_s(step, rank, expert, 1.0) * (1.0 - still)


@helper()
def _slot_s(step: Step, rank: int, expert: int, share: float) -> float:
    """Return the seconds of a slot with this share of its expert's tokens."""
    part = step.tokens[expert] * share
    return float(step.per_token[rank, expert] * part + step.touch[rank] * touched(part, step.whole))


@helper()
def _price(step: Step, split: Split) -> None:
    """Compute the seconds of all ranks (`split.busy`) with the shares of `split`."""
    each = len(split.share) // len(split.busy)
    for rank in range(len(split.busy)):
        split.busy[rank] = 0.0
        for slot in range(rank * each, (rank + 1) * each):
            if split.after[slot] != TWIN and split.share[slot] > 0.0:
                split.busy[rank] += _slot_s(step, rank, split.expert[slot], split.share[slot])


@helper()
def _keep(split: Split, scratch: SplitScratch, slowest: float) -> float:
    """Keep the shares of `split` if their slowest rank takes less than `slowest` seconds; return the lower time."""
    longest = split.busy.max()
    if longest >= slowest:
        return slowest
    copy_row(scratch.share, split.share)
    copy_row(scratch.busy, split.busy)
    return float(longest)


@helper()
def _gather(step: Step, split: Split) -> None:
    """Assign each expert to a single one of its ranks, longest expert first, where it finishes earliest."""
    each = len(split.share) // len(split.busy)
    left = np.zeros(len(split.first))
    for expert in range(len(left)):
        slot = split.first[expert]
        while slot >= 0:
            split.share[slot] = 0.0
            if split.copies[expert] > 1:
                left[expert] = max(left[expert], _slot_s(step, slot // each, expert, 1.0))
            slot = split.after[slot]
        if left[expert] <= 0.0 and split.copies[expert] > 0:
            split.share[split.first[expert]] = 1.0
    _price(step, split)
    while True:
        expert = int(np.argmax(left))
        if left[expert] <= 0.0:
            break
        left[expert] = 0.0
        best, soonest = NONE, np.inf
        slot = split.first[expert]
        while slot >= 0:
            done = split.busy[slot // each] + _slot_s(step, slot // each, expert, 1.0)
            if done < soonest:
                best, soonest = slot, done
            slot = split.after[slot]
        split.share[best] = 1.0
        split.busy[best // each] = soonest


@helper()
def _polish(step: Step, split: Split, scratch: SplitScratch) -> float:
    """Move shares off the slowest rank as long as its time falls; return the seconds of the slowest rank."""
    share, busy = scratch.share, scratch.busy
    ranks, each = len(busy), len(share) // len(busy)
    for _ in range(8 * ranks):
        slowest = int(np.argmax(busy))
        best, source, target, part = busy[slowest] * (1.0 - SAME), NONE, NONE, 0.0
        for slot in range(slowest * each, (slowest + 1) * each):
            expert = split.expert[slot]
            if split.after[slot] == TWIN or split.copies[expert] < 2 or share[slot] <= 0.0:
                continue
            other = split.first[expert]
            while other >= 0:
                if other != slot:
                    for amount in (share[slot], _balancing(step, split, share, busy, slot, other)):
                        here, there = _moved(step, split, share, busy, slot, other, amount)
                        if max(here, there) < best:
                            best, source, target, part = max(here, there), slot, other, amount
                other = split.after[other]
        if source == NONE:
            return float(busy[slowest])
        here, there = _moved(step, split, share, busy, source, target, part)
        share[source] = max(0.0, share[source] - part)
        share[target] += part
        busy[slowest], busy[target // each] = here, there
    return float(busy.max())


@helper()
def _balancing(step: Step, split: Split, share: Array, busy: Array, slot: int, other: int) -> float:
    """Return the share to move for equal seconds on both ranks, if the time to read weights stayed as estimated."""
    each = len(share) // len(busy)
    rank, peer, expert = slot // each, other // each, split.expert[slot]
    row_s = (step.per_token[rank, expert] + step.per_token[peer, expert]) * step.tokens[expert]
    if row_s <= 0.0:
        return 0.0
    apart = busy[rank] - busy[peer]
    if share[other] <= 0.0:
        apart -= step.touch[peer] * touched(step.tokens[expert] * share[slot], step.whole)
    return float(min(max(apart / row_s, 0.0), share[slot]))


@helper()
def _moved(
    step: Step, split: Split, share: Array, busy: Array, slot: int, other: int, part: float
) -> tuple[float, float]:
    """Return the seconds of both ranks after moving a share `part` from `slot` to `other`."""
    each = len(share) // len(busy)
    rank, peer, expert = slot // each, other // each, split.expert[slot]
    left = max(0.0, share[slot] - part)
    here = busy[rank] - _slot_s(step, rank, expert, share[slot]) + _slot_s(step, rank, expert, left)
    there = busy[peer] - _slot_s(step, peer, expert, share[other]) + _slot_s(step, peer, expert, share[other] + part)
    return here, there


@njit()
def split_steps(
    chosen: Indices,
    rows: Indices,
    tokens: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    speeds: Array,
    alive: NDArray[np.bool_],
    busy: Array,
) -> None:
    """Fill `busy` [layer, scenario, rank] with the seconds of the chosen layers, each scenario with its best split.

    `rows` is the expert [layer, slot]; `tokens` is [layer, scenario, expert]; `per_token` is in seconds [layer, rank,
    expert].
    """
    ranks, experts = per_token.shape[1:]
    scratch = new_step_scratch(rows.shape[1], experts, ranks)
    for layer in chosen:
        for scenario in range(tokens.shape[1]):
            step = Step(tokens[layer, scenario], per_token[layer], touch, whole, speeds, alive)
            split_step(rows[layer], step, scratch)
            copy_row(busy[layer, scenario], scratch.busy)
