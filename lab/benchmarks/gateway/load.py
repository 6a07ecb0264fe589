"""A closed-loop client that costs little: one request's bytes, written again as soon as its answer has come whole.

An answer is cut by its Content-Length or its last chunk; its status must be 200.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, cast
from urllib.parse import urlsplit

BODY = (
    b'{"model":"canned","messages":[{"role":"system","content":"You are a helpful assistant."},'
    b'{"role":"user","content":"'
    + b"How are experts chosen in a mixture of experts? " * 12
    + b'"}],"max_tokens":16,"temperature":0.0%b}'
)
PATH = "/v1/chat/completions"
ANSWER_S = 30.0


class Sample(NamedTuple):
    """Latencies of one client or several."""

    latencies_s: list[float]
    seconds: float


def request_bytes(url: str, stream: bool = False) -> bytes:
    body = BODY % (b',"stream":true' if stream else b"")
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nuser-agent: coterie-benchmark\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Client(asyncio.Protocol):
    def __init__(self, message: bytes) -> None:
        self.message = message
        self.left = 0
        self.until = 0.0
        self.latencies: list[float] = []
        self.sent_at = 0.0
        self.held = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def begin(self, requests: int, until: float) -> None:
        self.left = requests
        self.until = until
        self.sent_at = time.perf_counter()
        self.transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        if self.held:
            data = self.held + data
        if not _is_whole(data):
            self.held = data
            return
        self.held = b""
        now = time.perf_counter()
        self.latencies.append(now - self.sent_at)
        if not data.startswith(b"HTTP/1.1 200"):
            self.fail(f"answered {data[:80]!r}")
            return
        self.left -= 1
        if self.left and now < self.until:
            self.sent_at = now
            self.transport.write(self.message)
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(f"closed the connection: {exc}")

    def fail(self, what: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the target {what}"))


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return False
    head = data[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return data.endswith(b"0\r\n\r\n")
    return len(data) >= end + int(head[at + 15 : head.index(b"\r", at)])


async def closed_loop(
    url: str, clients: int, requests: int = 0, seconds: float = float("inf"), stream: bool = False
) -> Sample:
    """Let each client send `requests`, or send for `seconds`."""
    loop = asyncio.get_running_loop()
    where = urlsplit(url)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    message = request_bytes(url, stream)
    connected = [(await loop.create_connection(lambda: _Client(message), host, port))[1] for _ in range(clients)]
    try:
        start = time.perf_counter()
        for client in connected:
            client.begin(requests or -1, start + seconds)
        limit_s = ANSWER_S + (seconds if seconds < float("inf") else 0.01 * requests)
        await asyncio.wait_for(asyncio.gather(*(client.done for client in connected)), limit_s)
        return Sample([s for client in connected for s in client.latencies], time.perf_counter() - start)
    finally:
        for client in connected:
            client.fail("was left")
            client.transport.abort()
