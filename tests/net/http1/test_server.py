"""The server as its clients see it: requests in order, answers whole or streamed, and clients that leave."""

from __future__ import annotations

import asyncio
import socket

import pytest

from coterie.net.http1 import HttpError, HttpRequest, Responder
from http1_peers import Echo, chunked, get, post, run_on, serving, until

LOOPS = ["asyncio", "uvloop"]
CLOSE = b"Connection: close"


@pytest.mark.parametrize("loop", LOOPS)
def test_connection_is_kept_for_further_requests(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo()) as served:
            raw = await served.connect()
            for body in (b"one", b"", b"three" * 100_000):
                raw.send(post(body, "/path?query=1"))
                assert (await raw.answer()).endswith(b"POST /path " + body)
            raw.send(get("/last", CLOSE))
            assert b"connection: close" in await raw.rest()
            assert served.server.counters.accepted == 1
            assert served.server.counters.requests == 4

    run_on(loop, main())


def test_request_has_parts_of_its_head() -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served:
            await served.ask(get("/a%20b?c=d&e", b"X-One: 1", b"x-one: 2", b"X-Empty:", CLOSE))
            await served.ask(get("http://elsewhere:80/absolute?q", CLOSE))
        request, absolute = echo.seen
        assert (request.method, request.path, request.query, request.peer) == ("GET", "/a%20b", "c=d&e", "127.0.0.1")
        assert request.headers[:4] == [(b"host", b"test"), (b"x-one", b"1"), (b"x-one", b"2"), (b"x-empty", b"")]
        assert request.header(b"x-one") == b"1"
        assert request.header(b"absent") is None
        assert (absolute.path, absolute.query) == ("/absolute", "q")

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_sent_ahead_are_answered_in_order_one_at_a_time(loop: str) -> None:
    running = 0

    async def handler(request: HttpRequest, responder: Responder) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1
        responder.send(200, request.path.encode() + request.body, b"text/plain")

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            between = [get(f"/{number}") for number in range(2, 400)]
            raw.send(b"".join([get("/0"), post(b"x" * 9000, "/1"), *between, post(b"y", "/400")]))
            for number in range(401):
                body = {1: b"x" * 9000, 400: b"y"}.get(number, b"")
                assert (await raw.answer()).endswith(b"\r\n\r\n/%d" % number + body)
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_sent_ahead_take_bounded_memory(loop: str) -> None:
    async def main() -> None:
        may_answer = asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            await may_answer.wait()
            responder.send(200)

        async with serving(handler) as served:
            raw = await served.connect()
            count = 5_000
            raw.send(get() * count)
            await until(lambda: served.server.connections)
            (connection,) = served.server.connections
            await until(lambda: not connection.transport.is_reading())
            assert len(connection.unparsed) < 1 << 20  # a head's bytes and one read of the transport
            assert len(connection.waiting) < 4096 / 16
            may_answer.set()
            for _ in range(count):
                await raw.reader.readuntil(b"\r\n\r\n")
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_chunked_body_is_joined(loop: str, size: int) -> None:
    async def main() -> None:
        body = bytes(range(256)) * 20
        message = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        message += chunked(body, 300, b"A-Trailer: ignored\r\n")
        async with serving(Echo()) as served:
            raw = await served.connect()
            for at in range(0, len(message), size):
                raw.send(message[at : at + size])
                await asyncio.sleep(0)
            assert (await raw.answer()).endswith(b"POST / " + body)
            raw.send(get("/next"))
            assert (await raw.answer()).endswith(b"GET /next ")
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_stream_comes_in_chunks_or_with_its_length(loop: str) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")], 6 if request.path == "/length" else None)
        assert responder.started
        assert not responder.ended
        for piece in (b"one", b"", b"two"):
            responder.write(piece)
            await responder.drain()
        responder.end()
        assert responder.ended

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get())
            head = await raw.answer()
            assert b"transfer-encoding: chunked\r\n" in head
            assert b"content-length" not in head
            assert await raw.reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
            raw.send(get("/length"))
            assert (await raw.answer()).endswith(b"content-length: 6\r\n\r\nonetwo")
            raw.close()
            old = await served.ask(b"GET / HTTP/1.0\r\n\r\n")
            assert b"chunked" not in old
            assert old.endswith(b"connection: close\r\n\r\nonetwo"), "HTTP/1.0 knows no chunks"

    run_on(loop, main())


def test_head_and_empty_statuses_have_no_body() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/stream":
            responder.start(200, [])
            responder.write(b"body")
            responder.end()
        else:
            responder.send(204 if request.path == "/204" else 200, b"body")

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            for method, path in ((b"HEAD", b"/"), (b"HEAD", b"/stream"), (b"GET", b"/204")):
                raw.send(b"%b %b HTTP/1.1\r\nHost: test\r\n\r\n" % (method, path))
                head = await raw.reader.readuntil(b"\r\n\r\n")
                assert (b"content-length: 4" in head) == (path == b"/")
            raw.send(get("/", CLOSE))
            assert (await raw.rest()).startswith(b"HTTP/1.1 200 OK\r\n"), "no byte of a body came before"

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_expected_continue_is_sent_after_the_head_was_checked(loop: str) -> None:
    def check(request: HttpRequest) -> None:
        if request.path == "/secret":
            raise HttpError(401, "no key")

    async def main() -> None:
        async with serving(Echo(), check_head=check) as served:
            raw = await served.connect()
            head, _, body = post(b"body", "/", b"Expect: 100-continue").partition(b"\r\n\r\n")
            raw.send(head + b"\r\n\r\n")
            assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.send(body)
            assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            raw.send(post(b"came along", "/", b"Expect: 100-continue"))
            assert (await raw.answer()).startswith(b"HTTP/1.1 200"), "whose body has come needs no invitation"
            # behind another request its turn comes after that one's answer
            raw.send(get("/first") + head + b"\r\n\r\n")
            assert (await raw.answer()).endswith(b"GET /first ")
            assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.send(body)
            assert (await raw.answer()).endswith(b"POST / body")
            raw.close()
            refused = await served.ask(post(b"body", "/secret", b"Expect: 100-continue").removesuffix(b"body"))
            assert refused.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in refused
            assert (await served.ask(post(b"", "/", b"Expect: a-miracle"))).startswith(b"HTTP/1.1 417")

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "with a request sent ahead"])
def test_disconnect_cancels_the_handler(loop: str, ahead: bool) -> None:
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(_: HttpRequest, __: Responder) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get() * (2 if ahead else 1))
            await begun.wait()
            raw.close()
            await cancelled.wait()
            await until(lambda: not served.server.connections and not served.server.tasks)
            assert served.server.counters.disconnects == 1
            assert served.server.counters.requests == 1

    run_on(loop, main())


def test_handler_may_go_on_after_its_answer() -> None:
    async def main() -> None:
        release, done = asyncio.Event(), asyncio.Event()

        async def handler(request: HttpRequest, responder: Responder) -> None:
            responder.send(200)
            if request.path == "/slow":
                await release.wait()
                done.set()

        async with serving(handler) as served:
            raw = await served.connect()
            for path in ("/slow", "/next"):
                raw.send(get(path))
                assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            raw.close()
            await until(lambda: not served.server.connections)
            release.set()
            await done.wait()
            assert served.server.counters.disconnects == 0

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_slow_reader_holds_the_handler_back(loop: str) -> None:
    pieces, size = 300, 100_000
    written = 0

    async def handler(_: HttpRequest, responder: Responder) -> None:
        nonlocal written
        responder.start(200, [], pieces * size)
        for _number in range(pieces):
            responder.write(b"x" * size)
            written += 1
            await responder.drain()
        responder.end()

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get())
            await until(lambda: any(one.room is not None for one in served.server.connections))
            (connection,) = served.server.connections
            assert connection.transport.get_write_buffer_size() <= 65_536 + size
            assert written < pieces
            assert len((await raw.answer()).partition(b"\r\n\r\n")[2]) == pieces * size
            assert written == pieces
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_errors_of_a_handler(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        match request.path:
            case "/http":
                raise HttpError(429, 'say "please"', "slow_down", "n", [(b"retry-after", b"3")])
            case "/bug":
                raise ValueError(request.body)
            case "/late" | "/late-http":
                responder.start(200, [])
                responder.write(b"part")
                raise HttpError(500, "late") if request.path == "/late-http" else ValueError(request.body)
            case "/split":
                responder.send(200, b"body", headers=[(b"x", b"a\r\nset-cookie: b")])
            case "/split-error":
                raise HttpError(400, "no", headers=[(b"x", b"a\nb")])
            case "/short" | "/long":
                responder.start(200, [], 4)
                responder.write(b"abc" if request.path == "/short" else b"abcde")
                responder.end()
            case "/framing":
                responder.start(200, [(b"Content-Length", b"1")])

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get("/http"))
            answer = await raw.answer()
            assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n")
            assert answer.endswith(
                b'{"error":{"message":"say \\"please\\"","type":"rate_limit_error","param":"n","code":"slow_down"}}'
            )
            paths = ("/bug", "/silent", "/split", "/split-error", "/framing")
            for path in paths:
                raw.send(post(b"private", path))
                answer = await raw.answer()
                assert answer.startswith(b"HTTP/1.1 500")
                assert b"private" not in answer
                assert b"set-cookie" not in answer
            raw.close()
            for path in ("/late", "/late-http"):
                cut = await served.ask(post(b"private", path))
                assert not cut.endswith(b"0\r\n\r\n"), "the client must see that the stream is incomplete"
            for path in ("/short", "/long"):
                assert b"abcde" not in await served.ask(post(b"private", path)), "its client would read on"
            assert served.server.counters.errors == len(paths) + 3

    run_on(loop, main())
    assert "private" not in caplog.text
    assert "ValueError at" in caplog.text


def test_abort_cuts_the_connection_and_misuse_is_an_error() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/twice":
            responder.send(200)
            with pytest.raises(RuntimeError, match="has an answer already"):
                responder.send(200)
            with pytest.raises(RuntimeError, match="end"):
                responder.end()
            with pytest.raises(RuntimeError, match="write"):
                responder.write(b"x")
        else:
            responder.abort()

    async def main() -> None:
        async with serving(handler) as served:
            assert await served.ask(get("/")) == b""
            assert (await served.ask(get("/twice", CLOSE))).startswith(b"HTTP/1.1 200")
            assert served.server.counters.errors == 0
            assert served.server.counters.disconnects == 0

    run_on("asyncio", main())


def test_check_of_the_head_that_fails_is_counted() -> None:
    def check(_: HttpRequest) -> None:
        raise KeyError("private")

    async def main() -> None:
        async with serving(Echo(), check_head=check) as served:
            answer = await served.ask(get("/", CLOSE))
            assert answer.startswith(b"HTTP/1.1 500")
            assert b"private" not in answer
            assert served.server.counters.errors == 1

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_are_sent_at_once(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo()) as served:
            raw = await served.connect()
            await until(lambda: served.server.connections)
            (connection,) = served.server.connections
            own = connection.transport.get_extra_info("socket")
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("problem", [HttpError(504, "too late", "timeout"), KeyError("x"), None])
def test_a_stream_of_events_whose_handler_fails_ends_with_an_error(problem: Exception | None) -> None:
    """Any other answer is cut, as its client cannot be told."""

    async def handler(request: HttpRequest, responder: Responder) -> None:
        kind = b"text/event-stream" if request.path == "/events" else b"text/plain"
        responder.start(200, [(b"content-type", kind)])
        responder.write(b"data: half")
        if problem is not None:
            raise problem

    async def test() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get("/events"))
            said = await raw.reader.readuntil(b"0\r\n\r\n")
            assert b"data: half" in said
            assert (b'"code":"timeout"' if isinstance(problem, HttpError) else b"internal error") in said
            assert said.endswith(b"\n\n\r\n0\r\n\r\n")
            raw.send(get("/text"))
            assert not (await raw.rest()).endswith(b"0\r\n\r\n")

    run_on("asyncio", test())
