"""Files of a token table: one safetensors file, mapped when opened, every number checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.predictors.base import ActivationRates
from coterie.predictors.token_table.rows import ONE, TokenRows
from coterie.traces.store import ArrayFile, write_described
from coterie.types import narrowest_uint

FORMAT, VERSION = "coterie-token-table", 1

_DIMENSIONS = {"counts": 1, "experts": 3, "popularity": 2, "token_ids": 1, "weights": 3}


class Opened(NamedTuple):
    """What a file holds."""

    settings: dict[str, Any]
    """Settings of the table, not checked."""
    rows: TokenRows


def write_rows(file: Path, rows: TokenRows, settings: dict[str, Any]) -> None:
    about = {
        "format": FORMAT,
        "version": VERSION,
        "model": rows.model,
        "top_k": rows.popularity.top_k,
        "layer_ids": None if rows.layer_ids is None else list(rows.layer_ids),
    }
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": rows.token_ids,
        "counts": rows.counts,
        "experts": rows.experts,
        "weights": rows.weights,
        "popularity": rows.popularity.per_token,
    }
    write_described(file, arrays, about | settings)


def read_rows(file: Path) -> Opened:
    arrays = ArrayFile(file)
    about = arrays.about(FORMAT, VERSION)
    try:
        layers, top_k, model = about["layer_ids"], int(about["top_k"]), str(about["model"])
        layer_ids = None if layers is None else tuple(int(n) for n in layers)
    except KeyError as error:
        raise TraceError(file, f"metadata {error.args[0]}", "is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(file, "metadata", str(error)) from None
    found = {name: arrays[name] for name in _DIMENSIONS}
    _check(file, found, top_k, layer_ids)
    rows = TokenRows(
        token_ids=found["token_ids"],
        counts=found["counts"],
        experts=found["experts"],
        weights=found["weights"],
        popularity=ActivationRates(found["popularity"], top_k),
        model=model,
        layer_ids=layer_ids,
    )
    return Opened(about, rows)


def _check(file: Path, found: dict[str, NDArray[Any]], top_k: int, layer_ids: tuple[int, ...] | None) -> None:
    for name, array in found.items():
        if array.ndim != _DIMENSIONS[name] or 0 in array.shape:
            problem = f"has shape {array.shape}; expected {_DIMENSIONS[name]} dimensions, none 0"
            raise TraceError(file, name, problem)
    layers, experts = found["popularity"].shape
    if not 1 <= top_k <= experts:
        raise TraceError(file, "metadata top_k", f"is {top_k}; it must be in 1 … num_experts={experts}")
    if layer_ids is not None and len(layer_ids) != layers:
        raise TraceError(file, "metadata layer_ids", f"has {len(layer_ids)} entries; popularity has {layers} layers")
    shape = (len(found["token_ids"]), layers, found["experts"].shape[2])
    dtypes = {
        "counts": np.dtype(np.int64),
        "experts": narrowest_uint(experts - 1),
        "popularity": np.dtype(np.float64),
        "token_ids": np.dtype(np.int32),
        "weights": np.dtype(np.uint16),
    }
    for name, array in found.items():
        expected = (layers, experts) if name == "popularity" else shape[: array.ndim]
        if array.dtype != dtypes[name] or array.shape != expected:
            raise TraceError(file, name, f"is {array.dtype} {array.shape}; expected {dtypes[name]} {expected}")
    if int(found["token_ids"][0]) < 0 or (np.diff(found["token_ids"]) <= 0).any():
        raise TraceError(file, "token_ids", "must rise, from 0 or more")
    if int(found["counts"].min()) < 1:
        raise TraceError(file, "counts", f"holds {int(found['counts'].min())}; a token kept was seen at least once")
    if int(found["experts"].max()) >= experts:
        raise TraceError(file, "experts", f"holds {int(found['experts'].max())}; it must be in 0 … {experts - 1}")
    if int(found["weights"].sum(axis=2, dtype=np.int64).max()) > top_k * ONE:
        raise TraceError(file, "weights", f"of a layer sum past top_k={top_k}")
    popularity = found["popularity"]
    whole = np.isfinite(popularity).all() and popularity.min() >= 0
    if not whole or not np.allclose(popularity.sum(axis=1), top_k):
        raise TraceError(file, "popularity", f"must not be negative, and sum to top_k={top_k} in every layer")
