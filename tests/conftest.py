"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("coterie")


PLANNING = {
    "test_bench_placement", "test_free_split", "test_latency_optimal", "test_latency_optimal_ilp",
    "test_latency_optimal_suite", "test_objective", "test_plan", "test_planners", "test_rebalancing", "test_splits",
    "test_vllm_eplb",
}  # fmt: skip
"""Files whose tests plan placements: one worker takes them all, since the loops of planners compile for a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes whole files: if both had tests of one, both would compile its loops."""
    for item in items:
        group = "planning" if item.path.stem in PLANNING else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


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
