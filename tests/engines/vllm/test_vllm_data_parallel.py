"""A real vLLM engine of two data-parallel ranks computes a request on the rank that the router chose.

Its CPU build has no gather of uneven sizes, which MoE layers on several data-parallel ranks need (their first step ends
with NotImplementedError), so the model is a dense one: experts are made up, and what is tested is the rank.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from coterie.routing import Fleet as Workers
from coterie.routing import Semantic
from coterie.types import Placement
from routed_fleet import RoutedFleet, Served, rank_entries
from vllm_checks import dense_model
from vllm_servers import MODEL, Fleet, Server, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, needs_vllm]

RANKS, LAYERS, EXPERTS = 2, 1, 4
TOKENS = 3


@pytest.fixture(scope="module")
def engine(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = dense_model(tmp_path_factory.mktemp("ranks") / "dense")
    [server] = fleet.start({"ranks": {"model": folder, "extra": ("--data-parallel-size", str(RANKS))}})
    return server


def generated(server: Server) -> list[int]:
    """[rank] tokens generated so far."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=120) as response:
        text = response.read().decode()
    found = re.findall(r'^vllm:generation_tokens_total\{engine="(\d+)".*\} (\S+)$', text, re.M)
    return [int(float(dict(found)[str(rank)])) for rank in range(RANKS)]


def predict(body: Mapping[str, Any]) -> np.ndarray:
    """All experts of the half that the first token names."""
    counts = np.zeros((LAYERS, EXPERTS))
    counts[:, 2 * (body["prompt"][0] % RANKS) :][:, :2] = 1
    return counts


def test_requests_run_on_the_rank_that_was_chosen(engine: Server) -> None:
    async def serve(firsts: list[int]) -> list[Served]:
        router, ranks = Semantic(Placement.linear(LAYERS, EXPERTS, RANKS)), rank_entries(engine.url, RANKS)
        async with RoutedFleet([], ranks, router, Workers([8] * RANKS), predict) as proxy:
            body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            return [await proxy.serve("/v1/completions", body | {"prompt": [first, 7, 8]}) for first in firsts]

    for firsts, ranks in (([101], [1]), ([100], [0]), ([101, 100, 100, 101], [1, 0, 0, 1]), ([101] * 2, [1, 0])):
        before = generated(engine)
        served = asyncio.run(serve(firsts))
        assert [one.problem for one in served] == [None] * len(firsts)
        assert [one.decoder for one in served] == ranks
        deadline = time.monotonic() + 60  # counted after a request is answered
        while sum(after := generated(engine)) < sum(before) + TOKENS * len(firsts) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [new - old for new, old in zip(after, before, strict=True)] == [
            TOKENS * ranks.count(rank) for rank in range(RANKS)
        ]
