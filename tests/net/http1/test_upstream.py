"""The client as its callers use it: pooled connections, streams, and answers that are left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.net.http1 import Answer, HttpRequest, Responder, Upstream, UpstreamError, UpstreamLimits
from http1_peers import Clock, Echo, Spoken, chunked, client, run_on, saying, scripted, serving, until

LOOPS = ["asyncio", "uvloop"]
CERTIFICATE = Path(__file__).with_name("localhost.pem")
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_share_a_connection(loop: str) -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served, client(f"http://127.0.0.1:{served.port}/base/") as upstream:
            for number in range(3):
                answer = await upstream.send("POST", f"/path?n={number}", [(b"x-id", b"7")], b"body")
                assert answer.status == 200
                assert await answer.read() == b"POST /base/path body"
                assert answer.complete
                answer.close()
            assert served.server.counters.accepted == 1
            assert len(upstream.connections) == 1
        request = echo.seen[0]
        assert request.query == "n=0"
        assert request.header(b"x-id") == b"7"
        assert request.header(b"host") == f"127.0.0.1:{served.port}".encode()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 6\r\n\r\nonetwo"],
        [OK + b"Content-Length: 6\r\n", b"\r\none", b"two"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"onetwo", 3, b"T: trailer\r\n")],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\no", b"ne\r\n3;x=y\r\ntw", b"o\r\n0\r", b"\n\r\n"],
        [OK + b"\r\none", b"two"],
        [
            b"HTTP/1.1 100 Continue\r\n\r\n"
            + b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\n"
            + OK
            + b"Content-Length: 6\r\n\r\nonetwo"
        ],
        [b"HTTP/1.0 200 OK\r\n\r\nonetwo"],
    ],
    ids=["length", "length in pieces", "chunks", "chunks in pieces", "until closed", "informational", "HTTP/1.0"],
)
def test_bodies_are_read_and_iterated(loop: str, pieces: list[bytes]) -> None:
    async def main() -> None:
        async with scripted(saying(*pieces)) as url, client(url) as upstream:
            assert await (await upstream.send("GET", "/", [])).read() == b"onetwo"
            found = [piece async for piece in await upstream.send("GET", "/", [])]
            assert b"".join(found) == b"onetwo"
            assert all(found)

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_pieces_come_as_they_are_sent(loop: str) -> None:
    async def main() -> None:
        may_go_on = asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            responder.start(200, [])
            responder.write(b"first")
            await may_go_on.wait()
            responder.write(b"second")
            responder.end()

        async with serving(handler) as served, client(f"http://127.0.0.1:{served.port}") as upstream:
            answer = await upstream.send("GET", "/", [])
            assert await anext(answer) == b"first"
            assert not answer.complete
            may_go_on.set()
            assert await anext(answer) == b"second"
            with pytest.raises(StopAsyncIteration):
                await anext(answer)
            assert answer.complete

    run_on(loop, main())


def test_answers_without_a_body() -> None:
    async def main() -> None:
        async with (
            scripted(saying(OK + b"Content-Length: 100\r\n\r\n", then=Spoken.gone)) as url,
            client(url) as upstream,
        ):
            answer = await upstream.send("HEAD", "/", [])
            assert (b"content-length", b"100") in answer.headers
            assert await answer.read() == b""
        for line in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\n\r\n"):
            async with scripted(saying(line, then=Spoken.gone)) as url, client(url) as upstream:
                assert await (await upstream.send("GET", "/", [])).read() == b""
                assert len(upstream.connections) == 1

    run_on("asyncio", main())


def test_redirects_are_not_followed() -> None:
    async def main() -> None:
        line = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        async with scripted(saying(line)) as url, client(url) as upstream:
            answer = await upstream.send("GET", "/", [])
            assert answer.status == 302
            assert (b"location", b"http://127.0.0.1:1/") in answer.headers

    run_on("asyncio", main())


def test_encoded_bodies_are_passed_on_as_they_are() -> None:
    async def main() -> None:
        line = OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"
        async with scripted(saying(line)) as url, client(url) as upstream:
            assert await (await upstream.send("GET", "/", [])).read() == b"\x1f\x8b\x08\x00"

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_slow_consumer_holds_the_server_back(loop: str) -> None:
    async def main() -> None:
        size = 50 << 20
        clock = Clock()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            responder.start(200, [], size)
            for _number in range(size >> 20):
                responder.write(b"x" * (1 << 20))
                await responder.drain()
            responder.end()

        async with serving(handler) as served, client(f"http://127.0.0.1:{served.port}", clock=clock) as upstream:
            answer = await upstream.send("GET", "/", [])
            await until(lambda: any(one.room is not None for one in served.server.connections))
            (connection,) = upstream.connections
            await until(lambda: not connection.transport.is_reading())
            clock.now += 1000
            upstream.sweep()  # the consumer is slow, not the server
            first = len(await anext(answer))
            assert first <= 1 << 20  # what waits, and one read of the transport
            assert first + len(await answer.read()) == size
            assert len(upstream.connections) == 1, "kept"
            assert await (await upstream.send("GET", "/", [])).read() == b"x" * size

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", ["before the head", "while iterating", "by close"])
def test_leaving_an_answer_tells_the_server(loop: str, where: str) -> None:
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            try:
                if where != "before the head":
                    responder.start(200, [])
                    responder.write(b"first")
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def ask(upstream: Upstream) -> Answer:
            answer = await upstream.send("GET", "/", [])
            assert await anext(answer) == b"first"
            if where == "while iterating":
                await anext(answer)
            return answer

        async with serving(handler) as served, client(f"http://127.0.0.1:{served.port}") as upstream:
            asked = asyncio.create_task(ask(upstream))
            await begun.wait()
            if where == "by close":
                answer = await asked
                answer.close()
                assert not answer.complete
                with pytest.raises(UpstreamError, match="was closed"):
                    await anext(answer)
            else:
                for _ in range(20):
                    await asyncio.sleep(0)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            await cancelled.wait()
            await until(lambda: not upstream.connections)

    run_on(loop, main())


def test_cancelling_as_the_answer_comes_does_not_cut_another_request() -> None:
    """The connection of a complete answer may serve another request before its own task runs."""

    async def main() -> None:
        async with serving(Echo()) as served, client(f"http://127.0.0.1:{served.port}") as upstream:
            await (await upstream.send("GET", "/warm", [])).read()
            (connection,) = upstream.connections
            first = asyncio.create_task(upstream.send("GET", "/first", []))
            await until(lambda: connection.waiter is not None or first.done())
            while connection.waiter is not None:
                await asyncio.sleep(0)
            first.cancel()  # the answer has come, but its task has not run since
            second = asyncio.create_task(upstream.send("GET", "/second", []))
            await asyncio.gather(first, return_exceptions=True)
            assert await (await second).read() == b"GET /second "

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_unused_connections_are_few_and_short_lived(loop: str) -> None:
    async def main() -> None:
        clock = Clock()
        limits = UpstreamLimits(idle_connections=3, keep_s=4)
        async with serving(Echo()) as served, client(f"http://127.0.0.1:{served.port}", limits, clock) as upstream:
            await asyncio.gather(*(upstream.send("GET", "/", []) for _ in range(10)))
            await until(lambda: len(upstream.connections) == 3)
            clock.now += 3.9
            await (await upstream.send("GET", "/", [])).read()
            clock.now += 0.2
            upstream.sweep()
            await until(lambda: len(upstream.connections) == 1)
            clock.now += 4.1
            await (await upstream.send("GET", "/", [])).read()
            await until(lambda: len(upstream.connections) == 1)
            assert served.server.counters.accepted == 11, "too old a connection is not used"

    run_on(loop, main())


def test_close_fails_what_is_in_flight() -> None:
    async def main() -> None:
        async with scripted(saying(then=Spoken.gone)) as url, client(url) as upstream:
            asked = asyncio.create_task(upstream.send("GET", "/", []))
            await until(lambda: any(one.waiter is not None for one in upstream.connections))
            await upstream.close()
            with pytest.raises(UpstreamError) as raised:
                await asked
            assert raised.value.kind == "reset"
            with pytest.raises(UpstreamError, match="is closed"):
                await upstream.send("GET", "/", [])

    run_on("asyncio", main())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "127.0.0.1:80",
        "http://",
        "http://user:pw@a",
        "http://a/?q",
        "http://a:99999",
        "http://[",
        "http://a/ b",
    ],
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(ConfigError):
        Upstream(url)
