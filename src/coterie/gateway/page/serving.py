"""The dashboard's files and its stream of snapshots.

The files hold no data, so they are served without a key. `GET /live` sends snapshots as server-sent events, until the
client disconnects:

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
import hashlib
import time
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from coterie.gateway.page.snapshot import PageQuery, heat, snapshot
from coterie.gateway.parts import GatewayParts
from coterie.net.http1.messages import Headers, HttpError, HttpRequest, check_http
from coterie.net.http1.responder import Responder

PREFIX = "/page/"
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy: no foreign resources, scripts only from the page's files, no framing, no text as markup."""
GUARDS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class PageFile(NamedTuple):
    body: bytes
    content_type: bytes
    tag: bytes
    """ETag of the body, so that a browser with a cached copy is not sent the file again."""


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by URL path."""
    by_path = {}
    for file in files(__package__).joinpath("static").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            path = "/" if file.name == "index.html" else PREFIX + file.name
            by_path[path] = PageFile(body, kind, b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode())
    return by_path


def is_page(path: str) -> bool:
    return path == "/" or path.startswith(PREFIX)


def send_file(request: HttpRequest, responder: Responder) -> None:
    """Answer with a file of the page. Raises HttpError for an unknown path or another method."""
    if request.method not in ("GET", "HEAD"):
        raise HttpError(405, f"{request.path[:200]} takes GET, not {request.method}", headers=[(b"allow", b"GET")])
    file = page_files().get(request.path)
    if file is None:
        raise HttpError(404, f"{request.path[:200]} is not a file of the page")
    headers = [*GUARDS, (b"cache-control", b"no-cache"), (b"etag", file.tag)]
    if request.header(b"if-none-match") == file.tag:
        responder.send(304, headers=headers)
    else:
        responder.send(200, file.body, file.content_type, headers)


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
        check_http(name in ("heat", "pool", "worker"), 400, f"{name[:40]!r} is not known; known: heat, pool, worker")
        check_http(
            len(values[-1]) <= MOST_NAME, 400, f"{name} has {len(values[-1])} characters, more than {MOST_NAME}", name
        )
    return PageQuery(**{name: values[-1] for name, values in fields.items()})


def _event(name: str, value: dict[str, Any]) -> bytes:
    """Encode a server-sent event. Its JSON has no line breaks, so that one data line holds it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
