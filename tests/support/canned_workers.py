"""OpenAI servers with answers made to measure: they stream, fail, stall, lie and cut, and keep what they were asked.

Real servers on real sockets; what they say is fixed by the test. Tests of tokens use real workers instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from coterie.net.http1.messages import HttpError, HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.http1.server import HttpServer

Act = Callable[["Canned", HttpRequest, Responder], Awaitable[None]]
STREAM = b"text/event-stream"


class Asked:
    """One request that a worker got."""

    def __init__(self, request: HttpRequest, parses: bool = True) -> None:
        self.path, self.method = request.path, request.method
        self.headers = dict(request.headers)
        self.raw = request.body
        try:
            self.body: Any = msgspec.json.decode(request.body) if request.body and parses else None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:  # as engines do
            raise HttpError(400, f"the body is not JSON: {error}") from None


class Canned:
    """A worker; `act` answers completions and may be replaced at any time."""

    def __init__(self, name: str, act: Act | None = None) -> None:
        self.name = name
        self.act: Act = act or answer
        self.report: Act = says(404)
        """Answers ``/metrics``; may be replaced at any time."""
        self.models: Act = lists_itself
        """Answers ``/v1/models``; may be replaced at any time."""
        self.parses = True
        """Whether bodies must be JSON."""
        self.asked: list[Asked] = []
        self.cancelled = 0
        """Requests whose client went away."""
        self.well = True
        self.got = asyncio.Event()
        """Set when a completion arrives; clear it to wait for the next."""
        self.go = asyncio.Event()
        """What `held` waits for."""
        self.left = asyncio.Event()
        """Set when a client went away."""
        self.url = ""
        self.server: HttpServer | None = None

    async def start(self, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = HttpServer(self._handle)
        await self.server.start(listener)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close(0)
            self.server = None

    @property
    def completions(self) -> list[Asked]:
        return [one for one in self.asked if one.method == "POST"]

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        if request.path == "/health":
            responder.send(200 if self.well else 503)
            return
        if request.path == "/metrics":
            await self.report(self, request, responder)
            return
        self.asked.append(Asked(request, self.parses))
        if request.path == "/v1/models":
            await self.models(self, request, responder)
            return
        self.got.set()
        try:
            await self.act(self, request, responder)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.left.set()
            raise


async def lists_itself(_: Canned, __: HttpRequest, responder: Responder) -> None:
    card = {"id": "canned", "object": "model", "max_model_len": 1024}
    responder.send(200, msgspec.json.encode({"object": "list", "data": [card]}))


def completion(worker: Canned, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": f"from {worker.name}", "finish_reason": "length"}
    return {"id": "c", "object": "text_completion", "model": "canned", "choices": [choice], **more}


def events(worker: Canned, count: int = 3) -> list[bytes]:
    """Events of a stream, the last one included."""
    chunks = [msgspec.json.encode({"choices": [{"text": f"{worker.name}{number}"}]}) for number in range(count)]
    return [b"data: " + chunk + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


async def answer(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    """A completion, streamed if it was asked for so."""
    body = msgspec.json.decode(request.body)
    if not body.get("stream"):
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        responder.send(200, msgspec.json.encode(completion(worker, usage=usage)))
        return
    responder.start(200, [(b"content-type", STREAM)])
    for event in events(worker):
        responder.write(event)
        await responder.drain()
    responder.end()


def says(status: int, body: bytes = b"{}", headers: list[tuple[bytes, bytes]] | None = None) -> Act:
    async def act(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.send(status, body, headers=headers or [])

    return act


async def resets(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """No answer at all."""
    responder.abort()


async def stalls(_: Canned, __: HttpRequest, ___: Responder) -> None:
    """Never an answer."""
    await asyncio.Event().wait()


async def held(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    """An answer once the test says so."""
    await worker.go.wait()
    await answer(worker, request, responder)


async def cuts(worker: Canned, _: HttpRequest, responder: Responder) -> None:
    """A stream that breaks inside its second event."""
    first, second, *_rest = events(worker)
    responder.start(200, [(b"content-type", STREAM)])
    responder.write(first + second[:-5])
    await responder.drain()
    await asyncio.sleep(0)
    responder.abort()


async def head_only(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """A head and then nothing: the connection breaks before the first byte of the body."""
    responder.start(200, [(b"content-type", STREAM)])
    await asyncio.sleep(0)
    responder.abort()


async def opens(worker: Canned, _: HttpRequest, responder: Responder) -> None:
    """A stream that sends one event and then goes on for ever, silently, until the client leaves."""
    responder.start(200, [(b"content-type", STREAM)])
    responder.write(events(worker)[0])
    await responder.drain()
    await asyncio.Event().wait()


@asynccontextmanager
async def canned_workers(*names: str, **acts: Act) -> Any:
    """Workers that run, by name."""
    workers = [Canned(name, acts.get(name)) for name in names]
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        for worker in workers:
            await worker.stop()
