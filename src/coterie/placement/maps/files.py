"""Code shared by all placement formats: the placement map, strict parsing of numbers, and checks against a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, UnknownNameError, check, check_file, check_found, file_errors
from coterie.models import get_model
from coterie.types import ModelSpec, Placement

MAX_BYTES = 1 << 30
"""Largest file size that is read: larger than any placement file, and small enough for memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementMap:
    """A placement with its model, layers and shares."""

    placement: Placement
    model: str = "unknown"
    layer_ids: tuple[int, ...] | None = None
    """[layer] layer index of each row in the model, counting dense layers; None if unknown."""
    shares: NDArray[np.float64] | None = None
    """[layer, slot] share of its expert's tokens that each slot computes; None: equal shares."""

    def __post_init__(self) -> None:
        layers = self.placement.num_layers
        ids = self.layer_ids
        if ids is not None and (len(ids) != layers or any(a >= b for a, b in pairwise((-1, *ids)))):
            shown = str(ids if len(ids) <= 8 else (*ids[:8], ...)).replace("Ellipsis", "…")
            raise ConfigError(f"layer_ids={shown} must be {layers} numbers that rise from 0 or more")
        if self.shares is None:
            return
        check(
            self.shares.shape == self.placement.slot_experts.shape,
            f"shares has shape {self.shares.shape}; the placement {self.placement.slot_experts.shape}",
        )
        total = np.zeros((layers, self.placement.num_experts))
        np.add.at(total, (np.arange(layers)[:, None], self.placement.slot_experts), self.shares)
        # false for NaN as well
        check(
            (self.shares >= 0).all() and np.allclose(total, 1.0, atol=1e-6),
            "shares must not be negative, and an expert's must add up to 1",
        )


@dataclass(frozen=True, slots=True)
class MapOptions:
    """Facts supplied by the caller for values that a file may leave out."""

    model: ModelSpec | None = None
    model_name: str | None = None
    """Name of the model; used alone if no ModelSpec is known for it."""
    num_ranks: int | None = None
    num_experts: int | None = None


def made(
    path: Path,
    rows: NDArray[np.int64],
    options: MapOptions,
    layer_ids: tuple[int, ...] | None,
    shares: NDArray[np.float64] | None = None,
) -> PlacementMap:
    """Make a map from the rows of a file; raise TraceError if it is inconsistent or does not fit the given model."""
    spec = options.model
    ranks = check_found(options.num_ranks, path, "num_ranks", "is not in the file; say how many there are (--ranks)")
    experts = int(rows.max()) + 1 if options.num_experts is None else options.num_experts
    check_file(
        rows.shape[1] >= experts, path, "slots", f"are {rows.shape[1]} a layer; they must hold num_experts={experts}"
    )
    if spec is not None:
        ids = layer_ids or (spec.moe_layer_ids if len(rows) == spec.num_moe_layers else None)
        if ids is None or len(rows) != len(ids) or not set(ids) <= set(spec.moe_layer_ids):
            known = f"{spec.name} has {spec.num_layers}, {spec.num_moe_layers} of them MoE"
            raise TraceError(path, "layers", f"are {len(rows)}; {known}")
        layer_ids = ids
    name = spec.name if spec is not None else options.model_name or "unknown"
    try:
        return PlacementMap(Placement(rows.astype(np.int32), ranks, experts), name, layer_ids, shares)
    except ConfigError as error:
        raise TraceError(path, "placement", str(error)) from None


def complete_layers(format: str, map: PlacementMap) -> tuple[tuple[int, ...], ModelSpec | None]:
    """Return the layer of the model for each row, and the model if it is known.

    Raises ConfigError unless the placement has all MoE layers and experts of the model, as the engine requires.
    """
    placement, spec = map.placement, known_model(map.model)
    ids = map.layer_ids or (tuple(range(placement.num_layers)) if spec is None else spec.moe_layer_ids)
    if spec is not None and ids != spec.moe_layer_ids:
        problem = f"{placement.num_layers} layers of {spec.name}, which has {spec.num_moe_layers} MoE ones"
        raise ConfigError(f"the placement is for {problem}: {format} needs all of them")
    if spec is not None and placement.num_experts != spec.num_experts:
        raise ConfigError(f"the placement has {placement.num_experts} experts; {spec.name} has {spec.num_experts}")
    check(len(ids) == placement.num_layers, f"the placement has {placement.num_layers} layers; {len(ids)} are named")
    return ids, spec


def known_model(model: str) -> ModelSpec | None:
    try:
        return get_model(model)
    except UnknownNameError:
        return None


def check_model(path: Path, stated: Any, options: MapOptions) -> None:
    check_file(isinstance(stated, str), path, "model", f"is {stated!r}, expected a name")
    wanted, spec = options.model_name, known_model(stated)
    if wanted is None or stated == "unknown":
        return
    check_file(
        (stated if spec is None else spec.name) == (wanted if options.model is None else options.model.name),
        path,
        "model",
        f"is {stated!r}; the placement of {wanted!r} is wanted",
    )


def text_of(path: Path) -> str:
    with file_errors(path):
        check_file(
            path.stat().st_size <= MAX_BYTES,
            path,
            "file",
            f"has {path.stat().st_size} bytes; a placement has at most {MAX_BYTES}",
        )
        return path.read_text(encoding="utf-8")


def json_of(path: Path) -> dict[str, Any]:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [name for name, _ in pairs]
            raise TraceError(path, next(name for name in names if names.count(name) > 1), "is there twice")
        return value

    try:
        value = json.loads(text_of(path), object_pairs_hook=no_repeats)
    except TraceError:
        raise
    except (RecursionError, ValueError) as error:
        raise TraceError(path, "JSON", f"cannot be parsed: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(path, "JSON", f"must be an object, found {type(value).__name__}")
    return value


def check_keys(path: Path, value: Any, keys: tuple[str, ...], optional: tuple[str, ...] = (), field: str = "") -> None:
    if not isinstance(value, dict):
        raise TraceError(path, field or "JSON", f"must be an object, found {type(value).__name__}")
    prefix = f"{field}." if field else ""
    for key in keys:
        check_file(key in value, path, prefix + key, "is missing")
    for key in value:
        check_file(
            key in keys or key in optional,
            path,
            f"{prefix}{key}",
            f"is not a key of this format; known: {', '.join(keys)}",
        )


def list_of(path: Path, field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TraceError(path, field, "must be a list of at least one")
    return value


def ints_of(path: Path, field: str, value: Any) -> list[int]:
    for index, item in enumerate(list_of(path, field, value)):
        check_file(
            type(item) is int and 0 <= item < 2**31,
            path,
            f"{field}[{index}]",
            f"is {item!r}, expected a whole number, not negative",
        )
    return list(value)


def count_of(path: Path, field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise TraceError(path, field, f"is {value!r}, expected a whole number of at least 1")
    return value


def rows_of(path: Path, field: str, value: Any) -> NDArray[np.int64]:
    """Check a list of lists of expert indices and return it as an array [layer, slot]."""
    rows = [ints_of(path, f"{field}[{index}]", row) for index, row in enumerate(list_of(path, field, value))]
    for index, row in enumerate(rows):
        check_file(
            len(row) == len(rows[0]), path, f"{field}[{index}]", f"has {len(row)} slots, the first {len(rows[0])}"
        )
    return np.array(rows, np.int64)


def dump(value: dict[str, Any]) -> str:
    """Return the value as JSON with one line per layer."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("],[", "],\n[").replace('{"layer_id"', '\n{"layer_id"') + "\n"
