"""Record, fit, route on real vLLM: one prefill and two decode workers.

Nothing is said here of how many experts that saves: two decoders and 61 requests in batches of three are too few to
tell. lab/benchmarks/vllm_routing.py measures it with four.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from coterie.engines.vllm.settings import ConnectorSettings
from coterie.prompts import load_prompts, take_in_turn
from routed_loop import DecodeWorker, LoopSettings, run_loop
from vllm_servers import Fleet, Server, hand_over, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, needs_vllm]

SETTINGS = LoopSettings(
    in_flight=4, max_tokens=24, block_size=32, tail_tokens=2, routers=("round_robin", "latency_aware")
)


@pytest.fixture(scope="module")
def trio(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> list[Server]:
    fleet.stop(*list(fleet.servers))
    how: dict[str, Any] = {"settings": {"load_interval_s": 0.2}, "beside": hand_over(tmp_path_factory.mktemp("kv"))}
    return fleet.start({"routed-prefill": how, "routed-0": how, "routed-1": how})


def test_the_loop_closes_and_no_router_changes_a_token(fleet: Fleet, trio: list[Server]) -> None:
    prefill, *decoders = trio
    workers = [
        DecodeWorker(server.url, server.events, ConnectorSettings(store=server.store).store_path("", 0))
        for server in decoders
    ]
    chosen = take_in_turn(load_prompts(), 120)
    result = asyncio.run(run_loop([prefill.url], workers, chosen, SETTINGS))
    assert result.differing() == 0
    for run in result.runs:
        assert run.requests > 40
        assert (run.counts.footprints, run.counts.incomplete, run.counts.failed) == (run.requests, 0, 0)
        assert 4 <= run.distinct_per_step <= 32
        assert min(run.per_worker) > 0
    for server in trio:
        assert server.counter("errors") == 0
    fleet.stop(*(server.name for server in trio))
