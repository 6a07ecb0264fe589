"""Decode batches as routers formed them: reader and writer of the file that ``coterie replay`` takes.

A group (for example one load level) holds the decode steps of every router. A step is the expert ids [token, layer, k]
of the tokens that one worker decoded in it. The file is an .npz: `header` is JSON with the names, `ids_G_R` the ids of
router R in group G, all steps concatenated, and `tokens_G_R` the number of tokens of each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check, check_new_file
from coterie.traces.readers.npz import read_arrays
from coterie.types import ModelSpec, narrowest_uint

VERSION = 1

Steps = tuple[NDArray[np.unsignedinteger], ...]
"""Expert ids [token, layer, k] of each step."""


@dataclass(frozen=True, slots=True)
class ReplayBatches:
    """Decode steps by group and router, in the order they were formed."""

    model: str
    groups: Mapping[str, Mapping[str, Steps]]
    """Steps by group and router; the first router of a group is its baseline."""

    def __post_init__(self) -> None:
        check(self.groups, "groups is empty; at least one group of routers is needed")
        names = [list(routers) for routers in self.groups.values()]
        if not names[0] or any(routers != names[0] for routers in names):
            raise ConfigError(f"every group must hold the same routers, at least one; found {names}")
        shape = None
        for where, steps in self._runs():
            check(steps, f"{where}: there are no steps; at least one is needed")
            for number, ids in enumerate(steps):
                if ids.ndim != 3 or not ids.size or not np.issubdtype(ids.dtype, np.unsignedinteger):
                    raise ConfigError(
                        f"{where}, step {number}: ids are {ids.dtype}{list(ids.shape)}; expected unsigned "
                        "[token, layer, k]"
                    )
                shape = shape or ids.shape[1:]
                if ids.shape[1:] != shape:
                    raise ConfigError(
                        f"{where}, step {number}: [layer, k] is {ids.shape[1:]}; the first step has {shape}"
                    )

    def _runs(self) -> Iterator[tuple[str, Steps]]:
        """Yield "group, router" and its steps."""
        for group, routers in self.groups.items():
            yield from ((f"{group}, {router}", steps) for router, steps in routers.items())

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(next(iter(self.groups.values())))

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError unless the batches fit the model's shape."""
        expected = (spec.num_moe_layers, spec.top_k)
        for where, steps in self._runs():
            ids = np.concatenate(steps)
            if ids.shape[1:] != expected:
                raise ConfigError(f"{where}: [layer, k] is {ids.shape[1:]}; {spec.name} has {expected}")
            if ids.max() >= spec.num_experts:
                raise ConfigError(f"{where}: expert {ids.max()} must be below num_experts={spec.num_experts}")
            if (np.diff(np.sort(ids, axis=2).astype(np.int64), axis=2) == 0).any():
                raise ConfigError(f"{where}: a token takes the same expert twice in a layer; its ids must differ")


def write_batches(path: Path, model: str, groups: Mapping[str, Mapping[str, Sequence[NDArray[np.integer]]]]) -> None:
    """Write group → router → steps, each the expert ids [token, layer, k] of one worker's step. The file must be new.

    A few hundred steps per router are enough. Take them far apart, since neighbouring steps share their requests.
    """
    check(path.suffix == ".npz", f"{path} must end in .npz")
    check_new_file(path)
    batches = ReplayBatches(
        model, {g: {r: _narrow(steps) for r, steps in routers.items()} for g, routers in groups.items()}
    )
    header = {"version": VERSION, "model": model, "groups": list(batches.groups), "routers": list(batches.routers)}
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
    for g, routers in enumerate(batches.groups.values()):
        for r, steps in enumerate(routers.values()):
            arrays[f"ids_{g}_{r}"] = np.concatenate(steps)
            arrays[f"tokens_{g}_{r}"] = np.array([len(ids) for ids in steps], np.int32)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    part.replace(path)


def _narrow(steps: Sequence[NDArray[np.integer]]) -> Steps:
    if any(ids.size and ids.min() < 0 for ids in steps):
        raise ConfigError(f"expert id {min(int(ids.min()) for ids in steps)} must not be negative")
    kind = narrowest_uint(max((int(ids.max()) for ids in steps if ids.size), default=0))
    return tuple(ids.astype(kind) for ids in steps)


def read_batches(path: Path) -> ReplayBatches:
    """Read a file that :func:`write_batches` wrote."""
    if not path.is_file():
        raise TraceError(path, "file", "not found; expected batches that write_batches wrote (.npz)")
    arrays = read_arrays(path)
    header = _header(path, arrays)
    groups = {
        group: {router: _steps(path, arrays, f"{g}_{r}") for r, router in enumerate(header["routers"])}
        for g, group in enumerate(header["groups"])
    }
    try:
        return ReplayBatches(header["model"], groups)
    except ConfigError as error:
        raise TraceError(path, "batches", str(error)) from None


def _header(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    if "header" not in arrays:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise TraceError(path, "header", f"missing: found {names}; expected the batches of coterie replay")
    try:
        header = json.loads(str(arrays["header"]))
    except (ValueError, RecursionError):
        raise TraceError(path, "header", "is not JSON") from None
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise TraceError(path, "header", f"must be an object of version {VERSION}; found {str(header)[:80]}")
    if not isinstance(header.get("model"), str):
        raise TraceError(path, "header", f"model={header.get('model')!r} must be a name")
    for field in ("groups", "routers"):
        listed = header.get(field)
        if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed) or len({*listed}) != len(listed):
            raise TraceError(path, "header", f"{field}={listed!r} must be a list of names, each once")
    return header


def _steps(path: Path, arrays: Mapping[str, Any], key: str) -> Steps:
    for name in (f"ids_{key}", f"tokens_{key}"):
        if name not in arrays:
            raise TraceError(path, name, "missing")
    ids, tokens = arrays[f"ids_{key}"], arrays[f"tokens_{key}"]
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or (tokens.size and tokens.min() < 1):
        raise TraceError(path, f"tokens_{key}", "must be whole numbers [step] of at least 1")
    total = sum(tokens.tolist())  # Python integers: NumPy sums of numbers near 2**63 overflow
    if ids.ndim != 3 or len(ids) != total:
        raise TraceError(path, f"ids_{key}", f"shape {ids.shape} must be [token, layer, k] of {total} tokens")
    return tuple(np.split(ids, np.cumsum(tokens)[:-1])) if len(tokens) else ()
