"""Attacks on the handoff of KV: poisoned caches, requests to foreign hosts, names that killed the fleet, ghosts."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from canned_pairs import params_of, vllm_pair
from canned_workers import Canned, answer, canned_workers, completion, resets, says
from coterie.gateway.config import WorkerEntry
from coterie.gateway.exchange.call import OWNED
from coterie.gateway.fleet.health import HealthSettings
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import FAST, config_of, gateway, idle, run, settled

EVIL: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "remote_request_id": "another's",
    "remote_block_ids": [1, 2, 3],
    "remote_engine_id": "x",
}


def smuggled() -> list[bytes]:
    """Bodies in which a client names KV, in every spelling that a worker could read as the same."""
    params = msgspec.json.encode(EVIL)
    return [
        b'{"prompt":"x","kv_transfer_params":%b}' % params,
        b'{"kv_transfer_params":null,"prompt":"x","kv_transfer_params":%b}' % params,
        b'{"kv_transfer_params":%b,"prompt":"x","kv_transfer_params":null}' % params,
        b'{"prompt":"x","kv\\u005ftransfer_params":%b}' % params,
        b'{"prompt":"x","\\u006b\\u0076_transfer_params":%b}' % params,
        b'{"prompt":"x","kv_transfer_params":%b,"request_id":"another","rid":["a"],"data_parallel_rank":9}' % params,
        b'{"prompt":"x","vllm_xargs":{"kv_transfer_params":%b,"mine":1}}' % params,
        b'{"prompt":"x","vllm_xargs":{"kv\\u005ftransfer_params":%b}}' % params,
        b'{"vllm_xargs":{"kv_transfer_params":%b},"prompt":"x","vllm_xargs":{}}' % params,
        b'{"vllm_xargs":{},"prompt":"x","vllm_xargs":{"ec_transfer_params":%b,"kv_cache_report_mode":"x"}}' % params,
        b'{"prompt":"x","ec_transfer_params":%b,"kv_transfer_params":null,"vllm_xargs":{"request_id":"y"}}' % params,
    ]


def clean(worker: Canned) -> None:
    """No trace of the client's parameters in anything that a worker got."""
    for asked in worker.completions:
        assert b"169.254" not in asked.raw
        assert not (OWNED - {"kv_transfer_params"}) & set(asked.body)
        given = asked.body.get("kv_transfer_params")
        assert given is None or given.get("remote_host") is None
        assert set(asked.body.get("vllm_xargs") or {}) <= {"mine"}


@pytest.mark.parametrize(
    "prefill", [None, resets, says(500), says(200, b"{}"), says(200, b'{"kv_transfer_params":{}}')]
)
def test_poisoned_kv(prefill: Any) -> None:
    """Parameters of a client reached the decode worker where the prefill was down, or on a retry."""

    async def test() -> None:
        async with vllm_pair("d", "e", prefill=prefill) as (found, workers):
            for down in (answer, resets):
                workers["d"].act = down
                for body in smuggled():
                    assert (await found.client.ask("POST", "/v1/completions", body)).status == 200
            for worker in workers.values():
                clean(worker)
            await settled(found)

    run(test)


def test_poisoned_kv_of_single_workers() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
                for body in smuggled():
                    assert (await found.client.ask("POST", path, body)).status == 200
            clean(worker)
            assert all("kv_transfer_params" not in one.body for one in worker.completions)

    run(test)


def test_no_client_makes_the_gateway_connect_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """SSRF: neither bodies, nor headers, nor targets, nor what a worker answers choose a host."""
    asked: list[Any] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def watched(factory: Any, host: str, port: int, **more: Any) -> Any:
            asked.append((host, port))
            return await connect(factory, host, port, **more)

        monkeypatch.setattr(loop, "create_connection", watched)

        async def redirects(_: Canned, __: HttpRequest, responder: Responder) -> None:
            responder.send(307, headers=[(b"location", b"http://169.254.169.254/")])

        async with vllm_pair("d") as (found, workers):
            ports = {int(one.url.rpartition(":")[2]) for one in workers.values()} | {found.port}
            headers = [(b"x-forwarded-host", b"evil"), (b"forwarded", b"host=evil"), (b"proxy", b"http://evil")]
            for body in smuggled():
                await found.client.ask("POST", "/v1/completions", body, headers)
            await found.client.ask("POST", "/v1/completions", {"prompt": "x", "model": "http://evil/"}, headers)
            workers["d"].act = redirects
            await found.client.complete()
            workers["p"].act = redirects
            await found.client.complete()
            await settled(found)
            assert {host for host, _ in asked} == {"127.0.0.1"}
            assert {port for _, port in asked} <= ports

    run(test)


BAD_HOSTS = [
    "http://" + "a" * 64 + ".example",
    "http://" + ".".join(["a" * 60] * 5),
    "http://a..b",
    "http://.",
    "http://xn--" + "a" * 70,
    "http://256.256.256.256",
    "http://[fe80::1]:1",
    "http://no-such-host.invalid:1",
    "http://0",
    "https://127.0.0.1:1",
]


@pytest.mark.parametrize("url", BAD_HOSTS)
def test_a_bad_host_name_costs_one_worker(url: str) -> None:
    """One body with a host name that cannot be encoded took the whole fleet down for ever."""

    async def test() -> None:
        health = HealthSettings(backoff_s=0.0, every_s=0.02, timeout_s=60.0, retries=1)
        async with canned_workers("a") as (worker,), gateway(config_of([worker], health=health)) as found:
            parts = found.running.parts
            try:
                entry = WorkerEntry(id="bad", url=url)
            except ValueError:
                return  # refused before it joins
            parts.add_worker(entry)
            for _ in range(6):
                assert (await found.client.complete()).status == 200
            while parts.pools["decode"].members["bad"].health.checks < 2 or found.open("decode") != {"a"}:
                await asyncio.sleep(0.001)
            assert {name for name, task in parts._checks.items() if not task.done()} == {
                ("decode", "a"),
                ("decode", "bad"),
            }, "both are asked on"
            idle(found)

    run(test)


def test_names_of_others_are_not_looked_up_in_bodies() -> None:
    async def test() -> None:
        async with vllm_pair("d") as (found, workers):
            body = {"prompt": "x", "kv_transfer_params": {**EVIL, "remote_host": "a" * 300}}
            for _ in range(3):
                assert (await found.client.ask("POST", "/v1/completions", body)).status == 200
            assert found.open("decode") == {"d"}
            assert found.open("prefill") == {"p"}
            clean(workers["d"])
            await settled(found)

    run(test)


GHOSTS: list[bytes] = [
    b'{"usage":{"prompt_tokens":1%b}}' % (b"0" * 30),
    b'{"usage":{"prompt_tokens":-1}}',
    b'{"usage":{"prompt_tokens":1e30}}',
    b'{"usage":null}',
    b'{"usage":[]}',
    b'{"usage":{"prompt_tokens":2147483648}}',
]


@pytest.mark.parametrize("ghost", GHOSTS)
def test_ghost_requests(ghost: bytes) -> None:
    """A worker that lies about tokens left a request in the fleet that never ended: its load was counted for ever."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        fields = msgspec.json.encode(completion(worker, kv_transfer_params=params_of(request)))
        responder.send(200, fields[:-1] + b"," + ghost[1:])

    async def test() -> None:
        async with vllm_pair("d", "e", prefill=act, health=FAST) as (found, workers):
            for _ in range(6):
                assert (await found.client.complete()).status == 200
            await settled(found)
            assert {len(workers[name].completions) for name in "de"} == {3}

    run(test)


def test_prompts_that_claim_to_be_endless() -> None:
    """Sizes in a client's body are the worker's to judge; here they must not count in the fleet."""

    async def test() -> None:
        async with canned_workers("a", "b") as workers, gateway(config_of(workers)) as found:
            for value in (b"1" + b"0" * 30, b"-1", b"1e308", b"null", b"[]"):
                for field in (b"max_tokens", b"n", b"prompt", b"seed", b"messages"):
                    body = b'{"%b":%b}' % (field, value)
                    for path in ("/v1/completions", "/v1/chat/completions"):
                        assert (await found.client.ask("POST", path, body)).status == 200
            idle(found)

    run(test)


def test_a_port_that_is_taken_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers at a worker's address is not a worker: bytes that are no HTTP cost one try."""
    del monkeypatch

    async def test() -> None:
        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            await writer.drain()
            writer.close()

        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(talk, sock=listener)
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            entry = WorkerEntry(id="mail", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
            found.running.parts.add_worker(entry)
            found.running.parts.pools["decode"].members["mail"].health.healthy = True
            found.running.parts.pools["decode"].keeper.set_open("mail", True)
            for _ in range(4):
                assert (await found.client.complete()).json["choices"][0]["text"] == "from a"
            idle(found)
        server.close()

    run(test)
