"""Activation traces, the experts that every token of every request activated, and the writer that records a trace.

:mod:`coterie.traces.segments` describes the files; docs/traces.md lists them after each step of a recording.
A writer locks its folder: two writers that append to one trace would each commit without the other's segments.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check
from coterie.traces.requests import RequestTrace, new_trace_folder, read_meta, write_requests
from coterie.traces.segments import (
    FINAL,
    OPTIONAL,
    PART,
    Activations,
    Chunk,
    Segment,
    SegmentedTrace,
    TraceMeta,
    check_ids,
    check_shapes,
    check_table,
    concat_requests,
    phase_lengths,
)
from coterie.traces.store import ArrayFileWriter, naming, write_json
from coterie.types import narrowest_uint


class ActivationWriter(AbstractContextManager["ActivationWriter"]):
    """Record a trace: append requests, flush now and then, close.

    >>> import tempfile
    >>> meta = TraceMeta("demo", num_experts=4, num_layers=1, top_k=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ActivationWriter(f"{folder}/t", meta) as out:
    ...         out.append(np.array([[[0, 3]], [[1, 2]]]), phase=[0, 1], arrival_s=0.5)
    ...     SegmentedTrace.open(f"{folder}/t").request(0).expert_ids.shape
    (2, 1, 2)
    """

    def __init__(self, path: str | Path, meta: TraceMeta, flush_tokens: int = 1 << 19, *, resume: bool = False) -> None:
        """With `resume` the folder must hold an interrupted recording, see :meth:`resume`."""
        if resume:
            read_meta(Path(path))  # raises a specific error for a missing folder, a file or another format
        self.folder = Path(path) if resume else new_trace_folder(path)
        self.meta = meta
        self.flush_tokens = flush_tokens
        self._entries: list[dict[str, Any]] = []
        self._parts: list[tuple[Activations, NDArray[np.int64], RequestTrace]] = []
        self._pending_tokens = 0
        self._columns: frozenset[str] | None = None
        self._closed = False
        self._unlock = _lock(self, self.folder)
        if not resume:
            with self._ended_by_errors():
                self._commit()
            return
        try:
            self._take_over(SegmentedTrace.open(self.folder))
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def resume(cls, path: str | Path, meta: TraceMeta, flush_tokens: int = 1 << 19) -> ActivationWriter:
        """Resume an interrupted recording: flushed requests are kept, and new requests are appended to them.

        Raises ConfigError if the trace was closed, if its metadata differs from `meta`, or if another writer has it
        open.
        """
        return cls(path, meta, flush_tokens, resume=True)

    def _take_over(self, flushed: SegmentedTrace) -> None:
        self._entries = check_unfinished(self.folder)
        _check_same_meta(self.folder, flushed.meta, self.meta)
        if self._entries:
            self._columns = _columns(flushed.segments[0].tokens, flushed.requests)
        self._sweep()

    def _sweep(self) -> None:
        """Delete files of an uncommitted flush, which are not part of the trace."""
        named = {entry[kind] for entry in self._entries for kind in ("activations", "requests")}
        for file in self.folder.iterdir():
            name = file.name.removesuffix(".tmp")
            if (name in FINAL or PART.fullmatch(name)) and file.name not in named:
                file.unlink()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the recording if it cannot be written: what was committed stays, and no folder without requests."""
        committed = list(self._entries)
        try:
            with naming(self.folder):
                yield
        except OSError:
            self._entries, self._parts, self._closed = committed, [], True
            self._sweep()
            if not committed:
                (self.folder / "meta.json").unlink(missing_ok=True)
                self.folder.rmdir()
            self._unlock()
            raise

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
        """Append one complete request. Call it in order of arrival."""
        phases = np.asarray(phase, np.uint8)
        offsets = np.array([0, len(phases)], np.int64)
        row = RequestTrace(
            *phase_lengths(phases, offsets),
            arrival_s=None if arrival_s is None else np.array([arrival_s]),
            ids=None if id is None else [id],
            domains=None if domain is None else [domain],
            prefix_blocks=None if prefix_blocks is None else [prefix_blocks],
            block_tokens=None if prefix_blocks is None else self.meta.block_tokens,
        )
        self.append_many(Activations(np.asarray(expert_ids), phases, token_ids, gate_weights), offsets, row)

    def append_many(self, tokens: Activations, offsets: NDArray[np.int64], requests: RequestTrace) -> None:
        """Append copies of several requests at once; all are checked before any is added."""
        check(not self._closed, f"{self.folder} is closed; nothing can be appended")
        check(
            np.issubdtype(tokens.expert_ids.dtype, np.integer),
            f"expert_ids is {tokens.expert_ids.dtype}; expected whole numbers",
        )
        check_ids(tokens.expert_ids, self.meta, "expert_ids")
        ids = tokens.expert_ids.astype(narrowest_uint(self.meta.num_experts - 1))
        narrow = Activations._make((ids, *(None if array is None else array.copy() for array in tokens[1:])))
        columns = _columns(tokens, requests)
        if self._columns is not None and columns != self._columns:
            raise ConfigError(
                f"{', '.join(sorted(columns ^ self._columns))}: given for some requests and not for others; "
                "give it for all or for none"
            )
        check_shapes("the appended requests", self.meta, narrow, offsets)
        check_table(requests, offsets)
        self._columns = columns
        self._parts.append((narrow, np.array(offsets), requests))
        self._pending_tokens += len(tokens.phase)
        if self._pending_tokens >= self.flush_tokens:
            self.flush()

    def flush(self) -> None:
        """Commit the requests appended so far: after this returns, a crash does not lose them."""
        if not self._parts:
            return
        number = len(self._entries) + 1
        names = (f"activations-{number:05d}.safetensors", f"requests-{number:05d}.parquet")
        trace = SegmentedTrace(
            self.meta,
            [Segment(offsets, tokens, None, None) for tokens, offsets, _ in self._parts],
            concat_requests([table for _, _, table in self._parts]),
        )
        with self._ended_by_errors():
            self._entries.append(self._write_segment(trace, *names))
            self._commit()
        self._parts, self._pending_tokens = [], 0

    def _write_segment(self, trace: SegmentedTrace, activations: str, requests: str) -> dict[str, Any]:
        """Write the two files of a segment; return its entry in meta.json."""
        optional = [n for n in OPTIONAL if all(getattr(s.tokens, n) is not None for s in trace.segments)]
        write_requests(self.folder / requests, trace.requests)
        with ArrayFileWriter(
            self.folder / activations, self.meta.specs(trace.num_tokens, trace.num_requests, optional)
        ) as out:
            out.append("offsets", np.concatenate([[0], np.cumsum(trace.lengths)]))
            for chunk in trace.chunks():
                for name in ("expert_ids", "phase", *optional):
                    out.append(name, getattr(chunk.tokens, name))
        return {"activations": activations, "requests": requests, "num_tokens": trace.num_tokens}

    def _commit(self) -> None:
        write_json(self.folder / "meta.json", self.meta.json(self._entries))

    def close(self) -> None:
        """Flush, and join the segments into the final two files. Closing again does nothing."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        trace = SegmentedTrace.open(self.folder) if self._entries else SegmentedTrace.empty(self.meta)
        parts = [part[kind] for part in self._entries for kind in ("activations", "requests")]
        with self._ended_by_errors():
            self._entries = [self._write_segment(trace, *FINAL)]
            self._commit()
        for name in parts:
            (self.folder / name).unlink()
        self._unlock()

    def suspend(self) -> None:
        """Flush and unlock the folder without joining segments: :meth:`resume` continues from here."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._unlock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.suspend()  # keep the recorded requests: the segments are readable without being joined


def check_unfinished(folder: Path) -> list[dict[str, Any]]:
    """Return the segments of a trace that can be resumed; raises ConfigError if the trace was closed."""
    entries = [dict(entry) for entry in read_meta(folder).get("segments") or []]
    check(
        not any(entry.get("activations") == FINAL[0] for entry in entries),
        f"{folder} is closed: its recording was finished and cannot be resumed",
    )
    return entries


def _check_same_meta(folder: Path, recorded: TraceMeta, wanted: TraceMeta) -> None:
    """Raise ConfigError if the recording has other settings than `wanted`; the message names each difference."""
    differing = []
    for field in fields(TraceMeta):
        old, new = getattr(recorded, field.name), getattr(wanted, field.name)
        if field.name == "source":
            new = json.loads(json.dumps(dict(new)))  # as read back from disk, where a tuple becomes a list
            differing += [
                f"{key}={old.get(key)!r}, not {new.get(key)!r}"
                for key in sorted({*old, *new})
                if old.get(key) != new.get(key)
            ]
        elif old != new:
            differing.append(f"{field.name}={old!r}, not {new!r}")
    check(not differing, f"{folder} cannot be resumed: it was recorded with {'; '.join(differing)}")


def _lock(owner: object, folder: Path) -> weakref.finalize[..., Any]:
    """Lock the folder until the returned finalizer is called, `owner` is deleted or the process ends."""
    try:
        import fcntl
    except ImportError:  # not Unix, no lock: the user must not run two writers
        return weakref.finalize(owner, int)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder} is being recorded by another process; end that one first") from None
    except OSError:
        pass  # a file system without locks
    return weakref.finalize(owner, os.close, descriptor)


def _columns(tokens: Activations, requests: RequestTrace) -> frozenset[str]:
    """Return the optional columns that are present: a trace has a column for all its requests or for none."""
    given = {name for name in OPTIONAL if getattr(tokens, name) is not None}
    given |= {n for n in ("arrival_s", "ids", "domains", "prefix_blocks") if getattr(requests, n) is not None}
    return frozenset(given | {f"extra.{name}" for name in requests.extra})


__all__ = ["ActivationTrace", "Activations", "Chunk", "TraceMeta", "concat_requests"]


class ActivationTrace(SegmentedTrace):
    """A recorded (or synthetic) trace, mapped from disk or held in memory."""

    def save(self, path: str | Path) -> None:
        """Write a copy of the trace, with its segments joined."""
        with ActivationWriter(path, self.meta) as out:
            for chunk in self.chunks():
                rows = slice(chunk.first_request, chunk.first_request + len(chunk.offsets) - 1)
                out.append_many(chunk.tokens, chunk.offsets, self.requests.take(rows))
