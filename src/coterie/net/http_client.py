"""The HTTP client for servers: one request, or many with a few in flight and answers in order of completion.

A failed request gives an answer with the problem: recording under load must not stop because one prompt was too long or
one connection was reset. Nothing is sent twice. Only :meth:`Client.call` raises if a server does not answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp

from coterie.errors import ConfigError, UnavailableError, check_at_least
from coterie.net.access import bearer
from coterie.prompts import Prompt
from coterie.wire.handoff import REQUEST_ID_HEADER

CONNECT_S = 10.0
REQUEST_S = 3600.0
"""Timeout of a request: it may wait long in the queue of a busy server."""
CALL_S = 120.0
"""Timeout of a call that no queue holds up: a server that takes longer is stalled."""
GRACE_S = 60.0
"""Seconds that requests in flight get after the time is over; a stalled server would hold them for an hour."""
HEALTH_S = 2.0
LOCAL = ("localhost", "127.0.0.1", "::1")


class HttpResult(NamedTuple):
    """Result of one request."""

    number: int
    """Index among the bodies, from 0."""
    sent_s: float
    """Send time, in seconds after the first."""
    body: dict[str, Any] | None
    """JSON of the answer; None if it failed."""
    problem: str | None = None
    """Reason of a failure, in one line."""
    server_failed: bool = False
    """Whether the server failed, not the request: no connection, HTTP 5xx, or an answer that is no JSON object."""


@dataclass(slots=True)
class Tally:
    """Number of requests that succeeded, and the problems of the others."""

    done: int = 0
    problems: Counter[str] = field(default_factory=Counter)

    def note(self, answer: HttpResult) -> None:
        if answer.problem is None:
            self.done += 1
        else:
            self.problems[answer.problem] += 1

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
    """URL without a trailing slash or ``/v1``, which users often include."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def completion_path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def completion_body(prompt: Prompt, model: str, max_tokens: int, chat: bool, **more: Any) -> dict[str, Any]:
    """Body for OpenAI's endpoints: one greedy answer, not streamed."""
    asked = {"messages": [{"role": "user", "content": prompt.prompt}]} if chat else {"prompt": prompt.prompt}
    return {"model": model, **asked, "max_tokens": max_tokens, "temperature": 0.0, "stream": False, **more}


class Client:
    """One server. ``async with Client(url) as client: async for answer in client.send(path, bodies, 8): …``"""

    def __init__(self, url: str, timeout_s: float = REQUEST_S, key: str | None = None) -> None:
        """`key` is shown to the server, as a bearer token."""
        self.url = server_url(url)
        self._key = key
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
        self._call_timeout = aiohttp.ClientTimeout(total=min(timeout_s, CALL_S), sock_connect=CONNECT_S)
        self._open: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._open = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),  # send() limits the requests in flight
            # A connection for each request: a server that closes an idle one just as it is taken again would look
            # dead (vLLM's closes after 5 s, the pool keeps 15).
            headers={"Connection": "close", **bearer(self._key)},
            # A proxy named in the environment cannot reach servers of this machine.
            trust_env=urlsplit(self.url).hostname not in LOCAL,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            raise ConfigError(f"the client of {self.url} is not open: use it in `async with`")
        return self._open

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Status and text of one answer; a server that cannot be reached raises UnavailableError."""
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=self._call_timeout
            ) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self.url} does not answer: {_reason(error)}") from None

    async def post(
        self, path: str, body: Mapping[str, Any], request_id: str | None = None, *, number: int = 0, sent_s: float = 0.0
    ) -> HttpResult:
        """POST one body; any problem is in the answer. The id identifies the request in a server's events and logs.

        `number` and `sent_s` are copied to the answer.
        """
        headers = {} if request_id is None else {REQUEST_ID_HEADER: request_id}
        try:
            async with self._session.post(self.url + path, json=body, headers=headers) as response:
                data, status = await response.read(), response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return HttpResult(number, sent_s, None, _reason(error), True)
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError):
            parsed = None
        if status != 200:
            return HttpResult(number, sent_s, None, f"HTTP {status}: {error_message(parsed, data)}", status >= 500)
        if not isinstance(parsed, dict):
            return HttpResult(number, sent_s, None, "the answer is not a JSON object", True)
        return HttpResult(number, sent_s, parsed)

    async def send(
        self, path: str, bodies: Iterable[Mapping[str, Any]], concurrency: int, duration_s: float | None = None
    ) -> AsyncGenerator[HttpResult, None]:
        """POST every body, at most `concurrency` at a time, and yield each answer on completion.

        After `duration_s` no further body is taken; those in flight get another `GRACE_S`, then they have failed.
        """
        check_at_least(1, concurrency=concurrency)
        source, started = enumerate(bodies), time.monotonic()
        running: dict[asyncio.Task[HttpResult], HttpResult] = {}
        """Requests in flight, and what is said of those that are given up."""
        try:
            while True:
                while len(running) < concurrency:
                    if duration_s is not None and time.monotonic() - started >= duration_s:
                        break
                    if (item := next(source, None)) is None:
                        break
                    number, body = item
                    sent_s = time.monotonic() - started
                    late = HttpResult(number, sent_s, None, "no answer came before the time was over", True)
                    named = body.get("request_id")  # vLLM reads it in the body, the reference worker in the header
                    running[asyncio.create_task(self.post(path, body, named, number=number, sent_s=sent_s))] = late
                if not running:
                    return
                left_s = None if duration_s is None else max(0.0, started + duration_s + GRACE_S - time.monotonic())
                done, _ = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del running[task]
                    yield task.result()
                if not done:
                    for late in running.values():
                        yield late
                    return
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def healthy(url: str, timeout_s: float = HEALTH_S) -> bool:
    """Whether ``GET url/health`` answers 200, for callers without an event loop."""

    async def ask() -> bool:
        async with Client(url, timeout_s) as client:
            try:
                return (await client.call("GET", "/health"))[0] == 200
            except UnavailableError:
                return False

    return asyncio.run(ask())


async def served_model(client: Client) -> str:
    """The name of the first model a server offers."""
    status, text = await client.call("GET", "/v1/models")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, RecursionError, LookupError, TypeError):
        raise UnavailableError(f"{client.url}/v1/models answers HTTP {status}, not a list of models") from None


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def error_message(parsed: Any, data: bytes) -> str:
    """Message of an error answer: OpenAI's ``{"error": {"message": …}}``, ``{"message": …}``, or its text."""
    with suppress(AttributeError):
        error = parsed.get("error", parsed)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
        if isinstance(message, str):
            return " ".join(message.split())[:200]
    return " ".join(data[:200].decode("utf-8", "replace").split())
