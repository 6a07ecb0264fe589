"""What one client can cost a worker: memory, time and connections are bounded, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
from typing import Any

from attacked_worker import WAIT_S, asking, attacked, connected

SOON: dict[str, Any] = {"head_s": 0.2, "body_s": 0.4}
"""Time limits of a request's head and body, short for the test."""


def test_compressed_bodies_are_refused() -> None:
    """51 KB of gzip took 2.6 GB."""

    async def run() -> None:
        async with attacked() as worker:
            bomb = gzip.compress(json.dumps(asking("a" * (8 << 20))).encode())
            for path in ("/v1/completions", "/v1/chat/completions"):
                reply = await worker.ask("POST", path, bomb, content_encoding="gzip", content_type="application/json")
                assert reply.status == 415
                assert set(reply.json["error"]) == {"message", "type", "param", "code"}

    asyncio.run(run())


def test_a_body_longer_than_any_prompt_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        async with attacked() as worker:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 67000000\r\n\r\n"
            assert (await worker.raw(head)).status == 413
            chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            assert (await worker.raw(head + 64 * chunk)).status == 413
            assert (await worker.complete([5, 6, 7])).status == 200

    asyncio.run(run())


def test_half_sent_requests_are_ended() -> None:
    """1,500 were held for as long as their sender liked."""
    halves = [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
    ]

    async def run() -> None:
        async with attacked(**SOON) as worker, contextlib.AsyncExitStack() as stack:
            held = []
            for data in 10 * halves:
                reader, writer = await stack.enter_async_context(connected(worker.port))
                writer.write(data)
                held.append(reader)
            assert (await worker.complete([5, 6, 7])).status == 200, "others are served meanwhile"
            async with asyncio.timeout(WAIT_S):
                for reader in held:
                    with contextlib.suppress(OSError):
                        await reader.read()  # until the worker closes it

    asyncio.run(run())


def test_one_long_word_holds_nobody_up() -> None:
    """No prompt of that length fits. The tokenizer's work on one is bounded in test_byte_pairs.py."""

    async def run() -> None:
        async with attacked() as worker:
            words = ["".join(random.Random(seed).choices("etaoinshrdlu", k=100_000)) for seed in range(3)]
            replies = await asyncio.gather(*(worker.complete(word) for word in words))
            assert {reply.status for reply in replies} == {400}
            assert {reply.json["error"]["code"] for reply in replies} == {"context_length_exceeded"}
            assert (await worker.complete([5, 6, 7])).status == 200

    asyncio.run(run())


def test_waiting_requests_are_bounded() -> None:
    async def run() -> None:
        async with attacked(max_batch=2, max_waiting=3) as worker, contextlib.AsyncExitStack() as stack:
            data = json.dumps(asking([5, 6, 7], 900)).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
            readers = []
            for _ in range(5):
                reader, writer = await stack.enter_async_context(connected(worker.port))
                writer.write(head + data)
                readers.append(reader)
            async with asyncio.timeout(WAIT_S):
                while worker.server.live < 5:
                    await asyncio.sleep(0.01)
            reply = await worker.complete([5, 6, 7], 1)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert reply.json["error"]["code"] == "overloaded"
            await stack.aclose()  # five clients leave
            async with asyncio.timeout(WAIT_S):
                while worker.server.live:
                    await asyncio.sleep(0.01)
            assert (await worker.complete([5, 6, 7], 1)).status == 200
            assert worker.server.engine.blocks.used == 0

    asyncio.run(run())


def test_a_stream_nobody_reads_does_not_hold_the_engine() -> None:
    async def run() -> None:
        async with attacked() as worker:
            data = json.dumps(asking([5, 6, 7], 200, stream=True)).encode()
            async with connected(worker.port) as (reader, writer):
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
                )
                assert (await worker.complete([8, 9], 3)).status == 200
                assert b" 200 " in await reader.readline()

    asyncio.run(run())
