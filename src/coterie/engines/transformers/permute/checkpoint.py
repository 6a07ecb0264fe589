"""Permute a checkpoint's experts from safetensors to safetensors without changing any byte of a weight.

A tensor of one expert is renamed to the expert's new index; the rows of a tensor of all experts, and of the router's
tensors, are reordered. Nothing is decoded, so that every dtype works, and every quantisation whose scales are separate
tensors. Weights are copied in chunks of at most 16 MB. The new folder is written under a temporary name beside the
target and renamed when it is complete.

**Ties.** An engine resolves equal router scores by the experts' indices, and a checkpoint cannot store a rule. After a
permutation, a tie between different experts at the edge of the top-k may therefore be resolved differently. Experts
with equal router rows tie for every token. A layer with such experts must stay as it is, or the placement is refused.
With ``ties="lowest_index"`` it is enough that they keep their order. That is correct if the engine prefers the lower
index, but not if its top-k has no such rule (``torch.topk``, and so vLLM on CPUs).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np

from coterie.engines.transformers.permute.tensors import (
    Block,
    Shard,
    Slots,
    Tensor,
    find_blocks,
    keep_groups,
    read_shard,
    routing_groups,
    row_bytes,
    rows_by_layer,
)
from coterie.errors import ConfigError, UnavailableError, check, check_file, check_one_of, read_json
from coterie.placement import PlacementMap, write_map
from coterie.traces.store import new_path, write_json
from coterie.types import Placement, Report

Ties = Literal["refuse", "lowest_index"]
TIES = ("refuse", "lowest_index")
RECORD = "coterie-placement.json"
"""File of a permuted checkpoint's placement, beside its weights."""

_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 24
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


class PermutedCheckpoint(NamedTuple):
    """Result of :func:`permute_checkpoint`."""

    folder: Path
    placement: Placement
    """Placement as applied: the given one, or the nearest that keeps routing groups whole."""
    layer_ids: tuple[int, ...]
    """[layer] index of each placement layer in the model; dense layers are counted too."""
    moved: int
    """Number of experts with a new index, over all layers."""
    regrouped: int
    """Number of experts on another rank than in the given placement, to keep routing groups whole."""
    tensors: int
    """Number of tensors renamed or with reordered rows."""
    weight_bytes: int
    left_out: tuple[str, ...]
    """Files and folders of the checkpoint that were not copied: weights in other formats, and all subfolders."""


class _Source(NamedTuple):
    folder: Path
    config: dict[str, Any]
    shards: list[Shard]
    blocks: list[Block]

    @property
    def weight_bytes(self) -> int:
        return sum(shard.path.stat().st_size for shard in self.shards)


def permute_checkpoint(
    asked: PlacementMap,
    checkpoint: str | Path,
    out: str | Path,
    *,
    nearest: bool = False,
    ties: Ties = "refuse",
    on_progress: Report | None = None,
) -> PermutedCheckpoint:
    """Write the checkpoint, with its experts in the order of the placement, to the new folder `out`.

    `nearest` applies the nearest placement that keeps routing groups whole if the given one does not.
    """
    check_one_of(TIES, ties=ties)
    source, target = _read(Path(checkpoint)), Path(out)
    check_new_checkpoint(target, source.folder)
    groups = routing_groups(source.config)
    placement = keep_groups(asked.placement, groups) if nearest and groups > 1 else asked.placement
    blocks = {block.layer_id: block for block in _main_blocks(source)}
    experts, *others = sorted({block.num_experts for block in blocks.values()})
    check_file(
        not others, source.folder, "experts", f"layers hold {[experts, *others]}; a placement has one number for all"
    )
    rows = rows_by_layer(placement, asked.layer_ids, list(blocks), experts, groups)
    _check_ties(source, blocks, rows, ties)
    above = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    check(
        free >= source.weight_bytes,
        f"{target} needs {source.weight_bytes:,} bytes; its disk has {free:,} free",
        UnavailableError,
    )
    record = PlacementMap(placement, asked.model, tuple(rows), asked.shares)
    left_out, tensors = _write(source, target, blocks, rows, record, on_progress or (lambda *_: None))
    ranks = [np.argsort(each.slot_experts) // placement.slots_per_rank for each in (asked.placement, placement)]
    return PermutedCheckpoint(
        folder=target,
        placement=placement,
        layer_ids=tuple(rows),
        moved=sum(int((row != np.arange(experts)).sum()) for row in rows.values()),
        regrouped=int((ranks[0] != ranks[1]).sum()),
        tensors=tensors,
        weight_bytes=source.weight_bytes,
        left_out=left_out,
    )


def check_new_checkpoint(target: Path, checkpoint: Path) -> None:
    """Raise ConfigError if the target is not empty, or is the checkpoint's folder or inside it."""
    check(
        not target.is_symlink() and (not target.exists() or target.is_dir()),
        f"{target} must be a new folder; it is a link or a file",
    )
    check(not target.exists() or not any(target.iterdir()), f"{target} is not empty; choose another folder")
    real, given = Path(os.path.realpath(target)), Path(os.path.realpath(checkpoint))
    check(
        real != given and given not in real.parents,
        f"{target} is the checkpoint or lies in it ({checkpoint}); choose another place",
    )


def _read(folder: Path) -> _Source:
    check_file(
        folder.is_dir(),
        folder,
        "checkpoint",
        "is a file; a checkpoint is a folder" if folder.exists() else "is missing",
    )
    config = read_json(folder / "config.json")
    check_file(
        isinstance(config.get("text_config") or {}, dict), folder / "config.json", "text_config", "must be an object"
    )
    check(
        not (folder / RECORD).exists(),
        f"{folder} was permuted already ({RECORD}): apply the placement to the original checkpoint",
    )
    check(
        not re.search(r"experts\.\d", str(config.get("quantization_config"))),
        f"{folder}/config.json: quantization_config names single experts; they would have to move too",
    )
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).exists():
        paths = sorted({folder / str(name) for name in _weight_map(folder).values()})
    check_file(paths, folder, "weights", "there is no .safetensors file; other formats are not permuted")
    for path in paths:
        check_file(
            path.exists() and path.parent == folder,
            folder / _INDEX,
            "weight_map",
            f"names {path.name}, which is not in the folder",
        )
    shards = [read_shard(path) for path in paths]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        twice = ", ".join(sorted(shard.tensors.keys() & tensors.keys()))
        check_file(not twice, shard.path, twice, "is in another file of the checkpoint too")
        tensors |= shard.tensors
    return _Source(folder, config, shards, find_blocks(folder, tensors))


def _weight_map(folder: Path) -> dict[str, Any]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    check_file(isinstance(weight_map, dict), folder / _INDEX, "weight_map", "must be an object: tensor → file")
    return cast(dict[str, Any], weight_map)


def _main_blocks(source: _Source) -> list[Block]:
    """Return the blocks of the model's own layers. Later layers (multi-token prediction) stay as they are."""
    layers = (source.config.get("text_config") or source.config).get("num_hidden_layers")
    own = [block for block in source.blocks if not isinstance(layers, int) or block.layer_id < layers]
    check_file(own, source.folder / "config.json", "num_hidden_layers", f"is {layers}; no MoE layer is below it")
    return own


def _check_ties(source: _Source, blocks: dict[int, Block], rows: dict[int, Slots], ties: Ties) -> None:
    for layer, row in rows.items():
        if (row == np.arange(len(row))).all():
            continue
        slot_of = np.argsort(row)
        seen: dict[bytes, int] = {}
        for expert, key in enumerate(_router_rows(source, blocks[layer])):
            other, seen[key] = seen.get(key), expert
            if other is None or (ties == "lowest_index" and slot_of[other] < slot_of[expert]):
                continue
            why = "an engine may choose the other once they move (ties='lowest_index' if it takes the lower index)"
            raise ConfigError(
                f"layer {layer}: experts {other} and {expert} have equal router rows and tie for every token; "
                + ("their order must stay" if ties == "lowest_index" else why)
            )


def _router_rows(source: _Source, block: Block) -> list[bytes]:
    """Return the bytes of all router tensors' rows for each expert, [expert]: its router score depends on them."""
    rows = [b""] * block.num_experts
    for shard in source.shards:
        for name in (name for name in block.router if name in shard.tensors):
            with shard.path.open("rb") as stream:
                own = row_bytes(stream, shard.tensors[name])
            rows = [row + more for row, more in zip(rows, own, strict=True)]
    return rows


def _write(
    source: _Source,
    target: Path,
    blocks: dict[int, Block],
    rows: dict[int, Slots],
    record: PlacementMap,
    report: Report,
) -> tuple[tuple[str, ...], int]:
    """Write the folder; return the names left out and the number of tensors changed."""
    names, moves = _changes(blocks, rows)
    left_out = []
    shards = {shard.path.name for shard in source.shards}
    with new_path(target) as beside:
        beside.mkdir()
        for path in sorted(source.folder.iterdir()):
            if path.name in shards:
                continue
            if path.is_dir() or path.suffix in (*_OTHER_WEIGHTS, ".safetensors"):
                left_out.append(path.name)
            elif path.name == _INDEX:
                renamed = {names.get(name, name): file for name, file in _weight_map(source.folder).items()}
                write_json(beside / _INDEX, read_json(path) | {"weight_map": renamed})
            else:
                shutil.copyfile(path, beside / path.name)
        for number, shard in enumerate(source.shards):
            report("Writing shards", number, len(source.shards))
            _write_shard(shard, beside / shard.path.name, names, moves)
        write_map(beside / RECORD, record)
    return tuple(left_out), len(moves) + sum(old != new for old, new in names.items())


def _changes(blocks: dict[int, Block], rows: dict[int, Slots]) -> tuple[dict[str, str], dict[str, Slots]]:
    """Return the new names of tensors, and the row orders of tensors: new row s is old row moves[name][s]."""
    names: dict[str, str] = {}
    moves: dict[str, Slots] = {}
    for layer, row in rows.items():
        block, slot_of = blocks[layer], np.argsort(row)
        names |= {name: block.renamed(name, int(slot_of[expert])) for name, expert in block.experts.items()}
        if (row != np.arange(len(row))).any():
            moves |= dict.fromkeys((*block.packed, *block.router), row)
    return names, moves


def _write_shard(shard: Shard, path: Path, names: dict[str, str], moves: dict[str, Slots]) -> None:
    header: dict[str, Any] = {} if shard.metadata is None else {"__metadata__": shard.metadata}
    at = 0
    for name, tensor in shard.tensors.items():
        header[names.get(name, name)] = tensor.entry | {"data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with shard.path.open("rb") as stream, path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in shard.tensors.items():
            width = tensor.nbytes // tensor.rows if tensor.rows else 0
            if name in moves and width:
                for row in moves[name]:
                    _copy(stream, tensor.start + int(row) * width, width, out)
            else:
                _copy(stream, tensor.start, tensor.nbytes, out)
        out.flush()
        os.fsync(out.fileno())


def _copy(stream: BinaryIO, start: int, nbytes: int, out: BinaryIO) -> None:
    stream.seek(start)
    while nbytes:
        part = stream.read(min(nbytes, _CHUNK))
        if not part:
            raise OSError(f"{stream.name} ends early: it changed while it was read")
        out.write(part)
        nbytes -= len(part)
