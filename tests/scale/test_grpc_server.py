"""The gRPC server: grpcio's client talks to it, and raw frames, also wrong ones, are thrown at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("hpack", reason="the server needs coterie[envoy]")
pytest.importorskip("grpc", reason="grpcio's client is what the server is tested with")

import grpc
import grpc.aio
import hpack

from coterie.net.grpc_server import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    MOST_FRAME,
    MOST_MESSAGE,
    NOT_FOUND,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    GrpcCall,
    GrpcError,
    GrpcServer,
    Handler,
    frame,
)
from gateway_runs import run
from http1_peers import until

pytestmark = pytest.mark.scale

ECHO = "/test/Echo"
FEW = settings(max_examples=30, deadline=None)


async def echo(call: GrpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


class Served(NamedTuple):
    server: GrpcServer
    port: int
    failures: list[BaseException]


@asynccontextmanager
async def served(handlers: Mapping[str, Handler] = {}, calls_at_once: int = 1000) -> AsyncIterator[Served]:
    failures: list[BaseException] = []
    methods = {ECHO: echo} | {f"/test/{name}": handler for name, handler in handlers.items()}
    server = GrpcServer(methods, failures.append, calls_at_once)
    port = await server.start("127.0.0.1", 0)
    try:
        yield Served(server, port, failures)
    finally:
        await server.close(0.0)
        await until(lambda: not server.tasks and not server.connections)


@asynccontextmanager
async def channel(found: Served, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{found.port}", **options) as opened:
        yield opened


async def all_of(opened: grpc.aio.Channel, method: str, messages: Sequence[bytes]) -> list[bytes]:
    stream = opened.stream_stream(method)()

    async def send() -> None:
        for message in messages:
            await stream.write(message)
        await stream.done_writing()

    sending = asyncio.create_task(send())
    try:
        return [message async for message in stream]
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def status(opened: grpc.aio.Channel, method: str, *messages: bytes) -> tuple[Any, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await all_of(opened, method, messages)
    return raised.value.code(), raised.value.details()


# ------------------------------------------------------------------------------------------------------ grpcio's client


def test_messages_of_any_size_come_back_in_order_from_many_calls_at_once() -> None:
    sizes = st.lists(st.sampled_from([0, 1, 4, 16_379, 16_384, 65_535, 70_000, 1_500_000]), max_size=6)

    @FEW
    @given(st.lists(sizes, min_size=1, max_size=4))
    def check(calls: list[list[int]]) -> None:
        async def test() -> None:
            async with served() as found, channel(found) as opened:
                sent = [[bytes([index % 251]) * size for index, size in enumerate(call)] for call in calls]
                got = await asyncio.gather(*(all_of(opened, ECHO, messages) for messages in sent))
                assert got == sent
                assert not found.failures

        run(test)

    check()


def test_statuses() -> None:
    async def breaks(_: GrpcCall) -> None:
        raise ZeroDivisionError("secret")

    async def refuses(call: GrpcCall) -> None:
        await call.write(await call.read() or b"")
        raise GrpcError(NOT_FOUND, "not: 100% ü")

    async def refuses_at_length(_: GrpcCall) -> None:
        raise GrpcError(NOT_FOUND, "ü" * 1000)

    async def test() -> None:
        handlers: dict[str, Handler] = {"Breaks": breaks, "Refuses": refuses, "Long": refuses_at_length}
        async with served(handlers) as found, channel(found) as opened:
            assert await status(opened, "/test/Breaks") == (grpc.StatusCode.INTERNAL, "the server failed")
            assert [type(failure) for failure in found.failures] == [ZeroDivisionError]
            assert await status(opened, "/test/Refuses", b"x") == (grpc.StatusCode.NOT_FOUND, "not: 100% ü")
            code, text = await status(opened, "/test/Long")
            assert (code, text) == (grpc.StatusCode.NOT_FOUND, "ü" * 21)
            assert (await status(opened, "/test/Unknown"))[0] == grpc.StatusCode.UNIMPLEMENTED
            large = b"x" * (MOST_MESSAGE + 1)
            assert (await status(opened, ECHO, large))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
            async with channel(found, compression=grpc.Compression.Gzip) as compressed:
                assert (await status(compressed, ECHO, b"x" * 1000))[0] == grpc.StatusCode.UNIMPLEMENTED
            assert await all_of(opened, ECHO, [b"still served"]) == [b"still served"]

    run(test)


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
def test_a_call_that_its_client_gives_up_is_cancelled(how: str) -> None:
    async def test() -> None:
        begun, ends = asyncio.Event(), []

        async def waits(call: GrpcCall) -> None:
            begun.set()
            try:
                await call.read()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        async with served({"Waits": waits}) as found:
            async with channel(found) as opened:
                stream = opened.stream_stream("/test/Waits")()
                await begun.wait()
                if how == "cancelled":
                    stream.cancel()
                    await until(lambda: ends)
            await until(lambda: ends)
            assert not found.failures

    run(test)


def test_close_waits_for_running_calls_and_cuts_those_that_last_longer() -> None:
    async def test() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def waits(call: GrpcCall) -> None:
            begun.set()
            await go.wait()
            await call.write(b"done")

        for drain_s in (1000.0, 0.0):
            async with served({"Waits": waits}) as found, channel(found) as opened:
                stream = opened.stream_stream("/test/Waits")()
                await begun.wait()
                closing = asyncio.create_task(found.server.close(drain_s))
                await until(partial(getattr, found.server, "draining"))
                if drain_s:
                    go.set()
                    assert await stream.read() == b"done"
                    assert await stream.code() == grpc.StatusCode.OK
                else:
                    assert await stream.code() == grpc.StatusCode.UNAVAILABLE
                await closing
                assert not found.server.tasks
            begun.clear()
            go.clear()

    run(test)


# ----------------------------------------------------------------------------------------------------------- raw frames


class Raw:
    """A client that sends what it is told to, and keeps what it gets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                self.frames.append((head[3], head[4], int.from_bytes(head[5:], "big"), payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def got(self, kind: int, stream: int | None = None) -> list[bytes]:
        return [found[3] for found in self.frames if found[0] == kind and stream in (None, found[2])]

    def echoed(self, stream: int) -> bytes:
        return b"".join(self.got(DATA, stream))

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def ping(self) -> None:
        """Wait until the server has taken all that was sent, and what it wrote for that has come."""
        for _ in range(2):  # a handler writes after the answer to a ping that came with its message
            pings = len(self.got(PING))
            self.send(frame(PING, 0, 0, b"12345678"))
            await until(partial(self._has, pings + 1))

    def _has(self, pings: int) -> bool:
        return len(self.got(PING)) >= pings


@asynccontextmanager
async def raw(found: Served, start: bytes = PREFACE + frame(SETTINGS, 0, 0)) -> AsyncIterator[Raw]:
    client = Raw(*await asyncio.open_connection("127.0.0.1", found.port))
    client.send(start)
    try:
        yield client
    finally:
        client.writer.transport.abort()
        await client.reading


def head_of(path: str = ECHO, encoder: hpack.Encoder | None = None) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers"), ("x-own", "a" * 40)]
    return bytes((encoder or hpack.Encoder()).encode(fields))


def message_of(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


@FEW
@given(st.data())
def test_any_cut_of_a_call_into_frames_and_packets_gives_the_same_answer(data: st.DataObject) -> None:
    """Headers in pieces, padded, with a priority; messages across frames; several calls of one encoder, mixed."""
    encoder, frames, sent = hpack.Encoder(), [PREFACE, frame(SETTINGS, 0, 0)], {}
    for stream in (1, 3, 5):
        block = head_of(encoder=encoder)
        cut = data.draw(st.integers(0, len(block)))
        pad = data.draw(st.integers(0, 3))
        first = bytes([pad]) + b"\0\0\0\0\7" + block[:cut] + b"\0" * pad
        frames += [frame(HEADERS, PADDED | PRIORITY, stream, first)]
        frames += [frame(CONTINUATION, END_HEADERS, stream, block[cut:])]
        sent[stream] = b"".join(map(message_of, data.draw(st.lists(st.binary(max_size=40), max_size=3))))
    parts = []
    for stream, messages in sent.items():
        cut = data.draw(st.integers(0, len(messages)))
        parts += [(stream, messages[:cut], 0), (stream, messages[cut:], END_STREAM)]
    for stream, part, flags in sorted(parts, key=lambda part: part[2]):
        frames += [frame(DATA, flags | PADDED, stream, b"\2" + part + b"\0\0"), frame(99, 7, stream, b"unknown kind")]
    whole = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))

    async def test() -> None:
        async with served() as found, raw(found, b"") as client:
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                client.send(whole[start:end])
                await asyncio.sleep(0)
            await until(lambda: len(found.server.tasks) == 0 and len(client.got(HEADERS)) >= 6 - len(empty))
            assert {stream: client.echoed(stream) for stream in sent} == sent

    empty = [stream for stream, messages in sent.items() if not messages]  # these get one frame of headers
    run(test)


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_path_is_read_rightly_whatever_the_encoder_remembers(paths: list[int]) -> None:
    """The encoder's table changes what the same bytes mean."""

    async def tells(call: GrpcCall, number: int) -> None:
        await call.write(bytes([number]))

    async def test() -> None:
        handlers = {str(number): partial(tells, number=number) for number in range(6)}
        encoder = hpack.Encoder()
        encoder.header_table_size = 200  # few of the headers fit in
        async with served(handlers) as found, raw(found) as client:
            for index, number in enumerate(paths):
                stream = 2 * index + 1
                client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, head_of(f"/test/{number}", encoder)))
            await until(lambda: all(client.echoed(2 * index + 1) for index in range(len(paths))))
            told = [client.echoed(2 * index + 1) for index in range(len(paths))]
            assert told == [message_of(bytes([number])) for number in paths]

    run(test)


@FEW
@given(
    st.lists(st.tuples(st.sampled_from(["call", "both", "setting"]), st.integers(1, 40_000)), max_size=8),
    st.integers(0, 70_000),
)
def test_the_server_sends_what_the_client_allows_and_no_more(grants: list[tuple[str, int]], window: int) -> None:
    size = 200_000

    async def test() -> None:
        start = PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + window.to_bytes(4, "big"))
        async with served() as found, raw(found, start) as client:
            client.send(frame(HEADERS, END_HEADERS, 1, head_of()))
            messages = message_of(b"x" * size)
            for at in range(0, len(messages), MOST_FRAME):
                client.send(frame(DATA, 0, 1, messages[at : at + MOST_FRAME]))
            call_may, connection_may, setting, may = window, FIRST_WINDOW, window, 0
            for kind, bytes_more in [("", 0), *grants]:
                more = bytes_more.to_bytes(4, "big")
                if kind == "setting":
                    client.send(frame(SETTINGS, 0, 0, b"\0\4" + more))
                    call_may, setting = call_may + bytes_more - setting, bytes_more
                elif kind:
                    client.send(frame(WINDOW_UPDATE, 0, 1, more))
                    call_may += bytes_more
                if kind == "both":
                    client.send(frame(WINDOW_UPDATE, 0, 0, more))
                    connection_may += bytes_more
                may = max(may, min(call_may, connection_may, len(messages)))
                await client.ping()
                assert len(client.echoed(1)) == may
            assert client.got(PING)[0] == b"12345678"

    run(test)


def test_a_client_may_not_send_without_end_what_is_not_read() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def reads_late(call: GrpcCall) -> None:
            await go.wait()
            await echo(call)

        async with served({"Late": reads_late}) as found, raw(found) as client:
            client.send(frame(WINDOW_UPDATE, 0, 0, (1 << 26).to_bytes(4, "big")))
            client.send(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\0"))
            client.send(frame(HEADERS, END_HEADERS, 1, head_of("/test/Late")))
            sent = 0

            def allowed() -> int:
                return WINDOW + sum(int.from_bytes(more, "big") for more in client.got(WINDOW_UPDATE, 1))

            part = message_of(b"x" * (MOST_FRAME - 5))
            while sent + len(part) <= allowed():
                client.send(frame(DATA, 0, 1, part))
                sent += len(part)
                await client.ping()
            assert WINDOW <= sent <= 3 * WINDOW
            client.send(frame(WINDOW_UPDATE, 0, 1, (1 << 26).to_bytes(4, "big")))
            go.set()
            await until(lambda: len(client.echoed(1)) == sent)
            await until(lambda: allowed() >= sent + WINDOW // 2)

    run(test)


def test_calls_past_the_limit_are_refused_and_the_others_served() -> None:
    async def test() -> None:
        async with served(calls_at_once=2) as found, raw(found) as client:
            client.send(*(frame(HEADERS, END_HEADERS, stream, head_of()) for stream in (1, 3, 5)))
            await until(lambda: client.got(RST_STREAM))
            assert [(found[2], found[3]) for found in client.frames if found[0] == RST_STREAM] == [
                (5, REFUSED_STREAM.to_bytes(4, "big"))
            ]
            client.send(*(frame(DATA, END_STREAM, stream, message_of(b"a")) for stream in (1, 3)))
            await until(lambda: client.echoed(1) == client.echoed(3) == message_of(b"a"))

    run(test)


WRONG = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL_ERROR),
    "a frame that is too large": (PREFACE + b"\1\0\0" + bytes(6), FRAME_SIZE_ERROR),
    "data of a call that was never made": (PREFACE + frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "a call with an even number": (PREFACE + frame(HEADERS, END_HEADERS, 2, head_of()), PROTOCOL_ERROR),
    "headers cut by another frame": (PREFACE + frame(HEADERS, 0, 1) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "a continuation of nothing": (PREFACE + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL_ERROR),
    "more padding than there is": (PREFACE + frame(HEADERS, END_HEADERS | PADDED, 1, b"\5"), PROTOCOL_ERROR),
    "headers that are none": (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), 9),
    "headers without end": (
        PREFACE + frame(HEADERS, 0, 1) + b"".join(frame(CONTINUATION, 0, 1, bytes(16_000)) for _ in range(3)),
        PROTOCOL_ERROR,
    ),
    "a window that is too large": (PREFACE + 2 * frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), 3),
    "a setting that is too large": (PREFACE + frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_client_that_breaks_the_protocol_is_told_and_cut_off(name: str) -> None:
    data, code = WRONG[name]

    async def test() -> None:
        async with served() as found, channel(found) as opened:
            async with raw(found, data) as client:
                await client.reading
                assert [int.from_bytes(payload[4:], "big") for payload in client.got(GOAWAY)] == [code]
            assert await all_of(opened, ECHO, [b"others are served"]) == [b"others are served"]
            assert not found.failures

    run(test)


_KINDS = st.integers(0, 11)
_FRAMES = st.builds(frame, _KINDS, st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60))
_HEADS = st.builds(lambda stream: frame(HEADERS, END_HEADERS, stream, head_of()), st.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(_FRAMES, _HEADS, st.binary(max_size=30)), max_size=12))
def test_no_bytes_break_the_server(pieces: list[bytes]) -> None:
    async def test() -> None:
        async with served() as found:
            async with raw(found, PREFACE) as client:
                client.send(*pieces)
                client.writer.write_eof()
                await client.reading
            async with raw(found) as client:
                client.send(
                    frame(HEADERS, END_HEADERS, 1, head_of()), frame(DATA, END_STREAM, 1, message_of(b"served"))
                )
                await until(lambda: client.echoed(1) == message_of(b"served"))
            assert not found.failures

    run(test)


def test_settings_and_pings_are_answered() -> None:
    async def test() -> None:
        async with served() as found, raw(found) as client:
            client.send(frame(SETTINGS, ACK, 0), frame(PING, ACK, 0, bytes(8)), frame(PING, 0, 0, b"abcdefgh"))
            await until(lambda: client.got(PING))
            assert client.got(PING) == [b"abcdefgh"]
            assert [found[1] for found in client.frames if found[0] == SETTINGS] == [0, ACK]

    run(test)
