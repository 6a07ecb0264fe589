"""`GET /live`: snapshots as server-sent events, until the client disconnects.

    event: snapshot   all panels, twice a second
    event: heat       the heat map of the chosen worker, after each change
    event: end        the gateway is shutting down

Nothing is computed while nobody listens. Listeners with the same query share one computed snapshot. A listener gets the
next snapshot after it has read the one before, so a slow listener buffers at most two. A listener that reads nothing is
disconnected by the server's `write_s` limit, which ends its task.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from coterie.gateway.page.files import GUARDS
from coterie.gateway.page.snapshot import PageQuery, heat, snapshot
from coterie.gateway.parts import GatewayParts
from coterie.net.http1.messages import HttpError, HttpRequest
from coterie.net.http1.responder import Responder

PERIOD_S = 0.5
MOST_LISTENERS = 32
MOST_NAME = 256
HEADERS = [*GUARDS, (b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
END = b"event: end\ndata: {}\n\n"


class Live:
    """Streams of snapshots for the open pages of the dashboard."""

    def __init__(self, parts: GatewayParts, period_s: float = PERIOD_S, most: int = MOST_LISTENERS) -> None:
        self.parts, self.period_s, self.most = parts, period_s, most
        self.listeners = 0
        self.computed = 0
        """Number of snapshots computed since the start."""
        self._closed = asyncio.Event()
        self._tick = -1
        self._made: dict[PageQuery, bytes] = {}
        """Query → encoded snapshot of the current tick."""

    def close(self) -> None:
        """End all streams, because the gateway shuts down."""
        self._closed.set()

    async def stream(self, request: HttpRequest, responder: Responder) -> None:
        """Send snapshots until the gateway shuts down or the client leaves, which cancels this task."""
        asked = asked_for(request.query)
        if request.method == "HEAD":
            responder.send(200, headers=HEADERS)
            return
        if self.listeners >= self.most or self._closed.is_set():
            why = "the gateway is shutting down" if self._closed.is_set() else f"{self.most} pages are open already"
            raise HttpError(503, f"{why}: no further one is served", headers=[(b"retry-after", b"5")])
        self.listeners += 1
        try:
            responder.start(200, HEADERS)
            await self._send(asked, responder)
            responder.write(END)
            responder.end()
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._made.clear()

    async def _send(self, asked: PageQuery, responder: Responder) -> None:
        shown: object = self  # view of the last heat map sent; self stands for none
        while not self._closed.is_set():
            view = None if self.parts.control is None else self.parts.control.view
            responder.write(self._snapshot(asked))
            if view is not shown:
                shown = view
                responder.write(_event("heat", heat(self.parts, asked.heat)))
            await responder.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.period_s - time.monotonic() % self.period_s):
                    await self._closed.wait()

    def _snapshot(self, asked: PageQuery) -> bytes:
        tick = int(time.monotonic() / self.period_s)
        if tick != self._tick:
            self._tick = tick
            self._made.clear()
        if asked not in self._made:
            self.computed += 1
            self._made[asked] = _event("snapshot", snapshot(self.parts, time.time(), asked))
        return self._made[asked]


def asked_for(query: str) -> PageQuery:
    """Parse the query ``heat=ID&pool=NAME&worker=ID``. Raises HttpError for any other."""
    try:
        fields = parse_qs(query, max_num_fields=8, keep_blank_values=False)
    except ValueError:
        raise HttpError(400, "the query has too many fields") from None
    for name, values in fields.items():
        if name not in ("heat", "pool", "worker"):
            raise HttpError(400, f"{name[:40]!r} is not known; known: heat, pool, worker")
        if len(values[-1]) > MOST_NAME:
            raise HttpError(400, f"{name} has {len(values[-1])} characters, more than {MOST_NAME}", param=name)
    return PageQuery(**{name: values[-1] for name, values in fields.items()})


def _event(name: str, value: dict[str, Any]) -> bytes:
    """Encode a server-sent event. Its JSON has no line breaks, so that one data line holds it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
