"""Token table: predict each token's experts from its id, whatever its context.

Right where a token's identity determines its experts: in the first layers of most models, and on average over a prompt
in far more. Wrong where context does. A token seen n times has weight n / (n + smoothing); the rest, and every unseen
token, falls back to popularity.

A full table of 200,000 tokens, 48 layers and 128 experts would be 4.9 GB in 32 bits, so only tokens that were seen are
kept, and of each layer only the `experts_kept` most likely experts, three bytes each. The remainder falls back to
popularity too: the load of a layer always sums to tokens x top_k.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, TraceError, check_at_least, check_not_negative, require_fitted
from coterie.predictors.base import Load, Popularity, PredictRequest, StartKind, calibrate, check_requests, predictors
from coterie.traces.activations import ActivationTrace
from coterie.traces.store import ArrayFile
from coterie.types import narrowest_uint

FORMAT = "coterie-token-table"
VERSION = 1
ONE = 1 << 15
"""Fixed-point scale of weights. Weights are rounded down, so that they never sum to more than top_k."""

_ARRAYS = ("counts", "experts", "popularity", "token_ids", "weights")


class TokenRows(NamedTuple):
    """Rows of the table, one per token seen, the most likely experts first."""

    token_ids: NDArray[np.int32]
    """[seen] rising."""
    counts: NDArray[np.int64]
    """[seen] times the token was seen, at least 1."""
    experts: NDArray[np.unsignedinteger]
    """[seen, layer, kept]"""
    weights: NDArray[np.uint16]
    """[seen, layer, kept] share of the token's occurrences that activated the expert, in units of 1 / ONE; falling."""
    popularity: Popularity
    model: str
    layer_ids: tuple[int, ...] | None
    """Index of each layer in the model, dense ones counted, where known."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.token_ids, self.counts, self.experts, self.weights))


@predictors.register("token_table")
@dataclass(slots=True, eq=False)
class TokenTable:
    """Mean activations of each token id, summed over a request's tokens."""

    needs_start: ClassVar[StartKind] = StartKind.TOKENS
    any_phase: ClassVar[bool] = True
    smoothing: float = 0.0
    """Occurrences of a token at which it weighs as much as popularity; 0 trusts a single one, and scored best where
    measured: noise of rare tokens averages out over a request, a pull towards popularity does not."""
    experts_kept: int | None = None
    """Experts kept of each token and layer; None is twice top_k."""
    max_bytes: int = 1 << 29
    """Largest size of the table; above it the rarest tokens are left out and fall back to popularity."""
    rows_: TokenRows | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_not_negative(smoothing=self.smoothing)
        check_at_least(1, experts_kept=self.experts_kept, max_bytes=self.max_bytes)

    @property
    def rows(self) -> TokenRows:
        return require_fitted(self.rows_, "predictor 'token_table'")

    @property
    def num_layers(self) -> int:
        return self.rows.popularity.num_layers

    @property
    def num_experts(self) -> int:
        return self.rows.popularity.num_experts

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> TokenTable:
        """Count the tokens of these requests; the trace must have token ids."""
        tokens, offsets = trace.arrays()
        if tokens.token_ids is None:
            raise ConfigError(f"the trace of {trace.meta.model!r} has no token_ids: a token table needs them")
        chosen = check_requests(trace, requests)
        popularity = calibrate(trace, chosen, phase)
        spans = [np.arange(offsets[r], offsets[r + 1]) for r in chosen]
        at = np.concatenate(spans)  # [token] of the trace
        if phase is not None:
            at = at[tokens.phase[at] == phase]
        ids = tokens.token_ids[at]
        if int(ids.min()) < 0:
            raise ConfigError(f"token_ids holds {int(ids.min())}; it must not be negative")
        at = at[np.argsort(ids, kind="stable")]
        seen, counts = np.unique(ids, return_counts=True)
        ends = np.cumsum(counts)
        meta = trace.meta
        kept = min(meta.num_experts, self.experts_kept or 2 * meta.top_k)
        dtype = narrowest_uint(meta.num_experts - 1)
        keep = self._fits(counts, meta.num_layers * kept * (dtype.itemsize + 2))
        shape = (len(keep), meta.num_layers, kept)
        experts, weights = np.zeros(shape, dtype), np.zeros(shape, np.uint16)
        bad = _count_rows(tokens.expert_ids, at, (ends - counts)[keep], ends[keep], meta.num_experts, experts, weights)
        if bad >= 0:
            raise ConfigError(f"token {bad} activates an expert outside 0 … {meta.num_experts - 1}")
        self.rows_ = TokenRows(
            token_ids=seen[keep].astype(np.int32),
            counts=counts[keep].astype(np.int64),
            experts=experts,
            weights=weights,
            popularity=popularity,
            model=meta.model,
            layer_ids=meta.layer_ids,
        )
        return self

    def _fits(self, counts: NDArray[np.int64], row_bytes: int) -> NDArray[np.int64]:
        """Indices, rising, of the tokens kept: all, or those seen most often."""
        limit = max(1, self.max_bytes // (row_bytes + 12))  # 12 bytes: id and count of the token
        if len(counts) <= limit:
            return np.arange(len(counts))
        return np.sort(np.argsort(-counts, kind="stable")[:limit])

    def predict(self, request: PredictRequest) -> Load:
        rows = self.rows
        rows.popularity.check(request)
        if request.token_ids is None or not len(request.token_ids):
            return rows.popularity.scaled(request)
        wanted, times = np.unique(np.asarray(request.token_ids, np.int64), return_counts=True)
        at = np.searchsorted(rows.token_ids, wanted)
        at[at == len(rows.token_ids)] = 0
        known = rows.token_ids[at] == wanted
        found = at[known]
        seen = rows.counts[found]
        trust = times[known] * (seen / (seen + self.smoothing))
        out = np.zeros((self.num_layers, self.num_experts))
        placed = _add_rows(rows.experts, rows.weights, found, trust, out)  # [layer] activations
        rest = len(request.token_ids) * rows.popularity.top_k - placed
        out += rest[:, None] / rows.popularity.top_k * rows.popularity.per_token
        scale = 1.0 if request.num_tokens is None else request.num_tokens / len(request.token_ids)
        return out * scale

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; the same table gives the same bytes. Refuses to overwrite."""
        from safetensors.numpy import save

        file, rows = Path(path), self.rows
        if file.exists():
            raise ConfigError(f"{file} exists; choose another name")
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": rows.model,
            "top_k": rows.popularity.top_k,
            "layer_ids": None if rows.layer_ids is None else list(rows.layer_ids),
            "smoothing": float(self.smoothing),
            "experts_kept": self.experts_kept,
            "max_bytes": self.max_bytes,
        }
        arrays = {
            "token_ids": rows.token_ids,
            "counts": rows.counts,
            "experts": rows.experts,
            "weights": rows.weights,
            "popularity": rows.popularity.per_token,
        }
        # One entry of metadata: the library writes several in an order that differs from run to run.
        data = save({n: np.ascontiguousarray(a) for n, a in arrays.items()}, {"coterie": json.dumps(about)})
        part = file.with_name(file.name + ".tmp")
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)

    @classmethod
    def load(cls, path: str | Path) -> TokenTable:
        """Map a saved table: processes of one machine share its memory. Every number is checked."""
        file = Path(path)
        arrays = ArrayFile(file)
        about = arrays.about(FORMAT, VERSION)
        try:
            kept, layers = about["experts_kept"], about["layer_ids"]
            table = cls(float(about["smoothing"]), None if kept is None else int(kept), int(about["max_bytes"]))
            top_k, model = int(about["top_k"]), str(about["model"])
            layer_ids = None if layers is None else tuple(int(n) for n in layers)
        except KeyError as error:
            raise TraceError(file, f"metadata {error.args[0]}", "is missing") from None
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(file, "metadata", str(error)) from None
        found = {name: arrays[name] for name in _ARRAYS}
        _check(file, found, top_k, layer_ids)
        table.rows_ = TokenRows(
            token_ids=found["token_ids"],
            counts=found["counts"],
            experts=found["experts"],
            weights=found["weights"],
            popularity=Popularity(found["popularity"], top_k),
            model=model,
            layer_ids=layer_ids,
        )
        return table


def _check(file: Path, found: dict[str, NDArray[Any]], top_k: int, layer_ids: tuple[int, ...] | None) -> None:
    dimensions = {"counts": 1, "experts": 3, "popularity": 2, "token_ids": 1, "weights": 3}
    for name, array in found.items():
        if array.ndim != dimensions[name] or 0 in array.shape:
            problem = f"has shape {array.shape}; expected {dimensions[name]} dimensions, none 0"
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


@njit()
def _count_rows(
    expert_ids: NDArray[Any],
    at: NDArray[Any],
    first: NDArray[Any],
    last: NDArray[Any],
    num_experts: int,
    experts: NDArray[Any],
    weights: NDArray[Any],
) -> int:
    """Fill the rows of tokens whose occurrences are at[first[i]:last[i]]; -1, or the token with an id out of range."""
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
            for place in range(min(kept, size)):
                best = place
                for other in range(place + 1, size):  # of ties, the lowest id
                    more = counts[used[other]] - counts[used[best]]
                    if more > 0 or (more == 0 and used[other] < used[best]):
                        best = other
                used[place], used[best] = used[best], used[place]
                experts[row, layer, place] = used[place]
                # Past 1 only where a trace repeats an id within a token; the excess falls back to popularity.
                weights[row, layer, place] = min(counts[used[place]], times) * ONE // times
            for place in range(size):
                counts[used[place]] = 0
    return -1


@njit()
def _add_rows(
    experts: NDArray[Any], weights: NDArray[Any], rows: NDArray[Any], trust: NDArray[Any], out: NDArray[Any]
) -> NDArray[np.float64]:
    """Add the rows, each times its trust, to out [layer, expert]; returns the sum added, [layer]."""
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
