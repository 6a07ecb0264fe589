"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("coterie")


TOGETHER = {
    "planning": (
        "bench_placement", "free_split", "latency_optimal", "latency_optimal_ilp", "latency_optimal_suite", "objective",
        "plan", "planners", "rebalancing", "splits", "vllm_eplb",
    ),
    "batching": ("bench_batching", "contract", "latency_aware"),
    "fleets": ("fleet", "fleet_reality", "fleet_requests", "fleet_checks"),
}  # fmt: skip
"""Files of tests that run the same loops: one worker takes them all, or both would compile them, for a minute each."""

GROUPS = {f"test_{name}": group for group, names in TOGETHER.items() for name in names}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes whole files: if both had tests of one, both would compile its loops."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(item.path.stem, item.path.stem)))


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
