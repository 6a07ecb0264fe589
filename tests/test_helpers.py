"""Helpers without machine code: callers compute the same, newly compiled or with what an earlier process cached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from coterie import _helpers

PARTS = """
from coterie._numba import helper

@helper()
def square(x):
    if x < 0:
        raise ValueError("negative")
    return x * x

@helper()
def total(values):
    result = 0.0
    for value in values:
        result += square(value)
    return result
"""

LOOP = """
from coterie._numba import njit
from parts import square, total

@njit()
def loop(values):
    return total(values) {sign} square(3.0)
"""

PROGRAM = """
import importlib, sys
import numpy as np
from numba.core.codegen import CPUCodeLibrary

made, finish = [], CPUCodeLibrary._finalize_final_module
CPUCodeLibrary._finalize_final_module = lambda library: (made.append(library.name), finish(library))
loop = importlib.import_module(sys.argv[1]).loop
print(loop(np.array([1.0, 2.0])))
try:
    loop(np.array([-1.0]))
except ValueError as error:
    print(error)
print(sorted({"loop", "square", "total"} & set(made)), len(loop.stats.cache_hits))
"""


@pytest.mark.skipif(numba.version_info[:2] not in _helpers.TESTED, reason="Numba's own way is used with this version")
def test_callers_compute_the_same_and_helpers_have_no_machine_code(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "plus.py").write_text(LOOP.format(sign="+"))
    (tmp_path / "minus.py").write_text(LOOP.format(sign="-"))
    source = Path(_helpers.__file__).parents[1]
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:{source}"}
    for module, value, hits in (
        ("plus", 14.0, 0),  # all is compiled
        ("plus", 14.0, 1),  # the loop is read from the cache
        ("minus", -4.0, 0),  # the helpers are
    ):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, module], env=environment, capture_output=True, text=True, check=False
        )
        assert ran.stdout.splitlines() == [str(value), "negative", f"['loop'] {hits}"], ran.stderr
