"""The answer to one request, as a handler writes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from coterie.errors import check
from coterie.net.http1.messages import HttpError, HttpRequest, header_lines, is_event_stream, status_line


class Line(Protocol):
    """The part of the connection that an answer uses."""

    @property
    def draining(self) -> bool:
        """Whether the server shuts down, so that the connection ends after this answer."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""

    def push(self, data: bytes) -> None:
        """Write a piece of the answer."""

    def finish(self, last: bytes, keep_alive: bool) -> None:
        """Write the end of the answer; begin the next request or end the connection."""

    async def drain(self) -> None:
        """Wait while the client's buffer is full."""

    def cut(self) -> None:
        """Close the connection at once."""


class Responder:
    """The answer to one request: sent whole, or started, written piece by piece and ended."""

    __slots__ = ("_chunked", "_connection", "_head_only", "_headers", "_keep_alive", "_left", "ended", "started")

    def __init__(self, connection: Line, head_only: bool, keep_alive: bool, chunked: bool) -> None:
        self._connection = connection
        self._head_only = head_only
        self._keep_alive = keep_alive
        self._chunked = chunked  # first: the client supports chunks; after the head: they are used
        self._left: int | None = None  # bytes of the announced length not yet written
        self._headers: Sequence[tuple[bytes, bytes]] = ()  # headers of a stream
        self.started = False
        self.ended = False

    @property
    def client_gone(self) -> bool:
        return self._connection.gone

    def send(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole answer. With an empty `content_type`, the caller's headers state it."""
        lines = header_lines(headers) if headers else b""
        if body and content_type:
            lines += header_lines(((b"content-type", content_type),))
        head = self._head(status, lines, len(body))
        self.ended = True
        self._connection.finish(head if self._head_only or status in (204, 304) else head + body, self._keep_alive)

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None = None) -> None:
        """Send the head of a stream: chunked, unless its length in bytes is given, which must then be kept."""
        self._connection.push(self._head(status, header_lines(headers), length))
        self._headers = headers
        self._left = None if self._head_only else length

    def _head(self, status: int, lines: bytes, length: int | None) -> bytes:
        check(not self.started, "this request has an answer already", RuntimeError)
        line = status_line(status)
        self._keep_alive &= not self._connection.draining
        if status in (204, 304):
            self._head_only = True
            self._chunked = False
        elif length is not None:
            lines += b"content-length: %d\r\n" % length
            self._chunked = False
        elif self._chunked:
            lines += b"transfer-encoding: chunked\r\n"
        else:  # HTTP/1.0 has no chunks: the end of the connection ends the answer
            self._keep_alive = False
        self.started = True
        return b"%b%b\r\n" % (line, lines) if self._keep_alive else b"%b%bconnection: close\r\n\r\n" % (line, lines)

    def write(self, data: bytes) -> None:
        check(self.started and not self.ended, "write() comes after start() and before end()", RuntimeError)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise RuntimeError(f"the answer has {-self._left} bytes more than its length")
        if data and not self._head_only:
            self._connection.push(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def drain(self) -> None:
        """Wait while the client's buffer is full."""
        await self._connection.drain()

    def end(self) -> None:
        check(self.started and not self.ended, "end() comes after start(), once", RuntimeError)
        check(not self._left, f"the answer lacks {self._left} bytes of its length", RuntimeError)
        self.ended = True
        last = b"0\r\n\r\n" if self._chunked and not self._head_only else b""
        self._connection.finish(last, self._keep_alive)

    def abort(self) -> None:
        """Cut the connection, so that the client sees that the answer is incomplete."""
        self.started = self.ended = True
        self._connection.cut()

    def fail(self, error: HttpError) -> None:
        """Answer with an error. A started event stream gets it as last event; any other started answer is cut."""
        if not self.started:
            self.send(error.status, error.body(), headers=error.headers)
        elif self.ended:
            return
        elif self._left is None and is_event_stream(self._headers):
            self.write(error.event())
            self.end()
        else:
            self.abort()


Handler = Callable[[HttpRequest, Responder], Awaitable[None]]
