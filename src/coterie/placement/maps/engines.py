"""Readers and writers of engines' placement files; :mod:`coterie.placement.maps.formats` describes the formats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from coterie.costs.replicas import equal_shares
from coterie.errors import ConfigError, TraceError, check, check_file
from coterie.placement.maps.files import (
    MapOptions,
    PlacementMap,
    check_keys,
    complete_layers,
    count_of,
    dump,
    ints_of,
    json_of,
    list_of,
    made,
    rows_of,
    text_of,
)
from coterie.placement.maps.targets import far_shares
from coterie.placement.maps.torch_file import torch_file
from coterie.traces.readers.npz import read_placements
from coterie.types import Placement


def write_sglang(map: PlacementMap) -> str:
    return dump({"physical_to_logical_map": _all_layers("sglang", map)[0].tolist()})


def write_sglang_das(map: PlacementMap) -> bytes:
    """Return a torch file with the map and, for each slot, the probability that a rank without a replica picks it."""
    placement = map.placement
    rows, ids = _all_layers("sglang-das", map)
    every = Placement(rows.astype(np.int32), placement.num_ranks, placement.num_experts)
    shares = equal_shares(every.slot_experts, placement.num_experts, np.ones(placement.num_slots, np.bool_))
    if map.shares is not None:
        shares[ids] = map.shares
    masses = far_shares(every, shares).astype(np.float32)
    return torch_file({"physical_to_logical_map": rows, "physical_mass": masses})


def _all_layers(format: str, map: PlacementMap) -> tuple[NDArray[np.int64], list[int]]:
    """Return a row of slots for every layer of the model, dense ones filled in order, and the rows of MoE layers."""
    placement, (ids, spec) = map.placement, complete_layers(format, map)
    layers = placement.num_layers if spec is None else spec.num_layers
    check(
        spec is not None or ids == tuple(range(layers)),
        f"{format} needs a row for every layer of the model, but model {map.model!r} is not known",
    )
    filled = np.tile(np.arange(placement.num_slots) % placement.num_experts, (layers, 1))
    filled[list(ids)] = placement.slot_experts
    return filled, list(ids)


def read_sglang_das(path: Path, _: MapOptions) -> PlacementMap:
    raise ConfigError(f"{path}: sglang-das files are only written; its map is that of the file for --to sglang")


def read_sglang(path: Path, options: MapOptions) -> PlacementMap:
    value = json_of(path)
    check_keys(path, value, ("physical_to_logical_map",))
    rows = rows_of(path, "physical_to_logical_map", value["physical_to_logical_map"])
    if options.model is not None and len(rows) == options.model.num_layers:
        rows = rows[list(options.model.moe_layer_ids)]
    return made(path, rows, options, None)


def write_tensorrt(map: PlacementMap) -> str:
    placement, (ids, _) = map.placement, complete_layers("tensorrt-llm", map)
    lines = [f"num_slots: {placement.num_slots}", "initial_global_assignments:"]
    lines += [f"  {layer}: {row.tolist()}" for layer, row in zip(ids, placement.slot_experts, strict=True)]
    return "\n".join([*lines, "layer_updates_per_iter: 0", ""])  # last: a truncated file lacks this key and is refused


def read_tensorrt(path: Path, options: MapOptions) -> PlacementMap:
    value = yaml_of(path)
    check_keys(path, value, ("num_slots", "initial_global_assignments", "layer_updates_per_iter"))
    slots, layers = count_of(path, "num_slots", value["num_slots"]), value["initial_global_assignments"]
    check_file(type(value["layer_updates_per_iter"]) is int, path, "layer_updates_per_iter", "must be a whole number")
    check_file(
        isinstance(layers, dict) and all(type(layer) is int and layer < 2**31 for layer in layers),
        path,
        "initial_global_assignments",
        "must map layers, by number, to lists of slots",
    )
    rows = rows_of(path, "initial_global_assignments", [layers[layer] for layer in sorted(layers)])
    check_file(rows.shape[1] == slots, path, "num_slots", f"is {slots}; initial_global_assignments has {rows.shape[1]}")
    return made(path, rows, options, tuple(sorted(layers)))


def write_ascend(map: PlacementMap) -> str:
    complete_layers("ascend", map)
    placement = map.placement
    by_rank = placement.slot_experts.reshape(placement.num_layers, placement.num_ranks, -1).tolist()
    return dump(
        {
            "moe_layer_count": placement.num_layers,
            "layer_list": [
                {
                    "layer_id": layer,
                    "device_count": placement.num_ranks,
                    "device_list": [{"device_id": rank, "device_expert": held} for rank, held in enumerate(ranks)],
                }
                for layer, ranks in enumerate(by_rank)
            ],
        }
    )


def read_ascend(path: Path, options: MapOptions) -> PlacementMap:
    value = json_of(path)
    check_keys(path, value, ("moe_layer_count", "layer_list"))
    layers = list_of(path, "layer_list", value["layer_list"])
    check_file(
        count_of(path, "moe_layer_count", value["moe_layer_count"]) == len(layers),
        path,
        "moe_layer_count",
        f"is {value['moe_layer_count']}; layer_list has {len(layers)}",
    )
    rows, ranks = [], -1
    for index, layer in enumerate(layers):
        field = f"layer_list[{index}]"
        check_keys(path, layer, ("layer_id", "device_count", "device_list"), field=field)
        check_file(layer["layer_id"] == index, path, f"{field}.layer_id", f"is {layer['layer_id']!r}, expected {index}")
        devices = list_of(path, f"{field}.device_list", layer["device_list"])
        ranks = len(devices) if ranks < 0 else ranks
        if not layer["device_count"] == len(devices) == ranks:
            problem = f"is {layer['device_count']!r}; device_list has {len(devices)}, the first layer {ranks}"
            raise TraceError(path, f"{field}.device_count", problem)
        row: list[int] = []
        for rank, device in enumerate(devices):
            where = f"{field}.device_list[{rank}]"
            check_keys(path, device, ("device_id", "device_expert"), field=where)
            check_file(
                device["device_id"] == rank, path, f"{where}.device_id", f"is {device['device_id']!r}, expected {rank}"
            )
            row += ints_of(path, f"{where}.device_expert", device["device_expert"])
            check_file(
                len(row) == (rank + 1) * len(devices[0]["device_expert"]),
                path,
                f"{where}.device_expert",
                "must be as long as that of the first device",
            )
        rows.append(row)
    check_file(options.num_ranks in (None, ranks), path, "device_count", f"is {ranks}, expected {options.num_ranks}")
    return made(path, rows_of(path, "layer_list", rows), replace(options, num_ranks=ranks), None)


def read_rank_expert(path: Path, options: MapOptions) -> PlacementMap:
    """Read a 0/1 array [rank, layer, expert] of an .npz file.

    All ranks need equally many slots, so a rank with fewer experts repeats one of them in its spare slots.
    """
    file, name = split_name(path)
    arrays = read_placements(file)
    check_file(
        name is not None or len(arrays) <= 1,
        file,
        "arrays",
        f"holds {len(arrays)}; name one as {file.name}#NAME: {', '.join(arrays)}",
    )
    if name is not None and name not in arrays:
        raise TraceError(file, name, f"is missing; the file has {', '.join(arrays)}")
    held = arrays[name or next(iter(arrays))]  # [rank, layer, expert]
    ranks, layers, experts = held.shape
    for wanted, count, what in ((options.num_ranks, ranks, "ranks"), (options.num_experts, experts, "experts")):
        check_file(wanted in (None, count), file, name or "arrays", f"has {count} {what}, expected {wanted}")
    per_rank = int(held.sum(axis=2).max())
    rows = np.empty((layers, ranks, per_rank), np.int64)
    replicas = held.sum(axis=0)  # [layer, expert]
    for layer in range(layers):
        for rank in range(ranks):
            own = np.flatnonzero(held[rank, layer])
            check_file(own.size, file, name or "arrays", f"rank {rank} has no expert of layer {layer}")
            # Repeat an expert with the fewest replicas: with no replica elsewhere, no other rank's share changes.
            spare = own[np.argmin(replicas[layer, own])]
            rows[layer, rank] = np.concatenate([own, np.full(per_rank - len(own), spare)])
    return made(file, rows.reshape(layers, -1), replace(options, num_ranks=ranks, num_experts=experts), None)


def split_name(path: Path) -> tuple[Path, str | None]:
    file, mark, name = path.name.partition(".npz#")
    return (path.with_name(f"{file}.npz"), name) if mark else (path, None)


# The subset of YAML that placements use: mappings keyed by name or number, lists, whole numbers. All else is an error.
#
# PyYAML only parses; the values are built here from its events. Its loaders read `012` as ten and `1:30` as ninety,
# keep the last of two equal keys and follow aliases; the C loader overflows the stack if lists nest 200,000 deep.

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's C parser if it is available, else the Python parser."""
MAX_DEPTH = 3
"""Deepest nesting of a valid file: mapping, mapping, list. Deeper nesting is an error."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def yaml_of(path: Path) -> dict[str | int, Any]:
    """Read a file with one mapping of mappings, lists and whole numbers. TraceError names the line of an error."""
    events = yaml.parse(text_of(path), Loader=LOADER)
    try:
        return _document(path, (event for event in events if not isinstance(event, yaml.StreamStartEvent)))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = "YAML" if mark is None else f"line {mark.line + 1}"
        raise TraceError(path, where, f"cannot be parsed: {' '.join(problem.split())}") from None


def _document(path: Path, events: Iterator[Any]) -> dict[str | int, Any]:
    check_file(isinstance(next(events), yaml.DocumentStartEvent), path, "YAML", "is empty")
    start = next(events)
    check_file(isinstance(start, yaml.MappingStartEvent), path, _line(start), "must be a mapping")
    value: dict[str | int, Any] = _value(path, start, events, 1)
    next(events)  # the document's end
    check_file(isinstance(next(events), yaml.StreamEndEvent), path, "YAML", "holds several documents")
    return value


def _value(path: Path, event: Any, events: Iterator[Any], depth: int) -> Any:
    check_file(
        not isinstance(event, yaml.AliasEvent) and event.anchor is None and event.tag is None,
        path,
        _line(event),
        "has an alias, an anchor or a tag",
    )
    if isinstance(event, yaml.ScalarEvent):
        if event.style or not _WHOLE.fullmatch(event.value):
            raise TraceError(path, _line(event), f"is {event.value[:20]!r}, expected a whole number, not negative")
        return int(event.value)
    check_file(depth <= MAX_DEPTH, path, _line(event), f"is nested more than {MAX_DEPTH} deep")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_value(path, event, events, depth + 1))
        return items
    values: dict[str | int, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(path, event)
        check_file(key not in values, path, f"{_line(event)}: {key}", "is there twice")
        values[key] = _value(path, next(events), events, depth + 1)
    return values


def _key(path: Path, event: Any) -> str | int:
    if isinstance(event, yaml.ScalarEvent) and not (event.style or event.anchor or event.tag):
        if _WHOLE.fullmatch(event.value):
            return int(event.value)
        if _NAME.fullmatch(event.value):
            return str(event.value)
    raise TraceError(path, _line(event), "has a key that is neither a name nor a whole number")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
