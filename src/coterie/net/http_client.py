"""Sending prompts to a running server: a few in flight at a time, answers in order of completion.

A request that fails is an answer that says so: recording under load must not stop because one prompt was too long or
one connection was reset. Nothing is sent twice. A server that does not answer at all raises.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from coterie.errors import ConfigError, UnavailableError
from coterie.prompts import Prompt

CONNECT_S = 10.0
REQUEST_S = 3600.0
"""A request may wait long in the queue of a busy server."""


class Answer(NamedTuple):
    """What became of one request."""

    number: int
    """Its place among the bodies, from 0."""
    sent_s: float
    """When it was sent, in seconds after the first."""
    body: Any
    """The JSON it was answered with; None where it failed."""
    problem: str | None = None
    """Why it failed, in one line."""


@dataclass(slots=True)
class Tally:
    """How many requests were answered as asked, and why the others were not."""

    done: int = 0
    problems: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.problems.total()

    @property
    def summary(self) -> str:
        """One line: the most frequent problem, and how many requests failed in all."""
        if not self.problems:
            return f"{self.done} requests, none failed"
        problem, count = self.problems.most_common(1)[0]
        return f"{self.failed} of {self.done + self.failed} requests failed, {count} of them so: {problem}"


def server_url(url: str) -> str:
    """Without a slash or ``/v1`` at its end, which users copy along."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def completion_path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def completion_body(prompt: Prompt, model: str, max_tokens: int, chat: bool, **more: Any) -> dict[str, Any]:
    """What OpenAI's endpoints take: one greedy answer, whole."""
    asked = {"messages": [{"role": "user", "content": prompt.prompt}]} if chat else {"prompt": prompt.prompt}
    return {"model": model, **asked, "max_tokens": max_tokens, "temperature": 0.0, "stream": False, **more}


class Client:
    """One server. ``async with Client(url) as client: async for answer in client.send(path, bodies, 8): …``"""

    def __init__(self, url: str) -> None:
        self.url = server_url(url)
        try:
            self._aiohttp: Any = importlib.import_module("aiohttp")
        except ImportError:
            raise UnavailableError("a server is recorded through aiohttp: pip install coterie[gateway]") from None
        self._session: Any = None

    async def __aenter__(self) -> Client:
        http = self._aiohttp
        timeout = http.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
        connector = http.TCPConnector(limit=0)  # send() bounds what is in flight
        self._session = http.ClientSession(timeout=timeout, connector=connector, trust_env=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Status and text of one answer; a server that cannot be reached raises UnavailableError."""
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                return int(response.status), await response.text(errors="replace")
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self.url} does not answer: {_reason(error)}") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """One body; whatever goes wrong is in the answer."""
        return await self._one(path, 0, body, 0.0)

    async def send(
        self, path: str, bodies: Iterable[Mapping[str, Any]], concurrency: int, duration_s: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """POST every body, at most `concurrency` at a time, and yield each answer when it is there.

        After `duration_s` no further body is taken; those in flight are waited for.
        """
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency} must be at least 1")
        source, started = enumerate(bodies), time.monotonic()
        running: set[asyncio.Task[Answer]] = set()
        try:
            while True:
                while len(running) < concurrency:
                    if duration_s is not None and time.monotonic() - started >= duration_s:
                        break
                    if (item := next(source, None)) is None:
                        break
                    running.add(asyncio.create_task(self._one(path, *item, time.monotonic() - started)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, path: str, number: int, body: Mapping[str, Any], sent_s: float) -> Answer:
        try:
            async with self._session.post(self.url + path, json=body) as response:
                data, status = await response.read(), int(response.status)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            return Answer(number, sent_s, None, _reason(error))
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if status != 200:
            return Answer(number, sent_s, None, f"HTTP {status}: {_message(found, data)}")
        if not isinstance(found, dict):
            return Answer(number, sent_s, None, "the answer is not a JSON object")
        return Answer(number, sent_s, found)


async def served_model(client: Client) -> str:
    """The name of the first model a server offers."""
    status, text = await client.call("GET", "/v1/models")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, RecursionError, LookupError, TypeError):
        raise UnavailableError(f"{client.url}/v1/models answers HTTP {status}, not a list of models") from None


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _message(found: Any, data: bytes) -> str:
    """The words of an error answer: OpenAI's ``{"error": {"message": …}}``, ``{"message": …}``, or its text."""
    with suppress(AttributeError):
        error = found.get("error", found)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
        if isinstance(message, str):
            return " ".join(message.split())[:200]
    return " ".join(data[:200].decode("utf-8", "replace").split())
