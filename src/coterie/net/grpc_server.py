"""A gRPC server on asyncio's loop: calls of messages in both directions, and as much of HTTP/2 as they need.

grpcio's server hands every message from thread to thread, which takes nine times as long as this one. Replies that are
written in one iteration of the loop leave here in one packet, which halves the client's work too. HTTP/2's pushes and
priorities, and trailers of clients, are skipped; compressed messages are refused.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast
from urllib.parse import quote

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR = 0, 1, 3, 6, 7, 9
MAX_STREAMS, WINDOW_SIZE, FRAME_SIZE = 3, 4, 5
"""Settings of a connection, by number."""
MOST_FRAME = 16_384
"""Most bytes of a frame, as HTTP/2 has it unless one side asks for more. We do not."""
FIRST_WINDOW = 65_535
"""Bytes that may be sent before the first leave to send more, as HTTP/2 has it."""
MOST_WINDOW = (1 << 31) - 1
WINDOW = 1 << 20
"""Bytes of a call that clients may send before what they sent is read. A connection has 16 times as many under way."""
MOST_UNSENT = 65_536
"""Bytes of a call's replies that wait before :meth:`GrpcCall.write` waits too."""
MOST_MESSAGE = 4 << 20
"""Most bytes of one message, as other gRPC servers have it."""
MOST_HEAD = 32_768
"""Most bytes of a call's headers."""
MOST_TEXT = 126
"""Most bytes of a status's text: HPACK writes their number in one byte."""
MOST_PATHS = 100
"""Most encoded headers whose path is kept."""
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, TOO_LARGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = (
    0,
    3,
    4,
    5,
    8,
    12,
    13,
    14,
)
"""Statuses of calls, by gRPC's numbers."""
_HEAD = struct.Struct(">BHBBI")
"""Head of a frame: the length's upper byte and its others, kind, flags, stream."""
_SETTING = struct.Struct(">HI")
_FIELD = b"\x00%c%b%c%b"
_ANSWER = b"\x88\x0f\x10\x10application/grpc"
"""HPACK of `:status: 200` and the content type."""


class GrpcError(Exception):
    """The end of a call with a status that is not OK."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _BrokenConnection(Exception):
    """A client's violation of HTTP/2, which ends its connection."""

    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP/2 error {code}")
        self.code = code


Handler = Callable[["GrpcCall"], Awaitable[None]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


class GrpcCall:
    """One call: read its messages, write replies. If the client gives it up, its task is cancelled."""

    def __init__(self, connection: GrpcConnection, number: int) -> None:
        self._connection, self._number = connection, number
        self._messages: deque[bytes] = deque()
        self._unread = self._owed = 0
        """Bytes of messages not read yet, and bytes that the client has no leave to send again yet."""
        self._part = bytearray()
        """Start of a message whose rest has not come."""
        self._problem: GrpcError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._unsent = bytearray()
        self._begun = False
        self.ended = False
        """Whether the client sends no more."""
        self.window = connection.call_window
        """Bytes that the client lets this call send."""
        self.task: asyncio.Task[None]

    @property
    def client_gone(self) -> bool:
        """Whether the client has left or given up the call."""
        return self._number not in self._connection.calls

    # ------------------------------------------------------------------------------------------------------- handlers

    async def read(self) -> bytes | None:
        """Return the next message; None after the client's last. Raises GrpcError for one that cannot be read."""
        while not self._messages:
            if self._problem is not None:
                raise self._problem
            if self.ended:
                return None
            await self._woken()
        message = self._messages.popleft()
        self._unread -= len(message)
        self._allow(0)
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; wait while the client lets too few bytes through."""
        if not self._begun:
            self._begun = True
            self._connection.send(frame(HEADERS, END_HEADERS, self._number, _ANSWER))
        data, connection = b"\0" + len(message).to_bytes(4, "big") + message, self._connection
        if self._unsent or len(data) > min(self.window, connection.room, connection.frame_bytes):
            self._unsent += data
            self.pump()
        else:  # nearly always, and without a copy
            self._send(data)
        while len(self._unsent) > MOST_UNSENT:
            await self._woken()

    async def run(self, handler: Handler, failed: Callable[[BaseException], None]) -> None:
        """Run the handler and send its status; errors that are not its own go to `failed`."""
        status, text = OK, ""
        try:
            await handler(self)
            while self._unsent:
                await self._woken()
        except GrpcError as error:
            status, text = error.status, str(error)
        except asyncio.CancelledError:
            status, text = UNAVAILABLE, "the server shuts down"
        except Exception as error:
            failed(error)
            status, text = INTERNAL, "the server failed"
        self._finish(status, text)

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _finish(self, status: int, text: str) -> None:
        """Send the status, unless the client is gone."""
        if self._connection.calls.pop(self._number, None) is None:
            return
        self.pump()
        fields = [_field(b"grpc-status", b"%d" % status)]
        if text:
            fields.append(_field(b"grpc-message", quote(text, safe=" ")[:MOST_TEXT].encode()))
        head = b"" if self._begun else _ANSWER
        flags = END_HEADERS | END_STREAM
        self._connection.send(frame(HEADERS, flags, self._number, head + b"".join(fields)))
        if not self.ended:
            self._connection.reset(self._number, NO_ERROR)

    # ----------------------------------------------------------------------------------------------------- connection

    def feed(self, payload: bytes, size: int) -> None:
        """Take `payload` of a frame of `size` bytes."""
        part = self._part
        part += payload
        while len(part) >= 5 and self._problem is None:
            length = int.from_bytes(part[1:5], "big")
            if part[0]:
                self._problem = GrpcError(UNIMPLEMENTED, "messages must not be compressed")
            elif length > MOST_MESSAGE:
                self._problem = GrpcError(TOO_LARGE, f"messages have at most {MOST_MESSAGE} bytes")
            elif len(part) < 5 + length:
                break
            else:
                self._messages.append(bytes(part[5 : 5 + length]))
                self._unread += length
                del part[: 5 + length]
        if self._problem is not None:
            part.clear()
        self._allow(size)
        self.wake()

    def _allow(self, received: int) -> None:
        """Let the client send as many bytes again as it did, unless messages wait that nobody has read."""
        self._owed += received
        if self._owed >= WINDOW // 2 and self._unread < WINDOW and not self.ended:
            self._connection.send(frame(WINDOW_UPDATE, 0, self._number, self._owed.to_bytes(4, "big")))
            self._owed = 0

    def pump(self) -> None:
        """Send what the client lets through of the replies that wait."""
        connection, unsent = self._connection, self._unsent
        while unsent and (room := min(self.window, connection.room, connection.frame_bytes)) > 0:
            part = bytes(unsent[:room])
            del unsent[:room]
            self._send(part)
        if len(unsent) <= MOST_UNSENT:
            self.wake()

    def _send(self, data: bytes) -> None:
        self.window -= len(data)
        self._connection.window -= len(data)
        self._connection.send(frame(DATA, 0, self._number, data))


class GrpcConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._received = b""
        self._greeted = False
        self._block: list[bytes] | None = None
        """Parts of headers whose rest has not come."""
        self._block_of = self._block_flags = 0
        self._decoder = hpack.Decoder(max_header_list_size=2 * MOST_HEAD)
        self._paths: dict[bytes, bytes] = {}
        """Encoded headers → path, of those that changed no state of the decoder: clients send the same ones always."""
        self._newest = 0
        """Number of the newest call."""
        self._owed = 0
        self._out: list[bytes] = []
        self._paused = False
        self.calls: dict[int, GrpcCall] = {}
        self.window = self.call_window = FIRST_WINDOW
        """Bytes that the client lets this connection, and a new call, send."""
        self.frame_bytes = MOST_FRAME

    @property
    def room(self) -> int:
        """Bytes that can be sent now."""
        return 0 if self._paused else self.window

    # ------------------------------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        settings = ((MAX_STREAMS, self._server.calls_at_once), (WINDOW_SIZE, WINDOW))
        self.send(frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings)))
        self.send(frame(WINDOW_UPDATE, 0, 0, (16 * WINDOW - FIRST_WINDOW).to_bytes(4, "big")))

    def connection_lost(self, _: Exception | None) -> None:
        self._server.connections.discard(self)
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._received + data if self._received else data)
        except _BrokenConnection as error:
            self.go_away(error.code)
            self.close()

    def eof_received(self) -> None:
        """Close the connection: a client that sends no more gives up its calls."""

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()  # pings are answered too: what a client does not read must not pile up

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._pump()

    def send(self, data: bytes) -> None:
        """Send frames, with all others of this iteration of the loop."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def _pump(self) -> None:
        for call in self.calls.values():
            call.pump()

    def reset(self, number: int, code: int) -> None:
        self.send(frame(RST_STREAM, 0, number, code.to_bytes(4, "big")))

    def go_away(self, code: int) -> None:
        """Say that no further call is taken, and why."""
        self.send(frame(GOAWAY, 0, 0, self._newest.to_bytes(4, "big") + code.to_bytes(4, "big")))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    # --------------------------------------------------------------------------------------------------------- frames

    def _take(self, data: bytes) -> None:
        at = 0
        if not self._greeted:
            if not data.startswith(PREFACE[: len(data)]):
                raise _BrokenConnection(PROTOCOL_ERROR)
            if len(data) >= len(PREFACE):
                self._greeted, at = True, len(PREFACE)
        while self._greeted and len(data) >= at + 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 16 | low
            if length > MOST_FRAME:
                raise _BrokenConnection(FRAME_SIZE_ERROR)
            if len(data) < at + 9 + length:
                break
            payload = data[at + 9 : at + 9 + length]
            at += 9 + length
            if (self._block is not None) != (kind == CONTINUATION):
                raise _BrokenConnection(PROTOCOL_ERROR)
            self._take_frame(kind, flags, stream & MOST_WINDOW, payload)
        self._received = data[at:]

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._take_data(stream, flags, payload)
        elif kind == HEADERS:
            self._take_headers(stream, flags, payload)
        elif kind == CONTINUATION:
            self._take_continuation(stream, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._take_window(stream, int.from_bytes(payload, "big") & MOST_WINDOW)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM and (call := self.calls.pop(stream, None)) is not None:
            call.task.cancel()

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._owed += size
        if self._owed >= 8 * WINDOW:
            self.send(frame(WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big")))
            self._owed = 0
        call = self.calls.get(stream)
        if call is not None:
            call.feed(_unpadded(flags, payload), size)
            self._end(call, flags)
        elif stream > self._newest or not stream % 2:
            raise _BrokenConnection(PROTOCOL_ERROR)

    def _end(self, call: GrpcCall, flags: int) -> None:
        if flags & END_STREAM:
            call.ended = True
            call.wake()

    def _take_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if not stream % 2:
            raise _BrokenConnection(PROTOCOL_ERROR)
        self._block, self._block_of, self._block_flags = [], stream, flags
        self._take_continuation(stream, flags, _unpadded(flags, payload)[5 if flags & PRIORITY else 0 :])

    def _take_continuation(self, stream: int, flags: int, payload: bytes) -> None:
        assert self._block is not None
        self._block.append(payload)
        if stream != self._block_of or sum(map(len, self._block)) + len(self._block) > MOST_HEAD:
            raise _BrokenConnection(PROTOCOL_ERROR)
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), None
            path = self._path_in(block)
            call = self.calls.get(stream)
            if call is None and stream > self._newest:
                self._newest = stream
                call = self._begin(stream, path)
            if call is not None:
                self._end(call, self._block_flags)

    def _path_in(self, block: bytes) -> bytes:
        path = self._paths.get(block)
        if path is None:
            table = self._decoder.header_table
            before = table.maxsize, next(iter(table.dynamic_entries), None)
            try:
                path = dict(self._decoder.decode(block, raw=True)).get(b":path", b"")
            except hpack.HPACKError:
                raise _BrokenConnection(COMPRESSION_ERROR) from None
            newest = next(iter(table.dynamic_entries), None)
            if before[0] != table.maxsize or before[1] is not newest or len(self._paths) == MOST_PATHS:
                self._paths.clear()
            else:
                self._paths[block] = path
        return path

    def _begin(self, stream: int, path: bytes) -> GrpcCall | None:
        server = self._server
        if server.draining or len(server.tasks) >= server.calls_at_once:
            self.reset(stream, REFUSED_STREAM)
            return None
        call = self.calls[stream] = GrpcCall(self, stream)
        call.task = asyncio.create_task(call.run(server.handler(path), server.failed))
        server.tasks.add(call.task)
        call.task.add_done_callback(server.tasks.discard)
        return call

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            number, value = _SETTING.unpack_from(payload, at)
            if number == WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise _BrokenConnection(FLOW_CONTROL_ERROR)
                for call in self.calls.values():
                    call.window += value - self.call_window
                self.call_window = value
            elif number == FRAME_SIZE:
                self.frame_bytes = max(MOST_FRAME, value)
        self.send(frame(SETTINGS, ACK, 0))
        self._pump()

    def _take_window(self, stream: int, more: int) -> None:
        call = self.calls.get(stream)
        if not stream:
            self.window += more
            self._pump()
        elif call is not None:
            call.window += more
            call.pump()
        if max(self.window, 0 if call is None else call.window) > MOST_WINDOW:
            raise _BrokenConnection(FLOW_CONTROL_ERROR)


class GrpcServer:
    """Serves calls; a method's path → its handler."""

    def __init__(
        self, handlers: Mapping[str, Handler], failed: Callable[[BaseException], None], calls_at_once: int = 100_000
    ) -> None:
        self._handlers, self.failed, self.calls_at_once = handlers, failed, calls_at_once
        self.connections: set[GrpcConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self._server: asyncio.Server | None = None

    def handler(self, path: bytes) -> Handler:
        return self._handlers.get(path.decode("latin-1"), _unknown)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Serve on an address; return the port. Raises OSError if it cannot be used."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: GrpcConnection(self), host, port, ssl=tls, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, drain_s: float) -> None:
        """Take no further calls, and end those that still run after `drain_s`."""
        if self._server is None:
            return
        self._server.close()
        self.draining = True
        for connection in self.connections:
            connection.go_away(NO_ERROR)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=drain_s)
        left = list(self.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in list(self.connections):
            connection.close()


async def _unknown(_: GrpcCall) -> None:
    raise GrpcError(UNIMPLEMENTED, "no such method")


def _field(name: bytes, value: bytes) -> bytes:
    return _FIELD % (len(name), name, len(value), value)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _BrokenConnection(PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
