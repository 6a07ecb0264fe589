"""Moves between two placements with their sources; slot orders and shares that change as little as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.movement import load_s
from coterie.costs.replicas import equal_shares
from coterie.errors import ConfigError, check
from coterie.placement.base import HOST, Moves
from coterie.types import Placement, Topology


def moves_between(
    current: Placement, slot_experts: NDArray[np.integer], topology: Topology, expert_bytes: float
) -> Moves:
    """Return the moves that fill `slot_experts` [layer, slot], without copies inside a rank and moves to dead ranks.

    The source is a holder with the fastest link, else the host. Among equally near holders the one that sends least in
    the layer is chosen, so that a hot expert's replicas do not queue at one sender.
    """
    speeds, per_rank = topology.rank_speeds, current.slots_per_rank
    changed = (slot_experts != current.slot_experts) & np.repeat(speeds > 0, per_rank)[None, :]
    layer, slot = np.nonzero(changed)
    expert = np.asarray(slot_experts, np.int64)[layer, slot]
    source, seconds = np.empty(len(layer), np.int64), np.empty(len(layer))
    _fill_sources(
        current.slot_experts,
        current.num_experts,
        speeds,
        load_s(topology, expert_bytes),
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
    links: NDArray[np.float64],
    layer: NDArray[np.int64],
    slot: NDArray[np.int64],
    expert: NDArray[np.int64],
    source: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> None:
    """Fill `source` and `seconds` [move]; the moves must be sorted by layer.

    A rank that already holds the expert is its own source.
    """
    slots, ranks = slot_experts.shape[1], len(speeds)
    per_rank = slots // ranks
    first, after = np.empty(experts, np.int64), np.empty(slots, np.int64)  # linked list of slots per expert
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
        # Experts with fewer copies have less choice of a sender, so they choose first.
        for count in range(copies.max() + 1):
            for move in range(start, end):
                if copies[expert[move]] != count:
                    continue
                rank, sender = slot[move] // per_rank, HOST
                at = first[expert[move]]
                while at >= 0:
                    holder = at // per_rank
                    slower = links[holder, rank] - links[sender, rank]
                    idler = slower == 0.0 and sends[holder] < sends[sender]
                    if sender != rank and (holder == rank or sender == HOST or slower < 0.0 or idler):
                        sender = holder
                    at = after[at]
                source[move], seconds[move] = sender, links[sender, rank]
                if sender not in (HOST, rank):
                    sends[sender] += 1
        start = end


def settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Reorder the slots of each rank in `new` so that experts that stay on a rank keep their slot of `old`.

    Returns the reordered rows [layer, slot] and, for each of their slots, its slot index in `new` [layer, slot].
    """
    order = np.full(new.shape, -1, np.int64)
    _settle(old, new, ranks, order)
    return np.take_along_axis(new, order, axis=1), order


@njit()
def _settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int, order: NDArray[np.int64]) -> None:
    layers, slots = new.shape
    per_rank = slots // ranks
    used = np.zeros(per_rank, np.bool_)
    for layer in range(layers):
        for rank in range(ranks):
            start = rank * per_rank
            used[:] = False
            for slot in range(start, start + per_rank):
                for other in range(per_rank):
                    if not used[other] and new[layer, start + other] == old[layer, slot]:
                        used[other] = True
                        order[layer, slot] = start + other
                        break
            other = 0
            for slot in range(start, start + per_rank):
                if order[layer, slot] < 0:
                    while used[other]:
                        other += 1
                    used[other] = True
                    order[layer, slot] = start + other


def living_shares(shares: NDArray[np.floating], current: Placement, alive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return shares [layer, slot] in which the shares of dead ranks go to the expert's living slots.

    The living slots of an expert keep their ratio; if all their shares are 0, they share equally.
    """
    given, experts = np.ascontiguousarray(shares, np.float64), current.slot_experts
    check(given.shape == experts.shape, f"shares has shape {given.shape}; the placement {experts.shape}")
    bad = np.argwhere(~((given >= 0) & (given < np.inf)))
    if bad.size:
        layer, slot = (int(index) for index in bad[0])
        raise ConfigError(f"shares[{layer}, {slot}] is {given[layer, slot]}; it must be finite and not negative")
    row = np.arange(current.num_layers)[:, None]
    total = np.zeros((current.num_layers, current.num_experts))
    np.add.at(total, (row, experts), given)
    bad = np.argwhere(~np.isclose(total, 1.0, rtol=0.0, atol=1e-6))
    if bad.size:
        layer, expert = (int(index) for index in bad[0])
        raise ConfigError(f"shares of layer {layer}, expert {expert} add up to {total[layer, expert]:g}; it must be 1")
    slot_alive = np.repeat(alive, current.slots_per_rank)
    if slot_alive.all():
        return given
    living = given * slot_alive
    total[:] = 0.0
    np.add.at(total, (row, experts), living)
    left = total[row, experts]
    equal = equal_shares(experts, current.num_experts, slot_alive)
    return np.where(left > 0, living / np.where(left > 0, left, 1.0), equal)
