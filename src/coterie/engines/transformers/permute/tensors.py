"""Classify a checkpoint's tensors by name: tensors of experts, tensors of routers, and their layers.

A *block* is the path that a layer's experts and router share: `model.layers.3.mlp`. Two layouts are known: one tensor
per expert (`…experts.7.up_proj.weight`, with any scales beside it) and one tensor for all (`…experts.gate_up_proj`,
whose first axis is the experts). Any other tensor with an axis of experts is refused, never left unpermuted.

A permutation can apply only placements without replicas that keep the groups of group-limited routing whole.
DeepSeek-V2 and V3 split the experts of a layer into `n_group` blocks of consecutive indices, choose `topk_group` blocks
and take the best experts of those. A permutation keeps that choice if it moves groups as whole blocks and experts
within them. Any other permutation gives the router other groups, and so other experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.errors import ConfigError, TraceError, check, check_file, check_found, check_input_file
from coterie.traces.store import read_header
from coterie.types import Placement

_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>[0-9]{1,9})\.(?P<rest>.+)")
_PACKED = re.compile(r"(?P<block>.+)\.experts\.(?P<rest>[^0-9].*)")
_LAYER = re.compile(r"(?:.*?\.)?([0-9]{1,9})(?:\..*)?")
_ROUTER = re.compile(r"(gate|router)\.\w+|\w*correction_bias")


class Tensor(NamedTuple):
    """Location of a tensor in its file."""

    entry: dict[str, Any]
    """The tensor's entry in the file's header."""
    start: int
    """Offset of the first byte in the file."""
    nbytes: int

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        shape = self.entry["shape"]
        return int(shape[0]) if shape else 1


class Shard(NamedTuple):
    """One safetensors file of a checkpoint."""

    path: Path
    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]
    """Tensors by name, in the order of their bytes."""


def read_shard(path: Path) -> Shard:
    check_input_file(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        header, start = read_header(path, stream, size)
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        try:
            first, last = (int(at) for at in entry["data_offsets"])
            shape = [int(length) for length in entry["shape"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(path, name, f"header entry {entry!r} must have dtype, shape, data_offsets") from None
        whole = min(shape, default=0) >= 0 and 0 <= first <= last <= size - start
        check_file(
            whole and not (last - first) % (shape[0] or 1 if shape else 1),
            path,
            name,
            f"data_offsets {first} to {last} do not fit {shape}, or the file is cut",
        )
        tensors[name] = Tensor(entry, start + first, last - first)
    return Shard(path, metadata, dict(sorted(tensors.items(), key=lambda item: item[1].start)))


def row_bytes(stream: BinaryIO, tensor: Tensor) -> list[bytes]:
    """Return the bytes of each row, [row]."""
    stream.seek(tensor.start)
    data, width = stream.read(tensor.nbytes), tensor.nbytes // tensor.rows
    return [data[row * width : (row + 1) * width] for row in range(tensor.rows)]


@dataclass(slots=True)
class Block:
    """The tensors of one MoE layer, by name."""

    path: str
    layer_id: int
    experts: dict[str, int] = field(default_factory=dict)
    """Tensors of single experts: name → expert."""
    packed: list[str] = field(default_factory=list)
    """Tensors of all experts in the experts module; rows are experts."""
    router: list[str] = field(default_factory=list)
    """Tensors of the router, outside the experts module; rows are experts."""
    num_experts: int = 0

    def renamed(self, name: str, slot: int) -> str:
        """Return the name of one expert's tensor with the expert's new index."""
        return f"{self.path}.experts.{slot}.{name.removeprefix(f'{self.path}.experts.').partition('.')[2]}"


def find_blocks(folder: Path, tensors: Mapping[str, Tensor]) -> list[Block]:
    """Return the MoE layers of a checkpoint, in order."""
    blocks: dict[str, Block] = {}
    others = {}
    for name in tensors:
        match = _EXPERT.fullmatch(name) or _PACKED.fullmatch(name)
        if match is None:
            others[name] = tensors[name]
            continue
        layer = check_found(_LAYER.fullmatch(match["block"]), folder, name, "does not say of which layer it is")
        block = blocks.setdefault(match["block"], Block(match["block"], int(layer[1])))
        if "expert" in match.groupdict():
            block.experts[name] = int(match["expert"])
        else:
            block.packed.append(name)
    check(blocks, f"{folder} has no experts among its {len(tensors)} tensors: it is not a MoE checkpoint")
    ordered = sorted(blocks.values(), key=lambda block: block.layer_id)
    for block in ordered:
        _count_experts(folder, block, tensors)
        _find_router(folder, block, others)
    for first, second in pairwise(ordered):
        check_file(
            first.layer_id != second.layer_id,
            folder,
            second.path,
            f"and {first.path} are both of layer {first.layer_id}",
        )
    return ordered


def _count_experts(folder: Path, block: Block, tensors: Mapping[str, Tensor]) -> None:
    held = sorted(set(block.experts.values()))
    counts = {tensors[name].rows for name in block.packed if tensors[name].rows > 1}
    if held:
        counts.add(len(held))
        if held != list(range(len(held))):
            missing = next(expert for expert in range(len(held)) if expert not in held)
            raise TraceError(folder, block.path, f"has no tensor of expert {missing}, but one of expert {held[-1]}")
        by_rest = Counter(block.renamed(name, 0) for name in block.experts)
        uneven = next((rest for rest, count in by_rest.items() if count != len(held)), None)
        if uneven is not None:
            raise TraceError(folder, uneven, f"is there for {by_rest[uneven]} of {len(held)} experts")
    check_file(len(counts) == 1, folder, block.path, f"holds tensors of {sorted(counts)} experts; expected one number")
    block.num_experts = counts.pop()
    # A scale shared by all experts has one row and stays unchanged.
    shared = [name for name in block.packed if tensors[name].rows != block.num_experts]
    for name in shared:
        _check_shared(folder, name, tensors[name], block.num_experts)
    block.packed = [name for name in block.packed if name not in shared]


def _find_router(folder: Path, block: Block, others: Mapping[str, Tensor]) -> None:
    for name, tensor in others.items():
        rest = name.removeprefix(f"{block.path}.")
        if rest == name or rest.startswith("shared_"):
            continue
        known = _ROUTER.fullmatch(rest) is not None
        if known and tensor.rows == block.num_experts:
            block.router.append(name)
        else:
            _check_shared(folder, name, tensor, block.num_experts, known)
    check_file(block.router, folder, block.path, "has experts and no router (gate.weight, router.weight)")


def _check_shared(folder: Path, name: str, tensor: Tensor, experts: int, routers: bool = False) -> None:
    """Raise if a tensor of unknown layout may be indexed by experts: it has an axis of them, or is the router's."""
    shape = tensor.entry["shape"]
    if routers or experts in shape:
        where = f"has shape {shape} in a layer of {experts} experts"
        raise TraceError(folder, name, f"{where}: how it is indexed by them is not known")


Slots = NDArray[np.int64]
"""[slot] expert of one layer; a permutation."""


def routing_groups(config: Mapping[str, Any]) -> int:
    """Return the number of groups in a model's group-limited routing, from its config; 1 if routing is not limited."""
    text = config.get("text_config") or config
    groups, kept = (text.get(name) or 1 for name in ("n_group", "topk_group"))
    check(
        isinstance(groups, int) and isinstance(kept, int) and min(groups, kept) >= 1,
        f"n_group={groups!r} and topk_group={kept!r} must be whole numbers of at least 1",
    )
    return 1 if text.get("topk_method") == "greedy" or kept >= groups else groups


def rows_by_layer(
    placement: Placement, layer_ids: Sequence[int] | None, moe_layers: Sequence[int], num_experts: int, groups: int
) -> dict[int, Slots]:
    """Return layer of the model → expert of each slot. Raise ConfigError if no permutation can apply the placement.

    `layer_ids` are the layers that the placement's rows are for; None means all MoE layers of the model, in order.
    Other layers stay as they are and are not in the result.
    """
    check(
        placement.num_experts == num_experts,
        f"the placement has {placement.num_experts} experts a layer; the model has {num_experts}",
    )
    check(
        placement.num_slots == num_experts,
        f"the placement has {placement.num_slots} slots for {num_experts} experts: a permutation has no replicas; "
        f"plan with --slots {num_experts}",
    )
    ids = list(moe_layers) if layer_ids is None else list(layer_ids)
    check(
        len(ids) == placement.num_layers,
        f"the placement has {placement.num_layers} layers; the model has {len(ids)} MoE layers",
    )
    missing = sorted(set(ids) - set(moe_layers))
    check(not missing, f"the placement is for layers {missing}, which are not MoE layers of the model")
    rows = placement.slot_experts.astype(np.int64)
    for layer, row in zip(ids, rows, strict=True):
        _check_groups(layer, row, groups)
    return dict(zip(ids, rows, strict=True))


def _check_groups(layer: int, row: Slots, groups: int) -> None:
    check(len(row) % groups == 0, f"num_experts={len(row)} must be a multiple of n_group={groups}")
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
    """Return the nearest placement that keeps groups whole: the most experts stay on their ranks.

    Groups are assigned to blocks of slots. A group in a block can keep on each rank as many experts as it has there, up
    to the block's slots on that rank. Between equal blocks, the one where more experts keep their slots wins.
    """
    experts, ranks = placement.num_experts, placement.num_ranks
    check(
        placement.num_slots == experts and experts % groups == 0,
        f"{placement.num_slots} slots must be num_experts={experts}, a multiple of n_group={groups}",
    )
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
    """Count each number below `length` in each row, [row, number]."""
    return np.stack([np.bincount(row, minlength=length) for row in rows])


def _filled(slot_of: Slots, block_of: Slots, rank_of: Slots) -> Slots:
    """Return [slot] expert, from the current slot [group, member] of each expert and the new block [group] of a group.

    Three passes: experts whose slot is in the block keep it, then experts take free slots on their rank, then any slot.
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
