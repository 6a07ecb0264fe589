"""The loops of :mod:`coterie.placement.planning.latency_optimal`: one layer's search, and all layers side by side.

A layer is searched towards a target time. What ranks have above it is *excess*; the search takes the slowest rank and
the action that takes most excess away for each move it costs: swap two slots of different ranks, or give a slot whose
expert has other replicas to another expert. Moves are counted against the placement at the start, so an action that
involves slots already given away costs less: a second swap with such a slot makes a ring of three ranks out of a pair
for one move more, and handing on what was brought is free. That is how rings of any length come about.

Layers share nothing and each is searched by one thread in a fixed order, so threads do not change the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.placement.splits._flows import NONE

Array = NDArray[np.float64]
Ints = NDArray[np.int32]

EMPTY = NONE
"""Expert of a slot that holds a second copy of what its rank has: it is given something else before all else."""

DEPTH = 0.03
"""Weight of squared room below the target: the search fills the emptiest ranks first, which few moves then close."""

SPARE = 0.3
"""Added to the moves of an action when excess is divided by them, so that free actions are not all alike."""

ROOMIEST = 4
"""Of more than eight ranks, those with the most room on which a swap is looked for: of 32, all take half as long again
for a twentieth fewer moves."""

SPARES = (SPARE, 2.0, 20.0)
"""Tried in turn where the target is out of reach: the search ends in different places, and the best is taken."""

LADDER = (0.0, 0.04, 0.12, 0.25, 0.45, 0.7)
"""Targets between the floor (0) and the slowest rank now (1): where moves are dear, a nearer one takes fewer."""

HALVINGS = 6
"""Further targets, between the fastest that was reached and what was not: a target out of reach makes the search trade
the slowest rank's time for the sum of all."""

SQUEEZE = 0.02
"""Share of the slowest rank's time that is first tried to do without."""

THOROUGH = 1024
"""Slots x ranks up to which a layer whose target is out of reach is searched from several sides; a larger one would
take seconds."""

CLOSE = 1e-3
"""Of the floor: nearer is not looked for."""

ENOUGH, KEPT, CHANGED, REPAIRED = 0, 1, 2, 3
"""What became of a layer."""

FAR = 1.7
"""Moves that one over a slower link than the fastest counts as. It steers only: the objective charges the full time,
but a search steered by that (9 times as long across nodes) made a third more moves on drifted loads."""

TINY = 1e-9
"""Of the target: excess that does not matter."""


class Layer(NamedTuple):
    """What the search of a layer is given."""

    unit: Array
    """[rank, expert] seconds of all of the expert's tokens."""
    share: Array
    """[replicas - 1, expert] of `unit` each replica takes."""
    load_in: Array
    """[rank, expert] seconds to load; 0 where the rank has it."""
    alive: NDArray[np.bool_]
    """[rank]"""
    alike: bool
    """Whether an expert takes as long on every living rank."""


class State(NamedTuple):
    """Where the search of a layer stands."""

    row: NDArray[np.int64]
    """[slot] expert."""
    held: NDArray[np.int16]
    """[rank, expert] slot that holds it, or -1."""
    home: NDArray[np.bool_]
    """[rank, expert] whether the rank had it at the start: it costs no move."""
    copies: NDArray[np.int64]
    """[expert] replicas on living ranks."""
    part: Array
    """[expert] of `unit` that each replica takes now."""
    busy: Array
    """[rank] seconds."""
    own: Array
    """[slot] seconds of what it holds."""
    fee: Array
    """[slot] moves that holding it costs, slow links counting for more; infinite on ranks that are gone."""


class Scratch(NamedTuple):
    """Filled anew in each look at a rank."""

    back: Array
    """[slot] seconds of its expert on the rank that is looked at."""
    back_fee: Array
    """[slot] moves if its expert went there; infinite where it cannot."""
    relief: Array
    """[expert] excess that goes away with one replica more."""
    burden: Array
    """[expert] excess that comes with one replica less."""
    order: NDArray[np.int64]
    """[rank]"""
    worth: Array
    """[slot of a rank] excess that a swap with it takes away for each move."""
    stuck: NDArray[np.bool_]
    """[rank] whether nothing helps it."""


class Action(NamedTuple):
    """Slots `first` and `second` change places; or, `first` being -1, `second` is given to `expert`."""

    score: float
    first: int
    second: int
    expert: int


class Prices(NamedTuple):
    """Of the objective, for a layer."""

    floor: float
    """Seconds below which nothing is gained."""
    horizon: float
    exposed: float
    move_price: float
    fastest: float
    """Seconds of a load over the fastest link."""


class Best(NamedTuple):
    """What a layer's search found, each better than the one before; without a trail only the last is kept."""

    rows: NDArray[np.int16]
    """[step, slot]"""
    totals: Array
    seconds: Array
    moves: NDArray[np.int64]
    kept: NDArray[np.int64]
    """[1] steps."""
    trail: bool


@helper()
def excess(busy: float, target: float, steep: float) -> float:
    over = busy - target
    return over if over > 0.0 else steep * over * over


@helper()
def slowest(busy: Array) -> float:
    most = busy[0]
    for rank in range(1, len(busy)):
        most = max(most, busy[rank])
    return float(most)


@helper()
def part_of(share: Array, expert: int, replicas: int) -> float:
    last = share.shape[0] - 1
    return float(share[replicas - 1 if replicas <= last else last, expert])


@helper()
def fee_of(load_in: Array, home: NDArray[np.bool_], rank: int, expert: int, fastest: float) -> float:
    if home[rank, expert]:
        return 0.0
    return FAR if load_in[rank, expert] > fastest else 1.0


@helper()
def start(layer: Layer, state: State, base: NDArray[np.int64], row: Ints) -> None:
    """Homes as they are, and a `base` in which second copies on a rank are EMPTY slots."""
    ranks, experts = layer.unit.shape
    per_rank = len(row) // ranks
    for rank in range(ranks):
        for expert in range(experts):
            state.home[rank, expert] = False
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            base[slot], state.own[slot], state.fee[slot] = expert, 0.0, np.inf
            if layer.alive[rank]:
                if state.home[rank, expert]:
                    base[slot] = EMPTY
                state.home[rank, expert] = True


@helper()
def refresh(layer: Layer, state: State, rank: int, fastest: float) -> None:
    """A rank's times and fees anew from its slots: sums never drift."""
    unit, load_in, row, home, part, own, fee = (
        layer.unit,
        layer.load_in,
        state.row,
        state.home,
        state.part,
        state.own,
        state.fee,
    )
    per_rank = len(row) // len(state.busy)
    total = 0.0
    if layer.alive[rank]:
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            if expert != EMPTY:
                own[slot] = unit[rank, expert] * part[expert]
                fee[slot] = fee_of(load_in, home, rank, expert, fastest)
                total += own[slot]
    state.busy[rank] = total


@helper()
def apply(layer: Layer, state: State, first: int, second: int, expert: int, fastest: float) -> None:
    per_rank = len(state.row) // len(state.busy)
    rank, was = second // per_rank, state.row[second]
    if first >= 0:
        other, expert = first // per_rank, state.row[first]
        state.held[other, expert] = -1
        state.held[other, was] = first
        state.row[first] = was
    if was != EMPTY:
        state.held[rank, was] = -1
    state.held[rank, expert] = second
    state.row[second] = expert
    if first >= 0:
        refresh(layer, state, rank, fastest)
        refresh(layer, state, other, fastest)
        return
    state.copies[expert] += 1
    state.part[expert] = part_of(layer.share, expert, state.copies[expert])
    if was != EMPTY:
        state.copies[was] -= 1
        state.part[was] = part_of(layer.share, was, state.copies[was])
    for other in range(len(state.busy)):
        if state.held[other, expert] >= 0 or (was != EMPTY and state.held[other, was] >= 0):
            refresh(layer, state, other, fastest)


@helper()
def give_gain(layer: Layer, state: State, slot: int, expert: int, target: float) -> float:
    """Excess that goes away when the slot is given to the expert, which its rank does not have."""
    rank, was, steep = slot // (len(state.row) // len(state.busy)), state.row[slot], DEPTH / target
    less = part_of(layer.share, expert, state.copies[expert] + 1)
    drop = state.part[expert] - less if state.copies[expert] else 0.0
    rise = 0.0
    if was != EMPTY and state.copies[was] > 1:
        rise = part_of(layer.share, was, state.copies[was] - 1) - state.part[was]
    gain = 0.0
    for other in range(len(state.busy)):
        change = 0.0
        if other == rank:
            change = layer.unit[rank, expert] * less - (state.own[slot] if was != EMPTY else 0.0)
        else:
            if state.held[other, expert] >= 0:
                change -= layer.unit[other, expert] * drop
            if was != EMPTY and state.held[other, was] >= 0:
                change += layer.unit[other, was] * rise
        if change != 0.0:
            gain += excess(state.busy[other], target, steep) - excess(state.busy[other] + change, target, steep)
    return gain


@helper(division_raises=False)
def look_at_swaps(
    layer: Layer, state: State, scratch: Scratch, rank: int, target: float, fastest: float, best: Action, spare: float
) -> Action:
    """The best swap of one of the rank's slots with a slot elsewhere, if better than `best`.

    Ranks with the most room come first; one is passed by when even a perfect fit would not be better.
    """
    unit, load_in, alive = layer.unit, layer.load_in, layer.alive
    row, held, home, part, busy, own, fee = (
        state.row,
        state.held,
        state.home,
        state.part,
        state.busy,
        state.own,
        state.fee,
    )
    back, back_fee, order, worth = scratch.back, scratch.back_fee, scratch.order, scratch.worth
    ranks = len(busy)
    per_rank = len(row) // ranks
    mine = rank * per_rank
    steep = DEPTH / target
    here = excess(busy[rank], target, steep)
    for place in range(ranks):
        at = place
        while at > 0 and busy[order[at - 1]] > busy[place]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = place
    mine_fee = 0.0
    for first in range(mine, mine + per_rank):
        mine_fee = max(mine_fee, fee[first])
    score, first_best, second_best = best.score, NONE, NONE
    for index in range(ranks if ranks <= 8 else ROOMIEST):
        other = order[index]
        if other == rank or not alive[other]:
            continue
        now = excess(busy[other], target, steep)
        fits = here + now
        if layer.alike:  # what one loses the other gains
            fits = min(here, max(target - busy[other], 0.0)) + (now if busy[other] < target else 0.0)
        start_at = other * per_rank
        cheap = 0.0
        for slot in range(start_at, start_at + per_rank):
            cheap = max(cheap, fee[slot])
        if mine_fee == 0.0 and cheap == 0.0 and fits <= score * spare:
            continue
        cheap = np.inf
        for slot in range(start_at, start_at + per_rank):
            expert = row[slot]
            back_fee[slot] = np.inf
            if held[rank, expert] < 0:
                back[slot] = unit[rank, expert] * part[expert]
                back_fee[slot] = fee_of(load_in, home, rank, expert, fastest) - fee[slot]
                cheap = min(cheap, back_fee[slot])
        theirs, theirs_back = own[start_at : start_at + per_rank], back[start_at : start_at + per_rank]
        theirs_fee = back_fee[start_at : start_at + per_rank]
        for first in range(mine, mine + per_rank):
            expert = row[first]
            if held[other, expert] >= 0:
                continue
            moves = fee_of(load_in, home, other, expert, fastest) - fee[first]
            if fits <= score * max(moves + cheap + spare, spare / 2):
                continue
            left = busy[rank] - own[first] - target
            there = busy[other] + unit[other, expert] * part[expert] - target
            for place in range(len(worth)):  # no branch and nothing else in it: it is vectorised
                one = left + theirs_back[place]
                two = there - theirs[place]
                after = one if one > 0.0 else steep * one * one
                after += two if two > 0.0 else steep * two * two
                worth[place] = (here + now - after) / max(moves + theirs_fee[place] + spare, spare / 2)
            for place in range(len(worth)):
                if worth[place] > score:
                    score, first_best, second_best = worth[place], first, start_at + place
    if second_best < 0:
        return best
    return Action(score, first_best, second_best, EMPTY)


@helper()
def look_at_gifts(
    layer: Layer, state: State, scratch: Scratch, rank: int, target: float, fastest: float, best: Action, spare: float
) -> Action:
    """The best slot to give away, in favour of an expert of the rank or on the rank itself, if better than `best`.

    What other ranks gain or lose is added up for each expert first. Where a rank holds both experts that sum is wrong,
    so what looks best is counted again in full.
    """
    unit, share, load_in, alive = layer.unit, layer.share, layer.load_in, layer.alive
    row, held, home, count, part, busy, own, fee = (
        state.row,
        state.held,
        state.home,
        state.copies,
        state.part,
        state.busy,
        state.own,
        state.fee,
    )
    relief, steep = scratch.relief, DEPTH / target
    per_rank = len(row) // len(busy)
    if not weigh_replicas(layer, state, scratch, rank, target):
        return best
    score, slot_best, expert_best = best.score, NONE, NONE
    most, most_here, wanted = -np.inf, -np.inf, False  # relief of an expert of the rank, and of any
    for place in range(rank * per_rank, (rank + 1) * per_rank):
        most = max(most, relief[row[place]])
        wanted = wanted or count[row[place]] > 1
    if wanted:
        for expert in range(len(relief)):
            most_here = max(most_here, relief[expert])
    slot = -1
    for other in range(len(busy)):
        if not alive[other]:
            slot += per_rank
            continue
        for _ in range(per_rank):
            slot += 1
            was = row[slot]
            if count[was] < 2:
                continue
            # What its own rank would have had to bear, had it kept it, is no loss.
            more = unit[other, was] * (part_of(share, was, count[was] - 1) - part[was])
            rest = excess(busy[other] + more, target, steep) - scratch.burden[was]
            # What it brings only takes away from this, and what it costs can only be more.
            least = max(spare - fee[slot], spare / 2)
            if (most_here if other == rank else most) + rest <= score * least:
                continue
            free = busy[other] - own[slot]
            for place in range(len(relief) if other == rank else per_rank):
                expert = place if other == rank else row[rank * per_rank + place]
                if relief[expert] + rest <= score * least or held[other, expert] >= 0:
                    continue
                brings = unit[other, expert] * part_of(share, expert, count[expert] + 1)
                gain = relief[expert] + rest - excess(free + brings, target, steep)
                moves = fee_of(load_in, home, other, expert, fastest) - fee[slot]
                divisor = max(moves + spare, spare / 2)
                if gain > score * divisor:
                    found = give_gain(layer, state, slot, expert, target) / divisor
                    if found > score:
                        score, slot_best, expert_best = found, slot, expert
    if slot_best < 0:
        return best
    return Action(score, NONE, slot_best, expert_best)


@helper()
def weigh_replicas(layer: Layer, state: State, scratch: Scratch, rank: int, target: float) -> bool:
    """Fill `relief` and `burden`, as far as a look at the rank needs them; False where no expert has replicas."""
    unit, share, row, held, count, part, busy = (
        layer.unit,
        layer.share,
        state.row,
        state.held,
        state.copies,
        state.part,
        state.busy,
    )
    relief, burden, steep = scratch.relief, scratch.burden, DEPTH / target
    per_rank = len(row) // len(busy)
    several, wanted = False, False
    for expert in range(len(count)):
        if count[expert] > 1:
            several = True
            if held[rank, expert] >= 0:
                wanted = True
    if not several:
        return False
    for expert in range(len(count)):
        relief[expert] = 0.0
        burden[expert] = 0.0
    slot = -1
    for other in range(len(busy)):
        if not layer.alive[other]:
            slot += per_rank
            continue
        now = excess(busy[other], target, steep)
        for _ in range(per_rank):
            slot += 1
            expert = row[slot]
            whole = unit[other, expert]
            if wanted or held[rank, expert] >= 0:
                less = whole * (part[expert] - part_of(share, expert, count[expert] + 1))
                relief[expert] += now - excess(busy[other] - less, target, steep)
            if count[expert] > 1:
                more = whole * (part_of(share, expert, count[expert] - 1) - part[expert])
                burden[expert] += excess(busy[other] + more, target, steep) - now
    return True


@helper()
def repair(layer: Layer, state: State, target: float, fastest: float) -> bool:
    """Bring experts that no living rank has to one, and fill EMPTY slots; whether there was anything to do."""
    slots, ranks = len(state.row), len(state.busy)
    per_rank = slots // ranks
    done = False
    for expert in range(len(state.copies)):
        if state.copies[expert]:
            continue
        best, at = -np.inf, NONE
        for slot in range(slots):
            rank, was = slot // per_rank, state.row[slot]
            if layer.alive[rank] and (was == EMPTY or state.copies[was] > 1):
                gain = give_gain(layer, state, slot, expert, target)
                if was == EMPTY:
                    gain += target  # such a slot must be filled anyhow: one move less
                if gain > best:
                    best, at = gain, slot
        apply(layer, state, NONE, at, expert, fastest)
        done = True
    for slot in range(slots):
        if state.row[slot] != EMPTY:
            continue
        rank = slot // per_rank
        best, pick = -np.inf, NONE
        for expert in range(len(state.copies)):
            if state.held[rank, expert] < 0:
                fee = fee_of(layer.load_in, state.home, rank, expert, fastest)
                gain = give_gain(layer, state, slot, expert, target) - TINY * target * fee
                if gain > best:
                    best, pick = gain, expert
        apply(layer, state, NONE, slot, pick, fastest)
        done = True
    return done


@helper()
def descend(
    layer: Layer, state: State, scratch: Scratch, best: Best, prices: Prices, target: float, spare: float
) -> bool:
    """Until no rank is above the target, or nothing helps; whether none is."""
    stuck, fastest, given_up = scratch.stuck, prices.fastest, 0
    for rank in range(len(stuck)):
        stuck[rank] = False
    while True:
        rank = NONE
        for other in range(len(state.busy)):
            slow = not stuck[other] and state.busy[other] > target * (1.0 + TINY)
            if slow and (rank < 0 or state.busy[other] > state.busy[rank]):
                rank = other
        if rank < 0:
            return given_up == 0
        action = Action(TINY * target, NONE, NONE, NONE)
        action = look_at_swaps(layer, state, scratch, rank, target, fastest, action, spare)
        action = look_at_gifts(layer, state, scratch, rank, target, fastest, action, spare)
        if action.second < 0:
            stuck[rank] = True
            given_up += 1
            continue
        apply(layer, state, action.first, action.second, action.expert, fastest)
        note(layer, state, best, prices)
        if given_up:
            for other in range(len(stuck)):
                stuck[other] = False
            given_up = 0


@helper()
def note(layer: Layer, state: State, best: Best, prices: Prices) -> None:
    """Keep what is better by the objective than all before, or the first; of equals, the one with fewer moves."""
    per_rank = len(state.row) // len(state.busy)
    slot, moves, latest, seconds = 0, 0, 0.0, 0.0
    for rank in range(len(state.busy)):
        here = 0.0
        for _ in range(per_rank):
            expert = state.row[slot]
            slot += 1
            if layer.alive[rank] and not state.home[rank, expert]:
                here += layer.load_in[rank, expert]
                moves += 1
        latest = max(latest, here)
        seconds += here
    total = prices.horizon * max(slowest(state.busy), prices.floor)
    total += prices.exposed * (latest + prices.move_price * seconds)
    at = best.kept[0] - 1
    if at < 0:
        at = 0
    else:
        least = best.totals[at]
        even = abs(total - least) <= TINY * least
        if not (total < least - TINY * least or (even and moves < best.moves[at])):
            return
        if best.trail and not even and at + 1 < len(best.rows):
            at += 1
    best.kept[0] = at + 1
    best.totals[at], best.seconds[at], best.moves[at] = total, seconds, moves
    for slot in range(len(state.row)):
        best.rows[at, slot] = state.row[slot]


@helper()
def restore(layer: Layer, state: State, row: NDArray[np.int64], fastest: float) -> None:
    """To a given state of the slots."""
    ranks, experts = layer.unit.shape
    per_rank = len(row) // ranks
    for expert in range(experts):
        state.copies[expert] = 0
    for rank in range(ranks):
        for expert in range(experts):
            state.held[rank, expert] = -1
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            state.row[slot] = expert
            if expert != EMPTY and layer.alive[rank]:
                state.copies[expert] += 1
                state.held[rank, expert] = slot
    for expert in range(experts):
        replicas = state.copies[expert]
        state.part[expert] = part_of(layer.share, expert, replicas) if replicas else 0.0
    for rank in range(ranks):
        refresh(layer, state, rank, fastest)


@helper()
def save(state: State, row: NDArray[np.int64]) -> None:
    for slot in range(len(row)):
        row[slot] = state.row[slot]


@njit()
def search(
    chosen: NDArray[np.int64],
    rows: Ints,
    unit: Array,
    share: Array,
    load_in: Array,
    alive: NDArray[np.bool_],
    floor: Array,
    numbers: Array,
    alike: bool,
    trail: bool,
    kept: NDArray[np.int64],
    trails: NDArray[np.int16],
    totals: Array,
    seconds: Array,
    moves: NDArray[np.int64],
    outcomes: NDArray[np.int64],
) -> None:
    """The chosen layers; `trails` [layer, step, slot] gets what each found, the best last, `kept` [layer] how many.

    The first step of a trail is the layer as it is, repaired where it must be.
    """
    slots, ranks, experts = rows.shape[1], unit.shape[1], unit.shape[2]
    state = State(
        np.zeros(slots, np.int64),
        np.zeros((ranks, experts), np.int16),
        np.zeros((ranks, experts), np.bool_),
        np.zeros(experts, np.int64),
        np.zeros(experts),
        np.zeros(ranks),
        np.zeros(slots),
        np.zeros(slots),
    )
    scratch = Scratch(
        np.zeros(slots),
        np.zeros(slots),
        np.zeros(experts),
        np.zeros(experts),
        np.zeros(ranks, np.int64),
        np.zeros(slots // ranks),
        np.zeros(ranks, np.bool_),
    )
    base, old = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    for at in chosen:
        layer = Layer(unit[at], share[at], load_in[at], alive, alike)
        prices = Prices(floor[at], numbers[0], numbers[1], numbers[2], numbers[3])
        best = Best(trails[at], totals[at], seconds[at], moves[at], kept[at : at + 1], trail)
        fastest, low = prices.fastest, max(prices.floor, 1e-300)  # a target of 0 is a layer without load
        start(layer, state, base, rows[at])
        restore(layer, state, base, fastest)
        repaired = repair(layer, state, low, fastest)
        save(state, base)
        kept[at] = 0
        note(layer, state, best, prices)
        first, peak = totals[at, 0], slowest(state.busy)
        outcomes[at] = REPAIRED if repaired else ENOUGH
        if peak <= low * (1.0 + TINY):
            continue
        cheapest = prices.exposed * fastest * (1.0 + prices.move_price)  # of a move
        high = peak
        for step in LADDER:
            target = low + step * (peak - low)
            if prices.horizon * target + cheapest >= totals[at, kept[at] - 1]:
                break  # even reaching it in one move would not be better
            if step > 0.0:
                restore(layer, state, base, fastest)
            descend(layer, state, scratch, best, prices, target, SPARE)
            high = min(high, slowest(state.busy))
        if high > low * (1.0 + CLOSE) and slots * ranks <= THOROUGH:
            # The floor is out of reach and `high` is not: targets between them.
            for _ in range(HALVINGS):
                target = (low + high) / 2.0
                if high <= low * (1.0 + CLOSE) or prices.horizon * target + cheapest >= totals[at, kept[at] - 1]:
                    break
                restore(layer, state, base, fastest)
                if not descend(layer, state, scratch, best, prices, target, SPARE):
                    low = target
                high = min(high, slowest(state.busy))
            low = prices.floor
            for spare in SPARES:  # other ways down
                if prices.horizon * low + cheapest >= totals[at, kept[at] - 1]:
                    break
                restore(layer, state, base, fastest)
                descend(layer, state, scratch, best, prices, low, spare)
                less = SQUEEZE
                while less > CLOSE:
                    save(state, old)
                    peak = slowest(state.busy)
                    if peak <= low * (1.0 + CLOSE):
                        break
                    descend(layer, state, scratch, best, prices, max(low, peak * (1.0 - less)), spare)
                    if slowest(state.busy) > peak * (1.0 - CLOSE / 10.0):
                        restore(layer, state, old, fastest)
                        less /= 2.0
        if not repaired:
            outcomes[at] = CHANGED if totals[at, kept[at] - 1] < first else KEPT


@njit()
def spend(
    kept: NDArray[np.int64], totals: Array, seconds: Array, moves: NDArray[np.int64], budget: int
) -> NDArray[np.int64]:
    """[layer] the step of its trail that each takes so that all moves fit: what saves most a second of moving first.

    The first steps, which repair, are taken whatever the budget.
    """
    chosen = np.zeros(len(kept), np.int64)
    left = budget
    for layer in range(len(kept)):
        left -= moves[layer, 0]
    while True:
        best, which, step = 0.0, -1, -1
        for layer in range(len(kept)):
            now = chosen[layer]
            for after in range(kept[layer]):
                saved = totals[layer, now] - totals[layer, after]
                if saved <= 0.0 or moves[layer, after] - moves[layer, now] > left:
                    continue
                rate = saved / max(seconds[layer, after] - seconds[layer, now], 1e-12)
                if rate > best:
                    best, which, step = rate, layer, after
        if which < 0:
            return chosen
        left -= moves[which, step] - moves[which, chosen[which]]
        chosen[which] = step
