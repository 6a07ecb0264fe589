"""Placement files: Coterie's own format and the formats that engines load.

    native        JSON: format, version, model, num_ranks, num_experts, layer_ids, slot_experts, shares, crc32
    vllm          JSON for Coterie's policy in vLLM, since vLLM has no file format: the same header and checksum as
                  native, and physical_to_logical_map with one row per MoE layer
    sglang        JSON {"physical_to_logical_map": [[…]]} and no other key, one row per layer of the model. SGLang never
                  uses the rows of dense layers; they are written as 0, 1, 2, … and dropped if the model is known
    sglang-das    torch file {"physical_to_logical_map" int64, "physical_mass" float32} [layer of the model, slot], with
                  the probability that a rank without the expert sends its tokens to the slot; written only
    tensorrt-llm  YAML: num_slots, initial_global_assignments {layer of the model: [slots]}, layer_updates_per_iter
    ascend        JSON {"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id",
                  "device_expert"}]}]}; layer_id counts MoE layers from 0, as vllm-ascend's own scripts do
    rank-expert   .npz with 0/1 [rank, layer, expert], as published by omni-infer; read only

A file is read completely or refused with its name and the wrong field. Without a checksum a changed digit cannot be
detected; all formats are checked for a slot for every expert and for rows of equal length.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check_file, check_new_file
from coterie.placement.maps.engines import (
    read_ascend,
    read_rank_expert,
    read_sglang,
    read_sglang_das,
    read_tensorrt,
    split_name,
    write_ascend,
    write_sglang,
    write_sglang_das,
    write_tensorrt,
)
from coterie.placement.maps.files import (
    MapOptions,
    PlacementMap,
    check_keys,
    check_model,
    count_of,
    dump,
    ints_of,
    json_of,
    known_model,
    made,
    rows_of,
    text_of,
)
from coterie.placement.maps.targets import Target
from coterie.registry import PolicyText, Registry
from coterie.traces.store import new_path
from coterie.traces.writers import Written
from coterie.types import ModelSpec

__all__ = ["MapFormat", "MapOptions", "PlacementMap", "check_map_target", "map_formats", "read_map", "write_map"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class MapFormat:
    """A file format for placements."""

    read: Callable[[Path, MapOptions], PlacementMap]
    write: Callable[[PlacementMap], str | bytes] | None
    """Function that returns the text of the file; None if the format is read-only."""
    sniff: Callable[[Any], bool]
    """Function that tells whether a parsed JSON value, or the file's text if it is not JSON, looks like this format."""
    keeps: frozenset[str]
    """Fields among model, layer_ids and shares that the format keeps."""
    help: str


map_formats: Registry[MapFormat] = Registry("map format", group="coterie.map_formats")


def read_map(
    path: str | Path,
    format: str | None = None,
    *,
    model: str | ModelSpec | None = None,
    num_ranks: int | None = None,
    num_experts: int | None = None,
) -> PlacementMap:
    """Read a placement in any known format; without `format`, the format is detected.

    `model`, `num_ranks` and `num_experts` supply facts that the file leaves out, and must agree with facts that it
    states. FILE.npz#NAME selects one placement of an .npz file with several.
    """
    path = Path(path)
    spec = known_model(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) or model is None else model.name
    if spec is not None and num_experts not in (None, spec.num_experts):
        raise ConfigError(f"num_experts={num_experts} must equal that of {spec.name}, {spec.num_experts}")
    options = MapOptions(spec, name, num_ranks, num_experts if spec is None else spec.num_experts)
    return map_formats[format or _detect(path)].read(path, options)


def write_map(path: str | Path, map: PlacementMap, format: str = "native", *, force: bool = False) -> Written:
    """Write a placement to a new file. A crash leaves no partial file under that name.

    `format` may say which engine will load the file (``sglang:version=0.5.23``, see :class:`Target`). A file with which
    that engine would compute other outputs is refused unless `force` is set.
    """
    path, target = Path(path), Target.parse(format)
    check_map_target(path, format)
    writer, format = map_formats[target.format], target.format
    assert writer.write is not None
    text = writer.write(map)
    if not force:
        target.check_outputs(map)
    with new_path(path) as tmp, tmp.open("wb") as stream:
        stream.write(text.encode() if isinstance(text, str) else text)
        stream.flush()
        os.fsync(stream.fileno())
    has = {"model": map.model != "unknown", "layer_ids": map.layer_ids is not None, "shares": map.shares is not None}
    return Written(path, format, tuple(name for name, there in has.items() if there and name not in writer.keeps))


def replace_map(path: str | Path, map: PlacementMap, format: str = "native") -> None:
    """Write a placement to a file as :func:`write_map` does, replacing an existing file atomically."""
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    write_map(fresh, map, format)
    fresh.replace(path)


def check_map_target(path: Path, format: str) -> None:
    """Raise ConfigError unless the format can be written and the file does not exist yet."""
    name = PolicyText.parse(format).name
    if map_formats[name].write is None:
        able = [name for name in map_formats if map_formats[name].write is not None]
        raise ConfigError(f"map format {name!r} is only read; {', '.join(able)} are written")
    check_new_file(path)


def _detect(path: Path) -> str:
    if split_name(path)[0].suffix == ".npz":
        return "rank-expert"
    text = text_of(path)
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    names = [name for name in map_formats if map_formats[name].sniff(value)]
    if len(names) == 1:
        return names[0]
    if not names and text.lstrip().startswith("{"):
        json_of(path)  # raises a parse error if the file is truncated; valid JSON is an unknown format
    problem = f"could be {' or '.join(names)}" if names else "is unknown, or the file is empty or cut"
    raise TraceError(path, "format", f"{problem}; it must be one of {', '.join(map_formats)}")


def _write_own(name: str, rows_key: str, shares: bool) -> Callable[[PlacementMap], str]:
    def write(map: PlacementMap) -> str:
        placement = map.placement
        value: dict[str, Any] = {
            "format": name,
            "version": VERSION,
            "model": map.model,
            "num_ranks": placement.num_ranks,
            "num_experts": placement.num_experts,
            "layer_ids": None if map.layer_ids is None else list(map.layer_ids),
            rows_key: placement.slot_experts.tolist(),
        }
        if shares:
            value["shares"] = None if map.shares is None else map.shares.tolist()
        return dump(value | {"crc32": _crc(value)})

    return write


def _read_own(name: str, rows_key: str, shares: bool) -> Callable[[Path, MapOptions], PlacementMap]:
    keys = ("format", "version", "model", "num_ranks", "num_experts", "layer_ids", rows_key)

    def read(path: Path, options: MapOptions) -> PlacementMap:
        value = json_of(path)
        check_keys(path, value, keys, ("crc32", *(("shares",) if shares else ())))
        for key, expected in (("format", name), ("version", VERSION)):
            check_file(value[key] == expected, path, key, f"is {value[key]!r}, expected {expected!r}")
        stated = value.pop("crc32", _crc(value))  # optional, so that users can edit a map by hand
        if stated != _crc(value):
            raise TraceError(path, "crc32", f"is {stated!r}, the file's content gives {_crc(value)}: it was changed")
        check_model(path, value["model"], options)
        rows = rows_of(path, rows_key, value[rows_key])
        layer_ids = None if value["layer_ids"] is None else tuple(ints_of(path, "layer_ids", value["layer_ids"]))
        counts = {key: count_of(path, key, value[key]) for key in ("num_ranks", "num_experts")}
        for key, count in counts.items():
            check_file(
                getattr(options, key) in (None, count), path, key, f"is {count}, expected {getattr(options, key)}"
            )
        stated_options = MapOptions(options.model, value["model"], **counts)
        return made(path, rows, stated_options, layer_ids, _shares(path, value.get("shares"), rows.shape))

    return read


def _crc(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True, allow_nan=True).encode())


def _shares(path: Path, value: Any, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    if value is None:
        return None
    try:
        shares = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TraceError(path, "shares", "must be numbers [layer][slot]") from None
    check_file(shares.shape == shape, path, "shares", f"has shape {shares.shape}; the placement {shape}")
    return shares


def _has(*keys: str, format: str | None = None) -> Callable[[Any], bool]:
    def sniff(value: Any) -> bool:
        return isinstance(value, dict) and all(key in value for key in keys) and value.get("format") == format

    return sniff


_OWN = ("coterie-placement", "slot_experts", True)
_VLLM = ("coterie-vllm", "physical_to_logical_map", False)
map_formats.add(
    "native",
    MapFormat(
        _read_own(*_OWN),
        _write_own(*_OWN),
        _has("slot_experts", format=_OWN[0]),
        frozenset({"model", "layer_ids", "shares"}),
        "Coterie's own JSON, with shares",
    ),
)
map_formats.add(
    "vllm",
    MapFormat(
        _read_own(*_VLLM),
        _write_own(*_VLLM),
        _has("physical_to_logical_map", format=_VLLM[0]),
        frozenset({"model", "layer_ids"}),
        "JSON that Coterie's policy in vLLM loads and saves",
    ),
)
map_formats.add(
    "sglang",
    MapFormat(
        read_sglang,
        write_sglang,
        _has("physical_to_logical_map"),
        frozenset({"layer_ids"}),
        "JSON for SGLang's --init-expert-location",
    ),
)
map_formats.add(
    "sglang-das",
    MapFormat(
        read_sglang_das,
        write_sglang_das,
        lambda _: False,
        frozenset({"layer_ids", "shares"}),
        "torch file of replicas' probabilities for HYGON's sglang-das; written only",
    ),
)
map_formats.add(
    "tensorrt-llm",
    MapFormat(
        read_tensorrt,
        write_tensorrt,
        lambda value: isinstance(value, str) and "initial_global_assignments" in value,
        frozenset({"layer_ids"}),
        "YAML for TensorRT-LLM's load balancer",
    ),
)
map_formats.add(
    "ascend", MapFormat(read_ascend, write_ascend, _has("layer_list"), frozenset(), "JSON expert map of vllm-ascend")
)
map_formats.add(
    "rank-expert",
    MapFormat(read_rank_expert, None, lambda _: False, frozenset(), "0/1 [rank, layer, expert] as .npz; read only"),
)
