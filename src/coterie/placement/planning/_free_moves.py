"""Search of one layer's moves for engines that share tokens freely; each move relieves the bottleneck the most.

Given a limit on every rank's seconds and optimal shares, excess work is in a bottleneck: ranks from which no replica
leads outside. A move helps only if it gives an expert of the bottleneck a replica outside. It helps by the smaller of
the work that this expert can drain and the work that the receiving rank (and the ranks it can push to) can take. One
search over experts and one over slots therefore finds the best pair. A slot may be overwritten if its expert has
another slot. If no such slot helps, two experts change places, one of them in the bottleneck.

A layer has one or more scenarios, each with its own shares, limit and bottleneck; the value of a move is the seconds it
saves over all scenarios. Planning for the mean step has one scenario.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.objective.flows.chains import (
    NONE,
    REACHED,
    TWIN,
    Indices,
    Split,
    bequeath,
    copy_shares,
    least_limit,
    link,
    link_in,
    new_split,
    rank_holds,
    relieve,
    relink,
    swap_shares,
    unlink,
)
from coterie.placement.objective.flows.splitting import Step, draw_lines
from coterie.placement.planning.search.state import Prices, movement

DRAINS = 8
"""Number of experts of a bottleneck, heaviest first, for which the drained work is computed."""

PAIRS = 16
"""Number of swaps of two experts that are evaluated, the most promising by a rough estimate."""

ROOMIEST, SLOTS_TRIED = 4, 3
"""Numbers of ranks tried for a new replica (most room first) and of slots tried per rank (least work first) if a layer
has several scenarios. Trying all takes ten times as long on 32 ranks."""

CLOSE = 1e-5
"""Work above the limit that is ignored, as a share of the limit."""

LOOSER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Targets to try, as shares above the floor; a looser target is tried only if the best plan so far exceeds it."""

SAME = 1e-6
"""Relative slack for comparing gains."""


class Layer(NamedTuple):
    """Input of the search of a layer."""

    alive: NDArray[np.bool_]
    speeds: Array
    unit: Array
    """[scenario, rank, expert] seconds of all the expert's tokens, without the fixed part."""
    fixed: Array
    """[scenario, expert] fixed cost of a slot, as a multiple of `unit`."""
    weights: Array
    """[scenario] probabilities, which add up to 1."""
    floor: Array
    """[scenario] seconds below which a faster placement counts as no gain."""
    load_in: Array
    """[rank, expert] seconds to load the expert; 0 if the rank holds it."""
    prices: Prices
    least: float
    """Seconds that a move must save, before its own cost."""


class Shares(NamedTuple):
    """Slots of a layer and their shares in every scenario."""

    links: Split
    """Slots of each expert, the same in all scenarios; the shares and seconds in it are not used."""
    share: Array
    """[scenario, slot] share of the expert's tokens."""
    busy: Array
    """[scenario, rank] seconds of the rank."""


class Tables(NamedTuple):
    """Working arrays of a search."""

    search: Indices
    """[scenario, 4, rank] search arrays (see `flows.chains`) that mark each scenario's bottleneck."""
    other: Indices
    """[4, rank] search array of a trial."""
    inside: NDArray[np.bool_]
    """[scenario, rank] whether a rank is in the bottleneck."""
    outside: NDArray[np.bool_]
    """[scenario, rank] whether a rank is not in the bottleneck."""
    nowhere: NDArray[np.bool_]
    """[rank] all False: no rank is closed."""
    target: Array
    """[scenario] limit on every rank's seconds."""
    over: Array
    """[scenario] work (speed x seconds) above the limit."""
    times: Array
    """[scenario] seconds of the slowest rank."""
    worth: Array
    """[scenario] seconds saved over the horizon per unit of work that is moved below the limit."""
    drains: Array
    """[scenario, expert] work that would leave the bottleneck with an expert."""
    room: Array
    """[scenario, rank] upper bound on the work that a rank outside the bottleneck could take."""
    arrivals: Array
    """[rank] seconds to load the experts that are new on the rank."""


class Move(NamedTuple):
    """One move, or a swap of two experts if `slot2` is not NONE; `slot` is outside the bottleneck."""

    slot: int
    expert: int
    slot2: int
    expert2: int
    gain: float
    """Seconds saved over the horizon, before the cost of movement."""
    score: float
    """Seconds saved over the horizon, after the cost of movement."""


@helper()
def _at(shares: Shares, scenario: int) -> Split:
    """Return the split of one scenario."""
    links = shares.links
    return Split(links.expert, links.after, links.first, links.copies, shares.share[scenario], shares.busy[scenario])


@helper()
def _new_shares(scenarios: int, slots: int, experts: int, ranks: int) -> Shares:
    return Shares(new_split(slots, experts, ranks), np.empty((scenarios, slots)), np.empty((scenarios, ranks)))


@helper()
def search_layer(row: Indices, layer: Layer, looser: float, slots: Indices, experts: Indices, totals: Array) -> int:
    """Fill `slots` and `experts` [move] and the objective `totals` [moves made]; return the number of moves.

    The objective is infinite if the map is not valid: between the two moves of a swap, or while an expert is on no
    living rank.
    """
    scenarios, ranks, num_experts = layer.unit.shape
    now = _new_shares(scenarios, len(row), num_experts, ranks)
    whole = _new_shares(scenarios, len(row), num_experts, ranks)
    trial = Shares(now.links, np.empty((scenarios, len(row))), np.empty((scenarios, ranks)))
    tables = Tables(
        search=np.zeros((scenarios, 4, ranks), np.int64),
        other=np.zeros((4, ranks), np.int64),
        inside=np.zeros((scenarios, ranks), np.bool_),
        outside=np.zeros((scenarios, ranks), np.bool_),
        nowhere=np.zeros(ranks, np.bool_),
        target=layer.floor * (1.0 + looser),
        over=np.zeros(scenarios),
        times=np.zeros(scenarios),
        worth=np.zeros(scenarios),
        drains=np.zeros((scenarios, num_experts)),
        room=np.zeros((scenarios, ranks)),
        arrivals=np.zeros(ranks),
    )
    each = len(row) // ranks
    for slot in range(len(row)):
        if layer.alive[slot // each]:
            tables.arrivals[slot // each] += layer.load_in[slot // each, row[slot]]
    for scenario in range(scenarios):
        link(row, layer.alive, layer.unit[scenario], layer.fixed[scenario], _at(now, scenario))
    steps = _rescue(layer, now, tables, slots, experts, totals)
    while True:
        left = _relieve_all(layer, now, trial, tables)
        totals[steps] = layer.prices.horizon * _expected(layer, tables) + movement(tables.arrivals, layer.prices)
        if not left or steps + 2 > len(slots):
            return steps
        move = _best_move(layer, now, trial, whole, tables)
        if move.slot == NONE:
            return steps
        if move.slot2 != NONE:
            _arrive(now.links, move.slot2, move.expert2, layer.load_in, tables.arrivals)
            slots[steps], experts[steps] = move.slot2, move.expert2
            steps += 1
            totals[steps] = np.inf
        _arrive(now.links, move.slot, move.expert, layer.load_in, tables.arrivals)
        _take(layer, now, move)
        slots[steps], experts[steps] = move.slot, move.expert
        steps += 1


@helper()
def _relieve_all(layer: Layer, now: Shares, trial: Shares, tables: Tables) -> bool:
    """Push work below the targets as far as possible; return whether some work is left above them."""
    left = False
    for scenario in range(len(tables.over)):
        split, tried, target = _at(now, scenario), _at(trial, scenario), tables.target[scenario]
        unit, search = layer.unit[scenario], tables.search[scenario]
        over = relieve(split, unit, layer.speeds, target, search, tables.nowhere)
        copy_shares(split, tried)
        start = target if over > 0.0 else layer.floor[scenario]
        tables.times[scenario] = least_limit(tried, unit, layer.speeds, start, tables.other)
        tables.over[scenario] = over
        left = left or over > CLOSE * target
    return left


@helper()
def _expected(layer: Layer, tables: Tables) -> float:
    """Return the expected seconds of the slowest rank; set `worth` to the cost per second of each scenario."""
    total = 0.0
    for scenario in range(len(tables.times)):
        total += layer.weights[scenario] * tables.times[scenario]
        tables.worth[scenario] = layer.prices.horizon * layer.weights[scenario]
    return total


@helper()
def _take(layer: Layer, shares: Shares, move: Move) -> None:
    links, slot = _at(shares, 0), move.slot
    if move.slot2 != NONE:
        for scenario in range(len(shares.busy)):
            swap_shares(_at(shares, scenario), slot, move.slot2, layer.unit[scenario], layer.fixed[scenario])
        unlink(links, slot)
        unlink(links, move.slot2)
        link_in(links, slot, move.expert)
        link_in(links, move.slot2, move.expert2)
        return
    rank, was, linked = slot // (len(links.expert) // len(links.busy)), links.expert[slot], links.after[slot] != TWIN
    if linked:
        unlink(links, slot)
    for scenario in range(len(shares.busy)):
        unit, fixed = layer.unit[scenario], layer.fixed[scenario]
        if linked:
            bequeath(_at(shares, scenario), slot, unit)
            shares.busy[scenario, rank] -= unit[rank, was] * fixed[was]
        shares.busy[scenario, rank] += unit[rank, move.expert] * fixed[move.expert]
    link_in(links, slot, move.expert)


@helper()
def _arrive(split: Split, slot: int, expert: int, load_in: Array, arrivals: Array) -> None:
    rank = slot // (len(split.expert) // len(arrivals))
    arrivals[rank] += load_in[rank, expert]
    if split.after[slot] != TWIN:
        arrivals[rank] -= load_in[rank, split.expert[slot]]


@helper()
def _price(layer: Layer, arrivals: Array, rank: int, expert: int) -> float:
    """Return the seconds that loading an expert adds to the objective."""
    before = movement(arrivals, layer.prices)
    arrivals[rank] += layer.load_in[rank, expert]
    after = movement(arrivals, layer.prices)
    arrivals[rank] -= layer.load_in[rank, expert]
    return after - before


@helper()
def _spare(split: Split, slot: int, alive: NDArray[np.bool_]) -> bool:
    """Return whether the slot may be overwritten: its rank is alive and its expert has another slot."""
    rank = slot // (len(split.expert) // len(alive))
    return bool(alive[rank] and (split.after[slot] == TWIN or split.copies[split.expert[slot]] > 1))


@helper()
def _rescue(layer: Layer, now: Shares, tables: Tables, slots: Indices, experts: Indices, totals: Array) -> int:
    """Load experts that no living rank holds into spare slots of the least busy ranks; return their number."""
    links, busy = now.links, np.empty(len(layer.alive))
    each, steps = len(links.expert) // len(busy), 0
    for expert in range(len(links.first)):
        if links.first[expert] != NONE:
            continue
        for rank in range(len(busy)):
            busy[rank] = 0.0
            for scenario in range(len(layer.weights)):
                busy[rank] += layer.weights[scenario] * now.busy[scenario, rank]
        best = NONE
        for slot in range(len(links.expert)):
            if _spare(links, slot, layer.alive) and (best == NONE or busy[slot // each] < busy[best // each]):
                best = slot
        _arrive(links, best, expert, layer.load_in, tables.arrivals)
        _take(layer, now, Move(best, expert, NONE, NONE, 0.0, 0.0))
        for scenario in range(len(layer.weights)):
            now.share[scenario, best] = 1.0
            now.busy[scenario, best // each] += layer.unit[scenario, best // each, expert]
        slots[steps], experts[steps], totals[steps] = best, expert, np.inf
        steps += 1
    return steps


@helper()
def _best_move(layer: Layer, now: Shares, trial: Shares, whole: Shares, tables: Tables) -> Move:
    """Return the move that saves the most seconds, estimated by the work it moves below the limit."""
    links, (scenarios, ranks) = now.links, now.busy.shape
    each, needed = len(links.expert) // ranks, 0.0
    for scenario in range(scenarios):
        width, over = 0.0, tables.over[scenario] > 0.0
        for rank in range(ranks):
            inside = over and tables.search[scenario, REACHED, rank] > 0
            tables.inside[scenario, rank], tables.outside[scenario, rank] = inside, not inside
            width += layer.speeds[rank] if inside or not over else 0.0
        tables.worth[scenario] /= width
        needed += tables.worth[scenario] * tables.over[scenario]
    needed = max(SAME * needed, layer.least)
    expert = _fill_drains(layer, now, trial, tables)
    work = np.zeros(len(links.expert))
    _fill_room(layer, now, tables, work)
    gain = np.zeros(len(links.first))
    room, bound = np.zeros(ranks), np.zeros(ranks)
    for scenario in range(scenarios):
        worth, drains = tables.worth[scenario], tables.drains[scenario]
        for other in range(len(gain)):
            gain[other] += worth * drains[other]
        for rank in range(ranks):
            room[rank] += worth * tables.room[scenario, rank]
            bound[rank] += worth * min(tables.room[scenario, rank], drains[expert])
    best = Move(NONE, NONE, NONE, NONE, 0.0, 0.0)
    few = scenarios > 1
    for _ in range(min(ranks, ROOMIEST) if few else ranks):
        rank = int(np.argmax(room))
        room[rank] = -1.0
        if bound[rank] <= 0.0 or (best.slot != NONE and bound[rank] <= best.score):
            continue
        price = _price(layer, tables.arrivals, rank, expert)
        for index in range(min(each, SLOTS_TRIED) if few else each):
            slot = rank * each + (int(np.argmin(work[rank * each : rank * each + each])) if few else index)
            work[slot] = np.inf
            if _spare(links, slot, layer.alive):
                saved = _takes(layer, now, trial, tables, slot, expert)
                if saved > needed and (best.slot == NONE or saved - price > best.score):
                    best = Move(slot, expert, NONE, NONE, saved, saved - price)
    if best.slot == NONE:
        return _best_pair(layer, now, whole, tables, needed)
    for nearer in range(len(gain)):  # prefer an expert that gains as much in this slot and is cheaper to load
        if gain[nearer] >= best.gain * (1.0 - SAME) and not rank_holds(links, nearer, best.slot // each, each):
            score = best.gain - _price(layer, tables.arrivals, best.slot // each, nearer)
            if score > best.score:
                best = Move(best.slot, nearer, NONE, NONE, best.gain, score)
    return best


@helper()
def _fill_room(layer: Layer, now: Shares, tables: Tables, work: Array) -> None:
    """Fill `room` and `work` [slot].

    The room of a rank outside is its free time plus the work of its replicated experts. The work of a slot is infinite
    if the slot may not be overwritten.
    """
    links, (scenarios, ranks) = now.links, now.busy.shape
    each = len(links.expert) // ranks
    for scenario in range(scenarios):
        room, outside = tables.room[scenario], tables.outside[scenario]
        room[:] = 0.0
        for slot in range(len(links.expert)):
            rank, expert = slot // each, links.expert[slot]
            if outside[rank] and links.copies[expert] > 1:
                part = now.share[scenario, slot] + layer.fixed[scenario, expert]
                room[rank] += part * layer.unit[scenario, rank, expert] * layer.speeds[rank]
            if _spare(links, slot, layer.alive):
                part = now.share[scenario, slot]
                work[slot] += tables.worth[scenario] * part * layer.unit[scenario, rank, expert] * layer.speeds[rank]
            else:
                work[slot] = np.inf
        for rank in range(ranks):
            if outside[rank]:
                room[rank] += max(0.0, tables.target[scenario] - now.busy[scenario, rank]) * layer.speeds[rank]


@helper()
def _fill_drains(layer: Layer, now: Shares, trial: Shares, tables: Tables) -> int:
    """Return the expert that would take the most work out of the bottlenecks; fill `drains` of the experts tried."""
    links, (scenarios, ranks) = now.links, now.busy.shape
    each = len(links.expert) // ranks
    heavy, work = np.zeros(len(links.first)), np.zeros(len(links.first))
    tables.drains[:] = 0.0
    for scenario in range(scenarios):
        work[:] = 0.0
        for slot in range(len(links.expert)):
            # An expert with tokens inside has no slot outside, else the tokens would have been pushed there.
            rank, expert = slot // each, links.expert[slot]
            if now.share[scenario, slot] > 0.0 and tables.inside[scenario, rank]:
                work[expert] = layer.unit[scenario, rank, expert] * layer.speeds[rank]
        for expert in range(len(work)):
            heavy[expert] += tables.worth[scenario] * work[expert]
    best, most = 0, 0.0
    for _ in range(DRAINS):
        expert = int(np.argmax(heavy))
        if heavy[expert] <= most:
            break
        heavy[expert] = total = 0.0
        for scenario in range(scenarios):
            if tables.over[scenario] <= 0.0:
                continue
            split, tried = _at(now, scenario), _at(trial, scenario)
            unit, search = layer.unit[scenario], tables.other
            copy_shares(split, tried)
            slot = links.first[expert]
            while slot >= 0:
                tried.busy[slot // each] -= unit[slot // each, expert] * tried.share[slot]
                tried.share[slot] = 0.0
                slot = links.after[slot]
            left = relieve(tried, unit, layer.speeds, tables.target[scenario], search, tables.outside[scenario])
            tables.drains[scenario, expert] = tables.over[scenario] - left
            total += tables.worth[scenario] * (tables.over[scenario] - left)
        if total > most:
            best, most = expert, total
    return best


@helper()
def _takes(layer: Layer, now: Shares, trial: Shares, tables: Tables, slot: int, expert: int) -> float:
    """Return the seconds saved if this slot is overwritten with an expert and takes the work it drains."""
    links, ranks = now.links, len(layer.speeds)
    rank, was = slot // (len(links.expert) // ranks), links.expert[slot]
    before, linked, saved = NONE, links.after[slot] != TWIN, 0.0
    if linked:
        before = unlink(links, slot)
    for scenario in range(len(tables.over)):
        split, tried, unit = _at(now, scenario), _at(trial, scenario), layer.unit[scenario]
        fixed, inside, work, lost = layer.fixed[scenario], tables.inside[scenario], tables.drains[scenario, expert], 0.0
        copy_shares(split, tried)
        if linked:
            heir = bequeath(tried, slot, unit)
            if heir != NONE and inside[heir]:
                lost = (tried.busy[heir] - split.busy[heir]) * layer.speeds[heir]
            tried.busy[rank] -= unit[rank, was] * fixed[was]
        tried.busy[rank] += work / layer.speeds[rank] + unit[rank, expert] * fixed[expert]
        left = relieve(tried, unit, layer.speeds, tables.target[scenario], tables.other, inside)
        saved += tables.worth[scenario] * (work - left - lost)
    if linked:
        relink(links, slot, before)
    return saved


@helper()
def _best_pair(layer: Layer, now: Shares, whole: Shares, tables: Tables, needed: float) -> Move:
    """Return the best of the most promising swaps of two experts."""
    links, ranks = now.links, len(layer.speeds)
    each = len(links.expert) // ranks
    guess = np.zeros(PAIRS)
    pairs = np.full((PAIRS, 2), NONE, np.int64)  # slot outside, slot inside
    _promising(layer, now, tables, guess, pairs)
    best = Move(NONE, NONE, NONE, NONE, 0.0, 0.0)
    for index in range(PAIRS):
        outer, inner = pairs[index, 0], pairs[index, 1]
        if outer == NONE:
            continue
        move = Move(outer, links.expert[inner], inner, links.expert[outer], 0.0, 0.0)
        _copy_links(links, whole.links)
        for scenario in range(len(tables.over)):
            copy_shares(_at(now, scenario), _at(whole, scenario))
        _take(layer, whole, move)
        gain = 0.0
        for scenario in range(len(tables.over)):
            split, target = _at(whole, scenario), tables.target[scenario]
            left = relieve(split, layer.unit[scenario], layer.speeds, target, tables.other, tables.nowhere)
            gain += tables.worth[scenario] * (tables.over[scenario] - left)
        score = gain - _price(layer, tables.arrivals, outer // each, move.expert)
        score -= _price(layer, tables.arrivals, inner // each, move.expert2)
        if gain > needed and (best.slot == NONE or score > best.score):
            best = Move(outer, move.expert, inner, move.expert2, gain, score)
    return best


@helper()
def _copy_links(links: Split, to: Split) -> None:
    copy_row(to.expert, links.expert)
    copy_row(to.after, links.after)
    copy_row(to.first, links.first)
    copy_row(to.copies, links.copies)


@helper()
def _promising(layer: Layer, now: Shares, tables: Tables, guess: Array, pairs: Indices) -> None:
    """Find swaps that move about as much work out of the bottlenecks as is above the limit, and no more than fits."""
    links, (scenarios, ranks) = now.links, now.busy.shape
    slots = len(links.expert)
    each, worst = slots // ranks, 0
    taken = np.zeros((slots, scenarios))  # [slot, scenario] work of a slot
    for slot in range(slots):
        rank, expert = slot // each, links.expert[slot]
        for scenario in range(scenarios):
            part = now.share[scenario, slot] + layer.fixed[scenario, expert]
            taken[slot, scenario] = layer.unit[scenario, rank, expert] * part * layer.speeds[rank]
    for outer in range(slots):
        there, goes = outer // each, links.expert[outer]
        if links.after[outer] == TWIN:
            continue
        for inner in range(slots):
            here, comes = inner // each, links.expert[inner]
            if here == there or links.after[inner] == TWIN:
                continue
            gain = 0.0
            for scenario in range(scenarios):
                if tables.inside[scenario, here] and not tables.inside[scenario, there]:
                    free = (tables.target[scenario] - now.busy[scenario, there]) * layer.speeds[there]
                    sent = taken[inner, scenario] - taken[outer, scenario]
                    gain += tables.worth[scenario] * (min(sent, tables.over[scenario]) - max(0.0, sent - free))
            if gain <= guess[worst] or rank_holds(links, goes, here, each) or rank_holds(links, comes, there, each):
                continue
            guess[worst] = gain
            pairs[worst, 0], pairs[worst, 1] = outer, inner
            worst = int(np.argmin(guess))


@njit()
def search_layers(
    chosen: Indices,
    rows: Indices,
    unit: Array,
    fixed: Array,
    tokens: Array,
    weights: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    alive: NDArray[np.bool_],
    speeds: Array,
    load_in: Array,
    floor: Array,
    prices: Prices,
    slots: Indices,
    experts: Indices,
    totals: Array,
    counts: Indices,
) -> None:
    """Run :func:`search_layer` for the `chosen` layers; the output arrays begin with [layer].

    `unit` [layer, scenario, rank, expert] and `fixed` [layer, scenario, expert] are as in :class:`Layer`. If they are
    empty, they are computed layer by layer, to save memory, from `tokens` [layer, scenario, expert], `touch` [rank] and
    `per_token` [layer, rank, expert]. `floor` is [layer, scenario].

    The first targets are the floors. If the best plan exceeds the floor by so much that a looser target may be better,
    looser targets are tried too; with several scenarios they are not, because this would nearly always be the case.
    """
    scenarios, (ranks, num_experts), most = len(weights), load_in.shape[1:], slots.shape[1]
    other_slots, other_experts = np.empty(most, np.int64), np.empty(most, np.int64)
    other_totals = np.empty(most + 1)
    lines, still = np.empty((scenarios, ranks, num_experts)), np.empty((scenarios, num_experts))
    for at in chosen:
        least, best = 0.0, np.inf
        for scenario in range(scenarios):
            least += prices.horizon * weights[scenario] * floor[at, scenario]
            if not len(unit):
                step = Step(tokens[at, scenario], per_token[at], touch, whole, speeds, alive)
                draw_lines(step, lines[scenario], still[scenario])
        layer = Layer(
            alive,
            speeds,
            unit[at] if len(unit) else lines,
            fixed[at] if len(unit) else still,
            weights,
            floor[at],
            load_in[at],
            prices,
            prices.least * least,
        )
        for looser in LOOSER:
            if best - least <= least * looser or (looser > 0.0 and scenarios > 1):
                break
            count = search_layer(rows[at], layer, looser, other_slots, other_experts, other_totals)
            total = other_totals[: count + 1].min()
            if total < best:
                best = total
                counts[at] = count
                copy_row(slots[at], other_slots)
                copy_row(experts[at], other_experts)
                copy_row(totals[at], other_totals)
