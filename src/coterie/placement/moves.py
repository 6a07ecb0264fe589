"""Moves that lead from one placement to another, with their sources: for plans and schedules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.placement.base import HOST, Moves
from coterie.types import Placement, Topology


def moves_between(
    current: Placement, slot_experts: NDArray[np.integer], topology: Topology, expert_bytes: float
) -> Moves:
    """Moves that fill `slot_experts` [layer, slot]. Copies inside a rank are no moves; ranks that are gone get none.

    A source is on the rank's node if one there has the expert, else on another, else the host. Of several as near, the
    one that sends least in the layer is taken, so that a hot expert's replicas do not queue at its first copy.
    """
    speeds, per_rank = topology.rank_speeds, current.slots_per_rank
    changed = (slot_experts != current.slot_experts) & np.repeat(speeds > 0, per_rank)[None, :]
    layer, slot = np.nonzero(changed)
    expert = np.asarray(slot_experts, np.int64)[layer, slot]
    source, seconds = np.empty(len(layer), np.int64), np.empty(len(layer))
    links = [
        link.latency_s + expert_bytes / link.bytes_per_s for link in (topology.intra, topology.inter, topology.host)
    ]
    _fill_sources(
        current.slot_experts,
        current.num_experts,
        speeds,
        topology.rank_nodes,
        np.array(links),
        layer,
        slot,
        expert,
        source,
        seconds,
    )
    new = source != slot // per_rank
    return Moves(layer[new], slot[new], expert[new], source[new], seconds[new])


@njit()
def _fill_sources(
    slot_experts: NDArray[np.int32],
    experts: int,
    speeds: NDArray[np.float64],
    nodes: NDArray[np.int64],
    links: NDArray[np.float64],
    layer: NDArray[np.int64],
    slot: NDArray[np.int64],
    expert: NDArray[np.int64],
    source: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> None:
    """Fill `source` and `seconds` [move]; moves are in the order of their layers.

    A rank that has the expert already is its own source.
    """
    slots, ranks = slot_experts.shape[1], len(speeds)
    per_rank = slots // ranks
    first, after = np.empty(experts, np.int64), np.empty(slots, np.int64)  # a list of slots for each expert
    copies, sends = np.empty(experts, np.int64), np.empty(ranks, np.int64)
    start = 0
    while start < len(layer):
        end = start
        while end < len(layer) and layer[end] == layer[start]:
            end += 1
        first[:] = -1
        copies[:] = 0
        sends[:] = 0
        for at in range(slots - 1, -1, -1):
            if speeds[at // per_rank] > 0.0:
                held = slot_experts[layer[start], at]
                after[at] = first[held]
                first[held] = at
                copies[held] += 1
        most = 0
        for move in range(start, end):
            most = max(most, copies[expert[move]])
        # Experts with one copy have no choice: they go first, and those with several go around them.
        for count in range(most + 1):
            for move in range(start, end):
                if copies[expert[move]] != count:
                    continue
                rank, found, best = slot[move] // per_rank, HOST, 0
                at = first[expert[move]]
                while at >= 0:
                    holder = at // per_rank
                    price = sends[holder] + (0 if nodes[holder] == nodes[rank] else len(layer))
                    if holder == rank:
                        price = -1
                    if found == HOST or price < best:
                        found, best = holder, price
                    at = after[at]
                source[move] = found
                seconds[move] = links[2] if found == HOST else links[0 if nodes[found] == nodes[rank] else 1]
                if found not in (HOST, rank):
                    sends[found] += 1
        start = end
