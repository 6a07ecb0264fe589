"""The client against servers that fail, stall and misbehave; raw sockets on the other side."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.net.http1 import Upstream, UpstreamError, UpstreamLimits
from coterie.net.http1 import upstream as upstream_module
from coterie.net.processes import free_port
from http1_peers import Clock, Spoken, client, fails, run_on, saying, scripted, until

LOOPS = ["asyncio", "uvloop"]
CERTIFICATE = Path(__file__).with_name("localhost.pem")
OK = b"HTTP/1.1 200 OK\r\n"


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


@pytest.mark.parametrize("loop", LOOPS)
def test_https_servers_are_verified(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        body = b"x" * 2_000_000
        script = saying(OK + b"Content-Length: %d\r\n\r\n" % len(body), body, then=Spoken.gone)
        async with scripted(script, context) as plain:
            url = plain.replace("http://127.0.0.1", "https://localhost")
            assert (await fails(url)).kind == "connect", "nobody vouches for it"
            monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
            async with client(url) as upstream:
                assert await (await upstream.send("POST", "/", [], b"x")).read() == body
            assert (await fails(plain)).kind == "reset"

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_sweeps_happen_by_themselves_on_a_connection_of_any_age(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "SWEEP_S", 0.01)

    async def main() -> None:
        async with scripted(saying(then=Spoken.gone)) as url:
            upstream = Upstream(url, UpstreamLimits(head_s=0.05))
            for _ in range(2):  # the second connection is opened after the first sweeper has ended
                with pytest.raises(UpstreamError, match="no answer in time"):
                    await upstream.send("GET", "/", [])
                await until(lambda: upstream._sweeper is None)
            await upstream.close()

    run_on(loop, main())


def test_client_that_is_closed_while_it_connects_keeps_nothing() -> None:
    async def main() -> None:
        async with scripted(saying(then=Spoken.gone)) as url, client(url) as upstream:
            asked = asyncio.create_task(upstream.send("GET", "/", []))
            await asyncio.sleep(0)
            await upstream.close()
            with pytest.raises(UpstreamError):
                await asked
            await until(lambda: not upstream.connections)

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_giving_up_a_server_ends_what_waits_for_a_first_byte(loop: str) -> None:
    """Requests of one method: without a head, or with a head and no body. Those whose answers have begun go on."""
    head, go, gone = OK + b"Content-Length: 2\r\n\r\n", asyncio.Event(), asyncio.Event()

    async def script(spoken: Spoken) -> None:
        asked = await spoken.request()
        if b" /silent " in asked:
            await spoken.gone()
            gone.set()
            return
        spoken.say(head + (b"h" if b" /begun " in asked else b""))
        await go.wait()
        spoken.say(b"i" if b" /begun " in asked else b"hi")
        await spoken.gone()

    async def main() -> None:
        async with scripted(script) as url, client(url) as upstream:
            silent = asyncio.create_task(upstream.send("POST", "/silent", []))
            headed, begun, other = [
                await upstream.send(method, path, [])
                for method, path in (("POST", "/headed"), ("POST", "/begun"), ("GET", "/headed"))
            ]
            assert await anext(begun) == b"h"
            await until(lambda: sum(one.waits for one in upstream.connections) == 3)
            upstream.give_up("POST")
            for one, answered in ((silent, False), (headed.read(), True)):
                with pytest.raises(UpstreamError) as error:
                    await one
                assert (error.value.kind, error.value.answered) == ("unhealthy", answered)
            await gone.wait()
            go.set()
            assert (await begun.read(), await other.read()) == (b"i", b"hi")
            upstream.give_up("POST")
            assert len(upstream.connections) == 2, "unused connections stay"

    run_on(loop, main())


def test_a_head_alone_does_not_shorten_the_wait_for_a_first_piece() -> None:
    """Engines send the head of a stream at once: the time between pieces counts from the first piece on."""
    begin = asyncio.Event()

    async def script(spoken: Spoken) -> None:
        await spoken.request()
        spoken.say(OK + b"Content-Length: 2\r\n\r\n")
        await begin.wait()
        spoken.say(b"h")
        await spoken.gone()

    async def main() -> None:
        clock = Clock()
        async with scripted(script) as url, client(url, UpstreamLimits(head_s=60.0, idle_s=5.0), clock) as upstream:
            late = await upstream.send("POST", "/", [])
            clock.now += 50.0
            upstream.sweep()
            begin.set()
            assert await anext(late) == b"h"
            clock.now += 6.0
            upstream.sweep()
            with pytest.raises(UpstreamError, match="within"):
                await anext(late)
            begin.clear()
            never = await upstream.send("POST", "/", [])
            clock.now += 61.0
            upstream.sweep()
            with pytest.raises(UpstreamError, match="no answer in time"):
                await anext(never)

    run_on("asyncio", main())
