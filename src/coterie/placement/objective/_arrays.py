"""Compiled loops that fill the arrays of a :class:`~coterie.placement.objective.problem.Problem`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.lines import slot_s
from coterie.placement.base import HOST

Array = NDArray[np.float64]


@lru_cache(maxsize=4)
def even_share(layers: int, replicas: int, experts: int) -> Array:
    """Return the share table 1 / replicas, used if reading weights costs nothing. Cached: do not write to it."""
    parts = 1.0 / np.arange(1, replicas + 1)
    return np.array(np.broadcast_to(parts[:, None], (layers, replicas, experts)), order="C")


@njit()
def fill(
    chosen: NDArray[np.int64],
    tokens: Array,
    alone: Array,
    touch_s: float,
    row_s: float,
    exchange: Array,
    each: Array,
    speeds: Array,
    slot_experts: NDArray[np.int32],
    links: Array,
    unit: Array,
    share: Array,
    load_in: Array,
    source: NDArray[np.int16],
    even: Array,
    reach: Array,
) -> None:
    """Fill the arrays of a :class:`Problem` for the chosen layers."""
    for layer in chosen:
        known = exchange[:, layer] if len(exchange) else exchange[:, 0]
        per_rank = slot_experts.shape[1] // len(speeds)
        _fill_unit(tokens[layer], alone[layer], known, each, speeds, unit[layer])
        if touch_s > 0.0:
            _fill_share(tokens[layer], alone[layer], touch_s, row_s, known, each, speeds, share[layer])
        fill_sources(slot_experts[layer], speeds, links, load_in[layer], source[layer])
        fill_bounds(
            unit[layer],
            share[layer],
            each,
            speeds,
            len(known) > 0,
            touch_s > 0.0,
            per_rank,
            even[layer:],
            reach[layer:],
        )


@helper()
def _fill_unit(tokens: Array, alone: Array, known: Array, each: Array, speeds: Array, unit: Array) -> None:
    for rank in range(len(speeds)):
        # A dead rank takes no time; planners must not place experts on it.
        pace = 1.0 / speeds[rank] if speeds[rank] > 0.0 else 0.0
        row, token_s = unit[rank], each[rank] if speeds[rank] > 0.0 else 0.0
        for expert in range(len(row)):
            row[expert] = alone[expert] * pace + tokens[expert] * token_s
        if len(known) and speeds[rank] > 0.0:
            for expert in range(len(row)):  # a loop: as a single array statement, compilation takes seconds
                row[expert] += known[rank, expert]


@helper()
def _fill_share(
    tokens: Array, alone: Array, touch_s: float, row_s: float, known: Array, each: Array, speeds: Array, share: Array
) -> None:
    """Fill `share` [replicas - 1, expert] from means over living ranks.

    Replicas divide the compute and the exchange of rows; each replica pays for reading the weights.
    """
    living, pace, token_s = 0, 0.0, 0.0
    for rank in range(len(speeds)):
        if speeds[rank] > 0.0:
            living += 1
            pace += 1.0 / speeds[rank]
            token_s += each[rank]
    for expert in range(share.shape[1]):
        sent = tokens[expert] * token_s
        if len(known):
            for rank in range(len(speeds)):
                if speeds[rank] > 0.0:
                    sent += known[rank, expert]
        whole = (pace * alone[expert] + sent) / living
        for index in range(share.shape[0]):
            part = 1.0 / (index + 1.0)
            if whole > 0.0:
                alone_s = slot_s(row_s, touch_s, tokens[expert] * part)
                part = (pace * alone_s + sent * part) / living / whole
            share[index, expert] = part


@njit()
def fill_sources(
    slot_experts: NDArray[np.int32], speeds: Array, links: Array, load_in: Array, source: NDArray[np.int16]
) -> None:
    """Fill the cheapest source of each expert for each rank, and its link seconds, from `links` [source, rank].

    The source is the rank itself, else the holder with the fastest link, the first if tied; without one the host.
    """
    ranks, experts = source.shape
    per_rank = len(slot_experts) // ranks
    for rank in range(ranks):
        at, seconds, differs = source[rank], load_in[rank], rank == 0
        for holder in range(ranks):
            differs = differs or links[holder, rank] != links[holder, rank - 1]
        if not differs:  # most ranks: they have the links of the rank before, on the same node
            copy_row(at, source[rank - 1])
            copy_row(seconds, load_in[rank - 1])
            continue
        for expert in range(experts):
            at[expert], seconds[expert] = HOST, links[ranks, rank]
        for slot in range(len(slot_experts)):
            holder, expert = slot // per_rank, slot_experts[slot]
            faster = at[expert] == HOST or links[holder, rank] < seconds[expert]
            if speeds[holder] > 0.0 and faster:
                at[expert], seconds[expert] = holder, links[holder, rank]
    for slot in range(len(slot_experts)):
        if speeds[slot // per_rank] > 0.0:
            source[slot // per_rank, slot_experts[slot]] = slot // per_rank
            load_in[slot // per_rank, slot_experts[slot]] = 0.0


@helper()
def copy_row(to: NDArray[Any], row: NDArray[Any]) -> None:
    """Copy `row` to `to`. `to[:] = row` would take seconds to compile, because of the message for unequal shapes."""
    for at in range(len(to)):
        to[at] = row[at]


# Lower bounds on the seconds of any placement of a layer.

CLOSE = 1e-6
"""Relative precision of a bound found by bisection."""

TINY = 1e-12
"""Relative slack for rounding errors."""


@helper()
def fill_bounds(
    unit: Array,
    share: Array,
    each: Array,
    speeds: Array,
    by_source: bool,
    streams: bool,
    per_rank: int,
    even: Array,
    reach: Array,
) -> None:
    ranks, experts = unit.shape
    work, least = np.full(experts, np.inf), np.full(experts, np.inf)  # seconds at speed 1, and on the fastest rank
    living, pace = 0, 0.0
    for rank in range(ranks):
        if speeds[rank] == 0.0:
            continue
        living += 1
        pace += speeds[rank]
        if rank > 0 and not by_source and speeds[rank] == speeds[rank - 1] and each[rank] == each[rank - 1]:
            continue  # same costs as the rank before
        row = unit[rank]
        for expert in range(experts):
            least[expert] = min(least[expert], row[expert])
            work[expert] = min(work[expert], row[expert] * speeds[rank])
    longest, total = 0.0, 0.0
    for expert in range(experts):
        lowest = share[0, expert]
        for index in range(1, share.shape[0]):
            lowest = min(lowest, share[index, expert])
        longest = max(longest, least[expert] * lowest)
        total += work[expert]
    spare = living * per_rank - experts
    if spare == 0:
        for _ in range(per_rank - 1):  # the shortest experts fill the longest expert's rank
            shortest = np.argmin(least)
            longest += least[shortest]
            least[shortest] = np.inf
    even[0] = total / pace
    reach[0] = max(even[0], longest)
    if streams and spare > 0:
        reach[0] = _streaming_reach(work, least, share, spare, pace, reach[0])


@helper()
def _streaming_reach(work: Array, least: Array, share: Array, spare: int, pace: float, low: float) -> float:
    """Return a lower bound, at least `low`, on a layer's seconds if every slot is filled and replicas read weights.

    `pace` is the sum of the ranks' speeds. The bound is found by bisection.
    """
    chords, room = np.empty(len(work)), np.empty(len(work), np.int64)
    if _fits(low, work, least, share, spare, pace, chords, room):
        return low
    high = 2.0 * low
    while not _fits(high, work, least, share, spare, pace, chords, room):
        low, high = high, 2.0 * high
    while high > low * (1.0 + CLOSE):
        middle = (low + high) / 2.0
        if _fits(middle, work, least, share, spare, pace, chords, room):
            high = middle
        else:
            low = middle
    return low


@helper()
def _fits(
    limit: float,
    work: Array,
    least: Array,
    share: Array,
    spare: int,
    pace: float,
    chords: Array,
    room: NDArray[np.int64],
) -> bool:
    """Return False if no placement can take at most `limit` seconds.

    Each expert gets as many replicas as it needs to fit into `limit`; the slots left over are filled as cheaply as
    possible. r replicas take r x share[r] x work seconds together, which is concave in r. An additional replica
    therefore adds at least the mean increase up to the largest r; the cheapest of these means give a lower bound.
    """
    most = share.shape[0]
    left, total = spare, 0.0
    for expert in range(len(work)):
        row, count = share[:, expert], 1
        while count < most and least[expert] * row[count - 1] > limit * (1.0 + TINY):
            count += 1
        left -= count - 1
        if left < 0:
            return False
        taken = count * row[count - 1] * work[expert]
        total += taken
        room[expert] = most - count
        chords[expert] = np.inf
        if count < most:
            chords[expert] = (most * row[most - 1] * work[expert] - taken) / (most - count)
    while left > 0:
        cheapest = np.argmin(chords)
        if chords[cheapest] == np.inf:
            break  # all experts have the most replicas; further slots cost nothing
        more = min(left, room[cheapest])
        total += more * chords[cheapest]
        chords[cheapest] = np.inf
        left -= more
    return bool(total <= limit * pace * (1.0 + TINY))


# Seconds of each rank in a placement: processing of a step, and loading of the experts that are new on the rank.


@njit()
def assess(
    chosen: NDArray[np.int64],
    slot_experts: NDArray[np.int32],
    unit: Array,
    share: Array,
    given: Array,
    load_in: Array,
    source: NDArray[np.int16],
    alive: NDArray[np.bool_],
    busy: Array,
    arrivals: Array,
    loads: NDArray[np.int64],
) -> None:
    """Fill step seconds, load seconds and number of loads of each rank for the chosen layers.

    An expert in two slots of a rank is loaded once.
    """
    ranks, experts = unit.shape[1:]
    per_rank = slot_experts.shape[1] // ranks
    for layer in chosen:
        row, replicas, seen = slot_experts[layer], np.zeros(experts, np.int64), np.full(experts, -1)
        for slot in range(len(row)):
            if alive[slot // per_rank]:
                replicas[row[slot]] += 1
        for rank in range(ranks):
            busy[layer, rank], arrivals[layer, rank], loads[layer, rank] = 0.0, 0.0, 0
            if not alive[rank]:
                continue
            for slot in range(rank * per_rank, (rank + 1) * per_rank):
                expert = row[slot]
                if len(given):
                    busy[layer, rank] += unit[layer, rank, expert] * _part(share[layer, :, expert], given[layer, slot])
                else:
                    # Duplicates on one rank may give an expert more replicas than the table covers.
                    known = min(replicas[expert], share.shape[1])
                    part = unit[layer, rank, expert] * share[layer, known - 1, expert]
                    busy[layer, rank] += part * known / replicas[expert]
                if source[layer, rank, expert] != rank and seen[expert] != rank:
                    seen[expert] = rank
                    arrivals[layer, rank] += load_in[layer, rank, expert]
                    loads[layer, rank] += 1


@helper()
def _part(share: Array, tokens: float) -> float:
    """Return the time of a slot with this share of its expert's tokens, as a part of the time for all tokens.

    `share` [replicas - 1] gives the time at 1, 1/2, 1/3 … of the tokens; between these the time is interpolated.
    """
    most = len(share)
    if tokens >= 1.0:
        return float(share[0] * tokens)
    if tokens * most <= 1.0:
        return float(share[most - 1] * tokens * most)
    fewer = min(int(1.0 / tokens), most - 1)
    rest = (fewer + 1.0) * (1.0 - fewer * tokens)  # 0 at 1 / fewer, 1 at 1 / (fewer + 1)
    return float(share[fewer - 1] + rest * (share[fewer] - share[fewer - 1]))
