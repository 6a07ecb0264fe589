"""Compiled helpers without machine code of their own.

Numba optimises every helper, makes machine code of it, and then links its intermediate code into each caller, where it
is optimised again. Nobody calls a helper's machine code, so it is not made here: compiling takes a fifth less time.

This changes private methods of Numba, so only for the versions it was tested with. With others, helpers are compiled
as Numba does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.targetconfig import TargetConfig

TESTED = ((0, 65),)
"""Versions of Numba, up to the minor number."""

INTERMEDIATE = "intermediate"
"""Kind of a cached library that has no machine code."""

_names: set[str] = set()
"""Qualified names of helpers."""


def without_machine_code(function: Callable[..., object]) -> None:
    """Make no machine code of a helper when it is compiled."""
    if not _names and numba.version_info[:2] in TESTED:
        _change_numba()
    _names.add(function.__qualname__)


def _is_helper(library: Any) -> bool:
    """Whether a library has a helper and no function that Python calls."""
    return library.name in _names and not any(
        function.name.startswith("_ZN7cpython") and not function.is_declaration
        for function in library._final_module.functions
    )


def _change_numba() -> None:
    finalize, set_env = CPUCodeLibrary.finalize, JITCPUCodegen.set_env
    serialize, unserialize = CPUCodeLibrary.serialize_using_object_code, CPUCodeLibrary._unserialize
    equal = TargetConfig.__eq__

    def equal_values(self: Any, other: object) -> Any:
        """Compare the options that were set; Numba compares all of them at every call of a NumPy function."""
        if isinstance(other, TargetConfig) and self._values.keys() == other._values.keys():
            return self._values == other._values
        return equal(self, other)

    def finalize_unless_helper(self: Any) -> None:
        if not _is_helper(self):
            finalize(self)
            return
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def set_env_if_loaded(self: Any, name: str, env: Any) -> None:
        if self._engine.is_symbol_defined(name):
            set_env(self, name, env)

    def serialize_unless_helper(self: Any) -> Any:
        if not _is_helper(self):
            return serialize(self)
        return self.name, INTERMEDIATE, self._get_module_for_linking().as_bitcode()

    def unserialize_helper(_class: Any, codegen: Any, state: Any) -> Any:
        name, kind, data = state
        if kind != INTERMEDIATE:
            return unserialize(codegen, state)
        library = codegen.create_library(name)
        library._final_module = library._shared_module = llvm.parse_bitcode(data)
        library._finalized = True
        return library

    TargetConfig.__eq__ = equal_values
    TargetConfig.__hash__ = lambda self: hash(type(self))  # Numba hashes names of options, the same for all
    CPUCodeLibrary.finalize = finalize_unless_helper
    CPUCodeLibrary.serialize_using_object_code = serialize_unless_helper
    CPUCodeLibrary._unserialize = classmethod(unserialize_helper)
    JITCPUCodegen.set_env = set_env_if_loaded
