"""The search behind free_split: one layer's moves, one at a time, each the one that takes most off a bottleneck.

With a limit on every rank's seconds and tokens shared as well as replicas allow, what is left over sits in a
bottleneck that no replica leads out of. So a move can help only by giving one of its experts a replica outside, and it
helps by the lesser of what that expert can drain and what the receiving rank (and those it can push to) can take. One
search over experts and one over slots therefore finds the best pair. A slot may be overwritten if its expert is
elsewhere too. Where no such slot helps, two experts change places, one of them inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective.flows.chains import (
    NONE,
    REACHED,
    TWIN,
    Array,
    Indices,
    Split,
    bequeath,
    copy_shares,
    copy_split,
    holds,
    least_limit,
    link,
    new_split,
    put,
    relieve,
    relink,
    swap_slots,
    unlink,
)

DRAINS = 8
"""Experts of a bottleneck, heaviest first, of which it is computed how much they would drain."""

PAIRS = 16
"""Double moves tried, the most promising by a rough estimate."""

CLOSE = 1e-5
"""Share of the limit: work above it by less than this is ignored."""

LOOSER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Past the floor: targets to try where those below cost more than that."""

SAME = 1e-6
"""Relative slack for comparing gains."""


class Layer(NamedTuple):
    """What a layer's search reads."""

    alive: NDArray[np.bool_]
    speeds: Array
    unit: Array
    """[rank, expert] seconds of all its tokens"""
    fixed: Array
    """[expert] of that, what a slot takes besides, however few it gets"""
    load_in: Array
    """[rank, expert]"""
    floor: float
    horizon: float
    exposed: float
    move_price: float


class Step(NamedTuple):
    """One move, or two experts that change places (where `slot2` is not NONE); `slot` is outside the bottleneck."""

    slot: int
    expert: int
    slot2: int
    expert2: int
    gain: float
    """Work that finds a place."""
    score: float
    """Seconds saved."""


@helper()
def search_layer(row: Indices, layer: Layer, target: float, slots: Indices, experts: Indices, totals: Array) -> int:
    """Write moves in order (slot, expert) and the objective after each; how many. totals[0] is before any move.

    The objective is infinite where a map cannot stay: between two moves that belong together, or while an expert is
    on no living rank.
    """
    ranks, num_experts = layer.unit.shape
    split, whole = new_split(len(row), num_experts, ranks), new_split(len(row), num_experts, ranks)
    trial = Split(split.expert, split.after, split.first, split.copies, np.empty(len(row)), np.empty(ranks))
    search, other = np.empty((4, ranks), np.int64), np.empty((4, ranks), np.int64)
    nowhere, arrivals = np.zeros(ranks, np.bool_), np.zeros(ranks)
    link(row, layer.alive, layer.unit, layer.fixed, split)
    steps = _rescue(layer, split, arrivals, slots, experts, totals)
    while True:
        over = relieve(split, layer.unit, layer.speeds, target, search, nowhere)
        copy_shares(split, trial)
        slowest = least_limit(trial, layer.unit, layer.speeds, target if over > 0.0 else layer.floor, other)
        totals[steps] = layer.horizon * slowest + _movement(layer, arrivals)
        if over <= CLOSE * target or steps + 2 > len(slots):
            return steps
        step = _best_step(layer, split, trial, whole, search, other, arrivals, target, over)
        if step.slot == NONE:
            return steps
        if step.slot2 != NONE:
            _arrive(split, step.slot2, step.expert2, layer.load_in, arrivals)
            slots[steps], experts[steps] = step.slot2, step.expert2
            steps += 1
            totals[steps] = np.inf
        _arrive(split, step.slot, step.expert, layer.load_in, arrivals)
        _take(layer, split, step)
        slots[steps], experts[steps] = step.slot, step.expert
        steps += 1


@helper()
def _take(layer: Layer, split: Split, step: Step) -> None:
    if step.slot2 == NONE:
        put(split, step.slot, step.expert, layer.unit, layer.fixed)
    else:
        swap_slots(split, step.slot, step.slot2, layer.unit, layer.fixed)


@helper()
def _movement(layer: Layer, arrivals: Array) -> float:
    """Seconds, as the objective counts them."""
    slowest = total = 0.0
    for seconds in arrivals:
        slowest = max(slowest, seconds)
        total += seconds
    return layer.exposed * (slowest + layer.move_price * total)


@helper()
def _arrive(split: Split, slot: int, expert: int, load_in: Array, arrivals: Array) -> None:
    rank = slot // (len(split.share) // len(arrivals))
    arrivals[rank] += load_in[rank, expert]
    if split.after[slot] != TWIN:
        arrivals[rank] -= load_in[rank, split.expert[slot]]


@helper()
def _price(layer: Layer, arrivals: Array, rank: int, expert: int) -> float:
    """Seconds that loading an expert adds to the objective."""
    before = _movement(layer, arrivals)
    arrivals[rank] += layer.load_in[rank, expert]
    after = _movement(layer, arrivals)
    arrivals[rank] -= layer.load_in[rank, expert]
    return after - before


@helper()
def _spare(split: Split, slot: int, alive: NDArray[np.bool_]) -> bool:
    """Whether the slot may be overwritten."""
    rank = slot // (len(split.share) // len(alive))
    return bool(alive[rank] and (split.after[slot] == TWIN or split.copies[split.expert[slot]] > 1))


@helper()
def _rescue(layer: Layer, split: Split, arrivals: Array, slots: Indices, experts: Indices, totals: Array) -> int:
    """Load experts that no living rank holds into the spare slots of the least busy ranks; how many."""
    each = len(split.share) // len(arrivals)
    steps = 0
    for expert in range(len(split.first)):
        if split.first[expert] != NONE:
            continue
        best = NONE
        for slot in range(len(split.share)):
            if _spare(split, slot, layer.alive) and (
                best == NONE or split.busy[slot // each] < split.busy[best // each]
            ):
                best = slot
        _arrive(split, best, expert, layer.load_in, arrivals)
        put(split, best, expert, layer.unit, layer.fixed)
        split.share[best] = 1.0
        split.busy[best // each] += layer.unit[best // each, expert]
        slots[steps], experts[steps], totals[steps] = best, expert, np.inf
        steps += 1
    return steps


@helper()
def _best_step(
    layer: Layer,
    split: Split,
    trial: Split,
    whole: Split,
    search: Indices,
    other: Indices,
    arrivals: Array,
    target: float,
    over: float,
) -> Step:
    """What saves most seconds, by how much less work is over the limit."""
    each = len(split.share) // len(arrivals)
    inside, outside = np.zeros(len(arrivals), np.bool_), np.zeros(len(arrivals), np.bool_)
    width = 0.0
    for rank in range(len(arrivals)):
        inside[rank] = search[REACHED, rank] > 0
        outside[rank] = not inside[rank]
        if inside[rank]:
            width += layer.speeds[rank]
    worth = layer.horizon / width  # seconds of the horizon for each second of work that finds a place
    drains = np.zeros(len(split.first))
    expert = _drain(layer, split, trial, inside, outside, other, target, over, drains)
    room = _room(layer, split, outside, target)
    best = Step(NONE, NONE, NONE, NONE, 0.0, 0.0)
    while True:
        rank = int(np.argmax(room))
        most = min(room[rank], drains[expert])
        if most <= 0.0 or (best.slot != NONE and worth * most <= best.score):
            break
        room[rank] = 0.0
        price = _price(layer, arrivals, rank, expert)
        for slot in range(rank * each, rank * each + each):
            if _spare(split, slot, layer.alive):
                gain = _takes(layer, split, trial, inside, other, target, slot, expert, drains[expert])
                if gain > SAME * over and (best.slot == NONE or worth * gain - price > best.score):
                    best = Step(slot, expert, NONE, NONE, gain, worth * gain - price)
    if best.slot == NONE:
        return _best_pair(layer, split, whole, inside, other, arrivals, target, over, worth)
    for nearer in range(len(drains)):  # as good for this slot, and cheaper to load
        if drains[nearer] >= best.gain * (1.0 - SAME):
            score = worth * best.gain - _price(layer, arrivals, best.slot // each, nearer)
            if score > best.score:
                best = Step(best.slot, nearer, NONE, NONE, best.gain, score)
    return best


@helper()
def _room(layer: Layer, split: Split, outside: NDArray[np.bool_], target: float) -> Array:
    """[rank] bound on the work that a rank outside could take: what is free and what it shares with other ranks."""
    each = len(split.share) // len(outside)
    room = np.zeros(len(outside))
    for slot in range(len(split.share)):
        rank = slot // each
        if outside[rank] and split.copies[split.expert[slot]] > 1:
            part = split.share[slot] + layer.fixed[split.expert[slot]]
            room[rank] += part * layer.unit[rank, split.expert[slot]] * layer.speeds[rank]
    for rank in range(len(room)):
        if outside[rank]:
            room[rank] += max(0.0, target - split.busy[rank]) * layer.speeds[rank]
    return room


@helper()
def _drain(
    layer: Layer,
    split: Split,
    trial: Split,
    inside: NDArray[np.bool_],
    outside: NDArray[np.bool_],
    other: Indices,
    target: float,
    over: float,
    drains: Array,
) -> int:
    """The expert that would take most with it if it left the bottleneck; sets `drains` of those it looked at."""
    each = len(split.share) // len(inside)
    work = np.zeros(len(split.first))
    for slot in range(len(split.share)):
        # An expert with tokens inside has no slot outside, or they would have gone there.
        if split.share[slot] > 0.0 and inside[slot // each]:
            expert = split.expert[slot]
            work[expert] = layer.unit[slot // each, expert] * layer.speeds[slot // each]
    best = 0
    for _ in range(DRAINS):
        expert = int(np.argmax(work))
        if work[expert] <= drains[best]:
            break
        work[expert] = 0.0
        copy_shares(split, trial)
        slot = split.first[expert]
        while slot >= 0:
            trial.busy[slot // each] -= layer.unit[slot // each, expert] * trial.share[slot]
            trial.share[slot] = 0.0
            slot = split.after[slot]
        drains[expert] = over - relieve(trial, layer.unit, layer.speeds, target, other, outside)
        if drains[expert] > drains[best]:
            best = expert
    return best


@helper()
def _takes(
    layer: Layer,
    split: Split,
    trial: Split,
    inside: NDArray[np.bool_],
    other: Indices,
    target: float,
    slot: int,
    expert: int,
    work: float,
) -> float:
    """How much of `work` from the bottleneck finds a place if it comes with its expert to this slot, overwriting what
    is there."""
    rank, was = slot // (len(split.share) // len(inside)), split.expert[slot]
    lost, before, linked = 0.0, NONE, split.after[slot] != TWIN
    copy_shares(split, trial)
    if linked:
        before = unlink(split, slot)
        heir = bequeath(trial, slot, layer.unit)
        if heir != NONE and inside[heir]:
            lost = (trial.busy[heir] - split.busy[heir]) * layer.speeds[heir]
        trial.busy[rank] -= layer.unit[rank, was] * layer.fixed[was]
    trial.busy[rank] += work / layer.speeds[rank] + layer.unit[rank, expert] * layer.fixed[expert]
    left = relieve(trial, layer.unit, layer.speeds, target, other, inside)
    if linked:
        relink(split, slot, before)
    return work - left - lost


@helper()
def _best_pair(
    layer: Layer,
    split: Split,
    whole: Split,
    inside: NDArray[np.bool_],
    other: Indices,
    arrivals: Array,
    target: float,
    over: float,
    worth: float,
) -> Step:
    """The best of the most promising double moves."""
    each = len(split.share) // len(inside)
    guess, nowhere = np.zeros(PAIRS), np.zeros(len(inside), np.bool_)
    pairs = np.full((PAIRS, 2), NONE, np.int64)  # slot outside, slot inside
    _promising(layer, split, inside, target, over, guess, pairs)
    best = Step(NONE, NONE, NONE, NONE, 0.0, 0.0)
    for i in range(PAIRS):
        outer, inner = pairs[i, 0], pairs[i, 1]
        if outer == NONE:
            continue
        step = Step(outer, split.expert[inner], inner, split.expert[outer], 0.0, 0.0)
        copy_split(split, whole)
        _take(layer, whole, step)
        gain = over - relieve(whole, layer.unit, layer.speeds, target, other, nowhere)
        score = worth * gain - _price(layer, arrivals, outer // each, step.expert)
        score -= _price(layer, arrivals, inner // each, step.expert2)
        if gain > SAME * over and (best.slot == NONE or score > best.score):
            best = Step(outer, step.expert, inner, step.expert2, gain, score)
    return best


@helper()
def _promising(
    layer: Layer, split: Split, inside: NDArray[np.bool_], target: float, over: float, guess: Array, pairs: Indices
) -> None:
    """Swaps that move about as much work out of the bottleneck as there is too much, and no more than fits."""
    each = len(split.share) // len(inside)
    worst = 0
    for outer in range(len(split.share)):
        there = outer // each
        if inside[there] or split.after[outer] == TWIN:
            continue
        goes = split.expert[outer]
        back = layer.unit[there, goes] * (split.share[outer] + layer.fixed[goes]) * layer.speeds[there]
        free = (target - split.busy[there]) * layer.speeds[there]
        for inner in range(len(split.share)):
            here = inner // each
            if not inside[here] or split.after[inner] == TWIN:
                continue
            comes = split.expert[inner]
            sent = layer.unit[here, comes] * (split.share[inner] + layer.fixed[comes]) * layer.speeds[here]
            gain = min(sent - back, over) - max(0.0, sent - back - free)
            if gain <= guess[worst] or holds(split, goes, here, each) or holds(split, comes, there, each):
                continue
            guess[worst] = gain
            pairs[worst, 0], pairs[worst, 1] = outer, inner
            worst = int(np.argmin(guess))


@njit()
def search_layers(
    chosen: Indices,
    rows: Indices,
    alive: NDArray[np.bool_],
    speeds: Array,
    unit: Array,
    fixed: Array,
    load_in: Array,
    floor: Array,
    prices: Array,
    slots: Indices,
    experts: Indices,
    totals: Array,
    counts: Indices,
) -> None:
    """:func:`search_layer` of the layers `chosen`; the rest of the arrays begins with [layer].

    The first target is the floor. Where what is left to pay is so much that a looser one may be better, some are
    tried too.
    """
    most = slots.shape[1]
    other_slots, other_experts = np.empty(most, np.int64), np.empty(most, np.int64)
    other_totals = np.empty(most + 1)
    horizon, exposed, move_price = prices
    for at in chosen:
        layer = Layer(alive, speeds, unit[at], fixed[at], load_in[at], floor[at], horizon, exposed, move_price)
        best = np.inf
        for looser in LOOSER:
            if best - horizon * layer.floor <= horizon * layer.floor * looser:
                break
            target = layer.floor * (1.0 + looser)
            count = search_layer(rows[at], layer, target, other_slots, other_experts, other_totals)
            total = np.inf
            for made in range(count + 1):
                total = min(total, other_totals[made])
            if total < best:
                best = total
                counts[at] = count
                for made in range(most):
                    slots[at, made], experts[at, made] = other_slots[made], other_experts[made]
                for made in range(most + 1):
                    totals[at, made] = other_totals[made]
