"""Activation traces: the experts every token of every request activated, exactly.

On disk a trace is a folder:

    meta.json                 model, shape, where it comes from, and the list of segments: the commit point
    requests.parquet          one row a request (see coterie.traces.requests)
    activations.safetensors   expert_ids [token, layer, k] in the narrowest dtype, offsets [request + 1],
                              phase [token], and where recorded token_ids [token], gate_weights [token, layer, k]

While a service is recorded, every flush adds a segment (``activations-00001.safetensors``,
``requests-00001.parquet``) and then replaces ``meta.json``, which names the segments that count. A crash at any
moment leaves a trace that reads up to the last flush. Closing the writer joins the segments into the two files
above. Reading maps the files: opening touches a few pages, whatever the size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.traces.requests import (
    FORMAT,
    VERSION,
    RequestTrace,
    new_trace_folder,
    read_meta,
    read_requests,
    write_requests,
)
from coterie.traces.store import ArrayFile, ArrayFileWriter, ArraySpec, write_json
from coterie.types import DECODE, PREFILL, narrowest_uint

OPTIONAL = ("token_ids", "gate_weights")
MAX_EXPERTS = 1 << 16
"""Experts of a layer, at most: far past any model, and small enough that a false number cannot exhaust memory."""


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """What a trace says of itself."""

    model: str
    num_experts: int
    num_layers: int
    """MoE layers recorded."""
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
        if self.top_k > self.num_experts or self.num_experts > MAX_EXPERTS:
            raise ConfigError(
                f"top_k={self.top_k} must be at most num_experts={self.num_experts}, and that at most {MAX_EXPERTS}"
            )
        if self.layer_ids is not None and not all(isinstance(n, int) for n in self.layer_ids):
            raise ConfigError(f"layer_ids={self.layer_ids} must be whole numbers")
        if not isinstance(self.source, Mapping):
            raise ConfigError(f"source={self.source!r} must be an object")
        if self.layer_ids is not None and len(self.layer_ids) != self.num_layers:
            raise ConfigError(f"layer_ids has {len(self.layer_ids)} entries; num_layers={self.num_layers}")

    def specs(self, num_tokens: int, num_requests: int, optional: Sequence[str] = ()) -> dict[str, ArraySpec]:
        """The arrays of a segment of that size."""
        cell = (num_tokens, self.num_layers, self.top_k)
        specs = {
            "expert_ids": ArraySpec(narrowest_uint(self.num_experts - 1), cell),
            "offsets": ArraySpec(np.dtype(np.int64), (num_requests + 1,)),
            "phase": ArraySpec(np.dtype(np.uint8), (num_tokens,)),
            "token_ids": ArraySpec(np.dtype(np.int32), (num_tokens,)),
            "gate_weights": ArraySpec(np.dtype(np.float16), cell),
        }
        return {name: spec for name, spec in specs.items() if name not in OPTIONAL or name in optional}

    def json(self, segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What meta.json holds; each segment names its two files and its tokens."""
        return {
            "format": FORMAT, "version": VERSION, "kind": "activations", "model": self.model,
            "num_experts": self.num_experts, "num_layers": self.num_layers, "top_k": self.top_k,
            "layer_ids": list(self.layer_ids) if self.layer_ids else None,
            "block_tokens": self.block_tokens, "source": dict(self.source), "segments": list(segments),
        }  # fmt: skip


class Activations(NamedTuple):
    """A run of tokens: of one request, or of several in a row."""

    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k]"""
    phase: NDArray[np.uint8]
    """[token] PREFILL or DECODE."""
    token_ids: NDArray[np.int32] | None = None
    """[token]"""
    gate_weights: NDArray[np.float16] | None = None
    """[token, layer, k]"""

    def only(self, phase: int) -> NDArray[np.unsignedinteger]:
        """[token, layer, k] of the tokens of one phase."""
        chosen: NDArray[np.unsignedinteger] = self.expert_ids[self.phase == phase]
        return chosen


class Chunk(NamedTuple):
    """Whole requests in a row, for streaming over a trace."""

    first_request: int
    offsets: NDArray[np.int64]
    """[request + 1] into the arrays of this chunk."""
    tokens: Activations


class _Segment(NamedTuple):
    offsets: NDArray[np.int64]
    tokens: Activations
    file: ArrayFile | None
    table: Path | None

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    def between(self, start: int, stop: int) -> Activations:
        tokens = self.tokens
        ids, gates = tokens.token_ids, tokens.gate_weights
        return Activations(
            tokens.expert_ids[start:stop],
            tokens.phase[start:stop],
            None if ids is None else ids[start:stop],
            None if gates is None else gates[start:stop],
        )


class ActivationTrace:
    """A recorded (or synthetic) trace, mapped from disk or held in memory."""

    def __init__(self, meta: TraceMeta, segments: Sequence[_Segment], requests: RequestTrace | None = None) -> None:
        self.meta = meta
        self._segments = list(segments)
        self._given_requests = requests
        self._first = np.concatenate([[0], np.cumsum([s.num_requests for s in segments])]).astype(np.int64)

    @classmethod
    def open(cls, path: str | Path) -> ActivationTrace:
        """Map a trace. Sizes are checked against the files; the ids themselves by :meth:`validate`."""
        folder = Path(path)
        raw = read_meta(folder)
        if raw["kind"] != "activations":
            raise TraceError(folder / "meta.json", "kind", f"found {raw['kind']!r}, expected 'activations'")
        try:
            layer_ids = raw.get("layer_ids")
            meta = TraceMeta(
                model=str(raw["model"]), num_experts=raw["num_experts"], num_layers=raw["num_layers"],
                top_k=raw["top_k"], layer_ids=tuple(layer_ids) if layer_ids else None,
                source=raw.get("source") or {}, block_tokens=raw.get("block_tokens"),
            )  # fmt: skip
            if not isinstance(raw["segments"], list) or not all(isinstance(e, dict) for e in raw["segments"]):
                raise TraceError(folder / "meta.json", "segments", "must be a list of objects")
            entries = [(str(e["activations"]), str(e["requests"]), int(e["num_tokens"])) for e in raw["segments"]]
        except KeyError as error:
            raise TraceError(folder / "meta.json", str(error.args[0]), "is missing") from None
        except TraceError:
            raise
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(folder / "meta.json", "shape", str(error)) from None
        if not entries:  # recording began, nothing was flushed yet
            return cls(meta, [_empty_segment(meta)], RequestTrace(*_no_lengths()))
        return cls(meta, [_open_segment(folder, meta, *entry) for entry in entries])

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
    ) -> ActivationTrace:
        """A trace in memory. Without `phase` every token counts as decode; ids are checked."""
        count = len(expert_ids)
        if phase is None:
            phase = np.full(count, DECODE, np.uint8)
        offsets = np.asarray(offsets, np.int64)
        tokens = Activations(expert_ids.astype(narrowest_uint(meta.num_experts - 1)), phase, token_ids, gate_weights)
        _check_ids(expert_ids, meta, "expert_ids")
        _check_shapes("from_arrays", meta, tokens, offsets)
        if requests is None:
            lengths = _phase_lengths(phase, offsets)
            requests = RequestTrace(prompt_tokens=lengths[0], output_tokens=lengths[1])
        if len(requests) != len(offsets) - 1:
            raise ConfigError(f"requests has {len(requests)} rows; offsets describe {len(offsets) - 1} requests")
        return cls(meta, [_Segment(offsets, tokens, None, None)], requests)

    @property
    def num_requests(self) -> int:
        return int(self._first[-1])

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens.phase) for s in self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of the expert ids."""
        return sum(s.tokens.expert_ids.nbytes for s in self._segments)

    @cached_property
    def requests(self) -> RequestTrace:
        """The request table, read when first asked for."""
        if self._given_requests is not None:
            return self._given_requests
        tables = []
        for segment in self._segments:
            assert segment.table is not None
            table = read_requests(segment.table, self.meta.block_tokens, self.meta.source)
            if len(table) != segment.num_requests:
                raise TraceError(
                    segment.table, "rows", f"found {len(table)}; the activations hold {segment.num_requests} requests"
                )
            tables.append(table)
        return tables[0] if len(tables) == 1 else concat_requests(tables)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[request] tokens recorded."""
        return np.concatenate([np.diff(s.offsets) for s in self._segments])

    def request(self, index: int) -> Activations:
        """The tokens of one request, as views into the mapped file."""
        if not 0 <= index < self.num_requests:
            raise ConfigError(f"request {index} must be in 0 … {self.num_requests - 1}")
        at = bisect_right(self._first, index) - 1
        segment, local = self._segments[at], index - int(self._first[at])
        return segment.between(int(segment.offsets[local]), int(segment.offsets[local + 1]))

    def chunks(self, max_tokens: int = 1 << 20) -> Iterator[Chunk]:
        """The whole trace in runs of whole requests of about `max_tokens`; memory read is let go after each."""
        for segment, first in zip(self._segments, self._first, strict=False):
            start = 0
            while start < segment.num_requests:
                limit = segment.offsets[start] + max_tokens
                stop = max(start + 1, int(np.searchsorted(segment.offsets, limit, side="right")) - 1)
                base, end = int(segment.offsets[start]), int(segment.offsets[stop])
                yield Chunk(int(first) + start, segment.offsets[start : stop + 1] - base, segment.between(base, end))
                if segment.file is not None:
                    segment.file.release()
                start = stop

    def arrays(self) -> tuple[Activations, NDArray[np.int64]]:
        """All tokens and the offsets [request + 1] as single arrays: views of a joined trace, else copies."""
        if len(self._segments) == 1:
            return self._segments[0].tokens, self._segments[0].offsets
        parts = [s.tokens for s in self._segments]
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        ids = [p.token_ids for p in parts if p.token_ids is not None]
        gates = [p.gate_weights for p in parts if p.gate_weights is not None]
        return (
            Activations(
                np.concatenate([p.expert_ids for p in parts]),
                np.concatenate([p.phase for p in parts]),
                np.concatenate(ids) if len(ids) == len(parts) and ids else None,
                np.concatenate(gates) if len(gates) == len(parts) and gates else None,
            ),
            offsets,
        )

    def validate(self) -> None:
        """Read every id and offset once; raises if an id is not an expert or an offset falls. Streams."""
        for segment in self._segments:
            name = segment.file.path if segment.file else "trace"
            try:
                _check_shapes(str(name), self.meta, segment.tokens, segment.offsets)
            except ConfigError as error:
                raise TraceError(name, "offsets", str(error)) from None
            ids = segment.tokens.expert_ids
            for start in range(0, len(ids), 1 << 18):
                try:
                    _check_ids(ids[start : start + (1 << 18)], self.meta, "expert_ids", start)
                except ConfigError as error:
                    raise TraceError(name, "expert_ids", str(error)) from None
                gates = segment.tokens.gate_weights
                if gates is not None and not np.isfinite(gates[start : start + (1 << 18)]).all():
                    raise TraceError(name, "gate_weights", f"holds NaN or infinity after token {start}")
                if segment.file is not None:
                    segment.file.release()

    def save(self, path: str | Path) -> None:
        """Write a joined copy."""
        with ActivationWriter(path, self.meta) as out:
            table = self.requests
            for chunk in self.chunks():
                rows = slice(chunk.first_request, chunk.first_request + len(chunk.offsets) - 1)
                out.append_many(chunk.tokens, chunk.offsets, table.take(rows))


def _open_segment(folder: Path, meta: TraceMeta, name: str, table: str, num_tokens: int) -> _Segment:
    file = ArrayFile(folder / name)
    offsets = file["offsets"]
    tokens = Activations(file["expert_ids"], file["phase"], file.get("token_ids"), file.get("gate_weights"))
    if len(tokens.phase) != num_tokens:
        raise TraceError(file.path, "phase", f"has {len(tokens.phase)} tokens, meta.json says {num_tokens}")
    try:
        _check_shapes(str(file.path), meta, tokens, offsets, deep=False)
    except ConfigError as error:
        raise TraceError(file.path, "shape", str(error)) from None
    return _Segment(offsets, tokens, file, folder / table)


def _check_ids(ids: NDArray[np.integer], meta: TraceMeta, name: str, start: int = 0) -> None:
    if ids.size and (int(ids.max()) >= meta.num_experts or int(ids.min()) < 0):
        bad = np.argwhere((ids >= meta.num_experts) | (ids < 0))[0]
        where = (int(bad[0]) + start, *(int(n) for n in bad[1:]))
        raise ConfigError(f"{name}{list(where)}={int(ids[tuple(bad)])} must be in 0 … {meta.num_experts - 1}")


def _check_shapes(
    name: str, meta: TraceMeta, tokens: Activations, offsets: NDArray[np.int64], deep: bool = True
) -> None:
    specs = meta.specs(len(tokens.phase), len(offsets) - 1, OPTIONAL)
    for field_name, spec in specs.items():
        array = offsets if field_name == "offsets" else getattr(tokens, field_name)
        if array is None:
            continue
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ConfigError(f"{field_name} is {array.dtype} {array.shape}; expected {spec.dtype} {spec.shape}")
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens.phase):
        raise ConfigError(f"offsets of {name} must run from 0 to the {len(tokens.phase)} tokens")
    if deep and (np.diff(offsets) < 0).any():
        raise ConfigError(f"offsets of {name} must not fall")
    if deep and len(tokens.phase) and int(tokens.phase.max()) > DECODE:
        raise ConfigError(f"phase={int(tokens.phase.max())} must be {PREFILL} (prefill) or {DECODE} (decode)")


def _phase_lengths(phase: NDArray[np.uint8], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    decode = np.concatenate([[0], np.cumsum(phase == DECODE)])[offsets]
    output = np.diff(decode).astype(np.int64)
    return np.diff(offsets) - output, output


def concat_requests(tables: Sequence[RequestTrace]) -> RequestTrace:
    """Tables one after the other. A column stays only if every table has it."""

    def join(name: str) -> Any:
        columns = [getattr(t, name) for t in tables]
        if any(c is None for c in columns):
            return None
        return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else [v for c in columns for v in c]

    shared = set(tables[0].extra).intersection(*(t.extra for t in tables))
    blocks = join("prefix_blocks")
    return RequestTrace(
        prompt_tokens=join("prompt_tokens"), output_tokens=join("output_tokens"), arrival_s=join("arrival_s"),
        ids=join("ids"), domains=join("domains"), prefix_blocks=blocks,
        block_tokens=tables[0].block_tokens if blocks is not None else None,
        extra={name: [v for t in tables for v in t.extra[name]] for name in sorted(shared)}, source=tables[0].source,
    )  # fmt: skip


class ActivationWriter:
    """Record a trace: append requests, flush now and then, close.

    >>> import tempfile
    >>> meta = TraceMeta("demo", num_experts=4, num_layers=1, top_k=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ActivationWriter(f"{folder}/t", meta) as out:
    ...         out.append(np.array([[[0, 3]], [[1, 2]]]), phase=[0, 1], arrival_s=0.5)
    ...     ActivationTrace.open(f"{folder}/t").request(0).expert_ids.shape
    (2, 1, 2)
    """

    def __init__(self, path: str | Path, meta: TraceMeta, flush_tokens: int = 1 << 19) -> None:
        self.meta = meta
        self.flush_tokens = flush_tokens
        self.folder = new_trace_folder(path)
        self._entries: list[dict[str, Any]] = []
        self._parts: list[tuple[Activations, NDArray[np.int64], RequestTrace]] = []
        self._pending_tokens = 0
        self._columns: frozenset[str] | None = None
        self._closed = False
        self._commit()

    def append(
        self,
        expert_ids: NDArray[np.integer],
        phase: Sequence[int] | NDArray[np.uint8],
        *,
        id: str | None = None,
        arrival_s: float | None = None,
        domain: str | None = None,
        token_ids: NDArray[np.int32] | None = None,
        gate_weights: NDArray[np.float16] | None = None,
        prefix_blocks: NDArray[np.int64] | None = None,
    ) -> None:
        """One request, whole. Requests come in order of arrival."""
        phases = np.asarray(phase, np.uint8)
        offsets = np.array([0, len(phases)], np.int64)
        prompt, output = _phase_lengths(phases, offsets)
        row = RequestTrace(
            prompt_tokens=prompt, output_tokens=output,
            arrival_s=None if arrival_s is None else np.array([arrival_s]),
            ids=None if id is None else [id], domains=None if domain is None else [domain],
            prefix_blocks=None if prefix_blocks is None else [prefix_blocks],
            block_tokens=None if prefix_blocks is None else self.meta.block_tokens,
        )  # fmt: skip
        self.append_many(Activations(np.asarray(expert_ids), phases, token_ids, gate_weights), offsets, row)

    def append_many(self, tokens: Activations, offsets: NDArray[np.int64], requests: RequestTrace) -> None:
        """Several requests at once, copied; all is checked before anything is kept."""
        if self._closed:
            raise ConfigError(f"{self.folder} is closed; nothing can be appended")
        if not np.issubdtype(tokens.expert_ids.dtype, np.integer):
            raise ConfigError(f"expert_ids is {tokens.expert_ids.dtype}; expected whole numbers")
        _check_ids(tokens.expert_ids, self.meta, "expert_ids")
        narrow = Activations(
            tokens.expert_ids.astype(narrowest_uint(self.meta.num_experts - 1)),
            tokens.phase.copy(),
            None if tokens.token_ids is None else tokens.token_ids.copy(),
            None if tokens.gate_weights is None else tokens.gate_weights.copy(),
        )
        columns = _columns(tokens, requests)
        if self._columns is not None and columns != self._columns:
            differing = ", ".join(sorted(columns ^ self._columns))
            raise ConfigError(f"{differing}: given for some requests and not for others; give it for all or for none")
        _check_shapes("the appended requests", self.meta, narrow, offsets)
        if len(requests) != len(offsets) - 1:
            raise ConfigError(f"requests has {len(requests)} rows; offsets describe {len(offsets) - 1} requests")
        self._columns = columns
        self._parts.append((narrow, np.array(offsets), requests))
        self._pending_tokens += len(tokens.phase)
        if self._pending_tokens >= self.flush_tokens:
            self.flush()

    def flush(self) -> None:
        """Make what was appended so far safe: after this returns, a crash does not lose it."""
        if not self._parts:
            return
        number = len(self._entries) + 1
        names = (f"activations-{number:05d}.safetensors", f"requests-{number:05d}.parquet")
        trace = ActivationTrace(
            self.meta,
            [_Segment(offsets, tokens, None, None) for tokens, offsets, _ in self._parts],
            concat_requests([table for _, _, table in self._parts]),
        )
        self._write_segment(trace, *names)
        self._entries.append(_entry(*names, trace))
        self._commit()
        self._parts, self._pending_tokens = [], 0

    def _write_segment(self, trace: ActivationTrace, activations: str, requests: str) -> None:
        optional = [n for n in OPTIONAL if all(getattr(s.tokens, n) is not None for s in trace._segments)]
        write_requests(self.folder / requests, trace.requests)
        specs = self.meta.specs(trace.num_tokens, trace.num_requests, optional)
        with ArrayFileWriter(self.folder / activations, specs) as out:
            out.append("offsets", np.concatenate([[0], np.cumsum(trace.lengths)]))
            for chunk in trace.chunks():
                for name in ("expert_ids", "phase", *optional):
                    out.append(name, getattr(chunk.tokens, name))

    def _commit(self) -> None:
        write_json(self.folder / "meta.json", self.meta.json(self._entries))

    def close(self) -> None:
        """Flush, and join the segments into the final two files. Closing again does nothing."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        if not self._entries:
            empty = ActivationTrace(self.meta, [_empty_segment(self.meta)], RequestTrace(*_no_lengths()))
            self._finish(empty, [])
            return
        parts = list(self._entries)
        self._finish(ActivationTrace.open(self.folder), parts)

    def _finish(self, trace: ActivationTrace, parts: list[dict[str, Any]]) -> None:
        names = ("activations.safetensors", "requests.parquet")
        self._write_segment(trace, *names)
        self._entries = [_entry(*names, trace)]
        self._commit()
        for part in parts:
            (self.folder / part["activations"]).unlink()
            (self.folder / part["requests"]).unlink()

    def __enter__(self) -> ActivationWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.flush()  # keep what was recorded; the segments read as they are


def _columns(tokens: Activations, requests: RequestTrace) -> frozenset[str]:
    """What was recorded beside the ids: a trace has a column for all its requests or for none."""
    given = {name for name in OPTIONAL if getattr(tokens, name) is not None}
    given |= {n for n in ("arrival_s", "ids", "domains", "prefix_blocks") if getattr(requests, n) is not None}
    return frozenset(given | {f"extra.{name}" for name in requests.extra})


def _entry(activations: str, requests: str, trace: ActivationTrace) -> dict[str, Any]:
    return {"activations": activations, "requests": requests, "num_tokens": trace.num_tokens}


def _no_lengths() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.empty(0, np.int64), np.empty(0, np.int64)


def _empty_segment(meta: TraceMeta) -> _Segment:
    arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in meta.specs(0, 0).items()}
    return _Segment(arrays["offsets"], Activations(arrays["expert_ids"], arrays["phase"]), None, None)
