"""Shared fixtures."""

from __future__ import annotations

import os
import signal
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
# A shell makes commands in the background ignore SIGINT, and they would pass that on to what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TOGETHER = {
    "vllm": ("vllm_gateway", "vllm_handoffs"),
    "fleets": (
        "demo",
        "drift_suite",
        "examples",
        "fleet",
        "fleet_checks",
        "fleet_control",
        "fleet_command",
        "fleet_reality",
        "fleet_requests",
        "fleet_tables",
        "front_door",
        "joint",
        "joint_prefixes",
        "live",
        "matching",
        "proxy",
        "routed_loop",
        "shell_blocks",
        "streams",
        "worker_embedded",
        "worker_requests",
    ),
    "planning": (
        "advice",
        "advising",
        "bench_placement",
        "flashlb",
        "free_split",
        "latency_optimal",
        "latency_optimal_ilp",
        "latency_optimal_suite",
        "objective",
        "place_inspect",
        "placement_suite",
        "plan",
        "planners",
        "rebalancing",
        "scenario_plans",
        "splits",
        "vllm_eplb",
        "vllm_eplb_paying",
    ),
    "batching": (
        "batch_server",
        "bench_batching",
        "caps",
        "contract",
        "latency_aware",
        "regimes",
        "same_order",
        "simulate",
        "simulate_cli",
        "simulate_requests",
        "strategies",
        "stranger",
        "waiting_machine",
    ),
    "serving": ("sem_moe_layer_time", "sem_moe_serving", "serving_group"),
    "routing": ("fleet_state", "keeper", "keeper_attacks", "keeper_machine", "routers"),
    "kv": ("directory", "follower", "kv_streams"),
    "dispatch": ("dispatch_requests", "dispatch_shuffle", "dispatch_slots", "tables"),
    "browser": ("page_browser", "page_server", "page_snapshot"),
    "generated": ("fitting", "generate", "inspect", "inspection", "page", "synthetic", "trace_invariants"),
}
"""Files of tests that run the same loops: one worker takes them all, or both would compile them, for a minute each.
Those of vLLM use the same servers.

The longest group comes first: a worker that began it last would leave the other one idle."""

GROUPS = {f"test_{name}": group for group, names in TOGETHER.items() for name in names}

PARAMETERS = {
    "choose_a_batch": "batching",
    "docs/batching": "batching",
    "docs/control": "test_fitted",
    "docs/engines/worker": "fleets",
    "docs/fleet": "fleets",
    "docs/fleet-simulator": "fleets",
    "docs/group-simulator": "serving",
    "docs/placement": "planning",
    "docs/placement-data": "planning",
    "docs/results/routed-fleet": "fleets",
    "docs/routing": "test_fitted",
    "docs/kv-directory": "kv",
    "plan_expert_placement": "planning",
}
"""Pages and examples that run such loops, by the parameter of their test: a group of the above, or a file."""
RUN = ("test_python_runs", "test_runs", "test_commands_print_what_is_shown")
"""Tests that run a page or an example."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """A worker takes whole files: if both had tests of one, both would compile its loops.

    Not by xdist_group marks: xdist 3.8 writes those where pytest 9 does not read them, and deals out single tests.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which is not how long they take
    return WholeFiles(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the groups first: workers of xdist are given files in the order of collection."""
    if hasattr(config, "workerinput"):
        ranks = {group: rank for rank, group in enumerate(TOGETHER)}
        items.sort(key=lambda item: ranks.get(group_of(item.nodeid), len(ranks)))


def group_of(nodeid: str) -> str:
    """Tests of one group go to one worker."""
    path, _, test = nodeid.partition("::")
    file, (name, _, parameter) = Path(path).stem, test.removesuffix("]").partition("[")
    known = PARAMETERS.get(parameter) if name in RUN else None
    return known or GROUPS.get(file, file)


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
