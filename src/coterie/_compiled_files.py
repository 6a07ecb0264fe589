"""Numba's cache of compiled loops, for the command line: a damaged or unwritable one costs time, not the command.

Numba reads its cache files with pickle and lets out whatever that raises on a cut or overwritten file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def recompile_if_damaged() -> None:
    """From now on, a function whose cache cannot be read is compiled, and one that cannot be saved is used unsaved."""
    from numba.core.caching import Cache
    from numba.core.dispatcher import Dispatcher

    load, save, enable = Cache.load_overload, Cache.save_overload, Dispatcher.enable_caching

    def load_overload(self: Any, *arguments: Any) -> Any:
        try:
            return load(self, *arguments)
        except Exception:  # pickle raises any exception on damaged bytes
            with suppress(OSError):
                self.flush()  # an empty index, which saving then adds to
            return None

    def save_overload(self: Any, *arguments: Any) -> None:
        with suppress(OSError):  # a full disk, a folder that is gone
            save(self, *arguments)

    def enable_caching(self: Any) -> None:
        with suppress(RuntimeError):  # no folder can be written
            enable(self)

    Cache.load_overload, Cache.save_overload = load_overload, save_overload
    Dispatcher.enable_caching = enable_caching
