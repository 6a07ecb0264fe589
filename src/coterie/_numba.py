"""Numba's ``njit`` with types, compiled once and cached on disk, and loops on several cores.

Numba takes about 0.4 s and 60 MB to import, so only modules with hot loops import this one, and nothing that
merely opens a trace does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from coterie import _compiling, _interrupts

_compiling.use_cache_of_tree()

import numba  # noqa: E402
import numpy as np  # noqa: E402
from numba.extending import register_jitable  # noqa: E402

_interrupts.on_numba_import()
_compiling.on_numba_import()

F = TypeVar("F", bound=Callable[..., object])

TURNS = 4
"""Parts of the work per thread: parts differ in duration, so smaller ones balance better."""


def njit(*, fastmath: bool = False, division_raises: bool = True) -> Callable[[F], F]:
    """Compile on first call; the machine code is cached beside the source file or in NUMBA_CACHE_DIR.

    Without `division_raises`, dividing by 0 gives infinity as NumPy does, and a loop that divides can be vectorised.
    """
    compile_: Callable[[F], F] = numba.njit(nogil=True, **_options(fastmath, division_raises))
    return compile_


def helper(*, fastmath: bool = False, division_raises: bool = True) -> Callable[[F], F]:
    """As :func:`njit`, for a function that only compiled functions call.

    Without the wrapper for calls from Python it compiles in two thirds of the time, and once for all plain numbers that
    callers pass. A call from Python runs the function uncompiled.
    """
    register: Callable[[F], F] = register_jitable(**_options(fastmath, division_raises))
    return register


def _options(fastmath: bool, division_raises: bool) -> dict[str, Any]:
    errors = "python" if division_raises else "numpy"
    return {"cache": True, "fastmath": fastmath, "error_model": errors, "no_cfunc_wrapper": True}


@helper()
def set_bits(word: np.uint64) -> np.uint64:
    """Return the number of bits that are set; compilers turn this pattern into one instruction."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


def side_by_side(work: Callable[..., object], count: int, *arguments: Any) -> None:
    """Call compiled `work(indices, *arguments)` on all cores; the calls together cover every index below `count` once.

    For independent work: the number of threads then changes no result. Uses threads, not Numba's parallel loops, which
    take three times as long to compile.
    """
    threads = min(numba.get_num_threads(), count)
    if threads <= 1:
        work(np.arange(count), *arguments)
        return
    work(np.arange(0), *arguments)  # compile in this thread, which Ctrl-C can interrupt
    parts = min(count, threads * TURNS)
    turns = [_pool(threads).submit(work, np.arange(first, count, parts), *arguments) for first in range(parts)]
    try:
        for turn in turns:
            turn.result()
    finally:
        for turn in turns:
            turn.cancel()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="coterie")
