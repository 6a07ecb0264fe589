"""How one layer's replicas share tokens, as a flow between ranks: the loops behind splits and free_split.

Every expert's tokens are always somewhere; what can flow is a share of a replicated expert from one of its ranks to
another. With a limit on every rank's seconds, busy ranks push what is over along chains of replicas (shortest first)
to ranks with room. Once nothing can be pushed, the ranks reached from those still over are a *bottleneck*: all of them
are full, and no replica leads out. Their work over their speed is then the least limit they allow.

Exact where an expert's seconds on its ranks differ by their speeds alone. Otherwise the flow has gains, pushing along
shortest chains may stop early, and the limit found is an upper bound.

A slot's seconds are affine in its share: ``unit[rank, expert] x (share + fixed[expert])``, `fixed` being what it takes
however few tokens it gets. Nothing of that can be pushed, so it only counts where slots come and go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

NONE: int = np.int64(-1)  # type: ignore[assignment]
"""No slot, rank or expert. Of a fixed width: Numba would compile a function anew for a plain constant."""

TWIN = -2
"""Mark instead of a next slot: another slot of the same rank holds the expert, or the rank is gone."""

TINY = 1e-12
"""Share of the limit: slack for rounding errors."""


class Split(NamedTuple):
    """One layer's slots and what each computes."""

    expert: Indices
    """[slot]"""
    after: Indices
    """[slot] the next slot of the same expert, NONE or TWIN"""
    first: Indices
    """[expert] its first slot, or NONE"""
    copies: Indices
    """[expert] living ranks that hold it"""
    share: Array
    """[slot] of its expert's tokens"""
    busy: Array
    """[rank] seconds"""


REACHED, LEFT, ENTERED, QUEUE = 0, 1, 2, 3
"""Rows of a search, an array [4, rank]: whether a rank over the limit can push there; the slot the way to it came from,
NONE where it starts; the slot where it came in; ranks in the order they were reached."""


@helper()
def new_split(slots: int, experts: int, ranks: int) -> Split:
    return Split(
        np.empty(slots, np.int64),
        np.empty(slots, np.int64),
        np.empty(experts, np.int64),
        np.empty(experts, np.int64),
        np.empty(slots),
        np.empty(ranks),
    )


@helper()
def link(row: Indices, alive: NDArray[np.bool_], unit: Array, fixed: Array, split: Split) -> None:
    """Start from a row of slot_experts and equal shares."""
    each = len(row) // len(alive)
    split.first[:] = NONE
    split.copies[:] = 0
    split.share[:] = 0.0
    split.busy[:] = 0.0
    for slot in range(len(row) - 1, -1, -1):
        expert = row[slot]
        split.expert[slot] = expert
        split.after[slot] = TWIN
        if alive[slot // each] and not rank_holds(split, expert, slot // each, each):
            split.after[slot] = split.first[expert]
            split.first[expert] = slot
            split.copies[expert] += 1
    for slot in range(len(row)):
        if split.after[slot] != TWIN:
            expert, rank = row[slot], slot // each
            split.share[slot] = 1.0 / split.copies[expert]
            split.busy[rank] += unit[rank, expert] * (split.share[slot] + fixed[expert])


@helper()
def rank_holds(split: Split, expert: int, rank: int, each: int) -> bool:
    slot = split.first[expert]
    while slot >= 0:
        if slot // each == rank:
            return True
        slot = split.after[slot]
    return False


@helper()
def copy_shares(split: Split, to: Split) -> None:
    for slot in range(len(split.share)):
        to.share[slot] = split.share[slot]
    for rank in range(len(split.busy)):
        to.busy[rank] = split.busy[rank]


@helper()
def bequeath(split: Split, slot: int, unit: Array) -> int:
    """Give the share of a slot that was unlinked to the least busy other of its expert; its rank, NONE if no share."""
    each = len(split.expert) // len(split.busy)
    rank, expert, share = slot // each, split.expert[slot], split.share[slot]
    if share <= 0.0:
        return NONE
    heir = other = split.first[expert]
    while other >= 0:
        if split.busy[other // each] < split.busy[heir // each]:
            heir = other
        other = split.after[other]
    split.busy[rank] -= unit[rank, expert] * share
    split.share[slot] = 0.0
    split.share[heir] += share
    split.busy[heir // each] += unit[heir // each, expert] * share
    return int(heir // each)


@helper()
def swap_shares(split: Split, one: int, other: int, unit: Array, fixed: Array) -> None:
    """The shares and seconds after two slots exchange their experts; shares go along."""
    each = len(split.expert) // len(split.busy)
    here, there = one // each, other // each
    leaves, comes = split.expert[one], split.expert[other]
    goes, arrives = split.share[one] + fixed[leaves], split.share[other] + fixed[comes]
    split.busy[here] += unit[here, comes] * arrives - unit[here, leaves] * goes
    split.busy[there] += unit[there, leaves] * goes - unit[there, comes] * arrives
    split.share[one], split.share[other] = split.share[other], split.share[one]


@helper()
def unlink(split: Split, slot: int) -> int:
    """Take a slot out of its expert's; the one before it, or NONE, for :func:`relink`."""
    expert = split.expert[slot]
    before = NONE
    if split.first[expert] == slot:
        split.first[expert] = split.after[slot]
    else:
        before = split.first[expert]
        while split.after[before] != slot:
            before = split.after[before]
        split.after[before] = split.after[slot]
    split.copies[expert] -= 1
    return before


@helper()
def relink(split: Split, slot: int, before: int) -> None:
    """Undo :func:`unlink`."""
    expert = split.expert[slot]
    if before == NONE:
        split.first[expert] = slot
    else:
        split.after[before] = slot
    split.copies[expert] += 1


@helper()
def link_in(split: Split, slot: int, expert: int) -> None:
    split.expert[slot] = expert
    split.after[slot] = split.first[expert]
    split.first[expert] = slot
    split.copies[expert] += 1


@helper()
def relieve(
    split: Split, unit: Array, speeds: Array, limit: float, search: Indices, closed: NDArray[np.bool_]
) -> float:
    """Push from ranks over the limit to ranks under it until nothing can be pushed; work (speed x seconds) left over.

    Where some is left, `search[REACHED]` is the bottleneck. Ranks that are `closed` are as if they were not there.
    """
    tiny = TINY * limit
    while True:
        sink = _reach(split, unit, limit, tiny, search, closed)
        if sink == NONE:
            over = 0.0
            for rank in range(len(split.busy)):
                if split.busy[rank] > limit + tiny and not closed[rank]:
                    over += (split.busy[rank] - limit) * speeds[rank]
            return over
        _push(split, unit, limit, search, sink)


@helper()
def _reach(split: Split, unit: Array, limit: float, tiny: float, search: Indices, closed: NDArray[np.bool_]) -> int:
    """The nearest rank under the limit that one over it can push to, or NONE."""
    ranks = len(split.busy)
    each = len(split.expert) // ranks
    end = 0
    for rank in range(ranks):
        over = split.busy[rank] > limit + tiny
        search[REACHED, rank] = over or closed[rank]
        if over and not closed[rank]:
            search[LEFT, rank] = NONE
            search[QUEUE, end] = rank
            end += 1
    begin = 0
    while begin < end:
        rank = search[QUEUE, begin]
        begin += 1
        for slot in range(rank * each, rank * each + each):
            expert = split.expert[slot]
            if split.copies[expert] < 2 or split.share[slot] * unit[rank, expert] <= tiny:
                continue
            other = split.first[expert]
            while other >= 0:
                peer = other // each
                if not search[REACHED, peer]:
                    search[REACHED, peer] = True
                    search[LEFT, peer] = slot
                    search[ENTERED, peer] = other
                    search[QUEUE, end] = peer
                    end += 1
                    if split.busy[peer] < limit - tiny:
                        return int(peer)
                other = split.after[other]
    return NONE


@helper()
def _push(split: Split, unit: Array, limit: float, search: Indices, sink: int) -> None:
    """Push as much as the path to `sink` takes. Only the ranks at its two ends change their seconds."""
    each = len(split.expert) // len(split.busy)
    room = limit - split.busy[sink]  # seconds that arrive at the sink
    gain = 1.0  # seconds that leave the rank for each that arrives
    rank = sink
    while search[LEFT, rank] != NONE:
        slot = search[LEFT, rank]
        expert, origin = split.expert[slot], slot // each
        room = min(room, split.share[slot] * unit[rank, expert] / gain)
        gain *= unit[origin, expert] / unit[rank, expert]
        rank = origin
    arrives = min(room, (split.busy[rank] - limit) / gain)
    split.busy[rank] -= arrives * gain
    split.busy[sink] += arrives
    rank, seconds = sink, arrives
    while search[LEFT, rank] != NONE:
        slot = search[LEFT, rank]
        expert, origin = split.expert[slot], slot // each
        part = min(split.share[slot], seconds / unit[rank, expert])
        split.share[slot] -= part
        split.share[search[ENTERED, rank]] += part
        seconds = part * unit[origin, expert]
        rank = origin


@helper()
def least_limit(split: Split, unit: Array, speeds: Array, start: float, search: Indices) -> float:
    """Share the tokens so that the slowest rank is fastest, and its seconds: at least `start`, to begin with.

    Newton's method: each bottleneck names the least limit it allows, and what was pushed under a lower limit stays
    right under a higher one.
    """
    limit, closed = start, np.zeros(len(speeds), np.bool_)
    while relieve(split, unit, speeds, limit, search, closed) > 0.0:
        work = speed = 0.0
        for rank in range(len(speeds)):
            if search[REACHED, rank]:
                work += split.busy[rank] * speeds[rank]
                speed += speeds[rank]
        raised = work / speed
        if raised <= limit * (1.0 + TINY):
            break
        limit = raised
    return limit


@helper()
def separable(split: Split, unit: Array, speeds: Array) -> bool:
    """Whether replicated experts take as long on all their ranks, but for speed: the flow is then exact."""
    each = len(split.expert) // len(split.busy)
    for expert in range(len(split.first)):
        if split.copies[expert] < 2:
            continue
        slot = split.first[expert]
        work = unit[slot // each, expert] * speeds[slot // each]
        while slot >= 0:
            if abs(unit[slot // each, expert] * speeds[slot // each] - work) > TINY * work:
                return False
            slot = split.after[slot]
    return True
