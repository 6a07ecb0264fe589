"""Dynamo's stock frontend, one prefill and three decode workers around the embedded workers, routed by Coterie."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coterie.net.http_client import Client
from coterie.prompts import load_prompts

pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs ai-dynamo-runtime"),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "dynamo" / "fleet.py"
MODEL = "coterie-tiny"
WAIT_S = 120.0
PROMPTS = [prompt.prompt for prompt in load_prompts()[:12]]
LONG = {"prompt": "def add(a, b):\n    return", "max_tokens": 400}
"""Request whose greedy answer goes on for 400 tokens, seconds here."""


class Server(Protocol):
    url: str
    pid: int

    def kill(self) -> int: ...


class Fleet(Protocol):
    url: str
    component: Server
    decoders: list[Server]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    run_fleet: Callable[[], AbstractContextManager[Fleet]] = runpy.run_path(str(EXAMPLE))["run_fleet"]
    with run_fleet() as running:
        yield running


async def complete(client: Client, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 16, "temperature": 0, **more}
    async with asyncio.timeout(WAIT_S):
        answer = await client.post("/v1/completions", body)
    return {"text": None, "problem": answer.problem} if answer.body is None else dict(answer.body["choices"][0])


async def values(fleet: Fleet, name: str) -> dict[tuple[str, ...], float]:
    """Return label values → value of one of the component's metrics."""
    async with Client(fleet.component.url) as client:
        _, text = await client.call("GET", "/metrics")
    families = list(text_string_to_metric_families(text))
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"coterie_gateway_{name}"
    }


async def until_idle(fleet: Fleet) -> None:
    """Wait until the component counts no request, at any worker."""
    async with asyncio.timeout(WAIT_S):
        while (await values(fleet, "in_flight"))[()] or any((await values(fleet, "worker_running")).values()):
            await asyncio.sleep(0.05)


async def counted(server: Server, name: str, label: str = "") -> float:
    """Return the sum of a worker's metric, over the series that have this label."""
    async with Client(server.url) as client:
        _, text = await client.call("GET", "/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(one.value for one in samples if one.name == name and (not label or label in one.labels.values()))


async def busiest(fleet: Fleet) -> Server | None:
    """Return the decode worker with the most requests, once all requests are being decoded; None before."""
    running = {worker.url: await counted(worker, "coterie_worker_running") for worker in fleet.decoders}
    chosen = max(fleet.decoders, key=lambda worker: running[worker.url])
    return chosen if sum(running.values()) == 6 else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_component_can_be_ended_while_it_waits_for_a_worker(tmp_path: Path, number: signal.Signals) -> None:
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    env = {**os.environ, **planes, "DYN_FILE_KV": str(tmp_path), "DYN_TCP_RPC_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "coterie.stacks.dynamo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as component:
        assert component.stderr is not None
        assert any("waiting for a decode worker" in line for line in component.stderr)
        component.send_signal(number)
        component.communicate(timeout=WAIT_S)
    assert component.returncode == 0


def test_answers_equal_those_of_a_decode_worker_asked_directly(fleet: Fleet) -> None:
    async def run() -> None:
        async with Client(fleet.url) as front, Client(fleet.decoders[0].url) as direct:
            routed = await asyncio.gather(*(complete(front, prompt=prompt) for prompt in PROMPTS))
            expected = [await complete(direct, prompt=prompt) for prompt in PROMPTS]
            assert [one["text"] for one in routed] == [one["text"] for one in expected]
        await until_idle(fleet)
        sources = await values(fleet, "footprints_total")
        assert sources["answer",] == len(PROMPTS), "each request is routed by its prefill's footprint"
        assert sum([await counted(worker, "coterie_worker_kv_fetch_total", "ok") for worker in fleet.decoders]) >= 1
        assert len([count for count in (await values(fleet, "routed_total")).values() if count]) > 1

    asyncio.run(run())


def test_cached_prefixes_are_known_by_dynamos_kv_events(fleet: Fleet) -> None:
    async def run() -> None:
        prompt = " ".join(f"{number} apples and pears," for number in range(40))
        async with Client(fleet.url) as front:
            before = (await values(fleet, "cached_tokens_total"))["decode", "expected"]
            texts = set()
            async with asyncio.timeout(WAIT_S):  # events take a moment to arrive
                while (await values(fleet, "cached_tokens_total"))["decode", "expected"] <= before:
                    texts.add((await complete(front, prompt=prompt))["text"])
        assert len(texts) == 1
        assert None not in texts, "cached or computed, the answer is the same"

    asyncio.run(run())


def test_a_request_that_a_worker_refuses_is_the_clients_fault(fleet: Fleet) -> None:
    async def run() -> None:
        async with Client(fleet.url) as front:
            status, _ = await front.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 5000})
        assert status == 400
        await until_idle(fleet)

    asyncio.run(run())


def test_a_client_that_leaves_takes_its_load_with_it(fleet: Fleet) -> None:
    async def run() -> None:
        async with Client(fleet.url) as front:
            asked = asyncio.create_task(complete(front, **LONG))
            async with asyncio.timeout(WAIT_S):
                while not any((await values(fleet, "worker_running")).values()):
                    await asyncio.sleep(0.02)
            before = await values(fleet, "requests_total")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until_idle(fleet)
        after = await values(fleet, "requests_total")
        assert {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key)} == {
            ("cancelled", "other"): 1
        }

    asyncio.run(run())


def test_a_killed_worker_leaves_no_hung_request_and_no_entry(fleet: Fleet) -> None:
    """Last in this file: one worker is gone after it."""

    async def run() -> None:
        async with Client(fleet.url) as front:
            expected = await complete(front, **LONG)
            asked = [asyncio.create_task(complete(front, **LONG)) for _ in range(6)]
            before = set(await values(fleet, "worker_running"))
            async with asyncio.timeout(WAIT_S):
                while (victim := await busiest(fleet)) is None:
                    await asyncio.sleep(0.02)
            os.kill(victim.pid, signal.SIGKILL)
            texts = [one["text"] for one in await asyncio.gather(*asked)]
            assert texts == [expected["text"]] * 6, "the frontend prefills broken answers again, and they go on"
            after = [await complete(front, prompt=prompt) for prompt in PROMPTS]
            assert [one.get("problem") for one in after] == [None] * len(PROMPTS)
        await until_idle(fleet)
        assert len(await values(fleet, "worker_running")) == len(before) - 1

    asyncio.run(run())
