"""Shared fixtures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("coterie")

# Without compiled bytecode, commands that tests start would compile every source file: half of their time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; see docs/data.md."""
    folder = os.environ.get("COTERIE_DATA")
    if not folder:
        pytest.skip("COTERIE_DATA is not set: no real data to read (docs/data.md)")
    return Path(folder)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Run cells in this process: starting processes takes longer than small runs, and a test of its own covers that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie_lab.suites.running.os.cpu_count", lambda: 1)
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
