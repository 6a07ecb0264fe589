"""The search behind free_split: one layer's moves, one at a time, each the one that takes most off a bottleneck.

With a limit on every rank's seconds and tokens shared as well as replicas allow, what is left over sits in a
bottleneck that no replica leads out of. So a move can help only by giving one of its experts a replica outside, and it
helps by the lesser of what that expert can drain and what the receiving rank (and those it can push to) can take. One
search over experts and one over slots therefore finds the best pair. A slot may be overwritten if its expert is
elsewhere too. Where no such slot helps, two moves are tried together: experts that change places, or an expert put
into a spare slot elsewhere so that its own becomes free.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.placement._flows import (
    NONE,
    TWIN,
    Array,
    Indices,
    Search,
    Split,
    copy_split,
    holds,
    least_limit,
    link,
    new_search,
    new_split,
    put,
    relieve,
    swap,
)  # fmt: skip

DRAINS = 12
"""Experts of a bottleneck, heaviest first, of which it is computed how much they would drain."""

PAIRS = 16
"""Double moves tried, the most promising by a rough estimate."""

CLOSE = 1e-5
"""Of the floor: a layer this near to it is there."""


TINY_GAIN = 1e-6
WEAK = 1e-6


class Layer(NamedTuple):
    """What a layer's search reads."""

    alive: NDArray[np.bool_]
    speeds: Array
    unit: Array
    """[rank, expert]"""
    load_in: Array
    """[rank, expert]"""
    floor: float
    horizon: float
    exposed: float
    move_price: float


class Step(NamedTuple):
    """One move, or two (where `slot2` is not NONE)."""

    slot: int
    expert: int
    slot2: int
    expert2: int
    score: float


@njit()
def search_layer(row: Indices, layer: Layer, target: float, slots: Indices, experts: Indices, totals: Array) -> int:
    """Write moves in order (slot, expert) and the objective after each; how many. totals[0] is before any move.

    The objective is infinite where a map cannot stay: between two moves that belong together, or while an expert is
    on no living rank.
    """
    ranks, num_experts = layer.unit.shape
    split, trial = new_split(len(row), num_experts, ranks), new_split(len(row), num_experts, ranks)
    search = new_search(ranks)
    link(row, layer.alive, layer.unit, split)
    arrivals = np.zeros(ranks)
    steps = _rescue(split, layer, arrivals, slots, experts, totals)
    while True:
        over = relieve(split, layer.unit, layer.speeds, target, search)
        copy_split(split, trial)
        slowest = least_limit(trial, layer.unit, layer.speeds, layer.floor if over == 0.0 else target, new_search(ranks))
        totals[steps] = (
            layer.horizon * slowest + layer.exposed * (arrivals.max() + layer.move_price * arrivals.sum())
        )
        if over <= CLOSE * target or steps + 2 > len(slots):
            return steps
        step = _best_step(split, trial, layer, target, over, arrivals, search)
        if step.slot == NONE:
            return steps
        if step.slot2 == NONE:
            _arrive(split, step.slot, step.expert, layer, arrivals)
            put(split, step.slot, step.expert, layer.unit)
        else:
            _arrive(split, step.slot, step.expert, layer, arrivals)
            _arrive(split, step.slot2, step.expert2, layer, arrivals)
            _apply_pair(split, step, layer.unit)
            slots[steps], experts[steps] = step.slot2, step.expert2
            steps += 1
            totals[steps] = np.inf
        slots[steps], experts[steps] = step.slot, step.expert
        steps += 1


@njit()
def _apply_pair(split: Split, step: Step, unit: Array) -> None:
    if split.expert[step.slot2] == step.expert:
        swap(split, step.slot, step.slot2, unit)
    else:
        put(split, step.slot2, step.expert2, unit)
        put(split, step.slot, step.expert, unit)


@njit()
def _arrive(split: Split, slot: int, expert: int, layer: Layer, arrivals: Array) -> None:
    rank = slot // (len(split.expert) // len(arrivals))
    arrivals[rank] += layer.load_in[rank, expert]
    if split.after[slot] != TWIN:
        arrivals[rank] -= layer.load_in[rank, split.expert[slot]]


@njit()
def _price(slot: int, expert: int, split: Split, layer: Layer, arrivals: Array) -> float:
    """Seconds a move costs."""
    rank = slot // (len(split.expert) // len(arrivals))
    seconds = layer.load_in[rank, expert]
    return layer.exposed * (layer.move_price * seconds + max(0.0, arrivals[rank] + seconds - arrivals.max()))


@njit()
def _spare(split: Split, slot: int, each: int, alive: NDArray[np.bool_]) -> bool:
    """Whether the slot may be overwritten."""
    return alive[slot // each] and (split.after[slot] == TWIN or split.count[split.expert[slot]] > 1)


@njit()
def _rescue(
    split: Split, layer: Layer, arrivals: Array, slots: Indices, experts: Indices, totals: Array
) -> int:
    """Load experts that no living rank holds into the spare slots of the least busy ranks; how many."""
    each = len(split.expert) // len(arrivals)
    steps = 0
    for expert in range(len(split.first)):
        if split.first[expert] != NONE:
            continue
        best = NONE
        for slot in range(len(split.expert)):
            if _spare(split, slot, each, layer.alive) and (
                best == NONE or split.busy[slot // each] < split.busy[best // each]
            ):
                best = slot
        _arrive(split, best, expert, layer, arrivals)
        put(split, best, expert, layer.unit)
        split.share[best] = 1.0
        split.busy[best // each] += layer.unit[best // each, expert]
        slots[steps], experts[steps], totals[steps] = best, expert, np.inf
        steps += 1
    return steps


@njit()
def _best_step(
    split: Split, trial: Split, layer: Layer, target: float, over: float, arrivals: Array, search: Search
) -> Step:
    ranks, each = len(arrivals), len(split.expert) // len(arrivals)
    room = new_search(ranks)
    drains = np.zeros(len(split.first))
    expert = _drain(split, trial, layer, target, over, search.reached, drains, room)
    width = 0.0
    for rank in range(ranks):
        if search.reached[rank]:
            width += layer.speeds[rank]
    worth = layer.horizon / width  # seconds of the horizon for each second of work that finds a place
    best = Step(NONE, NONE, NONE, NONE, 0.0)
    gained = 0.0
    for slot in range(len(split.expert)):
        if search.reached[slot // each] or not _spare(split, slot, each, layer.alive):
            continue
        copy_split(split, trial)
        put(trial, slot, expert, layer.unit)
        gain = over - relieve(trial, layer.unit, layer.speeds, target, room)
        if gain <= TINY_GAIN * over:
            continue
        score = worth * gain - _price(slot, expert, split, layer, arrivals)
        if best.slot == NONE or score > best.score:
            best = Step(slot, expert, NONE, NONE, score)
            gained = gain
    if best.slot != NONE:
        best = _cheaper(split, trial, layer, target, over, arrivals, worth, gained, drains, best, room)
    if gained < WEAK * over:
        pair = _best_pair(split, trial, layer, target, over, arrivals, worth, drains, search, room)
        if pair.slot != NONE and (best.slot == NONE or pair.score > 2.0 * best.score):
            return pair
    return best





@njit()
def _drain(
    split: Split, trial: Split, layer: Layer, target: float, over: float, reached: NDArray[np.bool_],
    drains: Array, room: Search,
) -> int:  # fmt: skip
    """The expert that would take most with it if it left the bottleneck; [expert] how much, of those computed."""
    each = len(split.expert) // len(split.busy)
    work = np.zeros(len(split.first))
    for expert in range(len(work)):
        slot = split.first[expert]
        inside = slot >= 0
        while slot >= 0:
            inside = inside and reached[slot // each]
            slot = split.after[slot]
        if inside:
            rank = split.first[expert] // each
            work[expert] = layer.unit[rank, expert] * layer.speeds[rank]
    best, most = NONE, 0.0
    for _ in range(DRAINS):
        expert = int(np.argmax(work))
        if work[expert] <= most:
            break
        copy_split(split, trial)
        slot = trial.first[expert]
        while slot >= 0:
            trial.busy[slot // each] -= layer.unit[slot // each, expert] * trial.share[slot]
            trial.share[slot] = 0.0
            slot = trial.after[slot]
        drains[expert] = over - relieve(trial, layer.unit, layer.speeds, target, room)
        if drains[expert] > most:
            best, most = expert, drains[expert]
        work[expert] = 0.0
    return best


@njit()
def _cheaper(
    split: Split, trial: Split, layer: Layer, target: float, over: float, arrivals: Array, worth: float,
    gained: float, drains: Array, best: Step, room: Search,
) -> Step:  # fmt: skip
    """The same slot with an expert that gains as much and is nearer, if there is one."""
    for expert in range(len(drains)):
        if drains[expert] < gained * (1.0 - TINY_GAIN) or expert == best.expert:
            continue
        if _price(best.slot, expert, split, layer, arrivals) >= _price(best.slot, best.expert, split, layer, arrivals):
            continue
        copy_split(split, trial)
        put(trial, best.slot, expert, layer.unit)
        gain = over - relieve(trial, layer.unit, layer.speeds, target, room)
        score = worth * gain - _price(best.slot, expert, split, layer, arrivals)
        if score > best.score:
            best = Step(best.slot, expert, NONE, NONE, score)
    return best


@njit()
def _best_pair(
    split: Split, trial: Split, layer: Layer, target: float, over: float, arrivals: Array, worth: float,
    drains: Array, search: Search, room: Search,
) -> Step:  # fmt: skip
    """The best of the most promising double moves."""
    each = len(split.expert) // len(arrivals)
    guess = np.zeros(PAIRS)
    pairs = np.full((PAIRS, 2), NONE, np.int64)  # slot outside that receives, slot that takes its expert
    givers = np.full(PAIRS, NONE, np.int64)  # the expert that leaves the bottleneck
    for outer in range(len(split.expert)):
        there = outer // each
        if search.reached[there] or not layer.alive[there] or split.after[outer] == TWIN:
            continue
        goes = split.expert[outer]
        back = layer.unit[there, goes] * split.share[outer] * layer.speeds[there]
        free = max(0.0, target - split.busy[there]) * layer.speeds[there]
        for inner in range(len(split.expert)):
            here = inner // each
            if not search.reached[here] or split.after[inner] == TWIN or holds(split, goes, here, each):
                continue
            comes = split.expert[inner]
            if holds(split, comes, there, each):
                continue
            sent = layer.unit[here, comes] * split.share[inner] * layer.speeds[here]
            gain = min(sent - back, free, over)
            _keep(guess, pairs, givers, gain, outer, inner, comes)
    best = Step(NONE, NONE, NONE, NONE, 0.0)
    for i in range(PAIRS):
        if pairs[i, 0] == NONE:
            continue
        outer, inner = pairs[i]
        step = Step(outer, givers[i], inner, split.expert[outer], 0.0)
        copy_split(split, trial)
        _apply_pair(trial, step, layer.unit)
        gain = over - relieve(trial, layer.unit, layer.speeds, target, room)
        if gain <= TINY_GAIN * over:
            continue
        price = _price(outer, step.expert, split, layer, arrivals) + _price(inner, step.expert2, split, layer, arrivals)
        score = worth * gain - price
        if best.slot == NONE or score > best.score:
            best = Step(outer, step.expert, inner, step.expert2, score)
    return best


@njit()
def _keep(guess: Array, pairs: Indices, givers: Indices, gain: float, outer: int, inner: int, giver: int) -> None:
    worst = int(np.argmin(guess))
    if gain > guess[worst]:
        guess[worst] = gain
        pairs[worst, 0], pairs[worst, 1] = outer, inner
        givers[worst] = giver
