"""Rows of the token table: counted from a trace, summed for a request, saved to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import TraceError, check_file
from coterie.predictors.base import ActivationRates
from coterie.traces.store import ArrayFile, value_errors, write_described
from coterie.types import narrowest_uint

ONE = 1 << 15
"""Fixed-point scale of weights. Weights are rounded down, so that they never sum to more than top_k."""


class TokenRows(NamedTuple):
    """Rows of the table, one per token id seen; each lists its most likely experts first."""

    token_ids: NDArray[np.int32]
    """[seen] token ids, ascending."""
    counts: NDArray[np.int64]
    """[seen] times the token was seen, at least 1."""
    experts: NDArray[np.unsignedinteger]
    """[seen, layer, kept] expert ids, the most likely first."""
    weights: NDArray[np.uint16]
    """[seen, layer, kept] share of the token's occurrences that activated the expert, in 1 / ONE; descending."""
    popularity: ActivationRates
    model: str
    layer_ids: tuple[int, ...] | None
    """Index of each layer in the model, dense layers counted; None if not known."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.token_ids, self.counts, self.experts, self.weights))

    def find(self, token_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the row of each id, [token]; -1 if the id was never seen."""
        at = np.searchsorted(self.token_ids, token_ids)
        at[at == len(self.token_ids)] = 0
        return np.where(self.token_ids[at] == token_ids, at, -1)


def empty_rows(
    counts: NDArray[np.int64], num_layers: int, kept: int, num_experts: int, max_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger], NDArray[np.uint16]]:
    """Choose the tokens, seen `counts` times, whose rows fit in `max_bytes`: all, or those seen most often.

    Returns their indices, ascending, and arrays [chosen, layer, kept] for their experts and weights.
    """
    dtype = narrowest_uint(num_experts - 1)
    row_bytes = num_layers * kept * (dtype.itemsize + 2) + 12  # 12 bytes: id and count of the token
    chosen = np.sort(np.argsort(-counts, kind="stable")[: max(1, max_bytes // row_bytes)])
    shape = (len(chosen), num_layers, kept)
    return chosen, np.zeros(shape, dtype), np.zeros(shape, np.uint16)


@helper()
def _most_used(amounts: NDArray[Any], used: NDArray[Any], size: int, kept: int) -> None:
    """Move the `kept` experts with the largest amounts to the front of `used`, descending; ties by the lowest id."""
    for place in range(min(kept, size)):
        best = place
        for other in range(place + 1, size):
            more = amounts[used[other]] - amounts[used[best]]
            if more > 0 or (more == 0 and used[other] < used[best]):
                best = other
        used[place], used[best] = used[best], used[place]


@njit()
def count_rows(
    expert_ids: NDArray[Any],
    at: NDArray[Any],
    first: NDArray[Any],
    last: NDArray[Any],
    num_experts: int,
    experts: NDArray[Any],
    weights: NDArray[Any],
) -> int:
    """Fill the rows of tokens, the i-th of which occurs at positions at[first[i]:last[i]] of the trace.

    Returns -1, or the position of a token with an expert id out of range.
    """
    layers, k = expert_ids.shape[1], expert_ids.shape[2]
    kept = experts.shape[2]
    counts = np.zeros(num_experts, np.int64)
    used = np.empty(num_experts, np.int64)  # experts with a count: most tokens are rare and use few
    for row in range(len(first)):
        times = last[row] - first[row]
        for layer in range(layers):
            size = 0
            for i in range(first[row], last[row]):
                for j in range(k):
                    expert = np.int64(expert_ids[at[i], layer, j])
                    if expert < 0 or expert >= num_experts:
                        return int(at[i])
                    if counts[expert] == 0:
                        used[size] = expert
                        size += 1
                    counts[expert] += 1
            _most_used(counts, used, size, kept)
            for place in range(min(kept, size)):
                experts[row, layer, place] = used[place]
                # The count exceeds `times` only if a trace repeats an id within a token; popularity gets the excess.
                weights[row, layer, place] = min(counts[used[place]], times) * ONE // times
            for place in range(size):
                counts[used[place]] = 0
    return -1


@njit()
def add_rows(
    experts: NDArray[Any], weights: NDArray[Any], rows: NDArray[Any], trust: NDArray[Any], out: NDArray[Any]
) -> NDArray[np.float64]:
    """Add the rows, each times its trust, to out [layer, expert]; returns the sum added to each layer, [layer]."""
    layers, kept = experts.shape[1], experts.shape[2]
    placed = np.zeros(layers)
    for i in range(len(rows)):
        for layer in range(layers):
            for j in range(kept):
                weight = weights[rows[i], layer, j]
                if weight == 0:
                    break
                share = trust[i] * weight / ONE
                out[layer, experts[rows[i], layer, j]] += share
                placed[layer] += share
    return placed


FORMAT, VERSION = "coterie-token-table", 1

_DIMENSIONS = {"counts": 1, "experts": 3, "popularity": 2, "token_ids": 1, "weights": 3}


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


def read_rows(file: Path) -> tuple[dict[str, Any], TokenRows]:
    """Return a saved table's metadata, which has its settings unchecked, and its rows."""
    arrays = ArrayFile(file)
    about = arrays.about(FORMAT, VERSION)
    with value_errors(file, "metadata", "metadata"):
        layers, top_k, model = about["layer_ids"], int(about["top_k"]), str(about["model"])
        layer_ids = None if layers is None else tuple(int(n) for n in layers)
    columns = {name: arrays[name] for name in _DIMENSIONS}
    _check(file, columns, top_k, layer_ids)
    popularity = ActivationRates(columns.pop("popularity"), top_k)
    return about, TokenRows(**columns, popularity=popularity, model=model, layer_ids=layer_ids)


def _check(file: Path, columns: dict[str, NDArray[Any]], top_k: int, layer_ids: tuple[int, ...] | None) -> None:
    for name, array in columns.items():
        if array.ndim != _DIMENSIONS[name] or 0 in array.shape:
            problem = f"has shape {array.shape}; expected {_DIMENSIONS[name]} dimensions, none 0"
            raise TraceError(file, name, problem)
    popularity, ids, counts = (columns[name] for name in ("popularity", "token_ids", "counts"))
    layers, experts = popularity.shape
    check_file(1 <= top_k <= experts, file, "metadata top_k", f"is {top_k}; it must be in 1 … num_experts={experts}")
    if layer_ids is not None and len(layer_ids) != layers:
        raise TraceError(file, "metadata layer_ids", f"has {len(layer_ids)} entries; popularity has {layers} layers")
    shape = (len(ids), layers, columns["experts"].shape[2])
    dtypes = {
        "counts": np.dtype(np.int64),
        "experts": narrowest_uint(experts - 1),
        "popularity": np.dtype(np.float64),
        "token_ids": np.dtype(np.int32),
        "weights": np.dtype(np.uint16),
    }
    for name, array in columns.items():
        expected = (layers, experts) if name == "popularity" else shape[: array.ndim]
        check_file(
            array.dtype == dtypes[name] and array.shape == expected,
            file,
            name,
            f"is {array.dtype} {array.shape}; expected {dtypes[name]} {expected}",
        )
    highest = int(columns["experts"].max())
    shares = np.isfinite(popularity).all() and popularity.min() >= 0 and np.allclose(popularity.sum(axis=1), top_k)
    rules = (
        ("token_ids", ids[0] >= 0 and (np.diff(ids) > 0).all(), "must rise, from 0 or more"),
        ("counts", counts.min() >= 1, f"holds {int(counts.min())}; a token kept was seen at least once"),
        ("experts", highest < experts, f"holds {highest}; it must be in 0 … {experts - 1}"),
        (
            "weights",
            columns["weights"].sum(axis=2, dtype=np.int64).max() <= top_k * ONE,
            f"of a layer sum past top_k={top_k}",
        ),
        ("popularity", shares, f"must not be negative, and sum to top_k={top_k} in every layer"),
    )
    for name, holds, problem in rules:
        check_file(holds, file, name, problem)
