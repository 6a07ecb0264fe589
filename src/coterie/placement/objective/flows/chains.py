"""Split one layer's tokens over its replicas, as a flow between ranks: the loops behind `splits` and `free_split`.

The flow moves shares of a replicated expert from one of its ranks to another. Given a limit on every rank's seconds,
ranks above the limit push their excess along chains of replicas (shortest chain first) to ranks below the limit. When
nothing more can be pushed, the ranks reachable from those still above the limit are a *bottleneck*: all of them are
full, and no replica leads to another rank. The bottleneck's work ÷ its speed is a lower bound on the limit.

Exact if an expert's seconds on its ranks differ by the ranks' speeds alone. Otherwise the flow has gains, pushing along
shortest chains may stop early, and the limit found is an upper bound.

A slot's seconds are affine in its share: ``unit[rank, expert] x (share + fixed[expert])``. The fixed part does not
depend on the tokens and cannot be pushed, so it changes only if an expert gains or loses a slot on the rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective._arrays import Array, copy_row

Indices = NDArray[np.int64]

NONE: int = np.int64(-1)  # type: ignore[assignment]
"""Index that means no slot, rank or expert. An int64, because Numba compiles a function again for a plain int."""

TWIN = -2
"""Value of `Split.after` for an unused slot: another slot of the rank has the expert, or the rank is dead."""

TINY = 1e-12
"""Slack for rounding errors, as a share of the limit."""


class Split(NamedTuple):
    """One layer's slots and their shares; the slots of an expert form a linked list."""

    expert: Indices
    """[slot] expert in the slot."""
    after: Indices
    """[slot] next slot of the same expert, NONE or TWIN."""
    first: Indices
    """[expert] first slot of the expert, or NONE."""
    copies: Indices
    """[expert] number of living ranks that hold the expert."""
    share: Array
    """[slot] share of the expert's tokens that the slot computes."""
    busy: Array
    """[rank] seconds of the rank."""


REACHED, LEFT, ENTERED, QUEUE = 0, 1, 2, 3
"""Rows of a search array [4, rank]. REACHED: whether a rank above the limit can push to this rank. LEFT: slot that the
path to this rank leaves from; NONE at its start. ENTERED: slot of this rank where the path arrives. QUEUE: ranks in the
order they were reached."""


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
    """Fill `split` from a row [slot] of experts, with equal shares."""
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
    copy_row(to.share, split.share)
    copy_row(to.busy, split.busy)


@helper()
def bequeath(split: Split, slot: int, unit: Array) -> int:
    """Give the share of an unlinked slot to the expert's slot on the least busy rank.

    Returns that rank, or NONE if the unlinked slot had no share.
    """
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
    """Update shares and seconds for an exchange of the experts of two slots; each share goes with its expert."""
    each = len(split.expert) // len(split.busy)
    here, there = one // each, other // each
    leaves, comes = split.expert[one], split.expert[other]
    goes, arrives = split.share[one] + fixed[leaves], split.share[other] + fixed[comes]
    split.busy[here] += unit[here, comes] * arrives - unit[here, leaves] * goes
    split.busy[there] += unit[there, leaves] * goes - unit[there, comes] * arrives
    split.share[one], split.share[other] = split.share[other], split.share[one]


@helper()
def unlink(split: Split, slot: int) -> int:
    """Remove a slot from its expert's list; return the slot before it (NONE: it was first), for :func:`relink`."""
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
    """Push shares from ranks above the limit to ranks below it until nothing more can be pushed.

    Returns the work (speed x seconds) left above the limit; if it is not 0, `search[REACHED]` marks the bottleneck.
    Ranks that are `closed` take no part.
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
    """Return the nearest rank below the limit that a rank above the limit can push to, or NONE (breadth-first)."""
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
    """Push as much as possible along the path to `sink`. Only the seconds of the path's first and last rank change."""
    each = len(split.expert) // len(split.busy)
    room = limit - split.busy[sink]  # seconds that arrive at the sink
    gain = 1.0  # seconds that leave the path's first rank per second that arrives at the sink
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
    """Split the tokens so that the slowest rank takes the least time; return its seconds. `start` is a lower bound.

    Newton's method: each bottleneck gives a new lower bound for the limit, and shares pushed under a lower limit stay
    valid under a higher one.
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
    """Return whether the seconds of replicated experts differ by the ranks' speeds alone; the flow is then exact."""
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
