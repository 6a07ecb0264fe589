"""Static files of the dashboard, from the package. They hold no data, so they are served without a key."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from coterie.net.http1.messages import Headers, HttpError, HttpRequest
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
