"""Compiled loops over scenarios: seconds of the ranks in each scenario, and lower bounds for any placement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

Array = NDArray[np.float64]


@helper()
def touched(tokens: float, whole: bool) -> float:
    """Return the probability that a step reads the weights of a slot with this many tokens.

    In a `whole` step, `tokens` is a count or a share of one; otherwise it is the mean of a Poisson distribution.
    """
    if whole:
        return min(tokens, 1.0)
    return float(-np.expm1(-tokens))


@helper()
def find_edge(times: Array, weights: Array, share: float) -> float:
    """Return the time that the slowest `share` of the scenarios reach or exceed; `weights` add up to 1."""
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
    """Fill `busy` [layer, scenario, rank] with the seconds of the chosen layers.

    `given` [layer, slot] are the shares, or empty for equal shares; `tokens` is [layer, scenario, expert]; `touch` is
    the seconds [rank] to read an expert's weights; `per_token` is in seconds [layer, rank, expert].
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
    """Fill `seconds` [rank, expert, count - 1, scenario] with the time of one of `count` equal replicas, in one layer.

    `tokens` is [scenario, expert]; `touch` and `per_token` are in seconds, [rank] and [rank, expert].
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
    """Fill `even` and `reach` [layer, scenario] (seconds) of the chosen layers; an expert has at most `replicas`."""
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
                    # touch x speed is the same on all ranks: the time to read weights at speed 1.
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
