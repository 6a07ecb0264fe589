"""SGLang's pair through the gateway: both at once, in one room; another pair if the prefill fails in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_workers import Act, Canned, canned_workers, cuts, events, held, opens, resets, says, stalls
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from gateway_runs import FAST, Run, gateway, run, settled
from http1_peers import until
from routing_cases import EXPERTS, LAYERS, fitted


@asynccontextmanager
async def sglang_pair(
    *names: str, more: dict[str, Any] | None = None, **acts: Act
) -> AsyncIterator[tuple[Run, dict[str, Canned]]]:
    """Workers whose names begin with p prefill; the others decode."""
    async with canned_workers(*names, **acts) as workers:
        entries = [
            WorkerEntry(
                id=one.name,
                url=one.url,
                role="prefill" if one.name[0] == "p" else "decode",
                bootstrap_port=8998 if one.name[0] == "p" else None,
            )
            for one in workers
        ]
        config = GatewayConfig(listen="127.0.0.1:0", handshake="sglang", workers=entries, health=FAST, **(more or {}))
        async with gateway(config) as found:
            await until(lambda: len(found.open("prefill")) + len(found.open("decode")) == len(names))
            yield found, {worker.name: worker for worker in workers}


def test_both_get_the_same_room() -> None:
    async def test() -> None:
        async with sglang_pair("p", "d") as (found, workers):
            rooms = []
            for stream in (True, False):
                body = {"prompt": "x", "stream": stream, "bootstrap_room": 1, "bootstrap_host": "evil", "rid": "r"}
                got = await found.client.ask("POST", "/v1/completions", body, [(b"x-request-id", b"mine")])
                assert got.status == 200
                prefill, decode = (workers[name].completions[-1] for name in "pd")
                assert prefill.body == decode.body
                assert prefill.headers[b"x-request-id"] == decode.headers[b"x-request-id"] == b"mine"
                assert (prefill.body["bootstrap_host"], prefill.body["bootstrap_port"]) == ("127.0.0.1", 8998)
                assert "rid" not in prefill.body
                rooms.append(prefill.body["bootstrap_room"])
                if stream:
                    assert got.body == b"".join(events(workers["d"]))
            assert len(set(rooms)) == 2
            assert all(0 <= room < 1 << 63 for room in rooms)
            await settled(found)

    run(test)


def test_decode_is_chosen_by_a_predicted_footprint(tmp_path: Path) -> None:
    async def test() -> None:
        fitted().save(tmp_path / "fit.safetensors")
        spec = RouterSpec("locality_band", fit=str(tmp_path / "fit.safetensors"), model="gpt-oss-20b")
        async with sglang_pair("p", "d0", "d1", more={"decode": spec}) as (found, _):
            assert found.running.parts.knowledge.footprints.shape == (LAYERS, EXPERTS)
            assert (await found.client.ask("POST", "/v1/completions", {"prompt": "x"})).status == 200
            (decision,) = (await found.client.ask("GET", "/decisions?pool=decode")).json["decisions"]
            assert decision["footprint"] == "popularity", "nothing better is known yet"
            await settled(found)

    run(test)


@pytest.mark.parametrize("fails", [resets, says(500), says(503), says(429)])
def test_another_pair_if_the_prefill_fails_before_the_first_byte(fails: Any) -> None:
    """The decode worker would wait for KV that never comes."""

    async def test() -> None:
        async with sglang_pair("p0", "p1", "d", p0=fails, d=held) as (found, workers):
            workers["p1"].got.clear()
            asking = asyncio.create_task(found.client.complete(stream=True))
            await until(lambda: workers["p1"].completions)
            workers["d"].go.set()
            assert (await asking).body == b"".join(events(workers["d"]))
            assert workers["p1"].completions[0].body == workers["d"].completions[-1].body
            if workers["p0"].completions:
                rooms = {one.body["bootstrap_room"] for one in workers["d"].completions}
                assert len(rooms) == 2, "a room is used once"
            await settled(found)

    for _ in range(2):  # either may be chosen first
        run(test)


def test_what_the_prefill_refuses_is_refused() -> None:
    async def test() -> None:
        refusal = b'{"error": {"message": "too long"}}'
        async with sglang_pair("p", "d", p=says(400, refusal), d=held) as (found, workers):
            got = await found.client.ask("POST", "/v1/completions", {"prompt": "x"}, [(b"x-request-id", b"mine")])
            assert (got.status, got.body, got.headers[b"x-request-id"]) == (400, refusal, b"mine")
            await workers["d"].left.wait()
            assert not [name for name in found.metrics if "worker_failures_total{" in name]
            await settled(found)

    run(test)


@pytest.mark.parametrize("fails", [resets, says(500), says(429)])
def test_another_decode_worker_if_one_fails_before_the_first_byte(fails: Any) -> None:
    async def test() -> None:
        async with sglang_pair("p", "d0", "d1", d0=fails) as (found, workers):
            for _ in range(3):
                got = await found.client.complete(stream=True)
                assert got.body == b"".join(events(workers["d1"]))
            await settled(found)

    run(test)


def test_the_last_answer_is_passed_on() -> None:
    async def test() -> None:
        async with sglang_pair("p", "d", d=says(429, b"{}", [(b"retry-after", b"7")])) as (found, _):
            got = await found.client.complete()
            assert (got.status, got.headers[b"retry-after"]) == (429, b"7")
        async with sglang_pair("p", "d", d=resets) as (found, _):
            got = await found.client.complete()
            assert (got.status, got.json["error"]["code"]) == (502, "worker_failed")
            await settled(found)
        async with sglang_pair("p", "d", d=cuts) as (found, _):
            got = await found.client.complete(stream=True)
            assert got.status == 200
            assert b"worker_failed" in got.body
            assert b"[DONE]" not in got.body
            await settled(found)

    run(test)


def test_a_client_that_leaves_is_heard_of_by_both() -> None:
    async def test() -> None:
        async with sglang_pair("p", "d", p=stalls, d=opens) as (found, workers):
            body = msgspec.json.encode({"prompt": "x", "stream": True})
            got = await found.client.upstream.send("POST", "/v1/completions", [], body)
            await anext(got)
            got.close()
            await asyncio.gather(workers["p"].left.wait(), workers["d"].left.wait())
            await settled(found)

    run(test)
