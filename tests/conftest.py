"""Shared fixtures."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("coterie")

# Commands that tests start would otherwise read every source file of Coterie anew: half the time that most take.
sys.dont_write_bytecode = False
# What is imported stays: searching it for garbage, again and again, takes an eighth of the time.
gc.set_threshold(50_000)
# A shell makes commands in the background ignore SIGINT, and they would pass that on to what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; see docs/data.md."""
    folder = os.environ.get("COTERIE_DATA")
    if not folder:
        pytest.skip("COTERIE_DATA is not set: no real data to read (docs/data.md)")
    return Path(folder)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
