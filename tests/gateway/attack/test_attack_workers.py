"""Workers that are hostile or broken: endless events, answers without an end, headers and health that lie."""

from __future__ import annotations

import asyncio

import pytest

from canned_workers import Canned, canned_workers, says
from coterie.gateway.config import LimitSettings, WorkerEntry
from coterie.gateway.fleet.health import HealthSettings
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import config_of, gateway, idle, run, settled
from http1_peers import Raw, Spoken, scripted, until

PIECE = b"x" * 65_536


def test_an_endless_event_passes_in_pieces() -> None:
    """Events are not collected: one of 8 MB takes as much memory as one of 300 KB, and holds up no one."""
    largest = 0

    async def act(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b"data: ")
        for _number in range(128):
            responder.write(PIECE)
            await responder.drain()
        responder.write(b"\n\ndata: [DONE]\n\n")
        responder.end()

    async def test() -> None:
        nonlocal largest
        async with canned_workers("a", a=act) as (worker,), gateway(config_of([worker])) as found:
            answer = await found.client.upstream.send("POST", "/v1/completions", [], b'{"prompt":"x","stream":true}')
            size = 0
            async for piece in answer:
                size += len(piece)
                pool = found.running.parts.pools["decode"].members["a"].upstream.connections
                largest = max(largest, *(one.answer._buffered for one in pool if one.answer is not None), 0)
            assert size == 6 + 128 * len(PIECE) + 16
            assert largest < 2 << 20
            await settled(found)

    run(test)


def test_answers_over_the_limit_go_to_another_worker() -> None:
    async def test() -> None:
        limits = LimitSettings(answer_bytes=2000)
        large = says(200, b"x" * 5000)
        async with canned_workers("a", "b", a=large) as workers, gateway(config_of(workers, limits=limits)) as found:
            for _ in range(4):
                assert (await found.client.complete()).json["choices"][0]["text"] == "from b"
            await settled(found)
        async with canned_workers("a", a=large) as workers, gateway(config_of(workers, limits=limits)) as found:
            got = await found.client.complete()
            assert (got.status, got.json["error"]["code"]) == (502, "worker_failed")
            assert b"too large" in got.body
            idle(found)

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nx",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"",
        b"HTTP/1.1 600 What\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_health_that_never_ends_is_no_health(said: bytes) -> None:
    async def drips(spoken: Spoken) -> None:
        await spoken.request()
        spoken.say(said)
        await spoken.gone()

    async def test() -> None:
        health = HealthSettings(every_s=0.01, timeout_s=0.05, backoff_s=0.0)
        async with scripted(drips) as url, gateway(config_of([], health=health)) as found:
            found.running.parts.add_worker(WorkerEntry(id="drips", url=url))
            member = found.running.parts.pools["decode"].members["drips"]
            await until(lambda: member.health.checks >= 2)
            assert not member.health.healthy
            assert "drips" not in found.open("decode")

    run(test)


def test_a_list_of_models_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.gateway.gateway.MODELS_S", 0.05)

    async def drips(spoken: Spoken) -> None:
        head = await spoken.request()
        if b"/health" in head:
            spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await spoken.gone()

    async def test() -> None:
        async with scripted(drips) as url, gateway(config_of([])) as found:
            found.running.parts.add_worker(WorkerEntry(id="drips", url=url))
            got = await found.client.ask("GET", "/v1/models")
            assert (got.status, got.json["error"]["code"]) == (504, "worker_timeout")
            assert url.encode().removeprefix(b"http://") not in got.body

    run(test)


def test_ids_and_framing_of_a_worker_are_not_passed_on() -> None:
    async def act(_: Canned, __: HttpRequest, responder: Responder) -> None:
        headers = [(b"x-request-id", b"another's"), (b"keep-alive", b"9"), (b"x-more", b"1"), (b"upgrade", b"h2c")]
        responder.send(200, b"{}", headers=headers)

    async def test() -> None:
        async with canned_workers("a", a=act) as (worker,), gateway(config_of([worker])) as found:
            raw = await Raw.open(found.port)
            raw.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: mine\r\nConnection: close\r\n"
                b"Content-Length: 2\r\n\r\n{}"
            )
            head = (await raw.rest()).partition(b"\r\n\r\n")[0].lower()
            assert head.count(b"x-request-id") == 1
            assert b"x-request-id: mine" in head
            assert b"x-more: 1" in head
            assert b"h2c" not in head
            await settled(found)

    run(test)


def test_workers_that_stall_hold_up_only_their_own() -> None:
    async def stalls(spoken: Spoken) -> None:
        head = await spoken.request()
        if head.startswith(b"GET"):
            spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        spoken.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: x")
        await spoken.gone()

    async def test() -> None:
        async with scripted(stalls) as url, canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            found.running.parts.add_worker(WorkerEntry(id="stalls", url=url))
            await until(lambda: found.open("decode") == {"a", "stalls"})
            body = b'{"prompt":"x","stream":true}'
            answers = await asyncio.gather(
                *(found.client.upstream.send("POST", "/v1/completions", [], body) for _ in range(20))
            )
            keeper = found.running.parts.pools["decode"].keeper
            await until(lambda: len(keeper.requests) == keeper.running("stalls"))
            assert keeper.running("stalls") > 0
            assert (await found.client.complete()).json["choices"][0]["text"] == "from a", "it has the shorter queue"
            for one in answers:
                one.close()
            await settled(found)

    run(test)
