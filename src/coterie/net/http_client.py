"""HTTP client for engine servers: one request, or many with bounded concurrency and answers in completion order.

A failed request returns a result that holds the problem: recording under load must not stop because one prompt was too
long or one connection was reset. No request is retried. Only :meth:`Client.call` raises if a server does not answer.
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

from coterie.errors import UnavailableError, check, check_at_least
from coterie.net.access import bearer
from coterie.net.http1.messages import Headers
from coterie.net.http1.upstream import Upstream, UpstreamError, UpstreamLimits
from coterie.prompts import Prompt
from coterie.wire.handoff import REQUEST_ID_HEADER

CONNECT_S = 10.0
REQUEST_S = 3600.0
"""Timeout of a completion request, in seconds: it may wait long in the queue of a busy server."""
CALL_S = 120.0
"""Timeout of a call that is not queued, in seconds: a server that takes longer is stalled."""
GRACE_S = 60.0
"""Seconds that requests in flight get after `duration_s` is over; a stalled server would hold them for an hour."""
HEALTH_S = 2.0
MOST_BYTES, CALL_BYTES = 1 << 32, 1 << 27
"""Most bytes of an answer to a completion, which may have routed experts, and of one to a :meth:`Client.call`."""


class HttpResult(NamedTuple):
    """Result of one request."""

    number: int
    """Index of the request among the bodies sent, from 0."""
    sent_s: float
    """Send time, in seconds after :meth:`Client.send` started."""
    body: dict[str, Any] | None
    """JSON object of the answer; None if the request failed."""
    problem: str | None = None
    """Reason of the failure, in one line; None if the request succeeded."""
    server_failed: bool = False
    """Whether the server is at fault: no connection, HTTP 5xx, or an answer that is not a JSON object."""


@dataclass(slots=True)
class Tally:
    """Number of requests that succeeded, and counts of the problems of those that failed."""

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
        """One line with the number of failed requests and the most frequent problem."""
        if not self.problems:
            return f"{self.done} requests, none failed"
        problem, count = self.problems.most_common(1)[0]
        return f"{self.failed} of {self.done + self.failed} requests failed, {count} of them so: {problem}"


def server_url(url: str) -> str:
    """Return the URL without a trailing slash or ``/v1``, which users often include."""
    parts = urlsplit(url)
    check(
        parts.scheme in ("http", "https") and parts.hostname,
        f"url={url!r} must be http://HOST:PORT or https://HOST:PORT",
    )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def completion_path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def completion_body(prompt: Prompt, model: str, max_tokens: int, chat: bool, **more: Any) -> dict[str, Any]:
    """Return a body for OpenAI's completion endpoints: one greedy completion, not streamed."""
    asked = {"messages": [{"role": "user", "content": prompt.prompt}]} if chat else {"prompt": prompt.prompt}
    return {"model": model, **asked, "max_tokens": max_tokens, "temperature": 0.0, "stream": False, **more}


def json_headers(key: str | None, request_id: str | None = None) -> Headers:
    """Return the headers of a request with a JSON body: the key as a bearer token, and the request's id."""
    given = {"Content-Type": "application/json", **bearer(key)}
    if request_id is not None:
        given[REQUEST_ID_HEADER] = request_id
    return [(name.encode(), value.encode()) for name, value in given.items()]


class Client:
    """Client of a server: ``async with Client(url) as client: async for answer in client.send(path, bodies, 8): …``"""

    def __init__(self, url: str, timeout_s: float = REQUEST_S, key: str | None = None) -> None:
        """`key` is sent to the server as a bearer token."""
        self.url = server_url(url)
        self._key, self._timeout_s = key, timeout_s
        # One connection per request: one that is kept may be closed by the server just as it is used again, and sending
        # a request a second time would count it twice.
        limits = UpstreamLimits(
            connect_s=min(timeout_s, CONNECT_S), head_s=REQUEST_S, idle_s=REQUEST_S, idle_connections=0
        )
        self._upstream = Upstream(self.url, limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        most_bytes: int,
        request_id: str | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of the answer; raise UnavailableError if none arrives in time."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._upstream.send(method, path, json_headers(self._key, request_id), data)
                return answer.status, await answer.read(most_bytes)
        except (UpstreamError, TimeoutError) as error:
            problem = str(error) or f"{self.url}: nothing within {timeout_s:g} s"
            raise UnavailableError(f"the server does not answer: {problem}") from None

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Send one request and return status and text of the answer; raise UnavailableError if none arrives."""
        status, data = await self._ask(method, path, body, min(self._timeout_s, CALL_S), CALL_BYTES)
        return status, data.decode("utf-8", "replace")

    async def post(
        self, path: str, body: Mapping[str, Any], request_id: str | None = None, *, number: int = 0, sent_s: float = 0.0
    ) -> HttpResult:
        """POST one body; a problem is returned in the result, not raised.

        `request_id` identifies the request in the server's events and logs. `number` and `sent_s` go into the result.
        """
        try:
            status, data = await self._ask("POST", path, body, self._timeout_s, MOST_BYTES, request_id)
        except UnavailableError as error:
            return HttpResult(number, sent_s, None, " ".join(str(error).split()), True)
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
        """POST every body, at most `concurrency` at a time, and yield each result on completion.

        After `duration_s` no further body is sent. Requests in flight get another `GRACE_S`, then count as failed.
        """
        check_at_least(1, concurrency=concurrency)
        source, started = enumerate(bodies), time.monotonic()
        running: dict[asyncio.Task[HttpResult], HttpResult] = {}
        """Request in flight → the result yielded for it if it is abandoned."""
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
                    named = body.get("request_id")  # vLLM reads it from the body, the reference worker from a header
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
    """Whether ``GET url/health`` returns 200. Blocks: for callers without an event loop."""

    async def ask() -> bool:
        async with Client(url, timeout_s) as client:
            try:
                return (await client.call("GET", "/health"))[0] == 200
            except UnavailableError:
                return False

    return asyncio.run(ask())


async def served_model(client: Client) -> str:
    """Return the name of the first model that a server lists."""
    status, text = await client.call("GET", "/v1/models")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, RecursionError, LookupError, TypeError):
        raise UnavailableError(f"{client.url}/v1/models answers HTTP {status}, not a list of models") from None


def error_message(parsed: Any, data: bytes) -> str:
    """Return the message of an error body: OpenAI's ``{"error": {"message": …}}``, ``{"message": …}``, or its text."""
    with suppress(AttributeError):
        error = parsed.get("error", parsed)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
        if isinstance(message, str):
            return " ".join(message.split())[:200]
    return " ".join(data[:200].decode("utf-8", "replace").split())
