"""Both ends of HTTP/1.1 for tests: a server on a socket of its own, and peers that speak raw bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import pytest
import uvloop

from coterie.net.http1 import (
    Handler,
    HttpRequest,
    HttpServer,
    Limits,
    Responder,
    Upstream,
    UpstreamError,
    UpstreamLimits,
)
from coterie.net.http1.server import CheckHead

T = TypeVar("T")
PATIENCE_S = 300.0
"""No verdict depends on it: it ends a test that hangs."""
Run = Callable[[Coroutine[Any, Any, None]], None]


def run_on(name: str, main: Coroutine[Any, Any, None]) -> None:
    """Run on asyncio's loop or uvloop's. What a callback raises unhandled, and a task left behind, fail the test."""
    raised: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(f"{context.get('exception')!r}: {context}"))
        await asyncio.wait_for(main, PATIENCE_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    (uvloop if name == "uvloop" else asyncio).run(watched())
    assert not raised, raised


@dataclass
class Clock:
    """A clock that only the test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


class Served(NamedTuple):
    """A running server."""

    server: HttpServer
    port: int
    clock: Clock
    clients: list[Raw]

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.sweep()

    async def connect(self) -> Raw:
        self.clients.append(await Raw.open(self.port))
        return self.clients[-1]

    async def ask(self, *pieces: bytes) -> bytes:
        """Send pieces on a connection of their own; return all that comes until the server closes it."""
        raw = await self.connect()
        for piece in pieces:
            raw.send(piece)
        return await raw.rest()


@asynccontextmanager
async def serving(
    handler: Handler, limits: Limits | None = None, check_head: CheckHead | None = None
) -> AsyncIterator[Served]:
    clock, clients = Clock(), list[Raw]()
    server = HttpServer(handler, limits or Limits(), check_head, clock)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.start(listener)
    try:
        yield Served(server, port, clock, clients)
    finally:
        for client in clients:
            client.close()
            with suppress(ConnectionError):
                await client.writer.wait_closed()
        await server.close(0)
        assert not server.connections
        assert not server.lingering
        assert not server.tasks
        assert not server.peers


class Raw:
    """A client that sends and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    async def answer(self) -> bytes:
        """Return one answer: head and, by its Content-Length, body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await self.reader.readexactly(int(line[15:]))
        return head

    async def rest(self) -> bytes:
        """Return what comes until the server closes or resets the connection."""
        found = b""
        try:
            while piece := await self.reader.read(65_536):
                found += piece
        except ConnectionError:
            pass
        self.close()
        return found

    def close(self) -> None:
        self.writer.transport.abort()


def post(body: bytes, path: str = "/", *lines: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path.encode(), b"Host: test", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def get(path: str = "/", *lines: bytes) -> bytes:
    return b"\r\n".join([b"GET %b HTTP/1.1" % path.encode(), b"Host: test", *lines]) + b"\r\n\r\n"


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n" + trailer + b"\r\n"


@dataclass
class Echo:
    """Answers with the method, the path and the body, and remembers what it was asked."""

    seen: list[HttpRequest] = field(default_factory=list)

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        self.seen.append(request)
        responder.send(200, b"%b %b " % (request.method.encode(), request.path.encode()) + request.body, b"text/plain")


Script = Callable[["Spoken"], Awaitable[None]]


class Spoken(NamedTuple):
    """One connection to a scripted server."""

    number: int
    """Which connection it is, from 0."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        """Return the head of the next request; its body is read and dropped."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await self.reader.readexactly(length)
        return head

    def say(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    async def gone(self) -> None:
        """Return when the client has closed the connection."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass


@asynccontextmanager
async def scripted(script: Script, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve each connection by a script, which closes it at its end; yields the URL."""
    running: set[asyncio.Task[None]] = set()
    numbers = iter(range(1_000_000))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await script(Spoken(next(numbers), reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # asyncio's streams report a cancelled task as an error
        finally:
            writer.close()
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


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
