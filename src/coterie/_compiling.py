"""Says on stderr that loops are being compiled, for the command line: it takes a while, once per machine and version.

Numba tells when it compiles, but by then a verb may have run for seconds. So a file beside Numba's cache lists the
verbs whose loops are compiled, and a verb that is not listed says so as soon as it imports Numba. What the file cannot
know, such as a loop that only one option of a verb runs, is said when Numba begins to compile it.

Only the command line enables it; a program that imports Coterie prints nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MESSAGE = "compiling once, about {} s; coterie warm does it ahead"
FILE = "coterie-compiled.json"
DEFAULT_S = 25
"""Seconds, for verbs of which it is not known."""


class _Run:
    """The verb that this process runs."""

    enabled = False
    seconds: int | None = None
    """Seconds that compiling takes, for the message; None once it was printed, or where there is none."""
    listed = True
    """Whether the verb's loops are known to be compiled."""
    listening = False
    compiled = 0
    """Functions that Numba has compiled for it."""


def announce(verb: str, seconds: int | None) -> None:
    """Say it if this verb compiles. `seconds` is how long it takes; None is a verb that need not compile anything."""
    count_from_now()
    _Run.seconds = DEFAULT_S if seconds is None else seconds
    _Run.listed = seconds is None or verb in compiled_verbs()


def count_from_now() -> None:
    """Count compiled functions without a word; see :func:`compiled_functions`."""
    _Run.enabled, _Run.seconds, _Run.compiled = True, None, 0
    if "coterie._numba" in sys.modules:
        on_numba_import()


def compiled_functions() -> int:
    """Functions that Numba has compiled, not read from its cache, since :func:`announce` or :func:`count_from_now`."""
    return _Run.compiled


def before_numba_import() -> None:
    """Numba takes up to a second to import: a verb whose loops are not compiled says so before."""
    if not _Run.listed:
        _say()


def on_numba_import() -> None:
    """Listen to Numba, once it is imported; does nothing unless enabled."""
    if not _Run.enabled or _Run.listening:
        return
    _Run.listening = True
    from numba.core.event import Event, Listener, register

    class Heard(Listener):  # type: ignore[misc]  # numba has no types
        def on_start(self, _event: Event) -> None:
            _Run.compiled += 1
            _say()

        def on_end(self, _event: Event) -> None:
            pass

    heard: Any = Heard()
    register("numba:compile", heard)  # reading a loop from the cache is not compiling it


def _say() -> None:
    if _Run.seconds is not None:
        print(MESSAGE.format(_Run.seconds), file=sys.stderr, flush=True)  # noqa: T201  # rich puts it above its bars
        _Run.seconds = None


def note_compiled(*verbs: str) -> None:
    """List verbs whose loops are compiled now; where nothing can be written, nothing is."""
    known = compiled_verbs()
    if "coterie._numba" not in sys.modules or known >= set(verbs):
        return
    with contextlib.suppress(OSError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"key": _key(), "verbs": sorted(known | set(verbs))}))
        part.replace(path)


def compiled_verbs() -> set[str]:
    """Verbs whose loops are compiled, for this version of Coterie, Numba and Python on this processor."""
    try:
        found = json.loads(_file().read_text())
        return set(map(str, found["verbs"])) if found["key"] == _key() else set()
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _file() -> Path:
    """In NUMBA_CACHE_DIR, or where Numba keeps what it compiles without: beside the sources, or in the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / FILE
    package = Path(__file__).parent
    if os.access(package, os.W_OK):
        return package / "__pycache__" / FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba" / FILE


def _key() -> str:
    versions = []
    for name in ("coterie", "numba"):
        try:
            versions.append(version(name))
        except PackageNotFoundError:  # a source tree on the path
            versions.append("?")
    return " ".join([*versions, platform.python_version(), str(Path(__file__).parent), _processor()])


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
