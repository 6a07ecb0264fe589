"""Pooled client connections to one server: send requests, read answers as they arrive.

No redirects, no proxies, no decompression: the caller sees exactly what a worker sends. Every wait has a deadline (one
sweep checks them all), and the memory of an answer is bounded: reading pauses while its consumer is slow. Closing an
answer before its end closes the connection, which tells the server to stop.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, cast
from urllib.parse import SplitResult, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from coterie.errors import ConfigError, CoterieError, check, check_at_least, check_not_negative, check_positive
from coterie.net.http1.messages import Headers, check_target, header_lines, send_at_once, size_of

FULL_BYTES = 262_144
"""Bytes of an answer that may wait for its consumer; reading pauses above this."""
Kind = Literal["connect", "reset", "timeout", "protocol", "too_large", "incomplete", "unhealthy"]


class UpstreamError(CoterieError):
    """A request failed: no answer, or an incomplete one."""

    def __init__(self, kind: Kind, message: str, answered: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.answered = answered
        """Whether the head of an answer had arrived."""


@dataclass(slots=True, eq=False)
class Answer:
    """An answer whose head has arrived. Read the body, iterate over its pieces, or close it."""

    _connection: _Connection
    status: int
    headers: Headers
    complete: bool = False
    begun: bool = False
    """Whether a piece of the body has arrived."""
    _pieces: list[bytes] = field(default_factory=list)
    _buffered: int = 0
    _waiter: asyncio.Future[None] | None = None
    _error: UpstreamError | None = None

    async def read(self, limit: int | None = None) -> bytes:
        """Return the rest of the body; raise UpstreamError if it exceeds `limit` bytes (default: `body_bytes`)."""
        most = self._connection.upstream.limits.body_bytes if limit is None else limit
        if self.complete and len(self._pieces) == 1 and self._buffered <= most:
            return self._take()
        taken: list[bytes] = []
        size = 0
        async for piece in self:
            size += len(piece)
            if size > most:
                self.close()
                raise UpstreamError(
                    "too_large", f"{self._connection.upstream.url}: an answer of more than {most} bytes", answered=True
                )
            taken.append(piece)
        return b"".join(taken)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the bytes that arrived since the last call, waiting for some if there are none."""
        while not self._pieces:
            if self.complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
        return self._take()

    def _take(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._buffered > FULL_BYTES and not self.complete:
            self._connection.resume()
        self._buffered = 0
        return data

    def close(self) -> None:
        """Abandon the answer; if it is incomplete, its connection is closed."""
        if not self.complete and self._error is None:
            self._error = UpstreamError("reset", "the answer was closed", answered=True)
            self._connection.transport.abort()

    def add(self, piece: bytes) -> bool:
        """Buffer a piece of the body; return whether reading must pause."""
        self.begun = True
        self._pieces.append(piece)
        before = self._buffered
        self._buffered += len(piece)
        self._wake()
        return before <= FULL_BYTES < self._buffered

    def finish(self, error: UpstreamError | None = None) -> None:
        if self.complete or self._error is not None:
            return
        self._error = error
        self.complete = error is None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


SWEEP_S = 0.25
MOST_FIRST_LINES = 16


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Limits on one answer and on unused connections; times in seconds."""

    connect_s: float = 2.0
    head_s: float = 600.0
    """Time from sending the request to the first piece of its answer's body."""
    idle_s: float = 120.0
    """Time between two pieces of a body."""
    head_bytes: int = 32_768
    """Largest head of an answer in bytes. Also limits the trailers."""
    body_bytes: int = 64 << 20
    """Largest body that :meth:`Answer.read` returns by default, in bytes."""
    keep_s: float = 4.0
    """Time that an unused connection is kept: vLLM closes its side after 5 s."""
    idle_connections: int = 64
    """Most unused connections that are kept."""

    def __post_init__(self) -> None:
        check_positive(connect_s=self.connect_s, head_s=self.head_s, idle_s=self.idle_s)
        check_not_negative(keep_s=self.keep_s, body_bytes=self.body_bytes, idle_connections=self.idle_connections)
        check_at_least(1, head_bytes=self.head_bytes)


def parse_origin(url: str) -> SplitResult:
    """Split a server's URL; raise ConfigError if requests cannot be sent to it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        for part in (parts.netloc, parts.path):
            check_target(part.encode())
    except ValueError as error:
        raise ConfigError(f"url={url!r}: {error}") from None
    check(
        parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and not parts.query,
        f"url={url!r} must be http://HOST:PORT or https://HOST:PORT, without a user or a query",
    )
    return parts


class Upstream:
    """Client of one server, given its URL, with a pool of connections."""

    def __init__(
        self, url: str, limits: UpstreamLimits = UpstreamLimits(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        parts = parse_origin(url)
        self.url = url
        self.limits = limits
        self.clock = clock
        self.connections: set[_Connection] = set()
        self._address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.netloc.encode()
        self._base = parts.path.rstrip("/").encode()
        self._first_lines: dict[tuple[str, str], bytes] = {}
        self._idle: list[_Connection] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._retired = False

    async def send(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes = b"",
        *,
        head_s: float | None = None,
        written: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request; return its answer when the head has arrived.

        If the server has closed a pooled connection meanwhile, the request is sent once more on a fresh one. `written`
        is called just before each attempt: from then on the server may have received the request.
        """
        first = self._first_lines.get((method, target)) or self._first(method, target)
        message = b"%b%bcontent-length: %d\r\n\r\n%b" % (first, header_lines(headers), len(body), body)
        limit_s = self.limits.head_s if head_s is None else head_s
        connection = self._kept()
        if connection is not None:
            if written is not None:
                written()
            try:
                return await connection.ask(message, method, limit_s)
            except UpstreamError as error:
                if error.kind != "reset" or connection.heard:
                    raise
        connection = await self._connect()
        if written is not None:
            written()
        return await connection.ask(message, method, limit_s)

    def _first(self, method: str, target: str) -> bytes:
        """Return the request line and the Host line, cached for the first `MOST_FIRST_LINES` targets."""
        named, path = check_target(method.encode()), check_target(target.encode())
        lines = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (named, self._base, path, self.host)
        if len(self._first_lines) < MOST_FIRST_LINES:
            self._first_lines[method, target] = lines
        return lines

    def _kept(self) -> _Connection | None:
        oldest = self.clock() - self.limits.keep_s
        while self._idle:
            connection = self._idle.pop()
            if connection.since > oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        if self._closed:
            raise UpstreamError("connect", f"{self.url}: the client is closed")
        loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            async with asyncio.timeout(self.limits.connect_s):
                _, connection = await loop.create_connection(lambda: _Connection(self, loop), host, port, ssl=self._ssl)
        except TimeoutError:
            raise UpstreamError("connect", f"{self.url}: no connection within {self.limits.connect_s} s") from None
        except (OSError, ValueError) as error:  # a bad host name is a ValueError
            raise UpstreamError("connect", f"{self.url}: no connection: {error}") from None
        if connection.parser is not None:  # else the connection is lost already
            self._watch(connection)
        return connection

    def _watch(self, connection: _Connection) -> None:
        # Not in connection_made: if connecting is cancelled after it, uvloop closes without connection_lost.
        self.connections.add(connection)
        if self._closed:  # closed while connecting
            connection.transport.abort()
        elif self._sweeper is None:
            self._sweeper = connection.loop.call_later(SWEEP_S, self._sweep_again, connection.loop)

    def give_back(self, connection: _Connection) -> None:
        """Return a connection whose answer is complete to the pool; close it if the pool is full or no longer used."""
        if len(self._idle) < self.limits.idle_connections and not self._closed and not self._retired:
            connection.since = self.clock()
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def _sweep_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sweep()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep_again, loop) if self.connections else None

    def sweep(self) -> None:
        """Fail the requests and answers that are late, and close the connections that were unused too long."""
        now = self.clock()
        oldest = now - self.limits.keep_s
        while self._idle and self._idle[0].since <= oldest:  # the list is oldest first
            self._idle.pop(0).transport.abort()
        for connection in [connection for connection in self.connections if now >= connection.deadline]:
            connection.time_out()

    def give_up(self, method: str) -> None:
        """Fail the requests with this HTTP method that still wait for a first body byte: the server is unhealthy."""
        for connection in list(self.connections):
            if connection.method == method and connection.waits:
                connection.fail("unhealthy", "the server was found not to be well")

    def retire(self) -> None:
        """Close unused connections, now and from now on; answers in progress continue to their end."""
        self._retired = True
        while self._idle:
            self._idle.pop().transport.abort()

    async def close(self) -> None:
        """Close all connections; incomplete answers fail."""
        self._closed = True
        for connection in list(self.connections):
            connection.transport.abort()
        self._idle.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self.connections:
            await asyncio.sleep(0)  # transports close their sockets in one of the loop's next iterations


class _Connection(asyncio.Protocol):
    """One connection to the server, with one request at a time."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self.upstream = upstream
        self.loop = loop
        self.transport: asyncio.Transport
        self.parser: HttpResponseParser | None = HttpResponseParser(self)
        self.waiter: asyncio.Future[Answer] | None = None
        self.answer: Answer | None = None
        self.headers: Headers = []
        self.method = ""
        self.until_closed = False  # the end of the connection ends the body
        self.reusable = True
        self.heard = False  # a byte of the current answer has arrived
        self.quiet_bytes = 0  # bytes since the last piece of a body: bounds heads and trailers
        self.since = 0.0
        self.deadline = math.inf

    @property
    def waits(self) -> bool:
        """Whether a request was sent and no byte of its answer's body has arrived."""
        return self.waiter is not None if self.answer is None else not self.answer.begun

    async def ask(self, message: bytes, method: str, head_s: float) -> Answer:
        if self.transport.is_closing():
            raise UpstreamError("reset", f"{self.upstream.url}: the connection was closed")
        self.method = method
        self.heard = False
        self.quiet_bytes = 0
        self.deadline = self.upstream.clock() + head_s
        waiter: asyncio.Future[Answer] = self.loop.create_future()
        self.waiter = waiter
        self.transport.write(message)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled() or waiter.exception() is not None:
                self.transport.abort()
            else:  # the head arrived just now; if the answer is complete, its connection is back in the pool
                waiter.result().close()
            raise

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.deadline = self.upstream.clock() + self.upstream.limits.idle_s

    def time_out(self) -> None:
        begun = self.answer is not None and self.answer.begun
        self.fail(
            "timeout", f"no further piece within {self.upstream.limits.idle_s} s" if begun else "no answer in time"
        )

    def fail(self, kind: Kind, what: str) -> None:
        """Fail the current request with an error and close the connection."""
        error = UpstreamError(kind, f"{self.upstream.url}: {what}", answered=self.answer is not None)
        self.deadline = math.inf
        self.reusable = False
        answer, self.answer = self.answer, None
        waiter, self.waiter = self.waiter, None
        if answer is not None:
            answer.finish(error)
        elif waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self.transport.abort()

    # the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections.discard(self)
        self.parser = None
        answer = self.answer
        if answer is not None and self.until_closed and exc is None:
            self.answer = None
            answer.finish()
        else:
            self.fail("reset", f"the connection was closed: {exc}" if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        if self.parser is None or (self.waiter is None and self.answer is None):
            self.transport.abort()  # bytes that answer no request
            return
        self.heard = True
        self.quiet_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail("protocol", f"not an HTTP/1.1 answer: {error}")
            return
        if self.quiet_bytes > self.upstream.limits.head_bytes:
            self.fail("protocol", f"more than {self.upstream.limits.head_bytes} bytes of headers")
        elif self.answer is not None:
            self._after_piece(self.answer)

    def _after_piece(self, answer: Answer) -> None:
        if answer.complete:
            self.answer = None
            if not self.transport.is_reading():
                self.resume()
            self.deadline = math.inf
            if self.reusable and not self.transport.is_closing():
                self.upstream.give_back(self)
            else:
                self.transport.abort()
        elif not answer.begun:
            return  # keep the deadline: engines send the head at once, and the first token much later
        elif self.transport.is_reading():
            self.deadline = self.upstream.clock() + self.upstream.limits.idle_s
        else:
            self.deadline = math.inf  # reading is paused because the consumer is slow

    # the parser's callbacks

    def on_message_begin(self) -> None:
        self.headers = []
        if self.answer is not None:
            self.reusable = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.answer is None:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        status = self.parser.get_status_code()
        if status < 200 or self.answer is not None or self.waiter is None:
            return
        if status > 599:
            raise ValueError(f"status {status}")
        if (
            self.quiet_bytes > self.upstream.limits.head_bytes
            and size_of(self.headers) > self.upstream.limits.head_bytes
        ):
            raise ValueError("too many headers")
        names = [name for name, _ in self.headers]
        framed = b"content-length" in names or b"transfer-encoding" in names
        self.until_closed = not framed and status not in (204, 304)
        self.reusable = self.reusable and self.parser.should_keep_alive() and not self.until_closed
        self.answer = Answer(self, status, self.headers)
        waiter, self.waiter = self.waiter, None
        if not waiter.done():
            waiter.set_result(self.answer)
        if self.method == "HEAD":
            self.reusable = False  # the parser would wait for the body that a GET would have
            self.answer.finish()

    def on_body(self, body: bytes) -> None:
        self.quiet_bytes = 0
        answer = self.answer
        if answer is not None and not answer.complete and answer.add(body):
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.answer is not None:
            self.answer.finish()
