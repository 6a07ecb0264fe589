"""Numba's cache of compiled loops: a damaged one costs time, not the command, and its key outlives a checkout.

Numba reads its cache files with pickle and lets out whatever that raises on a cut or overwritten file.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import Cache, UserProvidedCacheLocator
from numba.core.dispatcher import Dispatcher

PACKAGE = Path(__file__).resolve().parent
_COMPILES = "coterie._numba"
_IMPORT = re.compile(r"^ *from (coterie[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def recompile_if_damaged() -> None:
    """From now on, a function whose cache cannot be read is compiled, and one that cannot be saved is used unsaved."""
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


class ByContent(UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    """Finds the machine code of a function of this package by the content of the sources it is made from.

    Numba's own key is the time of the function's file. A checkout changes that time, so that nothing compiled before it
    is used; and a change to a compiled function of *another* file does not. Used in source trees; elsewhere by
    ``NUMBA_CACHE_LOCATOR_CLASSES=coterie._compiled_files.ByContent,UserProvidedCacheLocator``.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        path = Path(py_file).resolve()
        self._stamp = sources_hash(path)
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        self._cache_path = str(Path(config.CACHE_DIR) / f"{module}-{self._stamp[:16]}")

    def get_source_stamp(self) -> str:
        return self._stamp

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        ours = Path(py_file).resolve().is_relative_to(PACKAGE)
        return super().from_function(py_func, py_file) if ours else None


@cache
def sources_hash(path: Path) -> str:
    """Hash of a file, of what it imports of this package, and so on for imports that have compiled functions.

    A compiled function holds the code of the compiled functions it calls, and the values of the constants it reads.
    """
    seen, ahead = {path}, [path]
    while ahead:
        for imported in _imports(ahead.pop()) - seen:
            seen.add(imported)
            if _COMPILES in _text(imported):
                ahead.append(imported)
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(f"{file.relative_to(PACKAGE)}\0{_text(file)}\0".encode())
    return digest.hexdigest()


@cache
def _imports(path: Path) -> set[Path]:
    files: set[Path] = set()
    for module, names in _IMPORT.findall(_text(path)):
        base = PACKAGE.joinpath(*module.split(".")[1:])
        candidates = [base.with_suffix(".py"), base / "__init__.py"]
        candidates += [base / f"{name}.py" for name in re.findall(r"\w+", names)]
        files.update(file for file in candidates if file.is_file())
    return files


@cache
def _text(path: Path) -> str:
    return path.read_text()
