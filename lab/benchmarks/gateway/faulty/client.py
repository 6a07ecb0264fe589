"""Clients of a gateway that fails: an open loop of short requests, each with what became of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from numpy.random import Generator

from coterie.engines.tiny import TINY
from coterie.net.http1.upstream import Answer, Upstream, UpstreamError, UpstreamLimits

PATIENCE_S = 90.0
"""Time that a client waits for the next byte of an answer."""
LIMITS = UpstreamLimits(connect_s=10.0, head_s=PATIENCE_S, idle_s=PATIENCE_S)
UNKEPT = UpstreamLimits(connect_s=10.0, head_s=PATIENCE_S, idle_s=PATIENCE_S, keep_s=0.0)
"""No connection is used twice."""
STREAMED = 0.8
"""Share of the requests whose answers are streamed."""
PLACES = ("a harbour", "a kitchen", "a library", "a mountain hut", "a railway station", "a theatre")
ASKED = ("Describe the light in {} in the morning.", "Count the chairs in {} and say why.", "Sell {} in one sentence.")
LENGTHS = (8, 16, 32)

State = Literal["whole", "before", "told", "silent", "left"]
"""Whole; failed before the first byte of the answer; broken after it with an error event; without one; left by its
own client."""


@dataclass(slots=True)
class Asked:
    """A request, and what became of it. Times are of the monotonic clock."""

    name: str
    prompt: str
    max_tokens: int
    stream: bool = True
    began_s: float = 0.0
    first_s: float | None = None
    """Time of the first byte of a good answer."""
    ended_s: float = 0.0
    state: State = "before"
    problem: str = ""
    """Kind of the failure: connect, reset, timeout, protocol, or an HTTP status with the error's code."""
    text: str = ""

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "model": TINY,
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "stream": self.stream,
                "temperature": 0,
                "ignore_eos": True,
            }
        )


class Clients:
    """Asks, and keeps what became of each request."""

    def __init__(self, url: str, rng: Generator) -> None:
        self.asked: list[Asked] = []
        self._rng = rng
        self._kept = Upstream(url, LIMITS)
        self._fresh = Upstream(url, UNKEPT)
        self._running: set[asyncio.Task[None]] = set()

    async def load(self, rate: float, until_s: float) -> None:
        """Send requests at random times, `rate` a second, until the clock says `until_s`; answers may still come."""
        due = time.monotonic()
        while (due := due + float(self._rng.exponential(1 / rate))) < until_s:
            await asyncio.sleep(due - time.monotonic())
            self.send(self.drawn())

    def drawn(self, max_tokens: int | None = None) -> Asked:
        """A request that was not sent yet."""
        rng = self._rng
        prompt = ASKED[rng.integers(len(ASKED))].format(PLACES[rng.integers(len(PLACES))])
        drawn = LENGTHS[rng.integers(len(LENGTHS))]
        stream = bool(rng.random() < STREAMED) or max_tokens is not None
        one = Asked(f"ask-{len(self.asked)}", prompt, max_tokens or drawn, stream)
        self.asked.append(one)
        return one

    def send(self, one: Asked) -> asyncio.Task[None]:
        """Send it in a task of its own; half of the requests take a connection that was used before."""
        upstream = self._kept if len(self.asked) % 2 else self._fresh
        task = asyncio.create_task(self._ask(one, upstream))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finished(self) -> None:
        """Wait for the answers of all requests."""
        while self._running:
            await asyncio.wait(self._running)
        for upstream in (self._kept, self._fresh):
            await upstream.close()

    async def _ask(self, one: Asked, upstream: Upstream) -> None:
        one.began_s = time.monotonic()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", one.name.encode())]
        try:
            answer = await upstream.send("POST", "/v1/completions", headers, one.body)
            if answer.status != 200:
                one.problem = refusal(answer.status, await answer.read())
            elif one.stream:
                await self._read(one, answer)
            else:
                one.first_s = time.monotonic()
                one.state = "silent"
                one.text = text_of(msgspec.json.decode(await answer.read()))
                one.state = "whole"
        except UpstreamError as error:
            one.problem = error.kind
        except asyncio.CancelledError:
            one.state = "left"
        one.ended_s = time.monotonic()

    async def _read(self, one: Asked, answer: Answer) -> None:
        """Events to the end of the stream. Whole is what has a finish reason, [DONE] and no error."""
        rest, finished, done = b"", False, False
        async for piece in answer:
            if one.first_s is None:
                one.first_s, one.state = time.monotonic(), "silent"
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if not event or event == data:
                    continue
                if data == b"[DONE]":
                    done = True
                    continue
                found = msgspec.json.decode(data)
                if "error" in found:
                    one.state, one.problem = "told", str(found["error"].get("message"))
                elif found["choices"]:
                    one.text += found["choices"][0]["text"]
                    finished = finished or found["choices"][0]["finish_reason"] is not None
        if one.state == "silent" and finished and done:
            one.state = "whole"


def refusal(status: int, data: bytes) -> str:
    """Status and code of an error."""
    try:
        code = msgspec.json.decode(data)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        code = None
    return f"{status} {code}" if code else str(status)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])
