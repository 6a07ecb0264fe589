"""Mutated files for every reader and random lines for every verb: no traceback, no memory, no lost input.

Each run is a process of its own, so that its peak memory is its own. `tests/support/fuzz` says what is drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
MOST_BYTES = 2 << 30


def fuzz(kind: str, count: int, seed: int, folder: Path, *more: object) -> dict[str, Any]:
    command = [sys.executable, "-m", f"fuzz.{kind}", *map(str, (count, seed, folder, *more))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["peak_bytes"] < MOST_BYTES
    return found


def test_mutated_files(tmp_path: Path) -> None:
    found = fuzz("files", 200, 0, tmp_path)
    assert found["read"] + found["refused"] == 200
    assert found["refused"] > 100, "most changes show"


def test_argument_lines(tmp_path: Path) -> None:
    found = fuzz("lines", 150, 0, tmp_path, 0.2)
    assert sum(found["codes"].values()) == 150
    assert found["codes"]["2"] > 50


@pytest.mark.long
def test_five_thousand_mutated_files(tmp_path: Path) -> None:
    found = fuzz("files", 5000, 1, tmp_path)
    assert found["read"] + found["refused"] == 5000


@pytest.mark.long
def test_three_thousand_argument_lines(tmp_path: Path) -> None:
    found = fuzz("lines", 3000, 1, tmp_path, 2)
    assert sum(found["codes"].values()) == 3000
