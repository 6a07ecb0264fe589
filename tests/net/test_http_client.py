"""The HTTP client of the recorders: bounded, in order of completion, and no single failure is fatal. Real sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from coterie.errors import ConfigError, UnavailableError
from coterie.net import http_client
from coterie.net.http_client import Client, HttpResult, Tally, completion_body, completion_path, server_url
from coterie.prompts import Prompt
from sglang_peer import Peer, Running

PROMPT = Prompt("p", "math", "en", "1 + 1")


def bodies(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text, "sampling_params": {"max_new_tokens": 3}} for text in texts]


async def collect(url: str, sent: list[dict[str, Any]], concurrency: int, **more: Any) -> list[HttpResult]:
    async with Client(url) as client:
        return [answer async for answer in client.send("/generate", sent, concurrency, **more)]


def test_answers_come_in_order_of_completion() -> None:
    """Each text says after how many answers it may be answered."""
    found: list[HttpResult] = []

    async def run(url: str) -> None:
        async with Client(url) as client:
            async for answer in client.send("/generate", bodies("2", "1", "0"), 3):
                found.append(answer)  # the peer looks at it meanwhile

    with Running(Peer(may_answer=lambda _, text: len(found) == int(text))) as peer:
        asyncio.run(run(peer.url))
    assert [answer.number for answer in found] == [2, 1, 0]
    assert all(answer.problem is None for answer in found)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_no_more_in_flight_than_asked_and_every_body_once(concurrency: int) -> None:
    texts = [f"{n:02d}" for n in range(20)]
    with Running(Peer(delay=lambda text: 0.001 * (int(text) % 7))) as peer:
        found = asyncio.run(collect(peer.url, bodies(*texts), concurrency))
    assert sorted(answer.number for answer in found) == list(range(20))
    assert Counter(body["text"] for body in peer.bodies) == Counter(texts)
    assert peer.most_in_flight <= concurrency
    assert peer.most_in_flight == 1 or concurrency > 1
    sent = [answer.sent_s for answer in sorted(found)]
    assert sent == sorted(sent), "bodies are taken in their order"


def test_bodies_are_taken_as_they_are_needed() -> None:
    """A million prompts need not be held as bodies."""
    taken = 0

    def lazily() -> Iterator[Any]:
        nonlocal taken
        for body in bodies(*"abcdef"):
            taken += 1
            yield body

    async def first(url: str) -> int:
        async with Client(url) as client, aclosing(client.send("/generate", lazily(), 2)) as answers:
            async for _ in answers:
                return taken
        return -1

    with Running(Peer(delay=lambda _: 0.01)) as peer:
        assert asyncio.run(first(peer.url)) == 2


def test_failures_are_answers() -> None:
    special: dict[str, Any] = {
        "reset": lambda: "reset",
        "openai": lambda: web.json_response({"error": {"message": "too\n  long", "code": 400}}, status=400),
        "sglang": lambda: web.json_response({"message": "not ready"}, status=503),
        "fastapi": lambda: web.json_response({"detail": "no such thing"}, status=404),
        "plain": lambda: web.Response(text="<h1>Bad\nGateway</h1>", status=502),
        "binary": lambda: web.Response(body=b"\xff\xfe", status=500),
        "list": lambda: [1],
        "text": lambda: web.Response(text="hello"),
    }
    with Running(Peer(special=special)) as peer:
        found = asyncio.run(collect(peer.url, bodies("fine", *special), 4))
    problems = {answer.number: answer.problem for answer in found}
    assert problems.pop(0) is None
    words = [
        "the connection was closed",
        "HTTP 400: too long",
        "HTTP 503: not ready",
        "HTTP 404: no such thing",
        "HTTP 502: <h1>Bad Gateway</h1>",
        "HTTP 500: ",
        "not a JSON object",
        "not a JSON object",
    ]
    for number, expected in enumerate(words, 1):
        problem = problems[number]
        assert problem is not None
        assert expected in problem
        assert "\n" not in problem
    blamed = [answer.server_failed for answer in sorted(found, key=lambda answer: answer.number)]
    assert blamed == [False, True, False, True, False, True, True, True, True]
    assert len(peer.bodies) == 9, "nothing is sent twice"


def test_after_the_time_no_further_body_is_sent_and_those_in_flight_are_waited_for() -> None:
    with Running(Peer(delay=lambda _: 0.15)) as peer:
        found = asyncio.run(collect(peer.url, bodies(*map(str, range(100))), 2, duration_s=0.4))
    assert len(found) <= 8
    assert len(peer.bodies) == len(found)


def test_a_server_that_never_answers_does_not_outlast_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections, reads, and says nothing."""
    monkeypatch.setattr(http_client, "GRACE_S", 0.3)
    monkeypatch.setattr(http_client, "CALL_S", 0.3)

    async def run() -> tuple[list[HttpResult], int]:
        taken = 0

        async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            taken += 1
            await reader.read()  # until the client gives up
            writer.close()

        server = await asyncio.start_server(stall, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            found = await asyncio.wait_for(collect(url, bodies(*"abcd"), 2, duration_s=0.3), 60)
            async with Client(url) as client:
                with pytest.raises(UnavailableError, match="does not answer"):
                    await asyncio.wait_for(client.call("GET", "/v1/models"), 60)
        return found, taken

    found, taken = asyncio.run(run())
    assert [answer.number for answer in found] == [0, 1]
    assert {answer.problem for answer in found} == {"no answer came before the time was over"}
    assert 1 <= taken <= 3, "of four bodies two are sent"


def test_leaving_early_cancels_what_is_in_flight() -> None:
    async def leave(peer: Peer) -> None:
        sent = bodies("fast", "slow")
        async with Client(peer.url) as client, aclosing(client.send("/generate", sent, 2)) as answers:
            async for _ in answers:
                while len(peer.bodies) < 2:  # the fast one may be answered before the slow one has arrived
                    await asyncio.sleep(0.01)
                return

    with Running(Peer(delay=lambda text: 600.0 if text == "slow" else 0.0)) as peer:
        begun = time.monotonic()
        asyncio.run(leave(peer))
        while not peer.gone and time.monotonic() - begun < 300:
            time.sleep(0.05)
        assert peer.gone == 1
        assert time.monotonic() - begun < 300, "the slow one is not waited for"


def test_a_server_that_is_not_there() -> None:
    async def call(url: str) -> None:
        async with Client(url) as client:
            await client.call("GET", "/server_info")

    with Running(Peer()) as peer:
        url = peer.url
    with pytest.raises(UnavailableError, match="does not answer") as caught:
        asyncio.run(call(url))
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)
    (answer,) = asyncio.run(collect(url, bodies("a"), 1))
    assert answer.problem is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://host:30000", "http://host:30000"),
        ("http://host:30000/", "http://host:30000"),
        ("https://host/v1/", "https://host"),
        ("http://host/prefix/v1", "http://host/prefix"),
    ],
)
def test_addresses(given: str, expected: str) -> None:
    assert server_url(given) == expected


@pytest.mark.parametrize("given", ["host:30000", "localhost", "", "ftp://host", "http://", "tcp://host:1"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        server_url(given)


def test_concurrency_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="concurrency=0"):
        asyncio.run(collect("http://localhost:1", [], 0))


def test_bodies_for_openais_endpoints() -> None:
    assert completion_path(True) == "/v1/chat/completions"
    assert completion_path(False) == "/v1/completions"
    chat = completion_body(PROMPT, "m", 5, True, extra=1)
    assert chat["messages"] == [{"role": "user", "content": "1 + 1"}]
    assert chat.items() >= {"model": "m", "max_tokens": 5, "temperature": 0.0, "stream": False, "extra": 1}.items()
    assert completion_body(PROMPT, "m", 5, False)["prompt"] == "1 + 1"


def test_a_tally_names_the_most_frequent_problem() -> None:
    tally = Tally(3)
    assert tally.summary == "3 requests, none failed"
    tally.problems.update({"rare": 1, "often": 4})
    assert tally.failed == 5
    assert tally.summary == "5 of 8 requests failed, 4 of them so: often"
