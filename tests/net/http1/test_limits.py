"""Whatever a client sends, holds back or leaves unread: it ends, and takes bounded memory."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from coterie.errors import ConfigError
from coterie.net.http1 import HttpError, HttpRequest, Limits, Responder
from http1_peers import Echo, Raw, Served, chunked, get, post, run_on, serving, until

LOOPS = ["asyncio", "uvloop"]
CHUNKED = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "started", [get().removesuffix(b"\r\n"), b"G", b"\r\n"], ids=["headers", "first byte", "blank line"]
)
def test_half_a_head_times_out_however_it_trickles(loop: str, started: bytes) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(head_s=10)) as served:
            raw = await served.connect()
            raw.send(started)
            await until(lambda: any(one.quiet_bytes for one in served.server.connections))
            (connection,) = served.server.connections
            served.later(9)
            if started != b"\r\n":
                raw.send(b"X: y" if started != b"G" else b"E")
                await until(lambda: connection.quiet_bytes > len(started))
            served.later(0.9)
            assert connection in served.server.connections
            served.later(0.2)
            assert (await raw.rest()).startswith(b"HTTP/1.1 408")
            assert served.server.counters.timeouts == {"head": 1}

    run_on(loop, main())


def test_second_head_has_its_own_time() -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(head_s=10, idle_s=75)) as served:
            raw = await served.connect()
            raw.send(get())
            await raw.answer()
            served.later(70)
            raw.send(get().removesuffix(b"\r\n"))
            (connection,) = served.server.connections
            await until(lambda: connection.deadline_kind == "head")
            served.later(9)
            raw.send(b"\r\n")
            await raw.answer()
            served.later(74)
            raw.send(b"GET")
            await until(lambda: connection.deadline_kind == "head")
            served.later(11)
            assert (await raw.rest()).startswith(b"HTTP/1.1 408")

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_silent_connections_are_closed_without_an_answer(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo()) as served:
            new, kept = await served.connect(), await served.connect()
            kept.send(get())
            await kept.answer()
            await until(lambda: len(served.server.connections) == 2)
            served.later(10)
            assert await new.rest() == b""
            served.later(64)
            assert len(served.server.connections) == 1
            served.later(1)
            assert await kept.rest() == b""
            assert served.server.counters.timeouts == {"head": 1, "idle": 1}

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["length", "chunked"])
def test_half_a_body_times_out_however_it_trickles(loop: str, how: str) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(body_s=30)) as served:
            raw = await served.connect()
            raw.send(post(b"half of it").removesuffix(b"of it") if how == "length" else CHUNKED + b"5\r\nhalf")
            await until(lambda: any(one.deadline_kind == "body" for one in served.server.connections))
            (connection,) = served.server.connections
            served.later(29)
            before = len(connection.body)
            raw.send(b" ")
            await until(lambda: len(connection.body) > before)
            served.later(2)
            assert (await raw.rest()).startswith(b"HTTP/1.1 408")
            assert served.server.counters.timeouts == {"body": 1}

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_handlers_may_take_longer_than_their_requests(loop: str) -> None:
    async def main() -> None:
        begun, may_answer = asyncio.Event(), asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            begun.set()
            await may_answer.wait()
            responder.send(200)

        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get())
            await begun.wait()
            served.later(10_000)
            may_answer.set()
            assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            raw.close()
            assert not served.server.counters.timeouts

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ended", [False, True], ids=["streaming", "ended"])
def test_unread_answer_is_cut(loop: str, ended: bool) -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def handler(_: HttpRequest, responder: Responder) -> None:
            if ended:
                responder.send(200, b"x" * (32 << 20))
                return
            responder.start(200, [])
            try:
                while True:
                    responder.write(b"x" * 100_000)
                    await responder.drain()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with serving(handler, Limits(write_s=60)) as served:
            raw = await served.connect()
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined] # the reader's own
            raw.send(get())
            await until(lambda: any(one.room is not None for one in served.server.connections))
            served.later(59)
            await asyncio.sleep(0)
            assert served.server.connections
            served.later(2)
            await until(lambda: not served.server.connections)
            if not ended:
                await cancelled.wait()
            assert served.server.counters.timeouts["write"] == 1
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_over_the_cap_are_told_to_come_again(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(connections=2)) as served:
            held = [await served.connect() for _ in range(2)]
            await until(lambda: len(served.server.connections) == 2)
            for _ in range(5):
                refused = await served.ask(get())
                assert refused.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1\r\n" in refused
                assert b"too many connections" in refused
            assert served.server.counters.refused == 5
            held[0].close()
            await until(lambda: len(served.server.connections) == 1)
            assert (await served.ask(get("/", b"Connection: close"))).startswith(b"HTTP/1.1 200")
            held[1].close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_refused_connections_do_not_pile_up(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(connections=1)) as served:
            raws = [await served.connect() for _ in range(150)]
            await until(lambda: served.server.counters.refused == 149)
            assert len(served.server.connections) == 1
            assert len(served.server.lingering) <= 64
            served.later(5)
            await until(lambda: not served.server.lingering)
            assert not served.server.counters.timeouts, "a refused connection is counted once"
            for raw in raws:
                raw.close()

    run_on(loop, main())


def test_connections_of_one_address_are_capped() -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(connections_per_peer=1)) as served:
            held = await served.connect()
            await until(lambda: served.server.connections)
            assert b"from this address" in await served.ask(get())
            held.close()
            await until(lambda: not served.server.connections)
            assert (await served.ask(get("/", b"Connection: close"))).startswith(b"HTTP/1.1 200")

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_too_long_a_body_is_refused_before_it_is_read(loop: str) -> None:
    def check(request: HttpRequest) -> int | None:
        return 10 if request.path == "/small" else None

    async def main() -> None:
        echo = Echo()
        async with serving(echo, Limits(body_bytes=1000), check) as served:
            for path, length in (("/", 1001), ("/small", 11), ("/", 10**15)):
                head = b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length)
                raw = await served.connect()
                raw.send(head)  # and no byte of the body
                assert (await raw.answer()).startswith(b"HTTP/1.1 413")
                raw.close()
            assert not echo.seen
            assert (await served.ask(post(b"x" * 10, "/small", b"Connection: close"))).startswith(b"HTTP/1.1 200")
            assert (await served.ask(post(b"x" * 1000, "/", b"Connection: close"))).startswith(b"HTTP/1.1 200")

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_refusal_reaches_a_client_that_is_still_sending(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(body_bytes=1000)) as served:
            assert (await served.ask(post(b"x" * 20_000_000))).startswith(b"HTTP/1.1 413")

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_chunked_body_is_counted_as_it_comes(loop: str) -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo, Limits(body_bytes=1000)) as served:
            raw = await served.connect()
            raw.send(CHUNKED + chunked(b"x" * 1000, 100))
            assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            raw.send(CHUNKED + chunked(b"x" * 1001, 100).removesuffix(b"0\r\n\r\n"))
            assert (await raw.rest()).startswith(b"HTTP/1.1 413")
            assert len(echo.seen) == 1

    run_on(loop, main())


def test_encoded_bodies_are_refused() -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served:
            for encoding in (b"gzip", b"deflate", b"br", b"gzip, identity", b"x"):
                answer = await served.ask(post(b"x", "/", b"Content-Encoding: " + encoding, b"Connection: close"))
                assert answer.startswith(b"HTTP/1.1 415")
            assert not echo.seen
            identity = post(b"x", "/", b"Content-Encoding: Identity", b"Connection: close")
            assert (await served.ask(identity)).startswith(b"HTTP/1.1 200")

    run_on("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "message",
    [
        get("/" + "x" * 40_000),
        get("/", b"X: " + b"y" * 40_000),
        get("/", *[b"X%d: %b" % (n, b"y" * 500) for n in range(80)]),
        get("/", *[b"X%d: y" % n for n in range(101)]),
        b"GET / HTTP/1.1\r\n" + b"X" * 40_000,
        b"\r\n" * 20_000,
        CHUNKED + b"0\r\nX: " + b"y" * 40_000,
        CHUNKED + b"5;" + b"x" * 40_000,
    ],
    ids=["url", "value", "headers", "count", "name", "blank lines", "trailer", "chunk extension"],
)
def test_heads_and_what_is_like_them_are_bounded(loop: str, message: bytes) -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served:
            assert (await served.ask(message)).startswith(b"HTTP/1.1 431")
            assert not echo.seen

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_refusal_by_the_head_keeps_the_connection_if_the_body_is_small(loop: str) -> None:
    def check(request: HttpRequest) -> None:
        if request.header(b"authorization") is None:
            raise HttpError(401, "no key")

    async def main() -> None:
        echo = Echo()
        async with serving(echo, check_head=check) as served:
            raw = await served.connect()
            head, _, body = post(b"x" * 1000).partition(b"\r\n\r\n")
            raw.send(head + b"\r\n\r\n")
            assert (await raw.answer()).startswith(b"HTTP/1.1 401"), "answered before the body has come"
            raw.send(body + get())
            assert (await raw.answer()).startswith(b"HTTP/1.1 401")
            raw.send(post(b"hello", "/", b"Authorization: yes"))
            assert (await raw.answer()).endswith(b"POST / hello")
            assert len(echo.seen) == 1
            raw.send(post(b"x" * 1000).removesuffix(b"x"))
            assert (await raw.answer()).startswith(b"HTTP/1.1 401")
            served.later(31)
            assert await raw.rest() == b"", "the rest of a refused body is not waited for without end"
            big = await served.ask(post(b"x" * 100_000))
            assert big.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in big

    run_on(loop, main())


def test_many_refusals_sent_ahead_do_not_recurse() -> None:
    def check(_: HttpRequest) -> None:
        raise HttpError(401, "no key")

    async def main() -> None:
        async with serving(Echo(), check_head=check) as served:
            answers = await served.ask(b"GET / HTTP/1.1\r\nHost:\r\n\r\n" * 2000 + get("/", b"Connection: close"))
            assert answers.count(b"HTTP/1.1 401") == 2001

    run_on("asyncio", main())


@pytest.mark.parametrize("wrong", [{"head_bytes": 0}, {"connections": 0}, {"head_s": 0.0}, {"body_bytes": -1}])
def test_limits_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize("loop", LOOPS)
def test_unread_answers_hold_back_the_next_request(loop: str) -> None:
    async def handler(_: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"x" * 100_000)

    async def main() -> None:
        async with serving(handler) as served:
            raw = await served.connect()
            raw.send(get() * 400)
            await until(lambda: any(one.room is not None for one in served.server.connections))
            (connection,) = served.server.connections
            assert connection.transport.get_write_buffer_size() < 65_536 + 101_000
            assert served.server.counters.requests < 400
            for _ in range(400):
                assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            raw.close()

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_slow_clients_that_take_all_connections_lose_them(loop: str) -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(connections=100)) as served:
            slow = [await served.connect() for _ in range(100)]
            for number, raw in enumerate(slow):
                raw.send(post(b"body", "/", b"X: y")[: 1 + number % 50])
            await until(lambda: sum(bool(one.quiet_bytes) for one in served.server.connections) == 100)
            assert (await served.ask(get())).startswith(b"HTTP/1.1 503")
            served.later(10)
            for raw in slow:
                assert (await raw.rest()).startswith(b"HTTP/1.1 408")
            await until(lambda: not served.server.connections)
            assert (await served.ask(get("/", b"Connection: close"))).startswith(b"HTTP/1.1 200")
            assert served.server.counters.timeouts == {"head": 100}

    run_on(loop, main())


def test_tiny_chunks_take_the_memory_of_their_bytes() -> None:
    async def main() -> None:
        size = 400_000
        async with serving(Echo()) as served:
            raw = await served.connect()
            raw.send(CHUNKED + chunked(b"xy" * (size // 2), 2).removesuffix(b"0\r\n\r\n"))
            await until(lambda: any(len(one.body) == size for one in served.server.connections))
            (connection,) = served.server.connections
            assert sys.getsizeof(connection.body) < 1.5 * size
            raw.send(b"0\r\n\r\n")
            assert len(await raw.answer()) > size

    run_on("asyncio", main())


async def connected(served: Served, address: str) -> Raw:
    served.clients.append(Raw(*await asyncio.open_connection("127.0.0.1", served.port, local_addr=(address, 0))))
    return served.clients[-1]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("busy", [False, True])
def test_a_client_that_takes_all_connections_leaves_places_for_others(loop: str, busy: bool) -> None:
    """Others were reset for 3 s. Idle connections of the greedy one go first; a reserve is there if it has none."""
    go = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/held":
            await go.wait()
        responder.send(200)

    async def main() -> None:
        async with serving(handler, Limits(connections=16)) as served:
            server = served.server
            greedy = [await connected(served, "127.0.0.2") for _ in range(16)]
            for raw in greedy:
                raw.send(get("/held") if busy else b"")
            await until(lambda: len(server.connections) == 16 and server.counters.requests == (16 if busy else 0))
            refused = [await connected(served, "127.0.0.2") for _ in range(200)]
            others = [await connected(served, f"127.0.0.{3 + number}") for number in range(2 if busy else 5)]
            for raw in others:
                raw.send(get())
                assert (await raw.answer()).startswith(b"HTTP/1.1 200")
            for raw in refused:
                said = await raw.rest()
                assert said.startswith(b"HTTP/1.1 503")
                assert b"too many connections" in said
            if busy:
                beyond = await connected(served, "127.0.0.9")
                assert (await beyond.rest()).startswith(b"HTTP/1.1 503"), "the reserve has an end"
                assert server.peers["127.0.0.2"] == 16, "what it asked for is answered"
            else:
                await until(lambda: server.peers["127.0.0.2"] == 11)
            go.set()
            for raw in (*greedy, *others):
                raw.close()
            await until(lambda: not server.connections)

    run_on(loop, main())


def test_random_clients_share_the_connections() -> None:
    """Whatever two addresses open, hold and close, a third is served, or told why not; the bound holds."""

    async def handler(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/held":
            await asyncio.Event().wait()
        responder.send(200)

    async def main() -> None:
        rng = random.Random(26)
        limits = Limits(connections=12, head_s=1e6, body_s=1e6, idle_s=1e6, write_s=1e6)
        async with serving(handler, limits) as served:
            opened: list[Raw] = []
            statuses = set()
            for _ in range(300):
                raw = await connected(served, f"127.0.0.{rng.choice((2, 2, 2, 2, 3))}")
                raw.send(rng.choice([b"", get("/held"), get(), get()[:9]]))
                opened.append(raw)
                if rng.random() < 0.3:
                    opened.pop(rng.randrange(len(opened))).close()
                modest = await connected(served, "127.0.0.4")
                modest.send(get("/", b"Connection: close"))
                statuses.add((await modest.rest())[:12])
                served.later(2.0)  # those that were refused are gone
                assert len(served.server.connections) <= 14, "of which one is closing"
            assert statuses <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
            assert b"HTTP/1.1 200" in statuses
            for raw in opened:
                raw.close()
            await until(lambda: not served.server.connections)

    run_on("asyncio", main())
