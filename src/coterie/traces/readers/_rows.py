"""Rows of CSV and JSON Lines files, plain or gzipped, with errors that name the line and the field.

A file that ends inside a row, a quoted field or a gzip stream is an error. A plain text file that was cut exactly
between two lines, or inside the last number of the last line, cannot be detected: some published traces have no newline
at the end, so a missing newline proves nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError, check, check_file, file_errors
from coterie.traces.readers.base import ReadOptions
from coterie.traces.requests import RequestTrace
from coterie.traces.store import value_errors

MOST_RATIO = 200
"""Largest accepted ratio of unpacked to packed bytes. Real traces unpack to at most 20 times their size."""
ALWAYS_BYTES = 1 << 28
"""Unpacked bytes that are accepted at any ratio."""
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_FIRST_LINE = 1 << 22  # bytes read to detect a format: a binary file may have no newline at all
_MAX_INT64 = 2**63 - 1


class Row(NamedTuple):
    """One row of a file."""

    path: Path
    line: int
    """Line number, counted from 1."""
    values: Mapping[str, Any]
    """Column or key → text (CSV) or JSON value."""
    is_text: bool
    """Whether all values are text (CSV), including numbers. In JSON a number in quotes is an error."""

    def error(self, name: str, problem: str) -> TraceError:
        return TraceError(self.path, f"line {self.line}, {name}", problem)

    def whole(self, name: str) -> int:
        """Return a count: a whole number of at least 0."""
        value = self.values[name]
        if self.is_text:
            text = value.strip()
            if text.isascii() and text.isdigit() and len(text) < 19:  # 18 digits always fit 64 bits
                return int(text)
        elif type(value) is int and 0 <= value <= _MAX_INT64:  # not isinstance, which accepts bool
            return value
        raise self.error(name, f"found {_shown(value)}, expected a whole number of at least 0")

    def number(self, name: str) -> float:
        """Return a number, such as a time in the file's own unit and from its own origin: finite, at least 0."""
        value = self.values[name]
        number = math.nan
        if self.is_text and "_" not in value:  # float() accepts 1_0 as 10
            with suppress(ValueError):
                number = float(value)
        elif type(value) in (int, float) and abs(value) <= _MAX_INT64:
            number = float(value)
        if math.isfinite(number) and number >= 0:
            return number
        raise self.error(name, f"found {_shown(value)}, expected a finite number of at least 0")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if isinstance(value, str):
            return value
        raise self.error(name, f"found {_shown(value)}, expected text as on the other lines")

    def blocks(self, name: str) -> NDArray[np.int64]:
        """Return the block hashes, [block]."""
        value = self.values.get(name)
        if isinstance(value, list) and all(type(v) is int and -_MAX_INT64 <= v <= _MAX_INT64 for v in value):
            return np.array(value, np.int64)
        raise self.error(name, f"found {_shown(value)}, expected a list of 64-bit whole numbers")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class RequestColumns:
    """Columns of a request trace, filled while its rows are read; numbers take eight bytes each."""

    def __init__(self, used: Collection[str], units_per_s: float = 1.0, typecode: str = "d") -> None:
        """`typecode` is that of the arrival times: "d" for floats, "q" for integers too large for them."""
        self.used = frozenset(used)
        self.units_per_s = units_per_s
        self.arrivals: array[Any] = array(typecode)
        self.prompt_tokens, self.output_tokens = array("q"), array("q")
        self.extra: dict[str, list[Any]] = {}

    def add(self, row: Row, arrival: float, prompt_tokens: int, output_tokens: int) -> None:
        """Add one request. Values in columns not in `used` are kept as extra, None for a line that lacks the value."""
        for name in row.values.keys() - self.used - self.extra.keys():
            self.extra[name] = [None] * len(self.arrivals)
        self.arrivals.append(arrival)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        for name, column in self.extra.items():
            column.append(row.values.get(name))

    def trace(self, path: Path, format: str, options: ReadOptions, **columns: Any) -> RequestTrace:
        """Return the trace in order of arrival, with the first arrival at 0 s."""
        since_first = np.array(self.arrivals) - min(self.arrivals)  # before the division: integers lose no digit
        model = {} if options.model is None else {"model": options.model}
        with value_errors(path, "requests"):
            trace = RequestTrace(
                prompt_tokens=np.array(self.prompt_tokens, np.int64),
                output_tokens=np.array(self.output_tokens, np.int64),
                arrival_s=since_first / self.units_per_s,
                extra={name: self.extra[name] for name in sorted(self.extra)},
                source={"format": format, "file": path.name} | model,
                **columns,
            )
        return trace.in_order()


def is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP_MAGIC


def open_binary(path: Path) -> io.BufferedReader:
    """Open the bytes of a file, unpacked if it is gzip; reading raises if the file unpacks to far too much."""
    return io.BufferedReader(_Unpacking(path), 1 << 16) if is_gzip(path) else path.open("rb")


class _Unpacking(io.RawIOBase):
    """A gzip stream that counts the unpacked bytes and checks them against the limit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = gzip.open(path, "rb")  # noqa: SIM115  # closed with this stream
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self._unpacked += count
        check_unpacked(self._path, self._unpacked)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def check_unpacked(path: Path, unpacked: int) -> None:
    """Raise TraceError if a file unpacks to far more than its size, before the bytes fill memory."""
    check_file(
        unpacked <= max(ALWAYS_BYTES, MOST_RATIO * path.stat().st_size),
        path,
        "file",
        f"unpacks to at least {unpacked:,} bytes, over {MOST_RATIO} times its size: not a file of real data",
    )


def read_unpacked(path: Path) -> bytes:
    """Return all bytes of a file, unpacked if it is gzip."""
    with file_errors(path), open_binary(path) as stream:
        return stream.read()


def csv_rows(path: Path, need: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a CSV file; its header must have at least the columns `need`."""
    with file_errors(path), io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as stream:
        lines = csv.reader(stream, strict=True)  # strict: a quote left open at the end of the file is an error
        count = 0
        try:
            header = [name.strip() for name in next(lines, [])]
            _check_header(path, header, need)
            for values in lines:
                if not values:  # an empty line
                    continue
                if len(values) < len(header):
                    problem = f"is missing: the line has {len(values)} of {len(header)} columns"
                    raise TraceError(path, f"line {lines.line_num}, {header[len(values)]}", problem)
                if len(values) > len(header):
                    problem = f"has {len(values)} values, the header names {len(header)}"
                    raise TraceError(path, f"line {lines.line_num}", problem)
                count += 1
                yield Row(path, lines.line_num, dict(zip(header, values, strict=True)), is_text=True)
        except csv.Error as error:
            raise TraceError(path, f"line {lines.line_num}", f"is not CSV: {error}") from None
    check_file(count, path, "requests", "has a header and no requests")


def _check_header(path: Path, header: Sequence[str], need: Sequence[str]) -> None:
    check_file(header, path, "file", "is empty")
    for name in need:
        check_file(name in header, path, f"line 1, {name}", f"column is missing; the header has {', '.join(header)}")
    for name in header:
        check_file(header.count(name) <= 1, path, f"line 1, {name}", f"names {header.count(name)} columns")


def json_rows(path: Path, need: Sequence[str]) -> Iterator[Row]:
    """Yield the objects of a JSON Lines file; each must have at least the keys `need`."""
    count = 0
    with file_errors(path), io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                if "\\ud" in line:  # JSON can escape a lone surrogate, which UTF-8 cannot encode
                    json.dumps(value, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                ends = "" if line.endswith("\n") else "; it is the last line and has no newline: cut short?"
                raise TraceError(path, f"line {number}", f"is not JSON: {error}{ends}") from None
            if not isinstance(value, dict):
                raise TraceError(path, f"line {number}", f"holds {_shown(value)}, expected a JSON object")
            for name in need:
                if name not in value:
                    raise TraceError(path, f"line {number}, {name}", f"is missing; the line has {', '.join(value)}")
            count += 1
            yield Row(path, number, value, is_text=False)
    check_file(count, path, "file", "is empty")


def head_of(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, without leading white space; none for a folder. For format detection."""
    if not path.is_file():
        return b""
    with path.open("rb") as stream:
        return stream.read(size).lstrip()


def sniff_csv(path: Path) -> frozenset[str]:
    """Return the columns of the header; empty if the file is not CSV. For format detection: never raises."""
    with suppress(ValueError, csv.Error):
        return frozenset(name.strip() for name in next(csv.reader([_first_line(path)], strict=True), []))
    return frozenset()


def sniff_json(path: Path) -> frozenset[str]:
    """Return the keys of the JSON object on the first line; empty if there is none. For detection: never raises."""
    try:
        value = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _first_line(path: Path) -> str:
    """Return the first line; raises ValueError (such as UnicodeDecodeError) if the file has no text."""
    check(path.is_file(), "not a file", ValueError)
    try:
        with open_binary(path) as stream:
            return stream.readline(_MAX_FIRST_LINE).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from None
