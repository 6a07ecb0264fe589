"""Every error Coterie raises on purpose.

    CoterieError
    ├── InputError            something given by the user is wrong: the command line exits with 2
    │   ├── TraceError        a file: names the file, the field, what was found and what was expected
    │   ├── ConfigError       a setting or a combination of settings
    │   │   └── NotFittedError    used before its fit()
    │   └── UnknownNameError  a name that no registry knows: suggests and lists the known ones
    ├── UnavailableError      the request is valid, but this machine lacks what it needs (torch, a GPU)
    └── RankFailedError       a process of an expert-parallel group raised, died or was silent too long

:class:`UnfinishedWarning` is a warning, not an error: the trace was read as far as it was written.

Messages are one line, quote the value, and state the relation that fails:
``num_slots=290 must be a multiple of num_ranks=32 (remainder 2)``.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class CoterieError(Exception):
    """Base of all errors raised by Coterie."""


class InputError(CoterieError, ValueError):
    """Something given by the user is wrong."""


class TraceError(InputError):
    """A file that cannot be read as what it claims to be."""

    def __init__(self, path: str | Path, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}".replace("\n", "\\n"))  # names may hold line breaks
        self.path = Path(path)
        self.field = field
        self.problem = problem


class UnfinishedWarning(UserWarning):
    """A trace whose recording was interrupted, or still runs: it holds what was flushed so far."""


class ConfigError(InputError):
    """A setting, or a combination of settings, that cannot work."""


class NotFittedError(ConfigError):
    """An object was used before its fit()."""


def require_fitted(value: T | None, what: str) -> T:
    """Return the fitted value; raise if fit() was not called."""
    return check_given(value, f"{what} is not fitted: call fit() first", NotFittedError)


def check(holds: object, problem: str, kind: type[Exception] = ConfigError) -> None:
    """Raise an error of this kind unless `holds`; for problems that can be put into words at once, and cheaply."""
    if not holds:
        raise kind(problem)


def check_given(value: T | None, problem: str, kind: type[Exception] = ConfigError) -> T:
    """Return the value; raise an error of this kind if it is None, as check does."""
    if value is None:
        raise kind(problem)
    return value


def check_file(holds: object, path: str | Path, field: str, problem: str) -> None:
    """Raise TraceError unless `holds`, as check does."""
    if not holds:
        raise TraceError(path, field, problem)


def check_found(value: T | None, path: str | Path, field: str, problem: str) -> T:
    """Return the value; raise TraceError if it is None, as check does."""
    if value is None:
        raise TraceError(path, field, problem)
    return value


def check_at_least(least: float, **values: float | None) -> None:
    """Raise ConfigError for a setting below `least`. None (not given) passes this check and the ones below."""
    _check(values, lambda value: value >= least, f"at least {least}")


def check_positive(**values: float | None) -> None:
    _check(values, lambda value: 0 < value < math.inf, "a finite number above 0")


def check_not_negative(**values: float | None) -> None:
    _check(values, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def check_within(low: float, high: float, **values: float | None) -> None:
    _check(values, lambda value: low <= value <= high, f"in {low} … {high}")


def check_share(**values: float | None) -> None:
    check_within(0, 1, **values)


def check_positive_share(**values: float | None) -> None:
    _check(values, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _check(values: Mapping[str, float | None], holds: Callable[[float], bool], relation: str) -> None:
    for name, value in values.items():
        if value is not None and not holds(value):
            raise ConfigError(f"{name}={value} must be {relation}")


def check_one_of(choices: Collection[str], **values: str) -> None:
    for name, value in values.items():
        if value not in choices:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}")


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise ConfigError with the first message whose condition holds."""
    for message, holds in reasons.items():
        if holds:
            raise ConfigError(message)


def check_input_file(path: Path) -> None:
    """Raise TraceError for a device, a pipe or a socket before it is opened: reading it may never end.

    A missing file passes: opening it gives a better error.
    """
    with suppress(OSError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise TraceError(path, "file", "is a device, a pipe or a socket, expected a file")


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn errors of opening, reading and unpacking a file into TraceErrors with one line that names the file."""
    check_input_file(path)
    try:
        yield
    except FileNotFoundError:
        raise TraceError(path, "file", "does not exist") from None
    except IsADirectoryError:
        raise TraceError(path, "file", "is a folder, expected a file") from None
    except EOFError:
        raise TraceError(path, "gzip", "the stream ends early: the file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, "gzip", f"cannot be unpacked: {error}") from None
    except OSError as error:
        raise TraceError(path, "file", f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(path, "text", f"is not UTF-8: {error.reason} at byte {error.start} of a block") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    with file_errors(path):
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise TraceError(path, "JSON", f"cannot be parsed: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(path, "JSON", f"must be an object, found {type(value).__name__}")
    return value


def check_new_file(path: Path | None) -> None:
    """Raise ConfigError if the file exists. None (nothing is to be written) passes."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise ConfigError(f"{path} exists already; choose another name or remove it first")


class UnknownNameError(InputError, KeyError):
    """A name that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        close = difflib.get_close_matches(name.lower(), self.known, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(self.known)}")

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class UnavailableError(CoterieError, RuntimeError):
    """This machine lacks what the request needs."""


class RankFailedError(CoterieError, RuntimeError):
    """A rank of an expert-parallel group failed, so no rank can continue."""


def check_known(kind: str, name: str | None, known: Collection[str]) -> None:
    """Raise UnknownNameError for a name that is not known; None (not given) passes."""
    if name is not None and name not in known:
        raise UnknownNameError(kind, name, known)
