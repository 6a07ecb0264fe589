"""Random bytes in random splits: never an unhandled exception, a hang, or a task or connection left behind.

The seed of a failure is in its message. Valid messages in random forms and splits are read as they were meant.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.net.http1 import HttpError, HttpRequest, Limits, Responder, Upstream, UpstreamError, UpstreamLimits
from http1_peers import Echo, Raw, Served, Spoken, chunked, get, post, run_on, scripted, serving, until

LOOPS = ["asyncio", "uvloop"]
CASES = 250
AT_A_TIME = 16
CHUNKED = b"Transfer-Encoding: chunked\r\n"
REQUESTS = [
    get("/a?b=c"),
    post(b'{"prompt": "hello"}', "/v1/completions", b"Content-Type: application/json"),
    b"POST / HTTP/1.1\r\nHost: test\r\n" + CHUNKED + b"\r\n" + chunked(b"hello world", 4, b"T: x\r\n"),
    post(b"body", "/", b"Expect: 100-continue"),
    b"HEAD / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n",
    b"OPTIONS * HTTP/1.0\r\n\r\n",
    post(b"x" * 3000, "/", b"Content-Encoding: gzip"),
    get("/stream"),
    get("/refused"),
]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
    b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n" + chunked(b"hello world", 4, b"T: x\r\n"),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
]
SPLICES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"0",
    b"-1",
    b"f" * 17,
    b"chunked",
    CHUNKED,
    b"Content-Length: 7\r\n",
]
SPLICES += [b"\xff\xfe", b"HTTP/1.1", b"\r\n\r\n", b"Connection: close\r\n", b"x" * 5000, b"Upgrade: h2c\r\n", b";a=b"]


def damaged(rng: random.Random, samples: list[bytes]) -> bytes:
    """Join some samples, and cut, repeat, replace and insert bytes in them; or give random bytes."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 2000))
    message = bytearray(b"".join(rng.choices(samples, k=rng.randrange(1, 4))))
    for _ in range(rng.randrange(6)):
        at = rng.randrange(len(message) + 1)
        match rng.randrange(4):
            case 0:
                message[at:at] = rng.choice(SPLICES)
            case 1:
                del message[at : at + rng.randrange(1, 20)]
            case 2:
                message[at : at + 1] = rng.randbytes(1)
            case _:
                message[at:at] = message[at : at + rng.randrange(1, 200)]
    return bytes(message)


def split(rng: random.Random, message: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(message) + 1) for _ in range(rng.choice((0, 1, 2, 5, 40))))
    return [message[low:high] for low, high in zip([0, *cuts], [*cuts, len(message)], strict=True) if low < high]


async def some_at_a_time(case: Callable[[int], Awaitable[None]]) -> None:
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int) -> None:
        async with limit:
            try:
                await case(seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error

    await asyncio.gather(*(one(seed) for seed in range(CASES)))


@pytest.mark.parametrize("loop", LOOPS)
def test_server_survives_damaged_requests(loop: str) -> None:
    def check(request: HttpRequest) -> int | None:
        if request.path == "/refused":
            raise HttpError(403, "no")
        return None

    async def handler(request: HttpRequest, responder: Responder) -> None:
        if request.path != "/stream":
            responder.send(200, request.body)
            return
        responder.start(200, [])
        for _ in range(3):
            responder.write(b"piece")
            await responder.drain()
            await asyncio.sleep(0)
        responder.end()

    async def main() -> None:
        async with serving(handler, Limits(head_bytes=4000, headers=20, body_bytes=2500), check) as served:

            async def case(seed: int) -> None:
                rng = random.Random(seed)
                raw = await served.connect()
                for piece in split(rng, damaged(rng, REQUESTS)):
                    raw.send(piece)
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)
                if rng.random() < 0.2:
                    raw.close()
                    return
                if raw.writer.can_write_eof() and not raw.writer.is_closing():
                    raw.writer.write_eof()
                for answer in re.findall(rb"HTTP/1\.1 (\d+)", await raw.rest()):
                    assert answer in (b"100", b"200", b"400", b"403", b"413", b"415", b"417", b"431"), answer

            await some_at_a_time(case)
            await until(lambda: not served.server.connections)
            assert served.server.counters.errors == 0
            assert served.server.counters.malformed > CASES / 10
            assert served.server.counters.requests > CASES / 10

    run_on(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_client_survives_damaged_answers(loop: str) -> None:
    kinds: dict[str, int] = {}

    async def main() -> None:
        async def script(spoken: Spoken) -> None:
            """Each request names its seed."""
            while True:
                head = await spoken.request()
                rng = random.Random(int(head.split(b" ")[1][1:]))
                for piece in split(rng, damaged(rng, ANSWERS)):
                    spoken.say(piece)
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)
                if rng.random() < 0.5:
                    return

        async with scripted(script) as url:
            upstream = Upstream(url, UpstreamLimits(head_bytes=4000, body_bytes=6000), clock := _Later())

            async def case(seed: int) -> None:
                try:
                    answer = await upstream.send("POST", f"/{seed}", [], b"x")
                    assert 200 <= answer.status <= 999
                    if seed % 7:
                        assert isinstance(await answer.read(), bytes)
                    else:
                        answer.close()
                    kinds["read"] = kinds.get("read", 0) + 1
                except UpstreamError as error:
                    kinds[error.kind] = kinds.get(error.kind, 0) + 1

            cases = asyncio.create_task(some_at_a_time(case))
            while not cases.done():  # an answer that a server holds back ends by its deadline
                await asyncio.sleep(0.02)
                clock.now += 60.0
                upstream.sweep()
            await cases
            await upstream.close()
            assert not upstream.connections

    run_on(loop, main())
    assert set(kinds) <= {"read", "reset", "protocol", "timeout", "too_large"}, kinds
    assert {"read", "reset", "protocol"} <= set(kinds), kinds


class _Later:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@st.composite
def valid_requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Bytes of a request, and the end of the answer that Echo gives to it."""
    body = draw(st.binary(max_size=300) | st.binary(min_size=1).map(lambda one: (one * 6000)[:6000]))
    path = "/" + draw(st.text("abc/%20.", max_size=12))
    headers = draw(
        st.lists(st.sampled_from([b"X: y", b"accept:  */* ", b"COOKIE:", b"Connection: keep-alive"]), max_size=3)
    )
    form = draw(st.sampled_from(["get", "length", "chunks"]))
    if form == "get":
        return get(path, *headers), b"GET %b " % path.encode()
    answer = b"POST %b " % path.encode() + body
    if form == "length":
        return post(body, path, *headers), answer
    head = b"\r\n".join([b"POST %b HTTP/1.1" % path.encode(), b"Host: t", b"TRANSFER-ENCODING: Chunked", *headers])
    trailer = draw(st.sampled_from([b"", b"T: v\r\n"]))
    return head + b"\r\n\r\n" + chunked(body, draw(st.integers(1, 400)), trailer), answer


@settings(max_examples=60)
@given(st.lists(valid_requests(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_valid_requests_are_read_as_meant_in_any_split(requests: list[tuple[bytes, bytes]], rng: random.Random) -> None:
    async def main() -> None:
        async with serving(Echo()) as served:
            raw = await served.connect()
            for piece in split(rng, b"".join(message for message, _ in requests)):
                raw.send(piece)
                await asyncio.sleep(0)
            for _, expected in requests:
                head, _, body = (await raw.answer()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert body == expected
            raw.close()

    run_on("asyncio", main())


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.binary(max_size=3000), st.sampled_from(["length", "chunks", "until closed"]), st.integers(1, 500)),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_valid_answers_are_read_as_meant_in_any_split(
    answers: list[tuple[bytes, str, int]], rng: random.Random
) -> None:
    async def main() -> None:
        left = list(answers)

        async def script(spoken: Spoken) -> None:
            while left:
                await spoken.request()
                body, form, size = left.pop(0)
                framing = {"length": b"Content-Length: %d\r\n" % len(body), "chunks": CHUNKED, "until closed": b""}[
                    form
                ]
                message = (
                    b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n" + (chunked(body, size) if form == "chunks" else body)
                )
                for piece in split(rng, message):
                    spoken.say(piece)
                    await asyncio.sleep(0)
                if form == "until closed":
                    return
            await spoken.gone()

        async with scripted(script) as url:
            upstream = Upstream(url)
            for number, (body, _, _) in enumerate(answers):
                answer = await upstream.send("POST", "/", [], b"x")
                found = await answer.read() if number % 2 else b"".join([piece async for piece in answer])
                assert found == body
            await upstream.close()

    run_on("asyncio", main())


def test_many_clients_that_come_and_go_leave_nothing() -> None:
    async def main() -> None:
        async with serving(Echo(), Limits(connections=50)) as served:

            async def case(seed: int) -> None:
                await _come_and_go(served, random.Random(seed))

            await some_at_a_time(case)
            await until(lambda: not served.server.connections)

    run_on("asyncio", main())


async def _come_and_go(served: Served, rng: random.Random) -> None:
    raw: Raw = await served.connect()
    for _ in range(rng.randrange(3)):
        raw.send(post(b"x" * rng.randrange(5000)))
        if rng.random() < 0.5:
            await raw.answer()
    raw.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_clients_that_leave_a_proxy_at_any_moment_leave_nothing(loop: str) -> None:
    """Client to proxy to worker: whoever leaves, all that worked for it ends."""

    async def work(request: HttpRequest, responder: Responder) -> None:
        rng = random.Random(int(request.path[1:]))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        responder.start(200, [])
        for _ in range(rng.randrange(20)):
            responder.write(b"x" * rng.randrange(1, 20_000))
            await responder.drain()
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            responder.abort()
        elif rng.random() < 0.1:
            await asyncio.Event().wait()  # until its client leaves
        else:
            responder.end()

    async def main() -> None:
        async with serving(work) as worker:
            upstream = Upstream(f"http://127.0.0.1:{worker.port}")

            async def forward(request: HttpRequest, responder: Responder) -> None:
                try:
                    answer = await upstream.send(request.method, request.path, [], request.body)
                    responder.start(answer.status, [])
                    async for piece in answer:
                        responder.write(piece)
                        await responder.drain()
                    responder.end()
                except UpstreamError as error:
                    raise HttpError(502, error.kind) from None

            async with serving(forward) as proxy:

                async def case(seed: int) -> None:
                    rng = random.Random(seed)
                    raw = await proxy.connect()
                    raw.send(post(b"x" * rng.randrange(3000), f"/{seed}"))
                    for _ in range(rng.randrange(60)):
                        await asyncio.sleep(0)
                    raw.close()

                await some_at_a_time(case)
                await until(lambda: not proxy.server.connections and not proxy.server.tasks)
                await until(lambda: not worker.server.tasks)
                assert proxy.server.counters.errors == worker.server.counters.errors == 0
                assert proxy.server.counters.disconnects > 0
            await upstream.close()
            await until(lambda: not worker.server.connections and not worker.server.tasks)

    run_on(loop, main())
