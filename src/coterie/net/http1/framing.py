"""Where a request ends and what it asks for, by its head; what two readers could read differently is refused."""

from __future__ import annotations

from functools import lru_cache

from coterie.net.http1.messages import Headers, HttpError

_NAMES = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"))


class Framing:
    """What the headers say of the body."""

    __slots__ = ("chunked", "encoding", "expect", "expects", "length")

    def __init__(self, headers: Headers, version: str) -> None:
        self.length = 0
        self.chunked = False
        self.encoding = self.expect = b""
        lengths = hosts = 0
        for name, value in headers:
            if name not in _NAMES:
                continue
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                lengths += 1
                if not value.isdigit():
                    raise HttpError(400, "Content-Length must be a number")
                self.length = int(value)
            elif name == b"transfer-encoding":
                if self.chunked or value.lower() != b"chunked" or version != "1.1":
                    raise HttpError(400, "Transfer-Encoding must be chunked, once")
                self.chunked = True
            elif name == b"content-encoding":
                self.encoding = value.lower()
            else:
                self.expect = value.lower()
        self.expects = bool(self.expect)
        if lengths + self.chunked > 1:
            raise HttpError(400, "a request must have one Content-Length or Transfer-Encoding, not both")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise HttpError(400, "a request must have one Host")

    def check_supported(self) -> None:
        if self.encoding not in (b"", b"identity"):
            raise HttpError(415, "Content-Encoding is not supported: send the body as it is")
        if self.expect not in (b"", b"100-continue"):
            raise HttpError(417, "only Expect: 100-continue is supported")


@lru_cache(64)  # most clients ask for few targets
def split_target(url: bytes) -> tuple[str, str]:
    """Return path and query of a request target, which may name a scheme and a host."""
    target = url.decode("latin-1")
    if not target.startswith("/") and target != "*":
        _, scheme, rest = target.partition("://")
        slash = rest.find("/")
        if not scheme or slash < 0:
            raise HttpError(400, "the target of a request must be a path")
        target = rest[slash:]
    if "#" in target:
        raise HttpError(400, "the target of a request has no fragment")
    path, _, query = target.partition("?")
    return path, query
