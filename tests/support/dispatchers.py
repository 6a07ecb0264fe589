"""Dispatch of tokens to replicas as each engine does it, token by token, written after the engines' sources.

Every function takes the slots of one expert in rising order, and tokens [source rank, token]; it returns the slot of
each token. The whole table is of one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.types import Placement, Topology

TOKENS = 4096
"""Tokens of an expert on every rank."""


class Replicas(NamedTuple):
    """Where an expert is."""

    slots: list[int]
    ranks: list[int]
    nodes: list[int]
    mass: list[float]
    """Probability of each replica in a file, if the engine reads one."""


class Sender(NamedTuple):
    rank: int
    node: int
    first_row: int
    """Index of the rank's first token among those of all ranks."""


Dispatch = Callable[[Replicas, Sender, np.random.Generator], NDArray[np.int64]]


def vllm(replicas: Replicas, _: Sender, __: np.random.Generator) -> NDArray[np.int64]:
    """Knuth's hash of the token's row on its rank (base_router.py, 0.32)."""
    hashed = (np.arange(TOKENS, dtype=np.uint64) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    return np.array(replicas.slots)[(hashed % np.uint64(len(replicas.slots))).astype(np.int64)]


def sglang_without_a2a(replicas: Replicas, sender: Sender, _: np.random.Generator) -> NDArray[np.int64]:
    """The row modulo the replicas, on every rank alike (expert_location_dispatch.py, 0.5.17 and later)."""
    rows = sender.first_row + np.arange(TOKENS)
    return np.array(replicas.slots)[rows % len(replicas.slots)]


def sglang_with_a2a(replicas: Replicas, sender: Sender, rng: np.random.Generator) -> NDArray[np.int64]:
    """The nearest replica if there is one, else any at random (expert_location.py, _find_nearest_expert)."""
    left = _nearest(replicas, sender)
    return np.array(left)[rng.integers(0, 65536, TOKENS) % len(left)]


def sglang_das(replicas: Replicas, sender: Sender, rng: np.random.Generator) -> NDArray[np.int64]:
    """The nearest replica if there is one, else by the masses of the file (moe_ep_setup.py of pull request 386)."""
    left = _nearest(replicas, sender)
    if len(left) == 1:
        return np.full(TOKENS, left[0])
    mass = np.array(replicas.mass)
    return np.asarray(rng.choice(np.array(left), TOKENS, p=mass / mass.sum()))


def tensorrt_llm(replicas: Replicas, sender: Sender, _: np.random.Generator) -> NDArray[np.int64]:
    """In turn within blocks of 1024 entries, from the number of the block and the rank (moeLoadBalanceKernels.cu)."""
    block, inside = np.divmod(np.arange(TOKENS), 1024)
    slots: NDArray[np.int64] = np.array(replicas.slots)
    return np.asarray(slots[(block + inside + sender.rank) % len(slots)])


def ascend(replicas: Replicas, sender: Sender, _: np.random.Generator) -> NDArray[np.int64]:
    """The rank modulo the replicas (eplb_utils.py, generate_log2phy_map without tensor parallelism)."""
    return np.full(TOKENS, replicas.slots[sender.rank % len(replicas.slots)])


def _nearest(replicas: Replicas, sender: Sender) -> list[int]:
    own = [slot for slot, rank in zip(replicas.slots, replicas.ranks, strict=True) if rank == sender.rank]
    near = [slot for slot, node in zip(replicas.slots, replicas.nodes, strict=True) if node == sender.node]
    if own:
        return own[:1]
    return near[:1] if 0 < len(near) < len(replicas.slots) else replicas.slots


def counted_shares(
    placement: Placement, topology: Topology, dispatch: Dispatch, mass: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """Return the share [layer, slot] of its expert's tokens that each slot gets, every rank having as many of them."""
    rng, per_rank = np.random.default_rng(0), placement.slots_per_rank
    counts = np.zeros(placement.slot_experts.shape)
    nodes = topology.rank_nodes.tolist()
    for layer, row in enumerate(placement.slot_experts):
        for expert in range(placement.num_experts):
            slots = np.flatnonzero(row == expert).tolist()
            if len(slots) == 1:
                counts[layer, slots] = 1.0
                continue
            ranks = [slot // per_rank for slot in slots]
            weights = [] if mass is None else mass[layer, slots].tolist()
            replicas = Replicas(slots, ranks, [nodes[rank] for rank in ranks], weights)
            for rank, node in enumerate(nodes):
                sent = dispatch(replicas, Sender(rank, node, rank * TOKENS), rng)
                counts[layer] += np.bincount(sent, minlength=len(row)) / (TOKENS * placement.num_ranks)
    return counts
