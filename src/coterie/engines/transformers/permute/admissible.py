"""Which placements a permutation can apply: no replicas, and the groups of group-limited routing kept whole.

DeepSeek-V2 and V3 cut the experts of a layer into `n_group` blocks of consecutive indices, choose `topk_group` blocks
and take the best experts of those. A permutation keeps that choice if it moves groups as whole blocks and experts
inside them; any other gives the router other groups, and so other experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.errors import ConfigError
from coterie.types import Placement

Slots = NDArray[np.int64]
"""[slot] expert of one layer; a permutation."""


def routing_groups(config: Mapping[str, Any]) -> int:
    """Groups that limit the choice of a model's routers, from its config; 1 where they limit nothing."""
    text = config.get("text_config") or config
    groups, kept = (text.get(name) or 1 for name in ("n_group", "topk_group"))
    if not isinstance(groups, int) or not isinstance(kept, int) or min(groups, kept) < 1:
        raise ConfigError(f"n_group={groups!r} and topk_group={kept!r} must be whole numbers of at least 1")
    return 1 if text.get("topk_method") == "greedy" or kept >= groups else groups


def rows_by_layer(
    placement: Placement, layer_ids: Sequence[int] | None, moe_layers: Sequence[int], num_experts: int, groups: int
) -> dict[int, Slots]:
    """Layer of the model → expert of each slot. Raise for what no permutation of this model can do.

    `layer_ids` are the layers that the placement's rows are for; None: all MoE layers of the model, in order. Layers
    that are not named stay as they are, and are not in the answer.
    """
    if placement.num_experts != num_experts:
        raise ConfigError(f"the placement has {placement.num_experts} experts a layer; the model has {num_experts}")
    if placement.num_slots != num_experts:
        raise ConfigError(
            f"the placement has {placement.num_slots} slots for {num_experts} experts: a permutation has no replicas; "
            f"plan with --slots {num_experts}"
        )
    ids = list(moe_layers) if layer_ids is None else list(layer_ids)
    if len(ids) != placement.num_layers:
        raise ConfigError(f"the placement has {placement.num_layers} layers; the model has {len(ids)} MoE layers")
    missing = sorted(set(ids) - set(moe_layers))
    if missing:
        raise ConfigError(f"the placement is for layer {missing[0]}, which is not a MoE layer of the model")
    rows = placement.slot_experts.astype(np.int64)
    for layer, row in zip(ids, rows, strict=True):
        _check_groups(layer, row, groups)
    return dict(zip(ids, rows, strict=True))


def _check_groups(layer: int, row: Slots, groups: int) -> None:
    if len(row) % groups:
        raise ConfigError(f"num_experts={len(row)} must be a multiple of n_group={groups}")
    size = len(row) // groups
    of = (row // size).reshape(groups, size)
    split = np.flatnonzero((of != of[:, :1]).any(axis=1))
    if split.size:
        at = int(split[0])
        first, other = int(of[at, 0]), int(of[at][of[at] != of[at, 0]][0])
        raise ConfigError(
            f"layer {layer}: slots {at * size} to {at * size + size - 1} hold experts of groups {first} and {other}; "
            f"routing chooses among n_group={groups} whole groups, so a group's {size} experts must stay together "
            "(keep_groups, --nearest)"
        )


def keep_groups(placement: Placement, groups: int) -> Placement:
    """The placement nearest to this one that keeps groups whole: the most experts stay on their ranks.

    Which block of slots a group gets is an assignment problem: a group in a block can leave on each rank as many
    experts as it has there, up to the slots of the block on that rank. Of equal blocks, the one where most keep their
    slots.
    """
    experts, ranks = placement.num_experts, placement.num_ranks
    if placement.num_slots != experts or experts % groups:
        raise ConfigError(f"{placement.num_slots} slots must be num_experts={experts}, a multiple of n_group={groups}")
    rank_of = np.arange(experts) // placement.slots_per_rank
    block_ranks = _counts(rank_of.reshape(groups, -1), ranks)
    rows = []
    for row in placement.slot_experts.astype(np.int64):
        slot_of = np.argsort(row)
        group_ranks = _counts(rank_of[slot_of].reshape(groups, -1), ranks)
        stay = np.minimum(group_ranks[:, None], block_ranks[None]).sum(axis=2)  # [group, block]
        keep = _counts(slot_of.reshape(groups, -1) // (experts // groups), groups)
        block_of = linear_sum_assignment(stay * (experts + 1) + keep, maximize=True)[1]
        rows.append(_filled(slot_of.reshape(groups, -1), block_of, rank_of))
    return Placement(np.array(rows, np.int32), ranks, experts)


def _counts(rows: Slots, length: int) -> Slots:
    """[row, number] how often each number below `length` is in each row."""
    return np.stack([np.bincount(row, minlength=length) for row in rows])


def _filled(slot_of: Slots, block_of: Slots, rank_of: Slots) -> Slots:
    """[slot] expert, from the present slot [group, member] of each expert and the block [group] of its group.

    Three passes: experts whose slot is in the block keep it, then those whose rank has a slot left, then the rest.
    """
    groups, size = slot_of.shape
    row = np.full(groups * size, -1, np.int64)
    for group in range(groups):
        block = block_of[group] * size + np.arange(size)
        waiting = list(range(size))
        for near in (np.arange(len(rank_of)), rank_of, np.zeros_like(rank_of)):
            for member in list(waiting):
                free = block[(row[block] < 0) & (near[block] == near[slot_of[group, member]])]
                if free.size:
                    row[free[0]] = group * size + member
                    waiting.remove(member)
    return row
