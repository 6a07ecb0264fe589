"""Arrays on disk as safetensors: memory-mapped for reading, streamed for writing.

The safetensors library copies arrays when it reads them, and writes only whole arrays. That does not suit a trace of
tens of gigabytes: here, opening maps the file, and rows are appended after the header. Files are plain safetensors, and
the tests read and write them with the library too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check_file, check_new_file, file_errors

_DTYPES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the safetensors library's own limit


class ArraySpec(NamedTuple):
    """Dtype and shape of an array to be written."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@contextmanager
def value_errors(path: str | Path, field: str, keys_of: str = "") -> Iterator[None]:
    """Turn errors of a file's values into TraceErrors that name the file and the field.

    A missing key is the field itself, after the words `keys_of`.
    """
    try:
        yield
    except TraceError:
        raise
    except KeyError as error:
        raise TraceError(path, f"{keys_of} {error.args[0]}".lstrip(), "is missing") from None
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(path, field, str(error)) from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the path in an OSError that names none, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replaced(path: Path, part: str | None = None) -> Iterator[BinaryIO]:
    """Open a file beside `path` that replaces it once it is written and on disk; an error leaves `path` as it was.

    `part` is the name of the file meanwhile, ``NAME.tmp`` by default.
    """
    tmp = path.with_name(part or f"{path.name}.tmp")
    try:
        with naming(path), tmp.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for a file or a folder that is renamed to it at the end; an error leaves neither.

    Raises ConfigError if `path` exists, or is created meanwhile: a rename would replace it. A folder may replace an
    empty one.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp
        if not (tmp.is_dir() and path.is_dir() and not any(path.iterdir())):
            check_new_file(path)
        tmp.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        if tmp.is_dir():
            shutil.rmtree(tmp)
        elif tmp.exists():  # missing_ok would still fail if a parent of the path is a file
            tmp.unlink()


class ArrayFile(dict[str, NDArray[Any]]):
    """A safetensors file mapped read-only: ``file["offsets"]`` is a view, not a copy."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with file_errors(path), path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header, start = read_header(path, stream, size)
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._metadata = header.pop("__metadata__", None)
        end = start
        for name, entry in header.items():
            self[name], stop = self._view(name, entry, start, size)
            end = max(end, stop)
        check_file(size == end, path, "file", f"has {size} bytes; its header describes {end}")

    def about(self, kind: str, version: int) -> dict[str, Any]:
        """Return Coterie's metadata of the file; raises TraceError for another format or version."""
        try:
            about = json.loads(self._metadata["coterie"])
            stated = (about["format"], about["version"])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise TraceError(self.path, "metadata", f"is not that of a {kind} file") from None
        check_file(
            stated == (kind, version),
            self.path,
            "metadata format",
            f"found {stated[0]!r} version {stated[1]!r}, expected {kind!r} version {version}",
        )
        return dict(about)

    def _view(self, name: str, entry: Any, start: int, size: int) -> tuple[NDArray[Any], int]:
        try:
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
            first, last = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(self.path, name, f"header entry {entry!r} must have dtype, shape, data_offsets") from None
        nbytes = ArraySpec(dtype, shape).nbytes
        check_file(
            min(shape, default=0) >= 0 and first >= 0 and last - first == nbytes,
            self.path,
            name,
            f"data_offsets span {last - first} bytes, {dtype} {shape} needs {nbytes}",
        )
        check_file(
            start + last <= size, self.path, name, f"ends at byte {start + last}, the file has {size}: it is cut short"
        )
        try:
            array = np.frombuffer(self._map, dtype, math.prod(shape), start + first).reshape(shape)
        except (ValueError, OverflowError) as error:  # shape [0, 2**70], or more dimensions than NumPy supports
            raise TraceError(self.path, name, f"has a shape that no array has: {error}") from None
        return array, start + last

    def __missing__(self, name: str) -> NDArray[Any]:
        raise TraceError(self.path, name, f"is missing; the file has {', '.join(sorted(self))}")

    def release(self) -> None:
        """Release the pages read so far: they stay in the page cache but no longer count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def read_header(path: Path, stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file of `size` bytes; returns it with the byte offset of the data."""
    prefix = stream.read(8)
    check_file(len(prefix) >= 8, path, "header", f"file has {size} bytes; safetensors starts with 8 of header length")
    length = int.from_bytes(prefix, "little")
    check_file(
        length <= min(_MAX_HEADER, size - 8),
        path,
        "header",
        f"claims {length} bytes, file has {size}: not safetensors, or cut",
    )
    try:
        header = json.loads(stream.read(length))
    except (ValueError, RecursionError):
        raise TraceError(path, "header", "is not JSON: not a safetensors file") from None
    check_file(isinstance(header, dict), path, "header", "must be a JSON object")
    return header, 8 + length


class ArrayFileWriter(AbstractContextManager["ArrayFileWriter"]):
    """Write a safetensors file row by row; the arrays' shapes must be known in advance.

    The file is ``NAME.tmp`` until the block ends without error: a crash leaves no file under the final name.
    """

    def __init__(self, path: Path, specs: Mapping[str, ArraySpec]) -> None:
        self.path = path
        # Widest first, as the library does, so that every array starts on a multiple of its item size.
        self.specs = dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        header: dict[str, Any] = {}
        at = 0
        for name, spec in self.specs.items():
            header[name] = {
                "dtype": _NAMES[spec.dtype.newbyteorder("<")],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in header}
        self._rows = dict.fromkeys(header, 0)
        self._tmp = path.with_name(path.name + ".tmp")
        self._file = os.open(self._tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.pwrite(self._file, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(self._file, 8 + len(text) + at)
        except OSError:
            self._close()
            raise

    def append(self, name: str, rows: NDArray[Any]) -> None:
        """Write the next rows of an array, after those appended before."""
        spec = self.specs[name]
        data = np.ascontiguousarray(rows, dtype=spec.dtype.newbyteorder("<"))
        done = self._rows[name]
        check_file(
            data.shape[1:] == spec.shape[1:] and done + len(data) <= spec.shape[0],
            self.path,
            name,
            f"rows of shape {data.shape} at row {done} do not fit {spec.shape}",
        )
        view, at = data.reshape(-1).view(np.uint8), 0
        start = self._start[name] + done * (spec.nbytes // max(1, spec.shape[0]))
        while at < len(view):  # pwrite moves at most 2 GiB at a time
            at += os.pwrite(self._file, view[at : at + (1 << 30)].data, start + at)
        self._rows[name] = done + len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        missing = [name for name, spec in self.specs.items() if self._rows[name] != spec.shape[0]]
        try:
            if kind is None and not missing:
                os.fsync(self._file)
                self._tmp.replace(self.path)
        finally:
            self._close()
        if kind is None and missing:
            rows = f"{self._rows[missing[0]]} of {self.specs[missing[0]].shape[0]}"
            raise TraceError(self.path, missing[0], f"has {rows} rows")

    def _close(self) -> None:
        os.close(self._file)
        self._tmp.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write whole arrays at once."""
    with ArrayFileWriter(path, {name: ArraySpec(array.dtype, array.shape) for name, array in arrays.items()}) as out:
        for name, array in arrays.items():
            out.append(name, array)


def write_described(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Write arrays with Coterie's metadata, which :meth:`ArrayFile.about` reads; replaces an existing file atomically.

    The same values give the same bytes.
    """
    from safetensors.numpy import save

    # A single metadata entry: the library writes several entries in an order that differs from run to run.
    data = save({n: np.ascontiguousarray(a) for n, a in arrays.items()}, {"coterie": json.dumps(about)})
    with replaced(path, f".{path.name}.{os.getpid()}.tmp") as stream:
        stream.write(data)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    with replaced(path) as stream:
        stream.write(json.dumps(value, indent=1).encode() + b"\n")
