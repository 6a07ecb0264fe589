"""Activation traces in segments: the files, and how they are read.

A trace is a folder:

    meta.json                 model, shape, origin, and the list of segments: the commit point
    requests.parquet          one row per request (see coterie.traces.requests)
    activations.safetensors   expert_ids [token, layer, k] in the narrowest dtype, offsets [request + 1],
                              phase [token] and, if recorded, token_ids [token], gate_weights [token, layer, k]

During a recording, every flush adds a segment (``activations-00001.safetensors``, ``requests-00001.parquet``) and then
replaces ``meta.json``, which lists the valid segments. A crash at any moment leaves a trace that is readable up to the
last flush. Closing the writer joins the segments into the two files above. Reading maps the files: opening a trace
reads a few pages, whatever its size.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_file
from coterie.traces.requests import COLUMNS, FORMAT, TABLES, VERSION, RequestTrace, read_meta, read_requests
from coterie.traces.store import ArrayFile, ArraySpec, value_errors
from coterie.types import DECODE, PREFILL, narrowest_uint

FINAL = ("activations.safetensors", "requests.parquet")
"""Files of a closed trace."""
PART = re.compile(r"activations-\d{5,}\.safetensors|requests-\d{5,}\.parquet")
"""Names of a segment's files during a recording."""

OPTIONAL = ("token_ids", "gate_weights")
MAX_EXPERTS = MAX_LAYERS = 1 << 16
"""Upper bounds on experts per layer and on layers: far above any model, but a wrong number cannot exhaust memory."""


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """Metadata of a trace."""

    model: str
    num_experts: int
    num_layers: int
    """Number of MoE layers recorded."""
    top_k: int
    layer_ids: tuple[int, ...] | None = None
    """Index of each recorded layer in the model, dense layers counted."""
    source: Mapping[str, Any] = field(default_factory=dict)
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_layers", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        check(
            self.top_k <= self.num_experts and self.num_experts <= MAX_EXPERTS,
            f"top_k={self.top_k} must be at most num_experts={self.num_experts}, and that at most {MAX_EXPERTS}",
        )
        check(self.num_layers <= MAX_LAYERS, f"num_layers={self.num_layers} must be at most {MAX_LAYERS}")
        check(isinstance(self.source, Mapping), f"source={self.source!r} must be an object")
        indices = range(self.num_layers) if self.layer_ids is None else self.layer_ids
        check(
            len(indices) == self.num_layers and all(isinstance(n, int) and abs(n) < 1 << 31 for n in indices),
            f"layer_ids={self.layer_ids} must be num_layers={self.num_layers} numbers of 32 bits",
        )

    def specs(self, num_tokens: int, num_requests: int, optional: Sequence[str] = ()) -> dict[str, ArraySpec]:
        """Return the dtypes and shapes of a segment's arrays."""
        ids_shape = (num_tokens, self.num_layers, self.top_k)
        specs = {
            "expert_ids": ArraySpec(narrowest_uint(self.num_experts - 1), ids_shape),
            "offsets": ArraySpec(np.dtype(np.int64), (num_requests + 1,)),
            "phase": ArraySpec(np.dtype(np.uint8), (num_tokens,)),
            "token_ids": ArraySpec(np.dtype(np.int32), (num_tokens,)),
            "gate_weights": ArraySpec(np.dtype(np.float16), ids_shape),
        }
        return {name: spec for name, spec in specs.items() if name not in OPTIONAL or name in optional}

    def json(self, segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the contents of meta.json; each segment has the names of its two files and its number of tokens."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": "activations",
            "model": self.model,
            "num_experts": self.num_experts,
            "num_layers": self.num_layers,
            "top_k": self.top_k,
            "layer_ids": list(self.layer_ids) if self.layer_ids else None,
            "block_tokens": self.block_tokens,
            "source": dict(self.source),
            "segments": list(segments),
        }


class Activations(NamedTuple):
    """Consecutive tokens of one request or of several consecutive requests."""

    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k] expert ids."""
    phase: NDArray[np.uint8]
    """[token] PREFILL or DECODE."""
    token_ids: NDArray[np.int32] | None = None
    """[token] vocabulary ids."""
    gate_weights: NDArray[np.float16] | None = None
    """[token, layer, k] router weight of each expert."""

    def only(self, phase: int) -> NDArray[np.unsignedinteger]:
        """Return the expert ids [token, layer, k] of the tokens of one phase."""
        chosen: NDArray[np.unsignedinteger] = self.expert_ids[self.phase == phase]
        return chosen


class Chunk(NamedTuple):
    """Consecutive whole requests, for streaming over a trace."""

    first_request: int
    offsets: NDArray[np.int64]
    """[request + 1] first token of each request in this chunk's arrays, then the number of tokens."""
    tokens: Activations


class Segment(NamedTuple):
    """One segment of a trace: mapped from files, or arrays in memory."""

    offsets: NDArray[np.int64]
    tokens: Activations
    file: ArrayFile | None
    table: Path | None

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    def between(self, start: int, stop: int) -> Activations:
        return Activations._make(None if array is None else array[start:stop] for array in self.tokens)


class SegmentedTrace:
    """Tokens of requests, in segments that are mapped from disk or held in memory."""

    def __init__(self, meta: TraceMeta, segments: Sequence[Segment], requests: RequestTrace | None = None) -> None:
        self.meta = meta
        self.segments = list(segments)  # in order; used only by the writer and this class
        self._given_requests = requests
        self.unfinished = False
        """Whether the recording was interrupted or still runs: the trace then has the requests flushed so far."""
        self._first = np.concatenate([[0], np.cumsum([s.num_requests for s in segments])]).astype(np.int64)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a trace. This checks the sizes of the arrays; :meth:`validate` checks the ids."""
        folder = Path(path)
        raw = read_meta(folder, "activations")
        with value_errors(folder / "meta.json", "shape"):
            meta = TraceMeta(
                model=str(raw["model"]),
                num_experts=raw["num_experts"],
                num_layers=raw["num_layers"],
                top_k=raw["top_k"],
                layer_ids=tuple(raw.get("layer_ids") or ()) or None,
                source=raw.get("source") or {},
                block_tokens=raw.get("block_tokens"),
            )
            check_file(
                isinstance(raw["segments"], list) and all(isinstance(e, dict) for e in raw["segments"]),
                folder / "meta.json",
                "segments",
                "must be a list of objects",
            )
            entries = [(str(e["activations"]), str(e["requests"]), int(e["num_tokens"])) for e in raw["segments"]]
            # A closing writer deletes the files named here, so names outside the folder or of other files are refused.
            for name in (name for entry in entries for name in entry[:2]):
                check_file(
                    name in FINAL or PART.fullmatch(name),
                    folder / "meta.json",
                    "segments",
                    f"{name!r} is not the name of a segment's file",
                )
        # No segments: the recording has begun, but nothing was flushed yet.
        trace = cls(meta, [_open_segment(folder, meta, *entry) for entry in entries]) if entries else cls.empty(meta)
        trace.unfinished = [entry[:2] for entry in entries] != [FINAL]
        return trace

    @classmethod
    def from_arrays(
        cls,
        meta: TraceMeta,
        expert_ids: NDArray[np.integer],
        offsets: NDArray[np.int64],
        requests: RequestTrace | None = None,
        phase: NDArray[np.uint8] | None = None,
        token_ids: NDArray[np.int32] | None = None,
        gate_weights: NDArray[np.float16] | None = None,
    ) -> Self:
        """Make a trace in memory. Without `phase` every token counts as decode. Expert ids are checked."""
        if phase is None:
            phase = np.full(len(expert_ids), DECODE, np.uint8)
        offsets = np.asarray(offsets, np.int64)
        tokens = Activations(expert_ids.astype(narrowest_uint(meta.num_experts - 1)), phase, token_ids, gate_weights)
        check_ids(expert_ids, meta, "expert_ids")
        check_shapes("from_arrays", meta, tokens, offsets)
        if requests is None:
            requests = RequestTrace(*phase_lengths(phase, offsets))
        check_table(requests, offsets)
        return cls(meta, [Segment(offsets, tokens, None, None)], requests)

    @classmethod
    def empty(cls, meta: TraceMeta) -> Self:
        """Make a trace without requests."""
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in meta.specs(0, 0).items()}
        return cls(
            meta,
            [Segment(arrays["offsets"], Activations(arrays["expert_ids"], arrays["phase"]), None, None)],
            RequestTrace(np.empty(0, np.int64), np.empty(0, np.int64)),
        )

    @property
    def num_requests(self) -> int:
        return int(self._first[-1])

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens.phase) for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of the expert ids."""
        return sum(s.tokens.expert_ids.nbytes for s in self.segments)

    @cached_property
    def requests(self) -> RequestTrace:
        """The request table, read on first access."""
        if self._given_requests is not None:
            return self._given_requests
        tables = [
            read_requests(segment.table, self.meta.block_tokens, self.meta.source, segment.num_requests)
            for segment in self.segments
            if segment.table is not None
        ]
        return tables[0] if len(tables) == 1 else concat_requests(tables)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[request] number of tokens recorded."""
        return np.concatenate([np.diff(s.offsets) for s in self.segments])

    def request(self, index: int) -> Activations:
        """Return the tokens of one request, as views into the mapped file."""
        check(0 <= index < self.num_requests, f"request {index} must be in 0 … {self.num_requests - 1}")
        at = bisect_right(self._first, index) - 1
        segment, local = self.segments[at], index - int(self._first[at])
        return segment.between(int(segment.offsets[local]), int(segment.offsets[local + 1]))

    def chunks(self, max_tokens: int = 1 << 20) -> Iterator[Chunk]:
        """Yield chunks of complete requests of about `max_tokens` tokens; mapped memory is released after each."""
        for segment, first in zip(self.segments, self._first, strict=False):
            for start, stop in request_ranges(segment.offsets, max_tokens):
                base, end = int(segment.offsets[start]), int(segment.offsets[stop])
                yield Chunk(int(first) + start, segment.offsets[start : stop + 1] - base, segment.between(base, end))
                if segment.file is not None:
                    segment.file.release()

    def arrays(self) -> tuple[Activations, NDArray[np.int64]]:
        """Return all tokens and the offsets [request + 1] as single arrays: copies if there are several segments."""
        if len(self.segments) == 1:
            return self.segments[0].tokens, self.segments[0].offsets
        columns = zip(*(segment.tokens for segment in self.segments), strict=True)
        tokens = (None if any(part is None for part in parts) else np.concatenate(parts) for parts in columns)
        return Activations._make(tokens), np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def validate(self) -> None:
        """Read all ids and offsets, in bounded memory; raises if an id is out of range or an offset decreases."""
        for segment in self.segments:
            name = segment.file.path if segment.file else "trace"
            with value_errors(name, "offsets"):
                check_shapes(str(name), self.meta, segment.tokens, segment.offsets)
            for start in range(0, len(segment.tokens.phase), 1 << 18):
                part = segment.between(start, start + (1 << 18))
                with value_errors(name, "expert_ids"):
                    check_ids(part.expert_ids, self.meta, "expert_ids", start)
                check_file(
                    part.gate_weights is None or np.isfinite(part.gate_weights).all(),
                    name,
                    "gate_weights",
                    f"holds NaN or infinity after token {start}",
                )
                if segment.file is not None:
                    segment.file.release()


TABLES["activations"] = lambda folder: SegmentedTrace.open(folder).requests


def _open_segment(folder: Path, meta: TraceMeta, name: str, table: str, num_tokens: int) -> Segment:
    file = ArrayFile(folder / name)
    offsets = file["offsets"]
    tokens = Activations(file["expert_ids"], file["phase"], file.get("token_ids"), file.get("gate_weights"))
    check_file(
        len(tokens.phase) == num_tokens,
        file.path,
        "phase",
        f"has {len(tokens.phase)} tokens, meta.json says {num_tokens}",
    )
    with value_errors(file.path, "shape"):
        check_shapes(str(file.path), meta, tokens, offsets, deep=False)
    return Segment(offsets, tokens, file, folder / table)


def request_ranges(offsets: NDArray[np.int64], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of complete requests with about `max_tokens` tokens; a longer request is alone."""
    start = 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + max_tokens, side="right")) - 1
        yield start, max(start + 1, stop)
        start = max(start + 1, stop)


def check_ids(ids: NDArray[np.integer], meta: TraceMeta, name: str, start: int = 0) -> None:
    if ids.size and (int(ids.max()) >= meta.num_experts or int(ids.min()) < 0):
        bad = np.argwhere((ids >= meta.num_experts) | (ids < 0))[0]
        where = (int(bad[0]) + start, *(int(n) for n in bad[1:]))
        raise ConfigError(f"{name}{list(where)}={int(ids[tuple(bad)])} must be in 0 … {meta.num_experts - 1}")


def check_table(requests: RequestTrace, offsets: NDArray[np.int64]) -> None:
    check(
        len(requests) == len(offsets) - 1,
        f"requests has {len(requests)} rows; offsets describe {len(offsets) - 1} requests",
    )


def check_shapes(
    name: str, meta: TraceMeta, tokens: Activations, offsets: NDArray[np.int64], deep: bool = True
) -> None:
    for field_name, spec in meta.specs(len(tokens.phase), len(offsets) - 1, OPTIONAL).items():
        array = offsets if field_name == "offsets" else getattr(tokens, field_name)
        if array is not None and (array.shape, array.dtype) != (spec.shape, spec.dtype):
            raise ConfigError(f"{field_name} is {array.dtype} {array.shape}; expected {spec.dtype} {spec.shape}")
    check(
        len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == len(tokens.phase),
        f"offsets of {name} must run from 0 to the {len(tokens.phase)} tokens",
    )
    check(not deep or not (np.diff(offsets) < 0).any(), f"offsets of {name} must not fall")
    if deep and len(tokens.phase) and int(tokens.phase.max()) > DECODE:
        raise ConfigError(f"phase={int(tokens.phase.max())} must be {PREFILL} (prefill) or {DECODE} (decode)")


def phase_lengths(phase: NDArray[np.uint8], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    output = np.diff(np.concatenate([[0], np.cumsum(phase == DECODE)])[offsets]).astype(np.int64)
    return np.diff(offsets) - output, output


def concat_requests(tables: Sequence[RequestTrace]) -> RequestTrace:
    """Concatenate request tables. A column is kept only if every table has it."""

    def join(name: str) -> Any:
        columns = [getattr(t, name) for t in tables]
        if any(c is None for c in columns):
            return None
        return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else [v for c in columns for v in c]

    shared = set(tables[0].extra).intersection(*(t.extra for t in tables))
    columns = {name: join(name) for name in COLUMNS}
    return RequestTrace(
        **columns,
        block_tokens=None if columns["prefix_blocks"] is None else tables[0].block_tokens,
        extra={name: [v for t in tables for v in t.extra[name]] for name in sorted(shared)},
        source=tables[0].source,
    )
