"""How a server stops: it accepts no more, lets requests end, and cuts what does not."""

from __future__ import annotations

import asyncio
import socket

import pytest

from coterie.net.http1 import HttpRequest, HttpServer, Limits, Responder
from http1_peers import Echo, Raw, get, post, run_on, serving, until

LOOPS = ["asyncio", "uvloop"]


@pytest.mark.parametrize("loop", LOOPS)
def test_close_lets_requests_end_and_answers_new_ones_until_then(loop: str) -> None:
    """Those on kept connections had reset, those on new ones found a closed port."""

    async def main() -> None:
        begun, may_answer = asyncio.Event(), asyncio.Event()

        async def handler(request: HttpRequest, responder: Responder) -> None:
            if request.path != "/long":
                responder.send(503 if served.server.draining else 200)
                return
            begun.set()
            await may_answer.wait()
            responder.send(200, b"{}")

        async with serving(handler) as served:
            kept, opened, busy = [await served.connect() for _ in range(3)]
            kept.send(get())
            await kept.answer()
            busy.send(get("/long") + get("/ahead"))
            await begun.wait()
            await until(lambda: len(served.server.connections) == 3)
            closing = asyncio.create_task(served.server.close(60))
            assert await kept.rest() == b"", "its next request is sent elsewhere"
            for raw in (opened, await served.connect()):
                raw.send(get())
                answer = await raw.rest()
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"connection: close" in answer
            silent = await served.connect()
            may_answer.set()
            answer = await busy.rest()
            assert answer.count(b"HTTP/1.1 200") == 1
            assert b"connection: close" in answer
            assert await closing == 0
            assert await silent.rest() == b""
            with pytest.raises(OSError, match=r"\[Errno"):
                await served.connect()

    run_on(loop, main())


def test_a_stream_that_began_before_the_drain_ends_its_connection() -> None:
    """Its head had promised to keep the connection, so that the drain waited until an idle client was timed out."""

    async def main() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            responder.start(200, [])
            await responder.drain()
            begun.set()
            await may_end.wait()
            responder.end()

        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get())
            await begun.wait()
            closing = asyncio.create_task(served.server.close(60))
            await until(lambda: served.server.draining)
            may_end.set()
            assert (await raw.rest()).endswith(b"0\r\n\r\n")
            assert await closing == 0

    run_on("asyncio", main())


def test_close_waits_for_requests_that_have_begun_to_come() -> None:
    async def main() -> None:
        async with serving(Echo()) as served:
            in_head, in_body = await served.connect(), await served.connect()
            in_head.send(post(b"body")[:10])
            in_body.send(post(b"body")[:-1])
            await until(lambda: len(served.server.connections) == 2)
            await until(lambda: all(one.quiet_bytes or one.body for one in served.server.connections))
            closing = asyncio.create_task(served.server.close(60))
            await until(lambda: served.server.draining)
            in_head.send(post(b"body")[10:])
            in_body.send(b"y")
            for raw in (in_head, in_body):
                assert b"connection: close" in await raw.rest()
            await closing

    run_on("asyncio", main())


def test_close_waits_for_handlers_that_go_on_after_their_answer() -> None:
    async def main() -> None:
        done: list[str] = []
        release = asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            responder.send(200)
            await release.wait()
            done.append("books kept")

        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get("/", b"Connection: close"))
            await raw.rest()
            await until(lambda: served.server.tasks)
            closing = asyncio.create_task(served.server.close(60))
            await until(lambda: served.server.draining)
            release.set()
            await closing
            assert done == ["books kept"]

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_close_cuts_what_does_not_end(loop: str) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            responder.start(200, [])
            responder.write(b"part")
            await responder.drain()
            begun.set()
            await asyncio.Event().wait()

        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get())
            await begun.wait()
            await served.server.close(0.01)
            assert not (await raw.rest()).endswith(b"0\r\n\r\n")

    run_on(loop, main())


def test_sweeps_happen_by_themselves() -> None:
    async def main() -> None:
        server = HttpServer(Echo(), Limits(head_s=0.05))
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        raw = await Raw.open(listener.getsockname()[1])
        raw.send(b"GET / HT")
        await raw.rest()
        assert server.counters.timeouts["head"] == 1
        await server.close(0)

    run_on("asyncio", main())
