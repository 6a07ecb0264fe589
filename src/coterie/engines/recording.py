"""Send prompts to a server whose routing is recorded; used by the recorders of all engines."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from coterie.errors import UnavailableError, check, check_at_least, check_positive
from coterie.net.http_client import Client, HttpResult
from coterie.prompts import Prompt
from coterie.types import Report

FLUSH_S = 10.0
"""Seconds between two flushes of a recording to disk: a crash loses at most this much."""


CONNECT_S = 5.0


def check_listening(address: str, start: str) -> None:
    """Raise UnavailableError if no server listens at a URL or ZMQ endpoint; `start` tells the user what to start.

    Only TCP is tried: the other ZMQ transports report their own errors.
    """
    parts = urlsplit(address)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https", "tcp"):
        return
    check(parts.hostname and port is not None, f"{address!r} must be {parts.scheme}://HOST:PORT")
    try:
        socket.create_connection((parts.hostname, port), CONNECT_S).close()
    except OSError as error:
        raise UnavailableError(f"nothing listens at {address} ({error.strerror or error}): {start}") from None


@dataclass(frozen=True, slots=True)
class Sending:
    """Prompts to send to a server, and how to send them. Without prompts the recorder only listens."""

    prompts: Sequence[Prompt] = ()
    duration_s: float | None = None
    """Seconds after which no prompt is sent; without prompts, seconds to listen."""
    concurrency: int = 8
    """Maximum number of requests in flight."""
    max_tokens: int = 64
    """Largest number of tokens per answer."""
    chat: bool = True
    """Use the server's chat template."""
    report: Report = lambda *_: None

    def __post_init__(self) -> None:
        check_at_least(1, concurrency=self.concurrency, max_tokens=self.max_tokens)
        check_positive(duration_s=self.duration_s)

    async def send(
        self, client: Client, path: str, bodies: Iterable[Mapping[str, Any]]
    ) -> AsyncGenerator[HttpResult, None]:
        """Send one request per body and yield the answers as they arrive."""
        counted = count()
        self.report("Recording requests", next(counted), len(self.prompts))
        async with aclosing(client.send(path, bodies, self.concurrency, self.duration_s)) as answers:
            async for answer in answers:
                yield answer
                self.report("Recording requests", next(counted), len(self.prompts))
