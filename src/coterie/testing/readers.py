"""Contract check of readers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coterie.errors import TraceError
from coterie.testing._require import no_error, require
from coterie.traces import ActivationTrace, LoadTable, RequestTrace
from coterie.traces.readers.base import Reader, ReadOptions, Trace
from coterie.traces.writers import write_trace

CUTS = 12
"""Number of lengths, evenly spaced from 0, that a file is cut to, besides all but its last byte."""
FOREIGN = {
    "text": b"It was a dark and stormy night.\n" * 20,
    "bytes": bytes(range(256)) * 8,
    "JSON": b'{"name": "value", "list": [1, 2, 3]}\n',
    "CSV": b"name,value\nfirst,1\nsecond,2\n",
}


def check_reader(reader: Reader, file: Path, options: ReadOptions | None = None, *, counted: bool = True) -> None:
    """Raise AssertionError if a reader breaks its contract; `file` is a file (or folder) of its format.

    `sniff` returns True for that file, and False for an empty file, files of other formats, an empty folder and a
    missing file. It raises nothing, not even for a file that is cut short. `read` returns the same valid trace each
    time and does not change the file. For an empty file, and for one cut anywhere, `read` raises TraceError, which
    names the file, and no other error.

    Give ``counted=False`` for a format that does not state its length, such as lines of text: cut between two lines it
    is a valid shorter file, which `read` may return. In a folder, the largest file is cut.
    """
    options = options or ReadOptions()
    require(
        isinstance(reader.help, str) and bool(reader.help.strip()) and "\n" not in reader.help,
        f"help={reader.help!r} must be one line of words",
    )
    with tempfile.TemporaryDirectory() as folder:
        _check_sniff(reader, file, Path(folder))
        _check_read(reader, file, options, Path(folder))
        _check_cut(reader, file, options, Path(folder), counted)


def _check_sniff(reader: Reader, file: Path, folder: Path) -> None:
    require(
        _sniff(reader, file, f"{file.name}, of its own format"),
        f"sniff({file.name}) must be true: the file is of its own format",
    )
    foreign, nothing = folder / f"foreign{file.suffix}", folder / f"nothing{file.suffix}"
    for name, data in (("empty", b""), *FOREIGN.items()):
        foreign.write_bytes(data)
        require(not _sniff(reader, foreign, f"foreign {name}"), f"sniff must be false of a foreign file ({name})")
    require(not _sniff(reader, nothing, "no file"), "sniff must be false of a name that is not there")
    nothing.mkdir()
    require(not _sniff(reader, nothing, "an empty folder"), "sniff must be false of an empty folder")


def _sniff(reader: Reader, path: Path, what: str) -> bool:
    with no_error(f"sniff of {what}"):
        known = reader.sniff(path)
    require(isinstance(known, bool), f"sniff of {what} returned {known!r}; it must be True or False")
    return known


def _check_read(reader: Reader, file: Path, options: ReadOptions, folder: Path) -> None:
    before = _contents(file)
    with no_error(f"read({file.name})"):
        traces = [reader.read(file, options) for _ in range(2)]
    copies = folder / "first", folder / "second"
    for trace, copy in zip(traces, copies, strict=True):
        _check_valid(trace, f"read({file.name})")
        write_trace(trace, copy)
    first, second = map(_contents, copies)
    require(first == second, f"read({file.name}) gave another trace the second time")
    require(_contents(file) == before, f"read({file.name}) changed the file, which it may only read")


def _check_valid(trace: Trace, where: str) -> None:
    require(
        isinstance(trace, ActivationTrace | LoadTable | RequestTrace),
        f"{where} returned {type(trace).__name__}; expected an ActivationTrace, a LoadTable or RequestTrace",
    )
    if isinstance(trace, ActivationTrace):
        trace.validate()  # mapped arrays are not checked when opened
        rows = len(trace.requests)
        require(rows == trace.num_requests, f"{where}: requests has {rows} rows; the trace has {trace.num_requests}")


def _contents(path: Path) -> dict[str, bytes]:
    """Return the contents of every file by its path in the folder; the path of a single file is `.`."""
    files = sorted(file for file in (path, *path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def _check_cut(reader: Reader, file: Path, options: ReadOptions, folder: Path, counted: bool) -> None:
    for length, path in _cut(file, folder / "cut"):
        where = f"{file.name} cut to {length} bytes"
        _sniff(reader, path, where)
        try:
            with no_error(f"{where}: read must raise TraceError; it", but=(TraceError, AssertionError)):
                trace = reader.read(path, options)
                _check_valid(trace, where)
            require(
                not counted and length > 0, f"{where}: read must raise TraceError; it returned a {type(trace).__name__}"
            )
        except TraceError as error:
            require(str(path) in str(error), f"{where}: the TraceError must name the file {path}; it says: {error}")


def _cut(file: Path, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield copies of a file or folder with its largest file cut, each with the length of the cut file in bytes."""
    folder.mkdir()
    path = folder / file.name
    parts = [part for part in (file, *file.rglob("*")) if part.is_file()]
    largest = max(parts, key=lambda part: part.stat().st_size)
    data = largest.read_bytes()
    for length in sorted({len(data) * part // CUTS for part in range(CUTS)} | {len(data) - 1}):
        if file.is_dir():
            shutil.copytree(file, path)
        (path / largest.relative_to(file)).write_bytes(data[:length])
        yield length, path
        shutil.rmtree(folder)
        folder.mkdir()
