"""One connection of a client to the server: reads its requests and answers them in order.

Reading and writing are callbacks of the transport and of the parser; only the handler is a task. `phase` says what is
being read (idle, head, body), `current` which request is being answered. Pipelined requests wait, unparsed where
possible: reading pauses when the waiting bytes exceed `Limits.head_bytes`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from coterie.errors import check
from coterie.net.http1.messages import (
    Framing,
    Headers,
    HttpError,
    HttpRequest,
    Limits,
    ServerCounters,
    check_http,
    send_at_once,
    size_of,
    split_target,
)
from coterie.net.http1.responder import Handler, Responder

logger = logging.getLogger(__name__)

SLICE_BYTES = 4096
"""Bytes parsed at a time: bounds how many parsed requests one read can leave waiting."""
CORK_BYTES = 65_536
"""Bytes of streamed pieces that are written at once; smaller amounts are written together, once per loop iteration."""
DISCARD_BYTES = 65_536
"""Largest body of a refused request, in bytes, that is read and discarded so that its connection can be kept."""
LINGER_S = 1.0
"""Seconds that a refused client gets to read its answer before the connection is cut, even if it is still sending."""
LINGERING = 64
"""Most connections over the cap that get `LINGER_S` to read the refusal. Others are closed right after the answer."""

CheckHead = Callable[[HttpRequest], int | None]
"""Check of a request's head before its body is read: raises HttpError to refuse, may return a body limit in bytes."""


def log_error(error: Exception) -> None:
    """Log where a handler failed, without the error message, which may quote the request."""
    frames = extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
    logger.error("a handler failed with %s at %s", type(error).__name__, where)


@dataclass(eq=False)
class Host(ABC):
    """The part of a server that its connections use."""

    handler: Handler
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    check_head: CheckHead | None = None
    clock: Callable[[], float] = time.monotonic
    on_error: Callable[[Exception], None] = log_error
    counters: ServerCounters = field(default_factory=ServerCounters)
    draining: bool = False
    connections: set[Connection] = field(default_factory=set)
    lingering: set[Connection] = field(default_factory=set)
    """Refused connections that may still read their answer: at most `LINGERING`, for `LINGER_S` each."""

    @abstractmethod
    def admit(self, connection: Connection) -> str | None:
        """Count a new connection; return the reason if it is refused, else None."""

    @abstractmethod
    def forget(self, connection: Connection) -> None:
        """Stop counting a connection that has ended."""

    @abstractmethod
    def outlive(self, task: asyncio.Task[None]) -> None:
        """Keep track of a handler that may run on after its answer or its connection has ended."""


@dataclass(slots=True)
class _Exchange:
    """One request with its answer, or with the error that refuses it."""

    request: HttpRequest | None
    responder: Responder
    refusal: HttpError | None = None


class Connection(asyncio.Protocol):
    """One client connection of a server."""

    def __init__(self, server: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.limits = server.limits
        self.seconds = {"head": self.limits.head_s, "body": self.limits.body_s, "idle": self.limits.idle_s}
        """Seconds that each phase of reading may take."""
        self.peer = ""
        self.transport: asyncio.Transport
        self.parser: HttpRequestParser | None = HttpRequestParser(self)
        self.task: asyncio.Task[None] | None = None
        # state of reading
        self.phase = "head"
        self.quiet_bytes = 0  # bytes since body data or a whole message: bounds heads, trailers and chunk extensions
        self.url = b""
        self.headers: Headers = []
        self.body: bytes | bytearray = b""
        self.body_room = 0
        self.arriving: _Exchange | None = None
        self.continue_owed = False
        self.deaf = False  # ignores further input: refused, malformed, or closing
        # requests waiting and being answered
        self.current: _Exchange | None = None
        self.waiting: deque[_Exchange] = deque()
        self.unparsed = bytearray()
        self.deadline = math.inf
        self.deadline_kind = ""
        self.write_deadline = math.inf
        self.corked: list[bytes] = []
        self.corked_bytes = 0
        self.room: asyncio.Future[None] | None = None

    # the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(transport)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else ""
        reason = self.server.admit(self)
        if reason is None:
            self._await("head")
            return
        self.server.counters.refused += 1
        if len(self.server.lingering) < LINGERING:
            self.server.lingering.add(self)
        self._refuse_in_turn(HttpError(503, reason, headers=[(b"retry-after", b"1")]))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.server.forget(self)
        self.deaf = True
        self.parser = None  # breaks the cycle: memory stays flat without the garbage collector
        self.waiting.clear()
        self.unparsed.clear()
        self.corked.clear()
        self._wake()
        task = self.task
        if task is not None and not task.done():
            self.server.outlive(task)
            if self.current is not None and not self.current.responder.ended:
                self.server.counters.disconnects += 1
                task.cancel()

    def pause_writing(self) -> None:
        self.write_deadline = self.server.clock() + self.limits.write_s
        self.room = self.loop.create_future()

    def resume_writing(self) -> None:
        self.write_deadline = math.inf
        self._wake()
        self._turn()

    def _wake(self) -> None:
        if self.room is not None and not self.room.done():
            self.room.set_result(None)
        self.room = None

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self.current is None and not self.unparsed and self.room is None:
            self._feed(data)
        else:
            self._keep(data)

    def _keep(self, data: bytes | memoryview) -> None:
        self.unparsed += data
        if len(self.unparsed) > self.limits.head_bytes:
            self.transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._parse(data)
        else:
            view = memoryview(data)
            for start in range(0, len(data), SLICE_BYTES):
                if self.current is not None or self.waiting:
                    self._keep(view[start:])
                    break
                self._parse(view[start : start + SLICE_BYTES])
                if self.deaf:
                    return
        if self.current is None and self.phase != self.deadline_kind and not self.deaf:
            self._await(self.phase)

    def _await(self, kind: str) -> None:
        self.deadline_kind = kind
        self.deadline = self.server.clock() + self.seconds[kind]
        if kind == "body" and self.continue_owed:
            self.continue_owed = False
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _parse(self, data: bytes | memoryview) -> None:
        assert self.parser is not None
        self.quiet_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, HttpError):
                raise cause or error from None
            self._refuse_in_turn(cause)
        except HttpParserError as error:
            self.server.counters.malformed += 1
            self._refuse_in_turn(HttpError(400, f"malformed request: {error}"))
        except HttpParserUpgrade:
            self._refuse_in_turn(HttpError(400, "protocol upgrades are not supported"))
        else:
            if self.quiet_bytes > self.limits.head_bytes and self.phase != "idle":
                self._refuse_in_turn(HttpError(431, f"more than {self.limits.head_bytes} bytes of headers"))

    # the parser's callbacks: an HttpError raised here refuses the request and ends the connection

    def on_message_begin(self) -> None:
        self.phase = "head"
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase != "head":
            return  # a trailer
        self.headers.append((name.lower(), value))
        if len(self.headers) > self.limits.headers:
            raise HttpError(431, f"more than {self.limits.headers} headers")

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        self.phase = "body"
        self.body = b""
        most = self.limits.head_bytes
        if self.quiet_bytes > most and size_of(self.headers) + len(self.url) > most:
            raise HttpError(431, f"more than {most} bytes of headers")
        version = self.parser.get_http_version()
        check_http(
            not self.parser.should_upgrade() and version in ("1.1", "1.0"),
            400,
            "only HTTP/1.1 without upgrades is served",
        )
        framing = Framing(self.headers, version)
        method = self.parser.get_method().decode()
        path, query = split_target(self.url)
        request = HttpRequest(method, path, query, self.headers, b"", self.peer)
        keep_alive = version == "1.1" and self.parser.should_keep_alive()
        exchange = _Exchange(request, Responder(self, method == "HEAD", keep_alive, version == "1.1"))
        try:
            self.body_room = self._body_limit(request)
            if framing.length > self.body_room:
                raise HttpError(413, f"a body of {framing.length} bytes is over the limit of {self.body_room}")
            framing.check_supported()
        except HttpError as error:
            if framing.chunked or framing.expects or framing.length > DISCARD_BYTES:
                raise
            exchange.refusal = error
            self.arriving = None  # its body is discarded
            self._take(exchange)
        else:
            self.arriving = exchange
            self.continue_owed = framing.expects

    def _body_limit(self, request: HttpRequest) -> int:
        check = self.server.check_head
        if check is None:
            return self.limits.body_bytes
        try:
            limit = check(request)
        except HttpError:
            raise
        except Exception as error:
            self._count_error(error)
            raise HttpError(500, "internal error") from None
        return self.limits.body_bytes if limit is None else limit

    def on_body(self, body: bytes) -> None:
        self.quiet_bytes = 0
        if self.arriving is None:
            return
        self.body_room -= len(body)
        if self.body_room < 0:
            raise HttpError(413, "the body is over the limit")
        if not self.body:
            self.body = body
        else:  # one buffer: a list of 2-byte chunks would take 28 times their size
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += body

    def on_message_complete(self) -> None:
        self.phase = "idle"
        self.quiet_bytes = 0
        self.continue_owed = False
        exchange, self.arriving = self.arriving, None
        if exchange is not None and exchange.request is not None:
            exchange.request.body = bytes(self.body)  # no copy if the body arrived in one piece
            self.body = b""
            self._take(exchange)

    # starting requests and answering them

    def _take(self, exchange: _Exchange) -> None:
        if self.current is None and not self.waiting and self.room is None and not self.transport.is_closing():
            self._begin(exchange)
        else:
            self.waiting.append(exchange)
            self._turn()

    def _refuse_in_turn(self, error: HttpError) -> None:
        """Answer with an error after the answers to earlier requests, and end the connection."""
        self.deaf = True
        self._take(_Exchange(None, Responder(self, False, False, True), error))

    def _turn(self) -> None:
        """Begin the next waiting request, unless one is being answered or the client's write buffer is full."""
        if self.current is not None or self.room is not None or self.transport.is_closing():
            return
        if self.waiting:
            self._begin(self.waiting.popleft())
        elif self.deaf:
            return
        elif self.unparsed:
            data = bytes(self.unparsed)
            self.unparsed.clear()
            self.transport.resume_reading()
            self._feed(data)
        else:
            self._await(self.phase)
            if self.server.draining:  # the head of the last answer was sent before the drain
                self.close_if_idle()

    def _begin(self, exchange: _Exchange) -> None:
        self.current = exchange
        self.deadline = math.inf
        self.deadline_kind = ""
        if exchange.refusal is not None or exchange.request is None:
            # One loop iteration per refusal: a client that sends thousands of bad requests must not delay the others.
            self.loop.call_soon(self._answer_refusal, exchange)
            return
        if self.task is not None and not self.task.done():
            self.server.outlive(self.task)
        self.server.counters.requests += 1
        self.task = self.loop.create_task(self._run(exchange.request, exchange.responder))

    def _answer_refusal(self, exchange: _Exchange) -> None:
        try:
            exchange.responder.fail(exchange.refusal or HttpError(400, "malformed request"))
        except Exception as error:
            self._count_error(error)
            exchange.responder.fail(HttpError(500, "internal error"))

    async def _run(self, request: HttpRequest, responder: Responder) -> None:
        try:
            try:
                await self.server.handler(request, responder)
            except HttpError as error:
                responder.fail(error)
            check(responder.ended, "the handler returned before its answer ended", RuntimeError)
        except asyncio.CancelledError:  # the client has left, or the server closes
            responder.fail(HttpError(503, "the server is shutting down", "draining", headers=[(b"retry-after", b"1")]))
            raise
        except Exception as error:
            self._count_error(error)
            responder.fail(HttpError(500, "internal error"))

    def _count_error(self, error: Exception) -> None:
        self.server.counters.errors += 1
        self.server.on_error(error)

    # writing

    @property
    def draining(self) -> bool:
        return self.server.draining

    @property
    def gone(self) -> bool:
        return self.parser is None

    def cut(self) -> None:
        self.transport.abort()

    def push(self, data: bytes) -> None:
        """Write a piece of a stream, together with the other pieces of this loop iteration."""
        if not self.corked:
            self.loop.call_soon(self.flush)
        self.corked.append(data)
        self.corked_bytes += len(data)
        if self.corked_bytes >= CORK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.corked:
            data = b"".join(self.corked)
            self.corked.clear()
            self.corked_bytes = 0
            self._write(data)

    def _write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        self.flush()
        while self.room is not None:
            await self.room

    def finish(self, last: bytes, keep_alive: bool) -> None:
        """Write the end of an answer; begin the next request or end the connection."""
        if self.corked:
            self.corked.append(last)
            self.flush()
        else:
            self._write(last)
        if keep_alive and not self.transport.is_closing():
            self.current = None
            self._turn()
        else:
            self._shut()

    def _shut(self) -> None:
        """End the connection after its client has read everything.

        Closing a socket with unread input resets it, which would discard the answer: a refused client gets `LINGER_S`.
        """
        self.waiting.clear()
        lingers = self in self.server.connections or self in self.server.lingering
        if self.deaf and lingers and self.transport.can_write_eof() and not self.transport.is_closing():
            self.deadline_kind = "linger"
            self.deadline = self.server.clock() + LINGER_S
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection, and the loop has not seen it yet
                self.transport.abort()
        else:
            self.deadline_kind = "write"
            self.deadline = self.server.clock() + self.limits.write_s
            self.transport.close()
        self.deaf = True

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, waiting or answered."""
        begun = self.phase == "body" or (self.phase == "head" and self.quiet_bytes)
        return self.current is None and not self.waiting and not self.deaf and not begun

    def close_if_idle(self) -> None:
        if self.is_idle:
            self._shut()

    def time_out(self, now: float) -> None:
        kind = "write" if now >= self.write_deadline else self.deadline_kind
        if kind != "linger":
            self.server.counters.timeouts[kind] += 1
        if kind in ("write", "linger"):
            self.transport.abort()
        elif kind == "idle" or (kind == "head" and not self.quiet_bytes) or (kind == "body" and self.arriving is None):
            self._shut()  # there is no request to answer
        else:
            self._refuse_in_turn(HttpError(408, f"the {kind} of the request did not come in time"))
