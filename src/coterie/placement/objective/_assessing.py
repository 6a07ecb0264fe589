"""Seconds of ranks in a placement: of a step, and of loading what is new there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

Array = NDArray[np.float64]


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
    """Times of ranks, and of loads, of the chosen layers; an expert in two slots of a rank is loaded once."""
    for layer in chosen:
        parts = given[layer] if len(given) else np.empty(0)
        _assess_layer(
            slot_experts[layer],
            unit[layer],
            share[layer],
            parts,
            load_in[layer],
            source[layer],
            alive,
            busy[layer],
            arrivals[layer],
            loads[layer],
        )


@helper()
def _assess_layer(
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
    ranks, experts = unit.shape
    per_rank = len(slot_experts) // ranks
    replicas, seen = np.zeros(experts, np.int64), np.empty(experts, np.int64)
    for expert in range(experts):
        seen[expert] = -1
    for slot in range(len(slot_experts)):
        if alive[slot // per_rank]:
            replicas[slot_experts[slot]] += 1
    slot = 0
    for rank in range(ranks):
        busy[rank], arrivals[rank], loads[rank] = 0.0, 0.0, 0
        for _ in range(per_rank):
            expert = slot_experts[slot]
            slot += 1
            if not alive[rank]:
                continue
            if len(given):
                busy[rank] += unit[rank, expert] * _part(share[:, expert], given[slot - 1])
            else:
                # Duplicates on one rank may bring an expert past the replicas the table has.
                known = min(replicas[expert], share.shape[0])
                busy[rank] += unit[rank, expert] * share[known - 1, expert] * known / replicas[expert]
            if source[rank, expert] != rank and seen[expert] != rank:
                seen[expert] = rank
                arrivals[rank] += load_in[rank, expert]
                loads[rank] += 1


@helper()
def _part(share: Array, tokens: float) -> float:
    """What a slot with this part of its expert's tokens takes of the whole: `share` [replicas - 1], on straight lines
    between 1, 1/2, 1/3 … of them and 0."""
    most = len(share)
    if tokens >= 1.0:
        return float(share[0] * tokens)
    if tokens * most <= 1.0:
        return float(share[most - 1] * tokens * most)
    fewer = min(int(1.0 / tokens), most - 1)
    rest = (fewer + 1.0) * (1.0 - fewer * tokens)  # 0 at 1 / fewer, 1 at 1 / (fewer + 1)
    return float(share[fewer - 1] + rest * (share[fewer] - share[fewer - 1]))


@njit()
def parts_taken(share: Array, shares: Array) -> Array:
    """[rank, expert] of the whole that these shares of an expert's tokens take; share [replicas - 1, expert]."""
    taken = np.empty(shares.shape)
    for rank in range(len(shares)):
        for expert in range(shares.shape[1]):
            taken[rank, expert] = _part(share[:, expert], shares[rank, expert])
    return taken
