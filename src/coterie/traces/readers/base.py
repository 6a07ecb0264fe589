"""The contract of a reader, and detection of a file's format.

A reader turns one file or folder of another system into a trace. It either reads the whole file or raises
:class:`~coterie.errors.TraceError` with the file, the field and the expected value; it never returns a partial trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from coterie.errors import ConfigError, TraceError, UnfinishedWarning, check_file, check_input_file, check_known
from coterie.registry import Registry
from coterie.traces.activations import ActivationTrace
from coterie.traces.load import LoadTable
from coterie.traces.requests import RequestTrace, read_meta

Trace = ActivationTrace | LoadTable | RequestTrace
T = TypeVar("T", ActivationTrace, LoadTable, RequestTrace)

KIND_NAMES: dict[type[Trace], str] = {ActivationTrace: "activations", LoadTable: "load", RequestTrace: "requests"}
"""Class of a trace → name of its kind in ``meta.json`` and in messages."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Information from the user that a file may lack."""

    model: str | None = None
    """Name of the model that produced the file."""
    num_experts: int | None = None
    """Experts per layer, for files that do not state it."""

    def check_experts(self, path: Path, field: str, experts: int) -> None:
        """Raise TraceError if the file has another number of experts than the user says."""
        check_file(
            self.num_experts in (None, experts),
            path,
            field,
            f"has {experts} experts, --num-experts says {self.num_experts}",
        )


@dataclass(frozen=True, slots=True)
class Reader:
    """An input format."""

    read: Callable[[Path, ReadOptions], Trace]
    sniff: Callable[[Path], bool]
    """Function that tells whether a file looks like this format: cheap, never raises on bytes of another format."""
    help: str
    """One-line description of the format and its source."""


readers: Registry[Reader] = Registry("format", group="coterie.readers")


def _read_coterie(path: Path, _: ReadOptions) -> Trace:
    kind = read_meta(path)["kind"]
    if kind == "activations":
        trace = ActivationTrace.open(path)
        if trace.unfinished:
            warnings.warn(
                f"{path}: its recording was interrupted or still runs; it holds {trace.num_requests:,} requests so far",
                UnfinishedWarning,
                stacklevel=3,
            )
        return trace
    return LoadTable.open(path) if kind == "load" else RequestTrace.open(path)


readers.add(
    "coterie", Reader(_read_coterie, lambda path: (path / "meta.json").exists(), "a trace folder of Coterie's own")
)


SAMPLE = "sample:"
"""Start of the name of a recording that comes with the package, as in ``sample:gpt-oss-20b``."""


def trace_path(given: str | Path) -> Path:
    """Return the path of a trace that a user names: as given, or the file of a shipped sample."""
    name = str(given)
    if not name.startswith(SAMPLE):
        return Path(given)
    samples = {SAMPLE + file.stem: file for file in Path(str(files("coterie").joinpath("data/samples"))).glob("*.npz")}
    check_known("sample", name, samples)
    return samples[name]


def read_trace(path: str | Path, format: str | None = None, options: ReadOptions | None = None) -> Trace:
    """Read a trace in any known format, or a shipped sample; if `format` is None, it is detected."""
    path = trace_path(path)
    check_input_file(path)
    if format is None:
        format = detect(path)
    return readers[format].read(path, options or ReadOptions())


def read_as(kind: type[T], path: Path, format: str | None = None) -> T:
    """Read a trace; raises TraceError if it is of another kind."""
    trace = read_trace(path, format)
    if not isinstance(trace, kind):
        raise TraceError(path, "kind", f"found {kind_of(trace)!r}, expected {KIND_NAMES[kind]!r}")
    return trace


def requests_of(trace: Trace | str | Path) -> RequestTrace:
    """Return the request table (arrival times and lengths) of a trace or of its file; raise for a load table."""
    if isinstance(trace, str | Path):
        trace = read_trace(trace)
    if isinstance(trace, LoadTable):
        raise ConfigError("a load table has no requests; arrivals need a trace of requests")
    return trace.requests if isinstance(trace, ActivationTrace) else trace


def kind_of(trace: Trace) -> str:
    """Return the name of the trace's kind: activations, load or requests."""
    return KIND_NAMES[type(trace)]


def detect(path: Path) -> str:
    """Return the name of the format of a file or folder, or of a shipped sample."""
    path = trace_path(path)
    check_file(path.exists(), path, "file", "does not exist")
    check_input_file(path)
    matches = [name for name in readers if readers[name].sniff(path)]
    if not matches and path.suffix == ".npz":
        return "npz"  # truncated or damaged: the reader's error is more specific
    check_file(
        matches,
        path,
        "format",
        f"is unknown, or the file is empty or cut: --from FORMAT says more ({', '.join(readers)})",
    )
    check_file(len(matches) <= 1, path, "format", f"could be {' or '.join(matches)}; say which with --from")
    return matches[0]
