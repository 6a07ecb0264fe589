"""Print on stderr that loops are being compiled, for the command line: it takes a while, once per machine and version.

Numba reports when it compiles, but by then a verb may have run for seconds. So a file beside Numba's cache lists the
verbs whose loops are compiled, and a verb that is not listed prints the message before it imports Numba. For loops that
the file cannot know, such as those of one option of a verb, it is printed when Numba begins to compile.

Only the command line enables the message; a program that imports Coterie prints nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TREE = Path(__file__).parents[2]
if (TREE / "pyproject.toml").is_file() and os.access(TREE, os.W_OK) and "NUMBA_CACHE_DIR" not in os.environ:
    # A source tree: a verb, make and the processes of a test all find what one of them compiled, whatever the time that
    # a checkout gave a file. Numba reads these when it is imported.
    os.environ["NUMBA_CACHE_DIR"] = str(TREE / ".numba_cache")
    os.environ["NUMBA_CACHE_LOCATOR_CLASSES"] = "coterie._compiled_files.ByContent,UserProvidedCacheLocator"

MESSAGE = "compiling once, about {} s; coterie warm does it ahead"
FILE = "coterie-compiled.json"
DEFAULT_S = 25
"""Compile time in seconds stated for verbs whose own is not known."""


class _Run:
    """State of the verb that this process runs."""

    enabled = False
    seconds: int | None = None
    """Compile time in seconds for the message; None if no message is to be printed, or it was printed already."""
    listed = True
    """Whether the verb's loops are known to be compiled."""
    listening = False
    compiled = 0
    """Number of functions that Numba has compiled for the verb."""


def announce(verb: str, seconds: int | None) -> None:
    """Print the message if this verb compiles. `seconds` is its compile time; None if it need not compile anything."""
    count_from_now()
    _Run.seconds = DEFAULT_S if seconds is None else seconds
    _Run.listed = seconds is None or verb in compiled_verbs()


def count_from_now() -> None:
    """Count compiled functions without printing the message; see :func:`compiled_functions`."""
    _Run.enabled, _Run.seconds, _Run.compiled = True, None, 0
    if "coterie._numba" in sys.modules:
        on_numba_import()


def compiled_functions() -> int:
    """Return the number of functions compiled, not read from the cache, since `announce` or `count_from_now`."""
    return _Run.compiled


def before_numba_import() -> None:
    """Print the message for a verb whose loops are not compiled, before Numba's import of up to a second."""
    if not _Run.listed:
        _say()


def on_numba_import() -> None:
    """Listen to Numba's compile events after its import; does nothing unless enabled."""
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

    register("numba:compile", Heard())  # not sent for a loop read from the cache


def _say() -> None:
    if _Run.seconds is not None:
        print(MESSAGE.format(_Run.seconds), file=sys.stderr, flush=True)  # noqa: T201  # rich puts it above its bars
        _Run.seconds = None


def note_compiled(*verbs: str) -> None:
    """Record in the file that the loops of these verbs are compiled; does nothing if it cannot be written."""
    known, path = compiled_verbs(), _file()
    if "coterie._numba" not in sys.modules or known >= set(verbs):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"key": _key(), "verbs": sorted(known | set(verbs))}))
        part.replace(path)


def compiled_verbs() -> set[str]:
    """Return the verbs whose loops are compiled, for this version of Coterie, Numba and Python on this processor."""
    try:
        listed = json.loads(_file().read_text())
        return set(map(str, listed["verbs"])) if listed["key"] == _key() else set()
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _file() -> Path:
    """Return the file's path, where Numba keeps its cache: NUMBA_CACHE_DIR, beside the sources, or the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / FILE
    package, user = Path(__file__).parent, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (package / "__pycache__" if os.access(package, os.W_OK) else user / "numba") / FILE


def _key() -> str:
    versions = _version("coterie"), _version("numba"), platform.python_version()
    return " ".join([*versions, str(Path(__file__).parent), _processor()])


def _version(package: str) -> str:
    with contextlib.suppress(PackageNotFoundError):  # a source tree on the path has no metadata
        return version(package)
    return "?"


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as lines:  # noqa: PTH123
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()
