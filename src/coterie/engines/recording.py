"""Sending prompts to a server that is recorded, for any engine."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from coterie.errors import ConfigError, UnavailableError, check_at_least, check_positive
from coterie.net.http_client import Client, HttpResult
from coterie.prompts import Prompt

Progress = Callable[[str, int, int], None]

FLUSH_S = 10.0
"""Seconds of recording that a crash may lose."""


CONNECT_S = 5.0


def check_listening(address: str, start: str) -> None:
    """Raise UnavailableError at once if no server listens at a URL or ZMQ endpoint; `start` says what to start.

    Only TCP is tried: other transports of ZMQ say for themselves what is wrong.
    """
    parts = urlsplit(address)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https", "tcp"):
        return
    if not parts.hostname or port is None:
        raise ConfigError(f"{address!r} must be {parts.scheme}://HOST:PORT")
    try:
        socket.create_connection((parts.hostname, port), CONNECT_S).close()
    except OSError as error:
        raise UnavailableError(f"nothing listens at {address} ({error.strerror or error}): {start}") from None


def _no_report(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Sending:
    """Prompts for a server, and how to send them. Without prompts it is only listened to."""

    prompts: Sequence[Prompt] = ()
    duration_s: float | None = None
    """No prompt is sent after this time; without prompts, how long to listen."""
    concurrency: int = 8
    """Requests in flight."""
    max_tokens: int = 64
    """Largest number of tokens per answer."""
    chat: bool = True
    """Use the server's chat template."""
    report: Progress = _no_report

    def __post_init__(self) -> None:
        check_at_least(1, concurrency=self.concurrency, max_tokens=self.max_tokens)
        check_positive(duration_s=self.duration_s)

    async def send(
        self, client: Client, path: str, bodies: Iterable[Mapping[str, Any]]
    ) -> AsyncGenerator[HttpResult, None]:
        """Answers to the prompts' bodies, as they arrive."""
        done = 0
        self.report("Recording requests", 0, len(self.prompts))
        async with aclosing(client.send(path, bodies, self.concurrency, self.duration_s)) as answers:
            async for answer in answers:
                yield answer
                done += 1
                self.report("Recording requests", done, len(self.prompts))
