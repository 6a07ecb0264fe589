"""Numba's ``njit`` with types, compiled once and cached on disk.

Numba takes about 0.4 s and 60 MB to import, so only modules with hot loops import this one, and nothing that
merely opens a trace does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

prange = numba.prange


def njit(*, parallel: bool = False, fastmath: bool = False, division_raises: bool = True) -> Callable[[F], F]:
    """Compile on first call; the machine code is cached beside the source file or in NUMBA_CACHE_DIR.

    Without `division_raises`, dividing by 0 gives infinity as NumPy does, and a loop that divides can be vectorised.
    """
    errors = "python" if division_raises else "numpy"

    def decorate(function: F) -> F:
        compile_ = numba.njit(cache=True, nogil=True, parallel=parallel, fastmath=fastmath, error_model=errors)
        compiled: F = compile_(function)
        return compiled

    return decorate
