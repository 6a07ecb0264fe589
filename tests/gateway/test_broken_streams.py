"""A stream that breaks after its first byte ends with an error event, whoever broke it and wherever.

Of 20,000 streams under random faults 142 broke, and 44 of those ended without a word.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest

from canned_workers import STREAM, Canned, canned_workers, events, opens, stalls
from coterie.gateway.config import GatewayConfig, LimitSettings, WorkerEntry
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.http1.upstream import Answer
from gateway_runs import FAST, Run, config_of, gateway, run, settled
from http1_peers import Spoken, chunked, scripted, until

BODY = b'{"prompt":"x","stream":true}'
EVENTS = b"".join(b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(4)) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
FRAMED = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, 7),
    "until closed": HEAD + b"\r\n" + EVENTS,
    "by length": HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
}


def last_event(said: bytes) -> str:
    """[DONE], or the code of the error that a stream ends with."""
    assert said.endswith(b"\n\n"), said[-80:]
    event = said.rstrip().rpartition(b"\n\n")[2]
    assert event.startswith(b"data: "), event
    return "[DONE]" if event == b"data: [DONE]" else msgspec.json.decode(event[6:])["error"]["code"]


async def streamed(found: Run) -> Answer:
    return await found.client.upstream.send("POST", "/v1/completions", [], BODY)


async def endings(said: Sequence[bytes], resets: bool) -> list[str]:
    """Last events of streams through a gateway whose only worker says these bytes, and then closes or resets."""

    async def script(spoken: Spoken) -> None:
        if (await spoken.request()).startswith(b"GET"):
            spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        spoken.say(said[next(numbers)])
        await spoken.writer.drain()
        if resets:
            spoken.writer.transport.abort()

    numbers = iter(range(len(said)))
    async with scripted(script) as url:
        config = GatewayConfig(listen="127.0.0.1:0", workers=[WorkerEntry(id="a", url=url)], health=FAST)
        async with gateway(config) as found:
            await until(lambda: found.open("decode") == {"a"})
            lasts = [last_event(await (await streamed(found)).read()) for _ in said]
            await settled(found)
    return lasts


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("framing", list(FRAMED))
def test_wherever_a_worker_breaks_off(framing: str, resets: bool) -> None:
    """Every stream that lacks its last event is told to be broken; one that has it is whole, whatever came after."""

    async def test() -> None:
        whole = FRAMED[framing]
        start = whole.index(b"data:") + 8
        cuts = sorted(random.Random(framing).sample(range(start, len(whole)), 24))
        lasts = await endings([whole[:cut] for cut in cuts], resets)
        for cut, last in zip(cuts, lasts, strict=True):
            assert last in ("[DONE]", "worker_failed"), cut
            if last == "[DONE]":
                assert b"[DONE]" in whole[:cut].replace(b"\r\n7\r\n", b"").replace(b"\r\n", b""), cut
            elif framing == "until closed":
                assert b"[DONE]" not in whole[:cut] or resets, cut

    run(test)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n", b""])
def test_a_connection_that_breaks_after_the_last_event(end: bytes) -> None:
    """The answer is whole. It ended with an error event after ``[DONE]`` and counted against the worker."""
    said = b'data: {"choices":[]}\n\ndata: [DONE]' + end

    async def script(spoken: Spoken) -> None:
        if (await spoken.request()).startswith(b"GET"):
            spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        spoken.say(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(said), said))
        await spoken.writer.drain()
        await read.wait()
        spoken.writer.transport.abort()

    read = asyncio.Event()

    async def test() -> None:
        async with scripted(script) as url:
            config = GatewayConfig(listen="127.0.0.1:0", workers=[WorkerEntry(id="a", url=url)], health=FAST)
            async with gateway(config) as found:
                await until(lambda: found.open("decode") == {"a"})
                answer = await streamed(found)
                got = await anext(answer)
                read.set()
                got += await answer.read()
                assert got == (said if end.endswith(b"\n\r\n") or end == b"\n\n" else said + b"\n\n")
                assert found.metrics['coterie_gateway_requests_total{outcome="ok",path="/v1/completions"}'] == 1
                assert not any(value for name, value in found.metrics.items() if "worker_failures_total{" in name)
                await settled(found)

    run(test)


def test_text_that_reads_like_a_last_event_is_none() -> None:
    async def test() -> None:
        said = HEAD + b'\r\ndata: {"choices":[{"text":"data: [DONE]'
        assert await endings([said], resets=False) == ["worker_failed"]

    run(test)


def test_a_stream_that_its_worker_ends_early() -> None:
    """Its HTTP is whole, as of a proxy whose worker is gone; it was passed on as if it were complete."""

    async def ends(worker: Canned, _: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", STREAM)])
        responder.write(b"".join(events(worker)[:2]))
        responder.end()

    async def test() -> None:
        async with canned_workers("a", a=ends) as (worker,), gateway(config_of([worker])) as found:
            said = await (await streamed(found)).read()
            assert said.startswith(b"".join(events(worker)[:2]))
            assert last_event(said) == "worker_failed"
            assert found.metrics['coterie_gateway_worker_failures_total{kind="incomplete",worker="a"}'] == 1
            assert found.metrics['coterie_gateway_requests_total{outcome="broken",path="/v1/completions"}'] == 1
            await settled(found)

    run(test)


def test_a_stream_without_an_event_goes_to_another_worker() -> None:
    async def ends(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", STREAM)])
        responder.end()

    async def test() -> None:
        async with canned_workers("a", "b", a=ends) as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b"})
            while not workers[0].completions:
                assert await (await streamed(found)).read() == b"".join(events(workers[1]))
            await settled(found)

    run(test)


def test_a_stream_that_takes_too_long() -> None:
    async def test() -> None:
        limits = LimitSettings(total_s=3600.0)
        async with canned_workers("a", a=opens) as (worker,), gateway(config_of([worker], limits=limits)) as found:
            answer = await streamed(found)
            await anext(answer)
            deadlines = found.running.gateway.deadlines
            deadlines.update(dict.fromkeys(deadlines, 0.0))
            found.running.gateway.sweep()
            assert last_event(await answer.read()) == "timeout"
            await worker.left.wait()
            await settled(found)

    run(test)


def test_requests_that_the_end_of_the_drain_cuts() -> None:
    """The stream gets an error event, the request without a byte 503. Both were counted as the clients' leaving."""

    async def test() -> None:
        async with canned_workers("a", a=opens) as (worker,), gateway(config_of([worker], log_requests=True)) as found:
            begun = await streamed(found)
            await anext(begun)
            worker.act, worker.got = stalls, asyncio.Event()
            waiting = asyncio.create_task(
                found.client.ask("POST", "/v1/completions", {"prompt": "x"}, [(b"x-request-id", b"mine")])
            )
            await worker.got.wait()
            worker.got.clear()
            leaving = asyncio.create_task(found.client.complete())
            await worker.got.wait()
            found.running.stop(asyncio.Event())
            leaving.cancel()
            await worker.left.wait()
            await found.running.close(0)
            assert last_event(await begun.read()) == "draining"
            got = await waiting
            assert (got.status, got.json["error"]["code"]) == (503, "draining")
            assert (got.headers[b"x-request-id"], got.headers[b"retry-after"]) == (b"mine", b"1")
            ended = 'coterie_gateway_requests_total{outcome="%s",path="/v1/completions"}'
            assert [found.metrics[ended % one] for one in ("drained", "cancelled", "broken")] == [2, 1, 0]
            logged = [msgspec.json.decode(line) for line in found.logged().splitlines()]
            ends = [(one["outcome"], one["status"]) for one in logged if one["event"] == "request"]
            assert sorted(ends) == [("cancelled", 499), ("drained", 503), ("drained", 503)]
            (stop,) = [one for one in logged if one["event"] == "stop"]
            assert stop["cut"] == 2

    run(test)
