"""Every error Coterie raises on purpose.

    CoterieError
    ├── InputError            something given by the user is wrong: the command line exits with 2
    │   ├── TraceError        a file: names the file, the field, what was found and what was expected
    │   ├── ConfigError       a setting or a combination of settings
    │   │   └── NotFittedError    used before its fit()
    │   └── UnknownNameError  a name that no registry knows: suggests and lists the known ones
    └── UnavailableError      the request is valid, but this machine lacks what it needs (torch, a GPU)

Messages are one line, quote the value, and state the relation that fails:
``num_slots=290 must be a multiple of num_ranks=32 (remainder 2)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class CoterieError(Exception):
    """Base of all errors raised by Coterie."""


class InputError(CoterieError, ValueError):
    """Something given by the user is wrong."""


class TraceError(InputError):
    """A file that cannot be read as what it claims to be."""

    def __init__(self, path: str | Path, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}")
        self.path = Path(path)
        self.field = field
        self.problem = problem


class ConfigError(InputError):
    """A setting, or a combination of settings, that cannot work."""


class NotFittedError(ConfigError):
    """An object was used before its fit()."""


def require_fitted(value: T | None, what: str) -> T:
    """Return the fitted value; raise if fit() was not called."""
    if value is None:
        raise NotFittedError(f"{what} is not fitted: call fit() first")
    return value


class UnknownNameError(InputError, KeyError):
    """A name that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        close = difflib.get_close_matches(name.lower(), self.known, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        message = f"Unknown {kind} {name!r}.{hint} Known: {', '.join(self.known)}"
        super().__init__(message)

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class UnavailableError(CoterieError, RuntimeError):
    """This machine lacks what the request needs."""
