"""Shared fixtures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("coterie")

# Commands that tests start would otherwise read every source file of Coterie anew: half the time that most take.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TOGETHER = {
    "planning": (
        "bench_placement",
        "free_split",
        "latency_optimal",
        "latency_optimal_ilp",
        "latency_optimal_suite",
        "objective",
        "plan",
        "planners",
        "rebalancing",
        "splits",
        "vllm_eplb",
    ),
    "batching": (
        "batch_server",
        "bench_batching",
        "caps",
        "contract",
        "latency_aware",
        "same_order",
        "simulate",
        "strategies",
        "waiting_machine",
    ),
    "fleets": ("fleet", "fleet_reality", "fleet_requests", "fleet_checks", "joint"),
    "workers": ("demo", "routed_fleet", "routed_loop", "worker_embedded", "worker_requests"),
    "generated": ("generate", "synthetic", "trace_invariants"),
}
"""Files of tests that run the same loops: one worker takes them all, or both would compile them, for a minute each."""

GROUPS = {f"test_{name}": group for group, names in TOGETHER.items() for name in names}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """A worker takes whole files: if both had tests of one, both would compile its loops.

    Not by xdist_group marks: xdist 3.8 writes those where pytest 9 does not read them, and deals out single tests.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0]).stem
            return GROUPS.get(file, file)

    return WholeFiles(config, log)


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
