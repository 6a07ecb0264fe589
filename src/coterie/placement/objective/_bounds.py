"""Seconds that no placement of a layer gets below."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper

Array = NDArray[np.float64]

CLOSE = 1e-6
"""Relative precision of a bound found by bisection."""

TINY = 1e-12
"""Relative slack for rounding errors."""


@helper()
def _smallest(values: Array) -> int:
    """The first of the smallest."""
    smallest = 0
    for at in range(1, len(values)):
        if values[at] < values[smallest]:
            smallest = at
    return smallest


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
    work, least = np.empty(experts), np.empty(experts)  # at speed 1, and where it is shortest
    for expert in range(experts):
        work[expert], least[expert] = np.inf, np.inf
    living, pace = 0, 0.0
    for rank in range(ranks):
        if speeds[rank] == 0.0:
            continue
        living += 1
        pace += speeds[rank]
        if rank > 0 and not by_source and speeds[rank] == speeds[rank - 1] and each[rank] == each[rank - 1]:
            continue  # the same as the one before
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
        for _ in range(per_rank - 1):  # the shortest ones fill its rank
            shortest = _smallest(least)
            longest += least[shortest]
            least[shortest] = np.inf
    even[0] = total / pace
    reach[0] = max(even[0], longest)
    if streams and spare > 0:
        reach[0] = _streaming_reach(work, least, share, spare, pace, reach[0])


@helper()
def _streaming_reach(work: Array, least: Array, share: Array, spare: int, pace: float, low: float) -> float:
    """Seconds, at least `low`, below which no ranks of `pace` all together come, since every slot is filled."""
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
    """Whether ranks might do within `limit`: each expert in replicas short enough, the slots left over filled cheaply.

    r replicas take r x share[r] x work in all, which is concave in r. So one more of them adds, up to the most there
    can be, at least the mean of all those: the cheapest such means, no more than there is room, are a bound.
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
        cheapest = _smallest(chords)
        if chords[cheapest] == np.inf:
            break  # more slots than ranks have use for
        more = min(left, room[cheapest])
        total += more * chords[cheapest]
        chords[cheapest] = np.inf
        left -= more
    return bool(total <= limit * pace * (1.0 + TINY))
