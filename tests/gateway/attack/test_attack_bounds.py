"""Attacks by size, slowness and shape: each is refused or waits alone, and the others are served meanwhile."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from canned_workers import Canned, canned_workers, held
from coterie.engines.tiny import tiny_model_path
from coterie.gateway.config import LimitSettings
from coterie.gateway.gateway import MOST_BODY
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import Run, config_of, gateway, idle, run, settled
from http1_peers import Clock, Raw, until

HOST = b"Host: 127.0.0.1"


def asking(body: bytes, *lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = [b"POST %b HTTP/1.1" % path, HOST, b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def status_of(raw: Raw) -> int:
    return int((await raw.answer()).split()[1])


async def served(found: Run) -> None:
    """Others are served."""
    raw = await Raw.open(found.port)
    raw.send(asking(b'{"prompt":"x"}'))
    assert await status_of(raw) == 200
    raw.close()


def test_gzip_bomb() -> None:
    """51 KB took 2.6 GB: nothing is ever inflated."""

    async def test() -> None:
        bomb = gzip.compress(b'{"prompt":"' + b"x" * (8 << 20) + b'"}')
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            for encoding in (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"GZIP", b"x-gzip"):
                raw = await Raw.open(found.port)
                raw.send(asking(bomb, b"Content-Encoding: " + encoding))
                assert await status_of(raw) == 415
                raw.close()
            raw = await Raw.open(found.port)
            raw.send(asking(bomb, b"Transfer-Encoding: gzip"))
            assert await status_of(raw) == 400
            raw.close()
            assert not worker.completions
            idle(found)

    run(test)


@pytest.mark.parametrize(
    "half", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX", None]
)
def test_slow_loris(half: bytes | None) -> None:
    """1,500 half-sent requests were held for ever. The clock is the test's: they end when their time has passed."""
    half = asking(b'{"prompt":"x"}')[:-3] if half is None else half

    async def test() -> None:
        limits = LimitSettings(connections=200)
        async with canned_workers("a") as (worker,), gateway(config_of([worker], limits=limits)) as found:
            server = found.running.server
            server.clock = clock = Clock()
            many = [await Raw.open(found.port) for _ in range(150)]
            for raw in many:
                raw.send(half)
            await until(lambda: len(server.connections) == 150)
            await served(found)
            assert not worker.completions[1:]
            await until(lambda: all(one.quiet_bytes or not half or one.phase == "body" for one in server.connections))
            clock.now += 31.0
            server.sweep()
            answers = await asyncio.gather(*(raw.rest() for raw in many))
            assert {one.partition(b"\r\n")[0].partition(b" ")[2][:3] for one in answers} == (
                {b"408"} if half else {b""}
            )
            await until(lambda: not server.connections)
            assert sum(server.counters.timeouts.values()) == 150
            await served(found)
            idle(found)

    run(test)


def test_more_connections_than_may_be() -> None:
    async def test() -> None:
        limits = LimitSettings(connections=20)
        async with canned_workers("a") as (worker,), gateway(config_of([worker], limits=limits)) as found:
            many = [await Raw.open(found.port) for _ in range(20)]
            await until(lambda: len(found.running.server.connections) == 20)
            over = await Raw.open(found.port)
            got = await over.rest()
            assert got.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in got
            for raw in many:
                raw.close()
            await until(lambda: not found.running.server.connections)
            await served(found)
            assert found.metrics["coterie_gateway_connections_refused_total"] == 1

    run(test)


def test_a_long_word_holds_up_no_one() -> None:
    """One word of 100 KB cost the tokenizer a minute, on the event loop."""

    async def test() -> None:
        async with canned_workers("a") as (worker,):
            config = config_of([worker], tokenizer=str(tiny_model_path()), limits=LimitSettings(body_bytes=1 << 20))
            async with gateway(config) as found:
                words = [b"x" * 100_000, b"ab" * 50_000, "\u00fc".encode() * 50_000, b" " * 100_000, b"'" * 100_000]
                slow = []
                for word in words:
                    raw = await Raw.open(found.port)
                    raw.send(asking(b'{"prompt":"' + word + b'"}'))
                    slow.append(raw)
                for _ in range(20):
                    await served(found)
                for raw in slow:
                    assert await status_of(raw) == 200
                    raw.close()
                await settled(found)

    run(test)


def test_floods_of_headers_and_bodies() -> None:
    async def test() -> None:
        limits = LimitSettings(body_bytes=100_000)
        async with canned_workers("a") as (worker,), gateway(config_of([worker], limits=limits)) as found:
            head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"\r\n"
            for data, status in (
                (head + b"".join(b"X-%d: 1\r\n" % one for one in range(200)) + b"\r\n", 431),
                (head + b"X: " + b"x" * 100_000 + b"\r\n\r\n", 431),
                (head + b"X" * 100_000, 431),
                (b"POST /" + b"x" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n\r\n", 431),
                (head + b"Content-Length: 99999999999\r\n\r\n", 413),
                (head + b"Content-Length: 9%b\r\n\r\n" % (b"9" * 30), 400),
                (head + b"Content-Length: -1\r\n\r\n", 400),
                (head + b"Transfer-Encoding: chunked\r\n\r\n" + b"20000\r\n" + b"x" * 0x20000 + b"\r\n", 413),
                (head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * 100_000 + b"\r\nx\r\n", 431),
                (head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
            ):
                raw = await Raw.open(found.port)
                raw.send(data)
                got = await raw.rest()
                assert got.startswith(b"HTTP/1.1 %d" % status), (data[:80], got[:80])
            assert not worker.completions
            await served(found)
            idle(found)

    run(test)


def test_a_worker_that_lies_about_its_context_does_not_lift_the_limit() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            found.running.parts.pools["decode"].context_tokens = (1 << 31) - 1
            assert found.running.gateway.body_limit == MOST_BODY
            raw = await Raw.open(found.port)
            raw.send(b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY + 1))
            assert await status_of(raw) == 413
            raw.close()

    run(test)


def test_pipelines() -> None:
    """Requests sent ahead are answered in order, few at a time; what follows a broken one is not read."""

    async def test() -> None:
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker])) as found:
            raw = await Raw.open(found.port)
            raw.send(b"".join(asking(b'{"prompt":"%d"}' % one) for one in range(300)))
            await until(lambda: worker.completions)
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(worker.completions) == 1, "one connection has one request in the fleet"
            assert found.running.parts.line.in_use == 1
            worker.go.set()
            for _ in range(300):
                assert await status_of(raw) == 200
            assert [one.body["prompt"] for one in worker.completions] == [str(one) for one in range(300)]
            raw.send(asking(b'{"prompt":"y"}') + b"\x00\x01 broken\r\n\r\n" + asking(b'{"prompt":"never"}'))
            rest = await raw.rest()
            assert rest.count(b"HTTP/1.1 200") == rest.count(b"HTTP/1.1 400") == 1
            assert worker.completions[-1].body["prompt"] == "y"
            await settled(found)

    run(test)


def test_pipelines_that_are_left() -> None:
    async def test() -> None:
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker])) as found:
            many = [await Raw.open(found.port) for _ in range(50)]
            for raw in many:
                raw.send(asking(b'{"prompt":"x"}') * 50)
            await until(lambda: len(worker.completions) == 50)
            for raw in many:
                raw.close()
            await until(lambda: worker.cancelled == 50)
            await settled(found)
            assert len(worker.completions) == 50, "what waited behind them was never begun"

    run(test)


JSON_BOMBS = [
    b"[" * 500_000,
    b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 990 + b"]" * 990 + b"}",
    b'{"kv_transfer_params":1,"prompt":' + b"[" * 970 + b"]" * 970 + b"}",
    b'{"kv_transfer_params":1,"tools":' + b'{"a":' * 980 + b"1" + b"}" * 981,
    b'{"prompt":%b}' % (b"9" * 100_000),
    b'{"prompt":1e999999}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\\ud800\\ud800"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"\xff"}',
    b'{"prompt":"\x00"}',
    b'{"prompt":NaN}',
    b'{"prompt":Infinity}',
    b'{"\\u0000":1}',
    b"{" + b",".join(b'"%d":1' % one for one in range(50_000)) + b"}",
    b"{" + b",".join(b'"a":%d' % one for one in range(50_000)) + b"}",
    b'{"stream":true,"stream":"x"}',
    b'{"a":1}{"a":2}',
    b"\xef\xbb\xbf{}",
    b"{}" + b" " * 100_000,
]


@pytest.mark.parametrize("handshake", ["none", "vllm", "sglang"])
def test_json_bombs(handshake: str) -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers:
            config = config_of(workers, ["both", "both"], handshake=handshake, limits=LimitSettings(body_bytes=1 << 20))
            async with gateway(config) as found:
                for body in JSON_BOMBS:
                    for path in ("/v1/completions", "/v1/chat/completions"):
                        got = await found.client.ask("POST", path, body)
                        assert got.status in (200, 400), (body[:40], got.status)
                        if got.status == 400:
                            assert len(got.body) < 1000
                assert found.running.server.counters.errors == 0
                await settled(found)

    run(test)


def test_answers_cannot_be_split() -> None:
    """What a client sends stands in headers and errors of answers: it must not end a line there."""

    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            for value in (
                b"a\rSet-Cookie: x=1",
                b"a\x00b",
                b"a\x7f",
                b"\xc3\xbc",
                b"\xe5\x98\x8a\xe5\x98\x8dX: 1",
                b"a\tb",
            ):
                raw = await Raw.open(found.port)
                raw.send(asking(b'{"prompt":"x"}', b"X-Request-Id: " + value, b"Connection: close"))
                refused = await raw.rest()
                assert refused.startswith(b"HTTP/1.1 400"), value
                assert b"set-cookie" not in refused.lower().partition(b"\r\n\r\n")[0]
            for name in ("a\r\nSet-Cookie: x=1", "a\r\n\r\nHTTP/1.1 200 OK", "\u560a\u560d", "\x00"):
                got = await found.client.ask("POST", "/v1/completions", {"model": name, "prompt": "x"})
                assert got.status == 200
                assert b"set-cookie" not in got.headers
                got = await found.client.ask("GET", "/workers/" + "%0d%0aSet-Cookie:%20x", None)
                assert b"set-cookie" not in got.headers
            got = await found.client.ask("DELETE", "/workers/%0d%0aSet-Cookie:%20x%0d%0a")
            assert got.status == 404
            assert b"set-cookie" not in got.headers
            good = await found.client.ask("POST", "/v1/completions", {"prompt": "x"}, [(b"x-request-id", b"a: b, c")])
            assert good.headers[b"x-request-id"] == b"a: b, c"
            idle(found)

    run(test)


def test_paths() -> None:
    """No spelling of a path reaches an endpoint by a way around its checks."""

    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            for path in (
                b"/v1/../workers",
                b"/v1/%2e%2e/workers",
                b"/v1/..;/workers",
                b"/./v1/completions",
                b"//v1/completions",
                b"/v1//completions",
                b"/v1/completions/",
                b"/V1/completions",
                b"/v1/completions%00",
                b"/v1/completions%2f",
                b"/v1\\completions",
                b"/v1/completions;x",
                b"/%76%31/completions",
                b"/health/../workers",
                b"/v1/completions/../../kv/x",
            ):
                raw = await Raw.open(found.port)
                raw.send(asking(b'{"prompt":"x"}', b"Connection: close", path=path))
                got = await raw.rest()
                assert int(got.split()[1]) in (404, 405, 415), (path, got[:60])
            for target in (b"http://127.0.0.1/v1/completions", b"http://evil.example/v1/completions"):
                raw = await Raw.open(found.port)
                raw.send(asking(b'{"prompt":"x"}', b"Connection: close", path=target))
                assert (await raw.rest()).startswith(b"HTTP/1.1 200")
            assert [one.path for one in worker.completions] == ["/v1/completions"] * 2, "workers get one of three paths"
            raw = await Raw.open(found.port)
            raw.send(b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example:80\r\n\r\n")
            assert (await raw.rest()).startswith(b"HTTP/1.1 4")
            raw = await Raw.open(found.port)
            raw.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert not (await raw.rest()).startswith(b"HTTP/1.1 2")
            idle(found)

    run(test)


def test_two_hosts() -> None:
    async def test() -> None:
        async with gateway(config_of([])) as found:
            for lines in (
                b"Host: 127.0.0.1\r\nHost: evil.example",
                b"Host: evil.example\r\nHost: 127.0.0.1",
                b"Host : 127.0.0.1",
                b"X: y",
                b" Host: 127.0.0.1",
            ):
                raw = await Raw.open(found.port)
                raw.send(b"GET /workers HTTP/1.1\r\n" + lines + b"\r\nConnection: close\r\n\r\n")
                assert (await raw.rest()).startswith(b"HTTP/1.1 400"), lines

    run(test)


def test_nothing_of_a_request_is_logged() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker], log_requests=True)) as found:
            secret = "correct horse battery staple"
            headers = [(b"cookie", secret.encode()), (b"user-agent", secret.encode())]
            await found.client.ask("POST", "/v1/completions", {"prompt": secret, "user": secret}, headers)
            await found.client.ask("POST", "/v1/completions", b'{"prompt": "' + secret.encode())
            await found.client.ask("GET", f"/{secret.replace(' ', '-')}")
            said = found.logged()
            assert '"event":"request"' in said
            assert secret not in said
            assert secret.replace(" ", "-") not in said

    run(test)


def test_a_slow_reader_takes_no_memory_and_no_other_s_time() -> None:
    """A client that does not read: what waits for it is bounded, others go on, and it is cut when its time is over."""

    async def endless(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        while True:
            responder.write(b"data: " + b"x" * 65_536 + b"\n\n")
            await responder.drain()

    async def test() -> None:
        async with canned_workers("a", "b") as (a, b), gateway(config_of([a])) as found:
            server = found.running.server
            server.clock = clock = Clock()
            a.act = endless
            raw = await Raw.open(found.port)
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            raw.send(asking(b'{"prompt":"x","stream":true}'))
            await until(lambda: any(one.room is not None for one in server.connections))
            (stuck,) = server.connections
            held_bytes = stuck.transport.get_write_buffer_size() + stuck.corked_bytes
            assert held_bytes < 8 << 20
            found.running.parts.add_worker(config_of([b]).workers[0])
            a.act = b.act
            await until(lambda: found.open("decode") == {"a", "b"})
            await served(found)
            clock.now += 61.0
            server.sweep()
            await until(lambda: a.cancelled)
            await settled(found)
            raw.close()

    run(test)
