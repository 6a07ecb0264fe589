"""Print on stderr that loops are being compiled, for the command line: it takes a while, once per machine and version.

Numba says when it begins to compile a function; loops that it reads from its cache are not announced. Only the command
line enables the message; a program that imports Coterie prints nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MESSAGE = "compiling once, about {} s; coterie warm does it ahead"
DEFAULT_S = 25
"""Compile time in seconds stated for verbs whose own is not known."""


class _Run:
    """State of the verb that this process runs."""

    enabled = False
    seconds: int | None = None
    """Compile time in seconds for the message; None if no message is to be printed, or it was printed already."""
    listening = False
    compiled = 0
    """Number of functions that Numba has compiled for the verb."""


def use_cache_of_tree() -> None:
    """In a source tree, let Numba keep its cache there, by the content of sources; call it before Numba is imported.

    A verb, make and the processes of a test then all find what one of them compiled, whatever the time that a checkout
    gave a file.
    """
    tree = Path(__file__).parents[2]
    if (tree / "pyproject.toml").is_file() and os.access(tree, os.W_OK) and "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = str(tree / ".numba_cache")
        os.environ["NUMBA_CACHE_LOCATOR_CLASSES"] = "coterie._compiled_files.ByContent,UserProvidedCacheLocator"


def announce(seconds: int | None) -> None:
    """Print the message when a verb begins to compile; `seconds` is its compile time, None if it is not known."""
    count_from_now()
    _Run.seconds = DEFAULT_S if seconds is None else seconds


def count_from_now() -> None:
    """Count compiled functions without printing the message; see :func:`compiled_functions`."""
    _Run.enabled, _Run.seconds, _Run.compiled = True, None, 0
    if "coterie._numba" in sys.modules:
        on_numba_import()


def compiled_functions() -> int:
    """Return the number of functions compiled, not read from the cache, since `announce` or `count_from_now`."""
    return _Run.compiled


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
