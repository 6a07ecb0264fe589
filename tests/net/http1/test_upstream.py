"""The client against servers that answer, fail and misbehave; raw sockets on the other side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from coterie.errors import ConfigError
from coterie.net.http1 import Answer, Request, Responder, Upstream, UpstreamError, UpstreamLimits
from coterie.net.processes import free_port
from http1_peers import Clock, Echo, Script, Spoken, chunked, run_on, scripted, serving, until

LOOPS = ["asyncio", "uvloop"]
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def client(url: str, limits: UpstreamLimits | None = None, clock: Clock | None = None) -> AsyncIterator[Upstream]:
    upstream = Upstream(url, limits or UpstreamLimits(), clock or Clock())
    try:
        yield upstream
    finally:
        await upstream.close()
        assert not upstream.connections


def saying(*pieces: bytes, then: Callable[[Spoken], Awaitable[None]] | None = None) -> Script:
    """Answer the first request of each connection with pieces; close it at once, or when the client does."""

    async def script(spoken: Spoken) -> None:
        await spoken.request()
        for piece in pieces:
            spoken.say(piece)
            await spoken.writer.drain()
        if then is not None:
            await then(spoken)

    return script


async def fails(url: str, limits: UpstreamLimits | None = None) -> UpstreamError:
    """Send a request and read its answer; return how it failed."""
    async with client(url, limits) as upstream:
        with pytest.raises(UpstreamError) as raised:
            await (await upstream.send("POST", "/", [], b"body")).read()
        await until(lambda: not upstream.connections)
        return raised.value


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

        async def handler(_: Request, responder: Responder) -> None:
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


def test_no_connection() -> None:
    async def main() -> None:
        error = await fails(f"http://127.0.0.1:{free_port()}")
        assert error.kind == "connect"
        assert not error.answered
        assert (await fails("http://a..b:80")).kind == "connect"

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("pieces", "kind", "answered"),
    [
        ([], "reset", False),
        ([b"HTTP/1.1 200 OK\r\nContent-"], "reset", False),
        ([OK + b"Content-Length: 10\r\n\r\nshort"], "reset", True),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n"], "reset", True),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "protocol", False),
        ([b"\0" * 100], "protocol", False),
        ([b"HTTP/2 200\r\n\r\n"], "protocol", False),
        ([b"HTTP/1.1 99999 OK\r\n\r\n"], "protocol", False),
        ([OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], "protocol", False),
        ([OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], "protocol", False),
        ([OK + b"Content-Length: five\r\n\r\n"], "protocol", False),
        ([OK + b"X: y\nZ: z\r\n\r\n"], "protocol", False),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"], "protocol", True),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"], "protocol", False),
        ([OK + b"X: " + b"y" * 40_000], "protocol", False),
        ([OK + b"X: " + b"y" * 40_000 + b"\r\nContent-Length: 2\r\n\r\nhi"], "protocol", False),
        ([OK, *[b"X: y\r\n" * 100] * 100], "protocol", False),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 2000], "protocol", False),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"y" * 40_000], "protocol", True),
    ],
    ids=[
        "closed",
        "closed in the head",
        "short body",
        "missing chunk",
        "another protocol",
        "zeros",
        "HTTP/2",
        "bad status",
        "two lengths",
        "length and chunks",
        "bad length",
        "bare LF",
        "bad chunk",
        "switched protocols",
        "endless header",
        "long head with body",
        "endless headers",
        "endless informational answers",
        "endless trailer",
    ],
)
def test_faults_of_servers(loop: str, pieces: list[bytes], kind: str, answered: bool) -> None:
    async def main() -> None:
        async with scripted(saying(*pieces)) as url:
            error = await fails(url)
            assert (error.kind, error.answered) == (kind, answered), error
            assert str(error).startswith(url)

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("head", [b"", OK + b"Content-Length: 10\r\n\r\nshort"], ids=["before the head", "after it"])
def test_resets(loop: str, head: bytes) -> None:
    async def reset(spoken: Spoken) -> None:
        await spoken.writer.drain()
        taken = spoken.writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        spoken.writer.transport.abort()

    async def main() -> None:
        async with scripted(saying(*([head] if head else []), then=reset)) as url:
            assert (await fails(url)).kind == "reset"

    run_on(loop, main())


def test_kept_connection_that_was_closed_is_replaced_once() -> None:
    async def main() -> None:
        served: list[int] = []
        stale = asyncio.Event()

        async def script(spoken: Spoken) -> None:
            """Answer one request, and close the connection at the next one's head."""
            await spoken.request()
            served.append(spoken.number)
            if stale.is_set() and spoken.number == 1:
                return
            spoken.say(OK + b"Content-Length: 2\r\n\r\nhi")
            await spoken.reader.readuntil(b"\r\n\r\n")

        async with scripted(script) as url, client(url) as upstream:
            for _ in range(2):
                assert await (await upstream.send("POST", "/", [], b"x")).read() == b"hi"
            assert served == [0, 1]
            await (await upstream.send("POST", "/", [], b"x")).read()
            assert served == [0, 1, 2]

        served.clear()
        stale.set()
        async with scripted(script) as url, client(url) as upstream:
            await (await upstream.send("POST", "/", [], b"x")).read()
            with pytest.raises(UpstreamError) as raised:  # the fresh connection fails as well
                await upstream.send("POST", "/", [], b"x")
            assert raised.value.kind == "reset"
            assert served == [0, 1]

    run_on("asyncio", main())


def test_answer_that_had_begun_is_not_asked_for_again() -> None:
    async def main() -> None:
        numbers: list[int] = []

        async def script(spoken: Spoken) -> None:
            numbers.append(spoken.number)
            await spoken.request()
            spoken.say(OK + b"Content-Length: 2\r\n\r\nhi")
            await spoken.request()
            spoken.say(b"HTTP/1.1 2")

        async with scripted(script) as url, client(url) as upstream:
            await (await upstream.send("POST", "/", [], b"x")).read()
            with pytest.raises(UpstreamError):
                await upstream.send("POST", "/", [], b"x")
            assert numbers == [0]

    run_on("asyncio", main())


@pytest.mark.parametrize("after", [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison", b"garbage"])
def test_answer_that_nobody_asked_for_is_never_used(after: bytes) -> None:
    async def main() -> None:
        async def script(spoken: Spoken) -> None:
            await spoken.request()
            spoken.say(OK + b"Content-Length: 2\r\n\r\nhi" + (after if spoken.number == 0 else b""))
            if spoken.number == 1:
                await spoken.writer.drain()
                await together.wait()
                spoken.say(after)
            await spoken.gone()

        together = asyncio.Event()
        async with scripted(script) as url, client(url) as upstream:
            assert await (await upstream.send("GET", "/", [])).read() == b"hi"
            await until(lambda: not upstream.connections)
            assert await (await upstream.send("GET", "/", [])).read() == b"hi"
            assert len(upstream.connections) == 1
            together.set()  # it comes while the connection is unused
            await until(lambda: not upstream.connections)
            assert await (await upstream.send("GET", "/", [])).read() == b"hi"

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_late_answers_time_out(loop: str) -> None:
    async def main() -> None:
        clock = Clock()
        async with scripted(saying(then=Spoken.gone)) as url, client(url, clock=clock) as upstream:
            for head_s, limit_s in ((None, 600.0), (5.0, 5.0)):
                asked = asyncio.create_task(upstream.send("GET", "/", [], head_s=head_s))
                await until(lambda: any(one.waiter is not None for one in upstream.connections))
                clock.now += limit_s - 0.1
                upstream.sweep()
                await asyncio.sleep(0)
                assert not asked.done()
                clock.now += 0.2
                upstream.sweep()
                with pytest.raises(UpstreamError) as raised:
                    await asked
                assert raised.value.kind == "timeout"
                assert not raised.value.answered
                await until(lambda: not upstream.connections)

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_stalled_bodies_time_out_between_pieces(loop: str) -> None:
    async def main() -> None:
        clock, more = Clock(), asyncio.Event()

        async def go_on(spoken: Spoken) -> None:
            await more.wait()
            spoken.say(b"5\r\nagain\r\n")
            await spoken.gone()

        script = saying(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n", then=go_on)
        async with scripted(script) as url, client(url, clock=clock) as upstream:
            answer = await upstream.send("GET", "/", [])
            assert await anext(answer) == b"first"
            clock.now += 119
            upstream.sweep()
            more.set()
            assert await anext(answer) == b"again"
            clock.now += 119
            upstream.sweep()
            late = asyncio.create_task(answer.read())
            await asyncio.sleep(0)
            clock.now += 2
            upstream.sweep()
            with pytest.raises(UpstreamError) as raised:
                await late
            assert raised.value.kind == "timeout"
            assert raised.value.answered

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_slow_consumer_holds_the_server_back(loop: str) -> None:
    async def main() -> None:
        size = 50 << 20
        clock = Clock()

        async def handler(_: Request, responder: Responder) -> None:
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


def test_bodies_over_the_limit_are_not_read_to_their_end() -> None:
    async def main() -> None:
        script = saying(OK + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000, then=Spoken.gone)
        async with scripted(script) as url:
            error = await fails(url, UpstreamLimits(body_bytes=1_000_000))
            assert error.kind == "too_large"
            async with client(url) as upstream:
                with pytest.raises(UpstreamError, match="more than 5 bytes"):
                    await (await upstream.send("GET", "/", [])).read(5)
                assert len(await (await upstream.send("GET", "/", [])).read(3_000_000)) == 3_000_000

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", ["before the head", "while iterating", "by close"])
def test_leaving_an_answer_tells_the_server(loop: str, where: str) -> None:
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(_: Request, responder: Responder) -> None:
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


@pytest.mark.parametrize(("method", "target", "name", "value"), [
    ("GET", "/ HTTP/1.1\r\nX: y", b"a", b"b"),
    ("GET /x", "/", b"a", b"b"),
    ("GET", "/", b"a", b"b\r\nc: d"),
    ("GET", "/", b"transfer-encoding", b"chunked"),
])  # fmt: skip
def test_requests_cannot_be_split(method: str, target: str, name: bytes, value: bytes) -> None:
    async def main() -> None:
        async with scripted(saying()) as url, client(url) as upstream:
            with pytest.raises(ConfigError):
                await upstream.send(method, target, [(name, value)])

    run_on("asyncio", main())
