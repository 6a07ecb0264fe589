"""Request traces: arrival times, lengths, and shared prompt blocks of requests.

In memory a request trace is columns of NumPy arrays; on disk, a folder with ``meta.json`` and
``requests.parquet``. An activation trace holds the same table beside its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check, check_file, file_errors, read_json
from coterie.traces.store import replaced, value_errors, write_json

FORMAT = "coterie-trace"
VERSION = 1
MAX_TOKENS = 1 << 40
"""Upper bound on the tokens of one request, so that sums over any trace fit in 64 bits."""

MOST_REQUESTS = 20_000_000
"""Most requests that may be drawn at once: they take 2 GB of memory."""


COLUMNS = ("prompt_tokens", "output_tokens", "arrival_s", "ids", "domains", "prefix_blocks")
"""Columns of a request trace with one value per request; `extra` has more."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests, one row each. A column that was not recorded is None.

    Readers of request traces return them in order of arrival; a live recording lists them as they finished.
    """

    prompt_tokens: NDArray[np.int64]
    """[request] tokens of the prompt."""
    output_tokens: NDArray[np.int64]
    """[request] tokens generated."""
    arrival_s: NDArray[np.float64] | None = None
    """[request] seconds since the start of the trace."""
    ids: Sequence[str] | None = None
    domains: Sequence[str] | None = None
    """[request] task or language the request belongs to."""
    prefix_blocks: Sequence[NDArray[np.int64]] | None = None
    """[request] hashes of the prompt's blocks, in order: equal leading hashes mean a shared prefix."""
    block_tokens: int | None = None
    """Tokens of one prefix block."""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Other columns of the source, by name."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the trace: format, file, licence."""

    def __post_init__(self) -> None:
        count = len(self.prompt_tokens)
        for name, column in {**{name: getattr(self, name) for name in COLUMNS}, **self.extra}.items():
            if column is not None and len(column) != count:
                raise ConfigError(f"{name} has {len(column)} rows; prompt_tokens has {count}")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = (int(f(getattr(self, name), initial=0)) for f in (np.min, np.max))
            check(low >= 0 and high <= MAX_TOKENS, f"{name}={low if low < 0 else high} must be in 0 … {MAX_TOKENS}")
        times = np.empty(0) if self.arrival_s is None else self.arrival_s
        for row in np.flatnonzero(~np.isfinite(times)):
            raise ConfigError(f"arrival_s[{row}]={times[row]} must be a finite time")
        check(
            self.block_tokens is None or (isinstance(self.block_tokens, int) and self.block_tokens >= 1),
            f"block_tokens={self.block_tokens!r} must be a whole number of at least 1",
        )
        check(
            (self.prefix_blocks is None) == (self.block_tokens is None),
            "prefix_blocks and block_tokens must be given together",
        )

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(np.ptp(self.arrival_s)) if self.arrival_s is not None and len(self) else 0.0

    def take(self, rows: Any) -> RequestTrace:
        """Select rows: a slice, or an array of indices in any order."""

        def cut(column: Any) -> Any:
            if column is None or isinstance(column, np.ndarray) or isinstance(rows, slice):
                return None if column is None else column[rows]
            return [column[int(row)] for row in rows]

        return replace(
            self,
            **{name: cut(getattr(self, name)) for name in COLUMNS},
            extra={name: cut(column) for name, column in self.extra.items()},
        )

    def in_order(self) -> RequestTrace:
        """Return the same requests in order of arrival; ties keep their order."""
        return self if self.arrival_s is None else self.take(np.argsort(self.arrival_s, kind="stable"))

    def save(self, path: str | Path) -> None:
        """Write the trace to a folder, which must be new or empty."""
        folder = new_trace_folder(path)
        write_requests(folder / "requests.parquet", self)
        write_json(
            folder / "meta.json",
            {
                "format": FORMAT,
                "version": VERSION,
                "kind": "requests",
                "num_requests": len(self),
                "block_tokens": self.block_tokens,
                "source": dict(self.source),
            },
        )

    @classmethod
    def open(cls, path: str | Path) -> RequestTrace:
        """Read a request trace, or the request table of an activation trace."""
        folder = Path(path)
        meta = read_meta(folder)
        if meta["kind"] == "requests":
            source, table = meta.get("source") or {}, folder / "requests.parquet"
            return read_requests(table, meta.get("block_tokens"), source, meta.get("num_requests"))
        if meta["kind"] in TABLES:
            return TABLES[meta["kind"]](folder)
        raise TraceError(folder / "meta.json", "kind", f"{meta['kind']!r} has no requests")


TABLES: dict[str, Callable[[Path], RequestTrace]] = {}
"""Kind of trace → function that reads the request table of its folder; the module of each kind adds its own."""


def check_new_folder(path: str | Path) -> Path:
    """Return the folder for a new trace; raises unless it is new or empty, so that a wrong path never loses data."""
    folder = Path(path)
    check(str(path) and not folder.is_file(), f"{str(path)!r} is not a folder; a trace is one")
    check(
        not (folder / "meta.json").exists(), f"{folder} holds a trace already; choose another folder or remove it first"
    )
    check(not folder.exists() or not any(folder.iterdir()), f"{folder} is not empty; choose another folder")
    return folder


def new_trace_folder(path: str | Path) -> Path:
    """Create the folder for a new trace; raises ConfigError if it exists and is not empty."""
    folder = check_new_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_meta(folder: Path, *kinds: str) -> dict[str, Any]:
    """Read the meta.json of a trace of one of the `kinds`; of any kind by default."""
    check_file(
        folder.is_dir(),
        folder,
        "trace",
        "is a file; a trace is a folder (coterie convert makes one)" if folder.exists() else "does not exist",
    )
    meta = read_json(folder / "meta.json")
    known = {"format": (FORMAT,), "version": (VERSION,), "kind": kinds or ("activations", "requests", "load")}
    for name, values in known.items():
        check_file(
            meta.get(name) in values,
            folder / "meta.json",
            name,
            f"found {meta.get(name)!r}, expected {' or '.join(map(repr, values))}",
        )
    return meta


def write_requests(path: Path, trace: RequestTrace) -> None:
    """Write the request table as parquet, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    optional: dict[str, tuple[Any, Any]] = {
        "prompt_tokens": (trace.prompt_tokens, pa.int64()),
        "output_tokens": (trace.output_tokens, pa.int64()),
        "arrival_s": (trace.arrival_s, pa.float64()),
        "id": (trace.ids, pa.string()),
        "domain": (trace.domains, pa.string()),
    }
    columns = {name: pa.array(values, kind) for name, (values, kind) in optional.items() if values is not None}
    if trace.prefix_blocks is not None:
        offsets = np.concatenate([[0], np.cumsum([len(blocks) for blocks in trace.prefix_blocks])])
        values = np.concatenate(list(trace.prefix_blocks)) if len(trace) else np.empty(0, np.int64)
        columns["prefix_blocks"] = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    for name, column in trace.extra.items():
        try:
            columns[f"extra.{name}"] = pa.array(list(column))
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, ValueError, TypeError):
            raise ConfigError(f"column {name!r} mixes kinds of values that one table column cannot hold") from None
    with replaced(path) as stream:  # it must be on disk before meta.json names it
        pq.write_table(pa.table(columns), stream, compression="zstd")


def read_requests(
    path: Path, block_tokens: int | None, source: Mapping[str, Any], num_requests: int | None
) -> RequestTrace:
    """Read a request table; raises TraceError unless it has `num_requests` rows, as stated elsewhere."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with file_errors(path), path.open("rb") as stream:  # a stream: Arrow interprets a path such as s3:x as a URI
        try:
            # With threads, the process may abort when it ends: https://github.com/apache/arrow/issues/50482
            table = pq.ParquetFile(stream, pre_buffer=False).read(use_threads=False)
            names = table.column_names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(path, "parquet", f"cannot be read: {str(error).partition(chr(10))[0]}") from None
    for name in names:
        check_file(names.count(name) <= 1, path, name, f"names {names.count(name)} columns")
    check_file(table.num_rows == num_requests, path, "rows", f"found {table.num_rows}, expected {num_requests}")

    kinds = pa.types

    def column_of(name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        check_file(name in names, path, name, f"is missing; the table has {', '.join(names)}")
        column = table[name].combine_chunks()
        check_file(
            fits(column.type) and not column.null_count,
            path,
            name,
            f"holds {column.type}, expected {expected} without gaps",
        )
        return column

    def counts(name: str) -> NDArray[np.int64]:
        return np.asarray(column_of(name, kinds.is_integer, "whole numbers").to_numpy(zero_copy_only=False), np.int64)

    def texts(name: str) -> list[str]:
        return list(column_of(name, lambda t: kinds.is_string(t) or kinds.is_large_string(t), "text").to_pylist())

    def lists_of_hashes(kind: Any) -> bool:
        return bool((kinds.is_list(kind) or kinds.is_large_list(kind)) and kinds.is_integer(kind.value_type))

    arrival_s = blocks = None
    if "arrival_s" in names:
        column = column_of("arrival_s", kinds.is_floating, "floating point numbers")
        arrival_s = np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
    if "prefix_blocks" in names and block_tokens:
        column = column_of("prefix_blocks", lists_of_hashes, "lists of whole numbers")
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy().astype(np.int64)
        blocks = [values[a:b] for a, b in pairwise(offsets)]
    with value_errors(path, "table"):
        return RequestTrace(
            prompt_tokens=counts("prompt_tokens"),
            output_tokens=counts("output_tokens"),
            arrival_s=arrival_s,
            ids=texts("id") if "id" in names else None,
            domains=texts("domain") if "domain" in names else None,
            prefix_blocks=blocks,
            block_tokens=block_tokens if blocks is not None else None,
            extra={n.removeprefix("extra."): table[n].to_pylist() for n in names if n.startswith("extra.")},
            source=source,
        )
