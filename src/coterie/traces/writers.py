"""Write a trace in Coterie's format or in another system's format.

A writer never overwrites anything: it refuses a path that exists, writes under a temporary name and renames at the
end. Parts that a format cannot hold are left out and named in the result; values that it would distort raise an error.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_given, check_new_file
from coterie.registry import Registry
from coterie.traces.activations import ActivationTrace
from coterie.traces.load import LoadTable
from coterie.traces.readers.base import Trace, kind_of
from coterie.traces.requests import RequestTrace
from coterie.traces.store import new_path

Kind = type[ActivationTrace] | type[LoadTable] | type[RequestTrace]


@dataclass(frozen=True, slots=True)
class Writer:
    """An output format."""

    write: Callable[[Any, Path], None]
    """Function that writes the trace to a path that does not exist."""
    kinds: tuple[Kind, ...]
    """Kinds of trace that the format can hold."""
    keeps: frozenset[str]
    """Optional parts of a trace that the format can hold, named as in :func:`optional_parts`."""
    help: str
    """One-line description of the format and its users."""


class Written(NamedTuple):
    """Result of a write."""

    path: Path
    format: str
    left_out: tuple[str, ...]
    """Parts of the trace that the format cannot hold."""


writers: Registry[Writer] = Registry("output format", group="coterie.writers")


def optional_parts(trace: Trace) -> tuple[str, ...]:
    """Return the optional parts that this trace has; ``requests`` is the request table of an activation trace."""
    if isinstance(trace, ActivationTrace):
        table = (f"requests.{part}" for part in optional_parts(trace.requests))
        return (*table, *(["layer_ids"] if trace.meta.layer_ids is not None else []), *_model(trace.meta.model))
    if isinstance(trace, LoadTable):
        names = ["labels", "tokens", "layer_ids"]
        return (*(name for name in names if getattr(trace, name) is not None), *_model(trace.model))
    names = ["arrival_s", "ids", "domains", "prefix_blocks"]
    return (*(name for name in names if getattr(trace, name) is not None), *(f"extra.{name}" for name in trace.extra))


def _model(name: str) -> tuple[str, ...]:
    return () if name == "unknown" else ("model",)


def check_trace_target(path: Path, format: str) -> None:
    """Raise unless the format is known and the path does not exist: call it before a long read."""
    writers[format]
    check_new_file(path)


def write_trace(trace: Trace, path: str | Path, format: str = "coterie") -> Written:
    """Write a trace in any known format; `path` must not exist."""
    path = Path(path)
    check_trace_target(path, format)
    writer = writers[format]
    if type(trace) not in writer.kinds:
        able = [name for name in writers if type(trace) in writers[name].kinds]
        raise ConfigError(f"format {format!r} cannot hold {kind_of(trace)}; {' and '.join(able)} can")
    with new_path(path) as tmp:
        writer.write(trace, tmp)
    kept = writer.keeps
    left_out = (part for part in optional_parts(trace) if part not in kept and part.split(".")[0] not in kept)
    return Written(path, format, tuple(left_out))


def _table(trace: RequestTrace, format: str, **more: Sequence[Any] | None) -> dict[str, Sequence[Any]]:
    """Return the columns of a plain table, without those that the trace lacks; raises if an extra one is ambiguous."""
    columns: dict[str, Sequence[Any] | None] = {
        "arrival_s": _arrivals(trace, format).tolist(),  # repr of a float reads back as the same float
        "prompt_tokens": trace.prompt_tokens.tolist(),
        "output_tokens": trace.output_tokens.tolist(),
        "id": trace.ids,
        "domain": trace.domains,
        **more,
    }
    for name in trace.extra:
        check(name not in columns, f"extra column {name!r} has the name of a column of the format; coterie can hold it")
    return {name: column for name, column in {**columns, **trace.extra}.items() if column is not None}


def _write_csv(trace: RequestTrace, path: Path) -> None:
    columns = _table(trace, "csv")
    with path.open("w", newline="", encoding="utf-8") as stream:
        # Quote all text: a lone carriage return in unquoted text would be read as the end of a line.
        out = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        out.writerow(columns)
        out.writerows(zip(*columns.values(), strict=True))


def _write_jsonl(trace: RequestTrace, path: Path) -> None:
    sizes = None if trace.prefix_blocks is None else [trace.block_tokens] * len(trace)
    columns = _table(trace, "jsonl", prefix_blocks=trace.prefix_blocks, block_tokens=sizes)
    _dump_lines((dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)), path)


def _write_npz(trace: ActivationTrace | LoadTable, path: Path) -> None:
    arrays: dict[str, NDArray[Any] | None]
    if isinstance(trace, LoadTable):
        arrays = {"counts": trace.counts, "layer_ids": trace.layer_ids, "tokens": trace.tokens}
    else:
        tokens, offsets = trace.arrays()
        layer_ids = trace.meta.layer_ids
        requests = trace.requests
        arrays = {
            "expert_ids": tokens.expert_ids,
            "offsets": offsets,
            "phase": tokens.phase,
            "token_ids": tokens.token_ids,
            "gate_weights": tokens.gate_weights,
            "num_experts": np.array(trace.meta.num_experts),
            "layer_ids": None if layer_ids is None else np.array(layer_ids, np.int64),
            "prompt_tokens": requests.prompt_tokens,
            "output_tokens": requests.output_tokens,
            "domains": None if requests.domains is None else np.array(requests.domains, np.str_),
        }
    given: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    with path.open("wb") as stream:  # a stream, because savez adds .npz to names
        np.savez(stream, **given)


def _arrivals(trace: RequestTrace, format: str) -> NDArray[np.float64]:
    """Return the arrival times; raises ConfigError if the trace has none, as the format requires them."""
    check(len(trace), f"the trace has no requests, which format {format!r} cannot say; coterie can hold it")
    return check_given(
        trace.arrival_s, f"the trace has no arrival_s, which format {format!r} needs; coterie can hold it"
    )


def _dump_lines(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


_REQUEST_COLUMNS = frozenset({"arrival_s", "ids", "domains", "prefix_blocks", "extra"})

writers.add(
    "coterie",
    Writer(
        lambda trace, path: trace.save(path),
        (ActivationTrace, LoadTable, RequestTrace),
        _REQUEST_COLUMNS | {"requests", "labels", "tokens", "layer_ids", "model"},
        "a trace folder of Coterie's own: every kind, nothing lost",
    ),
)
writers.add(
    "csv",
    Writer(
        _write_csv,
        (RequestTrace,),
        _REQUEST_COLUMNS - {"prefix_blocks"},
        "plain CSV of requests; extra columns become text",
    ),
)
writers.add("jsonl", Writer(_write_jsonl, (RequestTrace,), _REQUEST_COLUMNS, "plain JSON Lines of requests"))
writers.add(
    "npz",
    Writer(
        _write_npz,
        (ActivationTrace, LoadTable),
        frozenset({"layer_ids", "tokens", "requests.domains"}),
        "NumPy arrays: expert_ids, offsets, phase, lengths and what else is recorded, or counts",
    ),
)
