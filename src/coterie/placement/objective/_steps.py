"""The loops over scenarios: times of ranks in each of them, and seconds that no placement gets below."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

Array = NDArray[np.float64]


@helper()
def touched(tokens: float, whole: bool) -> float:
    """Chance that a slot with so many tokens of a step is streamed; of a mean step unless it is a `whole` one."""
    if whole:
        return min(tokens, 1.0)
    return float(-np.expm1(-tokens))


@helper()
def find_edge(times: Array, weights: Array, share: float) -> float:
    """The time that the worst `share` of the scenarios reach; `weights` add up to 1."""
    left, last = share, np.inf
    while True:
        top, weight = -1.0, 0.0
        for value in times:
            if value < last and value > top:
                top = value
        for scenario in range(len(times)):
            if times[scenario] == top:
                weight += weights[scenario]
        left -= weight
        if left <= 1e-12 or top < 0.0:
            return max(top, 0.0)
        last = top


@njit()
def assess_steps(
    chosen: NDArray[np.int64],
    slot_experts: NDArray[np.int32],
    given: Array,
    tokens: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    alive: NDArray[np.bool_],
    busy: Array,
) -> None:
    """`busy` [layer, scenario, rank] seconds of the chosen layers.

    `given` [layer, slot] are shares, or empty for equal ones; `tokens` [layer, scenario, expert]; `touch` [rank]
    seconds to stream an expert; `per_token` [layer, rank, expert] seconds.
    """
    ranks, experts = per_token.shape[1:]
    per_rank = slot_experts.shape[1] // ranks
    replicas = np.zeros(experts)
    for layer in chosen:
        row = slot_experts[layer]
        for expert in range(experts):
            replicas[expert] = 0.0
        for slot in range(len(row)):
            if alive[slot // per_rank]:
                replicas[row[slot]] += 1.0
        for scenario in range(tokens.shape[1]):
            known, times = tokens[layer, scenario], busy[layer, scenario]
            for rank in range(ranks):
                times[rank] = 0.0
                if not alive[rank]:
                    continue
                for slot in range(rank * per_rank, (rank + 1) * per_rank):
                    expert = row[slot]
                    part = known[expert] * (given[layer, slot] if len(given) else 1.0 / replicas[expert])
                    times[rank] += per_token[layer, rank, expert] * part
                    if touch[rank] > 0.0:
                        times[rank] += touch[rank] * touched(part, whole)


@njit()
def fill_replicas(tokens: Array, touch: Array, per_token: Array, whole: bool, seconds: Array) -> None:
    """`seconds` [rank, expert, replicas - 1, scenario] of each of so many equal replicas of one layer.

    `tokens` [scenario, expert]; `per_token` [rank, expert].
    """
    ranks, experts, replicas, scenarios = seconds.shape
    for rank in range(ranks):
        for expert in range(experts):
            for index in range(replicas):
                for scenario in range(scenarios):
                    part = tokens[scenario, expert] / (index + 1.0)
                    streamed = touch[rank] * touched(part, whole)
                    seconds[rank, expert, index, scenario] = per_token[rank, expert] * part + streamed


@njit()
def bound_steps(
    chosen: NDArray[np.int64],
    tokens: Array,
    touch: Array,
    per_token: Array,
    whole: bool,
    speeds: Array,
    replicas: int,
    even: Array,
    reach: Array,
) -> None:
    """`even` and `reach` [layer, scenario] seconds of the chosen layers; an expert has at most so many `replicas`."""
    ranks, experts = per_token.shape[1:]
    work, least = np.empty(experts), np.empty(experts)
    pace, quickest = 0.0, np.inf
    for rank in range(ranks):
        pace += speeds[rank]
        if speeds[rank] > 0.0:
            quickest = min(quickest, touch[rank])
    for layer in chosen:
        for expert in range(experts):
            work[expert], least[expert] = np.inf, np.inf
            for rank in range(ranks):
                if speeds[rank] > 0.0:
                    work[expert] = min(work[expert], per_token[layer, rank, expert] * speeds[rank])
                    least[expert] = min(least[expert], per_token[layer, rank, expert])
        for scenario in range(tokens.shape[1]):
            total, longest = 0.0, 0.0
            for expert in range(experts):
                known = tokens[layer, scenario, expert]
                part = known / replicas
                total += known * work[expert]
                alone = part * least[expert]
                if quickest > 0.0:
                    # Streaming takes `touch` at speed 1, whatever the rank.
                    total += touched(known, whole) * _at_speed_one(touch, speeds)
                    alone += touched(part, whole) * quickest
                longest = max(longest, alone)
            even[layer, scenario] = total / pace
            reach[layer, scenario] = max(total / pace, longest)


@helper()
def _at_speed_one(touch: Array, speeds: Array) -> float:
    for rank in range(len(speeds)):
        if speeds[rank] > 0.0:
            return float(touch[rank] * speeds[rank])
    return 0.0
