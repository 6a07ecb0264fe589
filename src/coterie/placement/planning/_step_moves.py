"""The search behind per_step: swaps and gifts of one layer's slots, each scenario with its best split.

A scenario's slowest rank takes as long as its bottleneck, the ranks that no replica leads out of, takes on average. So
let a rank in the bottleneck count by its speed, any other 0 (the dual of the split's linear program), and every expert
by the least counting of its ranks: these sum to the slowest rank's time, and for any other placement to a bound from
below. What a swap or a gift could gain at best is then two entries of a table. The most promising changes are tried
with the true split, and the first that lowers the objective is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective._steps import find_edge
from coterie.placement.objective.flows.chains import REACHED, Array, Indices, relieve
from coterie.placement.objective.flows.splitting import (
    SplitScratch,
    Step,
    draw_lines,
    new_step_scratch,
    split_best,
    split_step,
)

TRIED = 24
"""Changes tried in a round, by what they could gain at best."""

ROUNDS = 96
"""Most changes of a layer."""

BELOW = 1e-6
"""Share of a scenario's time by which the limit is lowered to see the bottleneck."""


class StepCase(NamedTuple):
    """What the search of a layer reads."""

    tokens: Array
    """[scenario, expert]"""
    weights: Array
    """[scenario]"""
    per_token: Array
    """[rank, expert] seconds."""
    touch: Array
    """[rank] seconds."""
    whole: bool
    speeds: Array
    """[rank]"""
    alive: NDArray[np.bool_]
    load_in: Array
    """[rank, expert] seconds to load; 0 where the rank has it."""
    floor: float
    horizon: float
    exposed: float
    move_price: float
    tail: float
    tail_share: float
    least: float
    """Share of the objective that a change must gain."""


class StepPlace(NamedTuple):
    """Where the search stands, and its tables."""

    row: Indices
    """[slot] expert"""
    held: NDArray[np.bool_]
    """[rank, expert]"""
    copies: Indices
    """[expert] living ranks that hold it."""
    arrivals: Array
    """[rank] seconds of loading."""
    times: Array
    """[scenario] seconds of the slowest rank."""
    trial: Array
    """[scenario] of a change that is tried."""
    low: Array
    """[scenario] seconds that no placement gets below."""
    rest: Array
    """[scenario + 1] what scenarios from this one on count at least."""
    dual: Array
    """[scenario, rank] weights of ranks."""
    second: Array
    """[scenario] what a second of it counts."""
    leave: Array
    """[slot] expected seconds added if it lost its expert; negative: saved."""
    join: Array
    """[rank, expert] if it got the expert besides."""
    go: Array
    """[slot, rank] if the slot's expert went to the rank."""
    guess: Array
    """[tried] seconds that a change could gain at best, over the horizon."""
    changes: Indices
    """[tried, 2] slot and expert of a gift, or slot and -1 - slot of a swap."""


@helper()
def stand(case: StepCase, place: StepPlace, row: Indices) -> None:
    """Begin at a placement in which no expert is twice on a rank."""
    ranks, experts = place.held.shape
    each = len(row) // ranks
    place.held[:] = False
    place.copies[:] = 0
    place.arrivals[:] = 0.0
    for slot in range(len(row)):
        expert, rank = row[slot], slot // each
        place.row[slot] = expert
        if case.alive[rank]:
            place.held[rank, expert] = True
            place.copies[expert] += 1
            place.arrivals[rank] += case.load_in[rank, expert]
    speed = 0.0
    for rank in range(ranks):
        speed += case.speeds[rank]
    for scenario in range(len(place.low)):
        work = 0.0
        for expert in range(experts):
            least = np.inf
            for rank in range(ranks):
                if case.alive[rank]:
                    least = min(least, case.per_token[rank, expert] * case.speeds[rank])
            work += case.tokens[scenario, expert] * least
        place.low[scenario] = work / speed
    place.rest[len(place.low)] = 0.0
    for scenario in range(len(place.low) - 1, -1, -1):
        counted = (1.0 - case.tail) * case.weights[scenario] * place.low[scenario]
        place.rest[scenario] = place.rest[scenario + 1] + counted


@helper()
def split_all(case: StepCase, place: StepPlace, scratch: SplitScratch, edge: float, most: float) -> float:
    """Set `trial`; what it counts over the scenarios, infinite as soon as that must be `most` or more."""
    total, steep = 0.0, case.tail / case.tail_share
    for scenario in range(len(place.trial)):
        step = Step(case.tokens[scenario], case.per_token, case.touch, case.whole, case.speeds, case.alive)
        seconds = split_step(place.row, step, scratch)
        place.trial[scenario] = seconds
        past = max(0.0, seconds - edge)
        total += case.weights[scenario] * ((1.0 - case.tail) * seconds + steep * past)
        if total + place.rest[scenario + 1] >= most:
            return np.inf
    return total


@helper()
def movement(case: StepCase, arrivals: Array) -> float:
    slowest = total = 0.0
    for seconds in arrivals:
        slowest = max(slowest, seconds)
        total += seconds
    return case.exposed * (slowest + case.move_price * total)


@helper()
def moved(case: StepCase, place: StepPlace, rank: int, more: float, other: int, further: float) -> float:
    """Movement once so many seconds of loading are added on two ranks."""
    place.arrivals[rank] += more
    place.arrivals[other] += further
    seconds = movement(case, place.arrivals)
    place.arrivals[rank] -= more
    place.arrivals[other] -= further
    return seconds


# What changes could gain at best.


@helper()
def look(case: StepCase, place: StepPlace, scratch: SplitScratch, edge: float) -> None:
    """The dual of every scenario's split, and the tables."""
    ranks = len(case.speeds)
    nowhere, steep = np.zeros(ranks, np.bool_), case.tail / case.tail_share
    place.leave[:] = 0.0
    place.join[:] = 0.0
    place.go[:] = 0.0
    for scenario in range(len(place.times)):
        past = steep if place.times[scenario] >= edge else 0.0
        place.second[scenario] = case.weights[scenario] * (1.0 - case.tail + past)
        if place.times[scenario] <= 0.0:
            continue
        step = Step(case.tokens[scenario], case.per_token, case.touch, case.whole, case.speeds, case.alive)
        draw_lines(step, scratch)
        split, lines = scratch.split, (scratch.unit, scratch.fixed)
        limit = split_best(place.row, case.alive, case.speeds, *lines, split, scratch.search)
        relieve(scratch.split, scratch.unit, case.speeds, limit * (1.0 - BELOW), scratch.search, nowhere)
        width = 0.0
        for rank in range(ranks):
            width += case.speeds[rank] if scratch.search[REACHED, rank] else 0.0
        for rank in range(ranks):
            inside = scratch.search[REACHED, rank] > 0 and width > 0.0
            place.dual[scenario, rank] = case.speeds[rank] / width if inside else 0.0
        tabulate(case, place, scratch, scenario)


@helper()
def tabulate(case: StepCase, place: StepPlace, scratch: SplitScratch, scenario: int) -> None:
    """Add one scenario to the tables."""
    ranks, experts = place.held.shape
    each, dual, second = len(place.row) // ranks, place.dual[scenario], place.second[scenario]
    most = place.times[scenario] - place.low[scenario]
    unit, fixed = scratch.unit, scratch.fixed
    for expert in range(experts):
        if case.tokens[scenario, expert] <= 0.0:
            continue
        now = np.inf
        for rank in range(ranks):
            if place.held[rank, expert]:
                now = min(now, dual[rank] * unit[rank, expert])
        for rank in range(ranks):
            if case.alive[rank] and not place.held[rank, expert]:
                value = dual[rank] * unit[rank, expert]
                place.join[rank, expert] += second * (value * fixed[expert] + max(min(value, now) - now, -most))
    for slot in range(len(place.row)):
        rank, expert = slot // each, place.row[slot]
        if not case.alive[rank] or case.tokens[scenario, expert] <= 0.0:
            continue
        now, without = np.inf, np.inf
        for other in range(ranks):
            if place.held[other, expert]:
                value = dual[other] * unit[other, expert]
                now = min(now, value)
                if other != rank:
                    without = min(without, value)
        saved = dual[rank] * unit[rank, expert] * fixed[expert]
        if place.copies[expert] > 1:
            place.leave[slot] += second * (without - now - saved)
        for other in range(ranks):
            if case.alive[other] and not place.held[other, expert]:
                value = dual[other] * unit[other, expert]
                place.go[slot, other] += second * (min(value, without) - now + value * fixed[expert] - saved)


@helper()
def propose(case: StepCase, place: StepPlace) -> None:
    """The changes that could gain most, movement paid."""
    ranks, experts = place.held.shape
    each, slots = len(place.row) // ranks, len(place.row)
    place.guess[:] = 0.0
    place.changes[:] = 0
    worst, now = 0, movement(case, place.arrivals)
    for slot in range(slots):
        rank, was = slot // each, place.row[slot]
        if not case.alive[rank]:
            continue
        if place.copies[was] > 1:
            for expert in range(experts):
                if place.held[rank, expert]:
                    continue
                gain = -case.horizon * (place.leave[slot] + place.join[rank, expert])
                if gain > place.guess[worst]:
                    more = case.load_in[rank, expert] - case.load_in[rank, was]
                    gain -= moved(case, place, rank, more, rank, 0.0) - now
                    worst = note(place, worst, gain, slot, expert)
        for other in range((rank + 1) * each, slots):
            there, comes = other // each, place.row[other]
            if not case.alive[there] or place.held[there, was] or place.held[rank, comes]:
                continue
            gain = -case.horizon * (place.go[slot, there] + place.go[other, rank])
            if gain > place.guess[worst]:
                more = case.load_in[rank, comes] - case.load_in[rank, was]
                further = case.load_in[there, was] - case.load_in[there, comes]
                gain -= moved(case, place, rank, more, there, further) - now
                worst = note(place, worst, gain, slot, -1 - other)


@helper()
def note(place: StepPlace, worst: int, gain: float, slot: int, what: int) -> int:
    """Put a change in the place of the least promising one, if it is more so; the least promising then."""
    if gain <= place.guess[worst]:
        return worst
    place.guess[worst], place.changes[worst, 0], place.changes[worst, 1] = gain, slot, what
    return int(np.argmin(place.guess))


# Changes.


@helper()
def change(case: StepCase, place: StepPlace, slot: int, what: int) -> int:
    """Make a gift or a swap; what undoes it at the same slot."""
    if what >= 0:
        was = place.row[slot]
        fill(case, place, slot, what)
        place.copies[was] -= 1
        place.copies[what] += 1
        return int(was)
    other = -1 - what
    mine, theirs = place.row[slot], place.row[other]
    fill(case, place, slot, theirs)
    fill(case, place, other, mine)
    return what


@helper()
def fill(case: StepCase, place: StepPlace, slot: int, expert: int) -> None:
    rank, was = slot // (len(place.row) // len(case.alive)), place.row[slot]
    place.held[rank, was], place.held[rank, expert] = False, True
    place.arrivals[rank] += case.load_in[rank, expert] - case.load_in[rank, was]
    place.row[slot] = expert


@helper()
def improve_once(case: StepCase, place: StepPlace, scratch: SplitScratch) -> bool:
    """Take the first of the promising changes that lowers the objective; whether there was one."""
    edge = find_edge(place.times, case.weights, case.tail_share) if case.tail > 0.0 else 0.0
    lean, steep = 1.0 - case.tail, case.tail / case.tail_share
    floor = case.floor - case.tail * edge
    seconds = 0.0
    for scenario in range(len(place.times)):
        past = max(0.0, place.times[scenario] - edge)
        seconds += case.weights[scenario] * (lean * place.times[scenario] + steep * past)
    if seconds <= floor:
        return False
    now = case.horizon * seconds + movement(case, place.arrivals)
    look(case, place, scratch, edge)
    propose(case, place)
    for _ in range(TRIED):
        at = int(np.argmax(place.guess))
        if place.guess[at] <= case.least * now:
            return False
        place.guess[at] = 0.0
        slot, what = place.changes[at, 0], place.changes[at, 1]
        back = change(case, place, slot, what)
        wanted = now * (1.0 - case.least) - movement(case, place.arrivals)
        if wanted > case.horizon * floor:
            found = split_all(case, place, scratch, edge, wanted / case.horizon)
            if case.horizon * max(found, floor) < wanted:
                for scenario in range(len(place.times)):
                    place.times[scenario] = place.trial[scenario]
                return True
        change(case, place, slot, back)
    return False


@njit()
def search_per_step(
    chosen: Indices,
    rows: Indices,
    tokens: Array,
    weights: Array,
    touch: Array,
    per_token: Array,
    load_in: Array,
    speeds: Array,
    alive: NDArray[np.bool_],
    whole: bool,
    floor: Array,
    numbers: Array,
) -> None:
    """Improve `rows` [layer, slot] of the chosen layers in place.

    Every expert must be on a living rank and none twice on one. `tokens` [layer, scenario, expert]; `numbers` are
    horizon, exposed, move_price, the tail's weight and share, and the share that a change must gain.
    """
    slots, (ranks, experts), scenarios = rows.shape[1], per_token.shape[1:], len(weights)
    scratch = new_step_scratch(slots, experts, ranks)
    place = StepPlace(
        row=np.zeros(slots, np.int64),
        held=np.zeros((ranks, experts), np.bool_),
        copies=np.zeros(experts, np.int64),
        arrivals=np.zeros(ranks),
        times=np.zeros(scenarios),
        trial=np.zeros(scenarios),
        low=np.zeros(scenarios),
        rest=np.zeros(scenarios + 1),
        dual=np.zeros((scenarios, ranks)),
        second=np.zeros(scenarios),
        leave=np.zeros(slots),
        join=np.zeros((ranks, experts)),
        go=np.zeros((slots, ranks)),
        guess=np.zeros(TRIED),
        changes=np.zeros((TRIED, 2), np.int64),
    )
    for at in chosen:
        case = StepCase(
            tokens[at],
            weights,
            per_token[at],
            touch,
            whole,
            speeds,
            alive,
            load_in[at],
            floor[at],
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            numbers[4],
            numbers[5],
        )
        if case.horizon <= 0.0:
            continue
        stand(case, place, rows[at])
        split_all(case, place, scratch, 0.0, np.inf)
        for scenario in range(scenarios):
            place.times[scenario] = place.trial[scenario]
        for _ in range(ROUNDS):
            if not improve_once(case, place, scratch):
                break
        for slot in range(slots):
            rows[at, slot] = place.row[slot]
