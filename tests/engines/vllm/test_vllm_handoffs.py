"""One prefill and two decode workers of real vLLM, and what happens when parts fail."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from coterie.engines.vllm.settings import ConnectorSettings
from coterie.errors import ConfigError
from coterie.prompts import load_prompts, take_in_turn
from coterie.routing import RoundRobin
from coterie.routing.fleet import Fleet as Workers
from routed_fleet import FleetCounts, RoutedFleet, Served
from vllm_checks import Listener, Truth, dense_model, event_of, sequence
from vllm_servers import MODEL, TRIO, Fleet, Server, needs_vllm, start_trio

pytestmark = [pytest.mark.vllm, needs_vllm]

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def trio(fleet: Fleet) -> Iterator[list[Server]]:
    """Those of test_vllm_gateway, which comes before: a test here kills one."""
    yield start_trio(fleet)
    fleet.stop(*TRIO)


def body(prompt: str | list[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return {**asked, **more}


def through_proxy(
    trio: list[Server], bodies: list[dict[str, Any]], in_flight: int, kill_after: int | None = None
) -> tuple[list[Served], FleetCounts]:
    """Serve all, so many at a time; the prefill worker may be killed after so many, while it has all the others.

    It is stopped before it gets the others: however fast the machine, it answers none of them.
    """

    async def run() -> tuple[list[Served], FleetCounts]:
        gate, (first, *others) = asyncio.Semaphore(in_flight), [server.url for server in trio]
        async with RoutedFleet([first], others, RoundRobin(), Workers([16, 16])) as proxy:

            async def one(number: int) -> Served:
                async with gate:
                    return await proxy.serve(PATH, bodies[number], name=f"r{number}r")

            if kill_after is None:
                return list(await asyncio.gather(*map(one, range(len(bodies))))), proxy.counts
            served = list(await asyncio.gather(*map(one, range(kill_after))))
            os.killpg(trio[0].process.pid, signal.SIGSTOP)
            late = [asyncio.create_task(one(number)) for number in range(kill_after, len(bodies))]
            await asyncio.sleep(0.5)  # until most are sent; one that is not fails just so
            trio[0].process.kill()
            return served + list(await asyncio.gather(*late)), proxy.counts

    return asyncio.run(run())


def received(trio: list[Server]) -> float:
    """Tokens whose KV the decode workers took from the prefill worker, until now."""
    return sum(server.metrics()["vllm:external_prefix_cache_hits_total"] for server in trio[1:])


def test_the_proxy_gives_the_same_tokens_and_every_handoff_a_footprint(
    fleet: Fleet, trio: list[Server], truth: Truth
) -> None:
    """60 prompts; those of one step (max_tokens=1 is what a prefill worker always gets) included."""
    (plain,) = fleet.start({"plain": {}})
    prompts = [prompt.prompt for prompt in take_in_turn(load_prompts(), 60)]
    listener, moved = Listener(trio[1].events), received(trio)
    served, counts = through_proxy(trio, [body(prompt) for prompt in prompts], in_flight=6)
    reference = plain.complete_all(prompts, 6, max_tokens=16)
    assert (counts.served, counts.handoffs, counts.footprints) == (60, 60, 60)
    assert (counts.damaged, counts.incomplete, counts.prefill_failures, counts.decode_failures) == (0, 0, 0, 0)
    assert {one.decoder for one in served} == {0, 1}
    for one, single in zip(served, reference, strict=True):
        assert one.problem is None
        assert one.tokens == single["choices"][0]["token_ids"]
        prompt = single["choices"][0]["prompt_token_ids"]
        assert one.footprint is not None
        assert (one.footprint.tokens, one.footprint.missing) == (len(prompt), 0)
        np.testing.assert_array_equal(one.footprint.counts, truth.footprint(prompt))
    assert received(trio) > moved, "no KV was handed over"
    # What a decoder did not compute it does not claim to know; what it did is right.
    found, foreign = listener.wait(sum(one.decoder == 0 for one in served)), 0
    for number, one in enumerate(served):
        if one.decoder == 0:
            event, tokens = event_of(found, one.name), sequence(reference[number])[:-1]
            known = event.seen()
            foreign += int((~known).sum())
            ours = truth.experts(tokens)[0]
            np.testing.assert_array_equal(np.sort(event.ids()[known], -1), np.sort(ours[known], -1))
            assert known[event.prompt_tokens :].all()
    assert foreign > 0


def test_a_prefill_worker_killed_in_the_middle(trio: list[Server]) -> None:
    """Requests whose prefill dies are decoded from scratch; the counter says how many.

    Prompts shorter than a block: of those ExampleConnector stores nothing. It takes a file that the killed worker left
    half written for whole KV, and the decoder would die of it.
    """
    prompts = [list(range(start, start + 30)) for start in range(100, 300)]

    bodies = [body(prompt, max_tokens=2) for prompt in prompts]
    served, counts = through_proxy(trio, bodies, in_flight=len(bodies), kill_after=20)
    assert (counts.handoffs, counts.prefill_failures) == (20, len(prompts) - 20)
    assert (counts.served, counts.decode_failures) == (len(prompts), 0)
    assert [len(one.tokens) for one in served] == [2] * len(prompts)
    for server in trio[1:]:
        assert server.counter("errors") == 0


@pytest.mark.long
def test_unknown_version_and_unknown_model(fleet: Fleet, tmp_path: Path) -> None:
    """Both serve as if the plugin were absent, and say so; the API answers without a footprint."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('vllm._version')\n"
        "module.__version__ = module.version = '0.99.0'\n"
        "module.__version_tuple__ = module.version_tuple = (0, 99, 0)\n"
        "module.commit_id = module.__commit_id__ = None\n"
        "sys.modules['vllm._version'] = module\n"
    )
    dense = dense_model(tmp_path / "dense")
    settings = {"footprint": "always", "load_interval_s": 0.2}
    future, plain = fleet.start(
        {
            "future": {"settings": settings, "env": {"PYTHONPATH": str(patch)}},
            "dense": {"settings": settings, "model": dense},
        }
    )
    for server, words in (
        (future, "vLLM 0.99.0 is not known to this version of Coterie"),
        (plain, "experts are not captured"),
    ):
        answers = server.complete_all(["Hello", "How many ducks"], 2, max_tokens=4)
        assert all(len(answer["choices"][0]["token_ids"]) >= 1 for answer in answers)
        assert not any(answer["kv_transfer_params"] for answer in answers)
        assert words in server.log.read_text()
    deadline = time.monotonic() + 120
    while "coterie_capture_on" not in plain.metrics() and time.monotonic() < deadline:
        plain.complete("again", max_tokens=2)
    assert plain.metrics()["coterie_capture_on"] == 0
    assert plain.counter("footprints_missing") >= 1
    fleet.stop("future", "dense")


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="footprints"):
        ConnectorSettings.parse({"footprints": "always"})
    with pytest.raises(ConfigError, match="load_interval_s"):
        ConnectorSettings.parse({"load_interval_s": 0})
    assert ConnectorSettings.parse({"events": "tcp://*:5602"}).endpoint(3) == "tcp://*:5605"
    assert ConnectorSettings(store="x").store_path("engine", 2).name == "coterie-x-2.slots"
