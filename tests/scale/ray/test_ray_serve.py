"""Apps on a real Ray Serve: routed by Coterie, tried again, never hanging, with nothing left in the books."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from coterie.answers.load.client import Asking, LoadClient
from coterie.answers.load.workload import LoadRequest, Message
from coterie.net.http1 import Answer, Upstream, UpstreamLimits
from coterie.net.http_client import Client
from coterie.prompts import load_prompts
from ray_apps import Serving

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore")]

WAIT_S = 120.0
PROMPTS = [prompt.prompt for prompt in load_prompts() if len(prompt.prompt) < 300][:12]
TINY = "latency_aware"
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def asked(url: str, prompt: str, path: str = "/v1/completions", **more: Any) -> AsyncIterator[Answer]:
    upstream = Upstream(url, UpstreamLimits(head_s=WAIT_S, idle_s=WAIT_S))
    body = {"model": "coterie-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}
    try:
        yield await upstream.send(
            "POST",
            path,
            [(b"content-type", b"application/json"), (b"x-request-id", b"named")],
            json.dumps(body).encode(),
        )
    finally:
        await upstream.close()


async def ask(url: str, prompt: str, **more: Any) -> tuple[int, bytes]:
    async with asked(url, prompt, **more) as answer:
        return answer.status, await answer.read()


async def state(url: str) -> dict[str, Any]:
    async with Client(url) as client:
        status, text = await client.call("GET", "/coterie/routers")
    assert status == 200
    (ledger,) = json.loads(text).values()
    assert ledger["problem"] == ""
    return dict(ledger)


async def idle(url: str) -> dict[str, Any]:
    """Wait until no request is counted; return the router's state."""
    until = time.monotonic() + WAIT_S
    while (now := await state(url))["requests"] or now["unfinished"] or any(now["running"].values()):
        assert time.monotonic() < until, now
        await asyncio.sleep(0.1)
    return now


@pytest.fixture
def canned(serving: Serving) -> str:
    return f"{serving.url}/canned"


@pytest.fixture
def tiny(serving: Serving) -> str:
    return f"{serving.url}/{TINY}"


async def full(url: str) -> None:
    """Wait until all eight places are taken and others wait, of which Serve routes four at a time."""
    until = time.monotonic() + WAIT_S
    while (now := await state(url))["unfinished"] != 8 or now["requests"] < 9:
        assert time.monotonic() < until, now
        await asyncio.sleep(0.1)
    assert sum(now["running"].values()) == now["requests"] <= 12


class TestCanned:
    def test_prefilled_first_and_passed_on(self, canned: str, serving: Serving) -> None:
        for deployment in ("Prefill", "Decode"):
            serving.broadcast("canned", "take_seen", deployment)
        status, data = asyncio.run(ask(canned, "ok"))
        assert status == 200
        assert data.endswith(DONE)
        (seen,) = filter(None, serving.broadcast("canned", "take_seen"))
        assert seen == [("/v1/completions", "named", True)]
        ((prefill, *others),) = serving.broadcast("canned", "take_seen", "Prefill")
        assert prefill == ("/v1/completions", "named", False)
        assert others == []

    @pytest.mark.parametrize("failure", ["503", "500", "429"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_tried_again_on_another_replica_without_the_kv(
        self, canned: str, serving: Serving, failure: str, stream: bool
    ) -> None:
        serving.broadcast("canned", "take_seen")
        status, data = asyncio.run(ask(canned, f"{failure} ok", stream=stream))
        assert status == 200
        assert data.endswith(DONE)
        seen = [kv for replica in serving.broadcast("canned", "take_seen") for _, _, kv in replica]
        assert sorted(seen) == [False, True]
        assert "router_error" not in asyncio.run(idle(canned))["fallbacks"]

    @pytest.mark.parametrize("status", [503, 429])
    def test_the_last_refusal_is_passed_on(self, canned: str, status: int) -> None:
        assert asyncio.run(ask(canned, f"{status} {status}"))[0] == status
        asyncio.run(idle(canned))

    def test_a_replica_that_raises_every_time_gives_503(self, canned: str) -> None:
        status, data = asyncio.run(ask(canned, "raise raise", stream=True))
        assert status == 503
        assert json.loads(data)["error"]["code"] == "worker_failed"
        asyncio.run(idle(canned))

    def test_the_request_itself_is_at_fault(self, canned: str, serving: Serving) -> None:
        serving.broadcast("canned", "take_seen")
        assert asyncio.run(ask(canned, "400 ok"))[0] == 400
        assert asyncio.run(ask(canned, "ok", max_tokens=-1))[0] == 400  # before the prefill
        assert sum(map(len, serving.broadcast("canned", "take_seen"))) == 1
        assert asyncio.run(ask(canned, "ok", path="/v1/nothing"))[0] == 404

    def test_a_client_cannot_name_a_source_of_kv(self, canned: str, serving: Serving) -> None:
        serving.broadcast("canned", "take_seen")
        asyncio.run(ask(canned, "bare ok", kv_transfer_params={"remote_host": "evil"}))
        assert [seen for (seen,) in filter(None, serving.broadcast("canned", "take_seen"))] == [
            ("/v1/completions", "named", False)
        ]

    def test_cut_after_its_first_byte(self, canned: str) -> None:
        status, data = asyncio.run(ask(canned, "cut cut", stream=True))
        assert status == 200
        assert b'"worker_failed"' in data.split(b"\n\n")[1]
        asyncio.run(idle(canned))

    def test_more_requests_than_places_wait(self, canned: str, serving: Serving) -> None:
        """Of 20 requests 12 wait for a place: Serve asks the router again and again, and each is counted once."""

        async def run() -> list[int]:
            waiting = [asyncio.create_task(ask(canned, "wait ok", stream=True)) for _ in range(20)]
            await full(canned)
            await asyncio.to_thread(serving.broadcast, "canned", "open")
            return [status for status, _ in await asyncio.gather(*waiting)]

        assert asyncio.run(run()) == [200] * 20
        asyncio.run(idle(canned))

    def test_clients_that_leave(self, canned: str) -> None:
        async def run() -> None:
            async def leave() -> None:
                async with asked(canned, "endless ok", stream=True) as answer:
                    await anext(answer)

            await asyncio.gather(*(leave() for _ in range(4)))
            gone = [asyncio.create_task(ask(canned, "endless ok")) for _ in range(12)]  # four of them wait for a place
            await full(canned)
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            await idle(canned)
            assert (await ask(canned, "ok"))[0] == 200

        asyncio.run(run())

    def test_a_replica_dies_before_its_first_byte(self, canned: str) -> None:
        status, data = asyncio.run(ask(canned, "die ok", stream=True))
        assert status == 503 or data.endswith(DONE)  # 503 if the other replica died of it too
        until = time.monotonic() + WAIT_S
        while len(asyncio.run(idle(canned))["running"]) < 2:
            assert time.monotonic() < until
            time.sleep(0.5)
        assert asyncio.run(ask(canned, "ok"))[0] == 200


class TestRaising:
    def test_every_request_is_answered_and_counted(self, serving: Serving) -> None:
        url = f"{serving.url}/raising"

        async def run() -> None:
            answers = await asyncio.gather(*(ask(url, "ok", stream=number % 2 == 0) for number in range(24)))
            assert [status for status, _ in answers] == [200] * 24
            counted = (await idle(url))["fallbacks"]  # more than the requests: a full replica sends some back
            assert counted.keys() == {"router_error"}
            assert counted["router_error"] >= 24  # so every footprint reached the router

        asyncio.run(run())


class TestSeveral:
    def test_calls_that_share_the_id_of_a_request(self, serving: Serving) -> None:
        """Serve 2.60 itself hands no replica to all but one of them, whatever the request router."""

        async def run() -> None:
            async with Client(f"{serving.url}/several") as client:
                for calls in (1, 2, 5, 20):
                    status, text = await client.call("GET", f"/?calls={calls}")
                    assert (status, text) == (200, str(3 * calls))

        asyncio.run(run())


def chat(number: int, prompt: str, tokens: int = 16) -> LoadRequest:
    return LoadRequest(number, number, "", (Message("user", prompt),), tokens)


class TestTiny:
    def test_same_tokens_as_direct(self, tiny: str, serving: Serving) -> None:
        async def texts(url: str, stream: bool) -> list[str]:
            asking = Asking("coterie-tiny", stream=stream, keep_text=True)
            async with LoadClient(url) as client:
                outcomes = await asyncio.gather(
                    *(client.ask(chat(number, prompt), asking) for number, prompt in enumerate(PROMPTS))
                )
            assert [outcome.problem for outcome in outcomes if outcome.failure] == []
            return [outcome.text for outcome in outcomes]

        direct = asyncio.run(texts(serving.broadcast(TINY, "describe")[0]["url"], False))
        assert len(set(direct)) > 1
        assert asyncio.run(texts(tiny, False)) == direct
        assert asyncio.run(texts(tiny, True)) == direct
        assert asyncio.run(idle(tiny))["fallbacks"] == {}

    def test_a_killed_replica_under_load(self, tiny: str, serving: Serving) -> None:
        """SIGKILL of a decode replica and of its worker: every request is answered, or cut with an error event."""
        replicas = serving.broadcast(TINY, "describe")
        by_id = {one["replica"]: one for one in replicas}

        async def run() -> None:
            whole, streamed = (Asking("coterie-tiny", stream=stream, keep_text=True) for stream in (False, True))
            async with LoadClient(tiny) as client:
                expected = [(await client.ask(chat(0, prompt, 64), whole)).text for prompt in PROMPTS]
                tasks = [
                    asyncio.create_task(client.ask(chat(n, PROMPTS[n % 12], 64), streamed if n % 2 else whole))
                    for n in range(36)
                ]
                until = time.monotonic() + WAIT_S
                while not max((running := (await state(tiny))["running"]).values()) >= 4:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.02)
                victim = by_id[max(running, key=lambda replica: running[replica])]
                for pid in victim["pids"]:
                    os.kill(pid, signal.SIGKILL)
                outcomes = await asyncio.gather(*tasks)
            for number, outcome in enumerate(outcomes):
                if outcome.failure is None:
                    assert outcome.text == expected[number % 12]
                else:
                    assert (number % 2, outcome.failure) == (1, "cut"), outcome
                    assert expected[number % 12].startswith(outcome.text)
            assert sum(outcome.failure is None for outcome in outcomes) >= 18
            after = await idle(tiny)
            assert after["fallbacks"] == {}

        asyncio.run(run())
        until = time.monotonic() + WAIT_S
        while len(asyncio.run(state(tiny))["running"]) < 3:  # Serve starts another
            assert time.monotonic() < until
            time.sleep(0.5)


@pytest.mark.long
def test_fewer_experts_than_power_of_two_choices(serving: Serving) -> None:
    import compare  # type: ignore[import-not-found]

    serving.start("power_of_two", TINY)
    compare.URL = serving.url
    result = compare.compare(0, requests=66)
    assert result.differing() == 0
    first, ours = result.runs
    assert ours.requests == first.requests
    assert result.like_with_like(ours, np.random.default_rng(0))[0] > 0
