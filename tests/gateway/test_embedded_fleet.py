"""Real reference workers behind the gateway: the tokens, the cached prefixes, and the KV that waits to be fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from coterie.gateway.embedded import EmbeddedFleet, run_embedded
from gateway_runs import Client, Run, gateway, run, settled
from http1_peers import until

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
CHAT = [{"role": "user", "content": "How many ducks are there on the pond?"}]


@pytest.fixture(scope="module")
def fleet() -> Iterator[EmbeddedFleet]:
    with run_embedded(decoders=1) as found:
        yield found


@asynccontextmanager
async def fronted(fleet: EmbeddedFleet) -> AsyncIterator[Run]:
    """A gateway whose workers are well and whose event streams are connected."""
    async with gateway(fleet.config(), access=fleet.access) as found:
        parts = found.running.parts
        await until(lambda: found.open("prefill") and found.open("decode"))
        await until(lambda: all(parts.knowledge.streams[name].connected(id) for name, id in parts._checks))
        yield found


@asynccontextmanager
async def alone(fleet: EmbeddedFleet, number: int) -> AsyncIterator[Client]:
    client = Client(fleet.workers[number].url)
    try:
        yield client
    finally:
        await client.upstream.close()


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [msgspec.json.decode(line) for line in lines]


def texts(body: bytes, stream: bool) -> str:
    chunks = events_of(body) if stream else [msgspec.json.decode(body)]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    parts = [one["text"] if "text" in one else (one.get("message") or one["delta"]).get("content") for one in choices]
    return "".join(part or "" for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_are_those_of_a_worker_alone(fleet: EmbeddedFleet, stream: bool) -> None:
    async def test() -> None:
        async with fronted(fleet) as found, alone(fleet, 1) as worker:
            more = {"max_tokens": 8, "temperature": 0, "stream": stream}
            for path, body in (
                ("/v1/completions", {"prompt": PROMPT, **more}),
                ("/v1/completions", {"prompt": "2 + 2 =", **more}),
                ("/v1/completions", {"prompt": [1, 5, 7, 9, 200], **more}),
                ("/v1/chat/completions", {"messages": CHAT, **more}),
            ):
                through = await found.client.ask("POST", path, body)
                directly = await worker.ask("POST", path, body)
                assert through.status == directly.status == 200
                assert texts(through.body, stream) == texts(directly.body, stream) != ""
            assert found.metrics['coterie_gateway_handoffs_total{outcome="ok"}'] == 4
            await settled(found)

    run(test)


def test_prefix_hits_are_those_that_the_directory_predicted(fleet: EmbeddedFleet) -> None:
    async def test() -> None:
        async with fronted(fleet) as found:
            parts = found.running.parts

            async def ask(prompt: str) -> tuple[int, int, int]:
                """Cached tokens: as each pool's decision expected them, and as the worker that decoded had them."""
                body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": "prefix test"}
                got = await found.client.ask("POST", "/v1/completions", body)
                decode, prefill = (await found.client.ask("GET", "/decisions?last=2")).json["decisions"]
                assert (decode["pool"], prefill["pool"]) == ("decode", "prefill")
                told = got.json["usage"]["prompt_tokens_details"]["cached_tokens"]
                return prefill["cached_tokens"], decode["cached_tokens"], told

            assert await ask(PROMPT) == (0, 0, 0), "the salt is new"
            ids = (await parts.knowledge.tokens.ids("/v1/completions", {"prompt": PROMPT})).ids
            assert ids is not None
            blocks = (len(ids) - 1) // 16 * 16
            for pool in ("prefill", "decode"):
                await until(lambda: parts.knowledge.streams[pool].cached(ids, 1, "prefix test")[0] == blocks)  # noqa: B023
            assert await ask(PROMPT) == (blocks, blocks, blocks)
            expected = await ask(PROMPT[: len(PROMPT) // 2] + " and something else follows here")
            assert 0 < expected[0] == expected[1] == expected[2] < blocks

    run(test)


def test_the_workers_own_metrics_are_read_with_their_key(fleet: EmbeddedFleet) -> None:
    async def test() -> None:
        async with fronted(fleet) as found:
            members = [member for pool in found.running.parts.pools.values() for member in pool.members.values()]
            await until(lambda: all(member.report is not None for member in members))
            assert [member.report_error for member in members] == [""] * len(members)
            assert not any(pool.keeper.fleet.in_flight.any() for pool in found.running.parts.pools.values())

    run(test)


def test_no_kv_stays_staged_when_clients_leave(fleet: EmbeddedFleet) -> None:
    async def staged(client: Client) -> dict[str, float]:
        got = await client.ask("GET", "/metrics", key=fleet.access.key)
        lines = [
            line.rpartition(" ") for line in got.body.decode().splitlines() if line.startswith("coterie_worker_kv_s")
        ]
        return {name.partition("{")[0]: float(value) for name, _, value in lines}

    async def test() -> None:
        async with fronted(fleet) as found, alone(fleet, 0) as prefill:
            before = (await staged(prefill))["coterie_worker_kv_staged_total"]
            body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 200, "stream": True})
            asking = [
                asyncio.create_task(found.client.upstream.send("POST", "/v1/completions", [], body)) for _ in range(12)
            ]
            decode = found.running.parts.pools["decode"].keeper
            await until(lambda: len(decode.requests) >= 3)  # some have a handoff behind them, some are being prefilled
            for number, one in enumerate(asking):
                if number % 3 == 0:
                    (await one).close()  # after its first byte
                else:
                    one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            for one in asking:
                if not one.cancelled():
                    one.result().close()
            await settled(found)
            while (now := await staged(prefill))["coterie_worker_kv_staged"]:
                await asyncio.sleep(0.01)
            assert now["coterie_worker_kv_staged_total"] > before
            assert (await found.client.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})).status == 200

    run(test)
