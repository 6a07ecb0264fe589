"""The client against a real server that fails in every way it tells apart, and cuts streams anywhere."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.answers.load.client import Asking, LoadClient, RequestOutcome
from coterie.answers.load.workload import LoadRequest, Message

REQUEST = LoadRequest(3, 0, "", (Message("user", "Hello."),), 4)
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def event(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
WHOLE = (
    event("", role="assistant") + b": ping\r\n\r\n" + event("a") + event("б") + event("c", "stop") + USAGE_EVENT
) + b"data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """A server that reads a request's head and body, then does anything."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ask(answer: Answer, stream: bool = True, timeout_s: float = 60.0) -> RequestOutcome:
    async def main() -> RequestOutcome:
        async with server(answer) as url, LoadClient(url) as client:
            return await client.ask(REQUEST, Asking("m", stream=stream, timeout_s=timeout_s))

    return asyncio.run(main())


def sends(*parts: bytes) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def status(code: int, body: bytes = b"", kind: bytes = b"application/json") -> Answer:
    return sends(b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (code, kind, len(body)), body)


def resets(*parts: bytes) -> Answer:
    """Close with RST, after sending these."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(reader, writer)
        if parts:
            await asyncio.sleep(0.2)  # a reset takes back what the client has not read yet
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return answer


def stalls(*parts: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(reader, writer)
        await asyncio.Event().wait()

    return answer


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


CHUNKED = SSE.replace(b"Connection: close", b"Transfer-Encoding: chunked")
ERROR = json.dumps({"error": {"message": "too many requests", "code": 429}}).encode()
BEFORE = {
    "429": (status(429, ERROR), "http_429", "HTTP 429: too many requests"),
    "400": (status(400, b'{"error": {"message": "no such field"}}'), "http_4xx", "HTTP 400: no such field"),
    "a redirect": (status(307), "http_4xx", "HTTP 307"),
    "503": (status(503, b"upstream is away", b"text/plain"), "http_5xx", "HTTP 503"),
    "reset": (resets(), "reset", ""),
    "reset after the head": (resets(SSE), "reset", ""),
    "closed without an answer": (sends(), "reset", ""),
    "closed after the role": (sends(SSE + event("", role="assistant")), "reset", "ended before"),
    "a stall": (stalls(), "timeout", "0.2 s"),
    "a stall after the head": (stalls(SSE), "timeout", "0.2 s"),
    "a stall after the role": (stalls(SSE + event("", role="assistant") + b": ping\n\n"), "timeout", "0.2 s"),
    "not HTTP": (sends(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "malformed", ""),
    "a page": (status(200, b"<html></html>", b"text/html"), "malformed", "text/html"),
    "an event that is not JSON": (sends(SSE + b"data: hello\n\n"), "malformed", "OpenAI"),
    "an event of another shape": (sends(SSE + b'data: {"choices": 3}\n\n'), "malformed", "OpenAI"),
    "an event that is not UTF-8": (sends(SSE + b'data: {"choices": "\xff"}\n\n'), "malformed", "OpenAI"),
    "an error in the stream": (sends(SSE + b'data: {"error": {"message": "boom"}}\n\n'), "http_5xx", "boom"),
    "a 429 in the stream": (sends(SSE + b"data: " + ERROR + b"\n\n"), "http_429", "too many"),
}
AFTER = {
    "reset": resets(SSE + event("a")),
    "closed": sends(SSE + event("a")),
    "closed in a chunk": sends(CHUNKED + chunked(event("a")) + b"40\r\ndata:"),
    "ended without its end": sends(CHUNKED + chunked(event("a")) + b"0\r\n\r\n"),
    "done without its end": sends(SSE + event("a") + b"data: [DONE]\n\n"),
    "a stall": stalls(SSE + event("a")),
    "an error": sends(SSE + event("a") + b'data: {"error": {"message": "worker died"}}\n\n'),
    "garbage": sends(SSE + event("a") + b"data: {{{\n\n"),
}


@pytest.mark.parametrize("how", BEFORE)
def test_failures_before_the_first_byte(how: str) -> None:
    answer, kind, words = BEFORE[how]
    found = ask(answer, timeout_s=0.2 if "stall" in how else 60.0)
    assert (found.failure, found.first, found.request) == (kind, None, 3), found
    assert words in found.problem
    assert found.ttft_s is found.tpot_s is found.e2e_s is found.gap_s is None


@pytest.mark.parametrize("how", AFTER)
def test_failures_after_the_first_byte_are_cuts(how: str) -> None:
    found = ask(AFTER[how], timeout_s=0.5 if "stall" in how else 60.0)
    if "stall" in how and found.first is None:  # a busy machine has not read the first piece in time
        found = ask(AFTER[how], timeout_s=60.0)
    assert found.failure == "cut", found
    assert found.first is not None
    assert found.problem
    assert found.ttft_s is None, "the times of a broken answer are not those of an answer"


def test_a_port_where_nobody_listens() -> None:
    async def main() -> RequestOutcome:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            async with LoadClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
                return await client.ask(REQUEST, Asking("m"))

    assert asyncio.run(main()).failure == "refused"


@given(st.lists(st.integers(0, len(WHOLE)), max_size=6))
def test_a_stream_may_be_cut_into_pieces_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    parts = [WHOLE[a:b] for a, b in pairwise(edges) if a < b]
    found = ask(sends(CHUNKED, *(chunked(part) for part in parts), b"0\r\n\r\n"))
    assert (found.failure, found.output_tokens, found.prompt_tokens, found.cached_tokens) == (None, 3, 9, 4), found
    assert len(found.pieces) == 2
    assert found.first is not None
    assert found.sent <= found.first <= found.pieces[0] <= found.pieces[1] <= found.end


def test_a_stream_with_carriage_returns_and_without_usage() -> None:
    lines = (event("a") + event("b") + event("", "length")).replace(b"\n", b"\r\n")
    found = ask(sends(SSE + lines))
    assert (found.failure, found.output_tokens, found.prompt_tokens, found.cached_tokens) == (None, 2, None, None)


def test_an_answer_without_text_has_its_end_as_first_content() -> None:
    found = ask(sends(SSE + event("", "stop") + b"data: [DONE]\n\n"))
    assert found.failure is None
    assert found.ttft_s is not None
    assert found.tpot_s is None


def test_reasoning_and_tool_calls_are_content() -> None:
    for name, value in (("reasoning_content", "hm"), ("tool_calls", [{"index": 0}])):
        delta = {"choices": [{"delta": {name: value}, "finish_reason": None}]}
        found = ask(sends(SSE + b"data: " + json.dumps(delta).encode() + b"\n\n" + event("", "stop")))
        assert (found.failure, found.output_tokens) == (None, 1)


def test_an_answer_that_is_not_streamed_has_no_first_token() -> None:
    body = {"choices": [{"message": {"content": "abc"}, "finish_reason": "stop"}], "usage": USAGE}
    found = ask(status(200, json.dumps(body).encode()), stream=False)
    assert (found.failure, found.first, found.output_tokens, found.cached_tokens) == (None, None, 3, 4)
    assert found.e2e_s is not None
    cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    assert ask(sends(cut), stream=False).failure == "cut"
    assert ask(status(200, b"{}"), stream=False).failure == "malformed"
    assert ask(status(200, b"\x00\xff"), stream=False).failure == "malformed"


def test_a_kept_connection_that_the_server_closed_is_no_failure() -> None:
    """It answers once on each connection, keeps it, and closes it when the next request comes."""

    async def main() -> tuple[list[RequestOutcome], int]:
        connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await sends(CHUNKED, chunked(WHOLE), b"0\r\n\r\n")(reader, writer)
            await reader.read(1)

        async with server(answer) as url, LoadClient(url) as client:
            found = [await client.ask(REQUEST, Asking("m")) for _ in range(3)]
            return found, connections

    found, connections = asyncio.run(main())
    assert [one.failure for one in found] == [None, None, None]
    assert connections == 3


def test_the_key_is_sent_and_not_to_where_a_redirect_leads() -> None:
    heads: list[bytes] = []

    async def main() -> RequestOutcome:
        async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(spy, "127.0.0.1", 0)
        async with listening, LoadClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "k1") as client:
            return await client.ask(REQUEST, Asking("m"), name="load-7")

    assert asyncio.run(main()).failure == "http_4xx"
    assert len(heads) == 1
    assert b"Authorization: Bearer k1" in heads[0]
    assert b"X-Request-Id: load-7" in heads[0]
