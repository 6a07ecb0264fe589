"""Parts shared by the HTTP/1.1 server and client: limits, requests, errors as JSON answers, and header lines.

Headers are (name, value) pairs of bytes, names in lower case, in the order of the message. Every header line is checked
before it is written: a CR, LF or NUL in a value would let its author forge the rest of the message.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec

from coterie.errors import ConfigError, CoterieError, check, check_at_least, check_not_negative, check_positive

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)
"""Headers that concern one connection only, which a proxy must not pass on."""
FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection", b"host"))
"""Headers that only the server and client code may write: they decide where a message ends and who receives it."""
_NOT_PASSED_ON = HOP_BY_HOP | {b"content-length", b"host", b"expect"}
_PLAIN_CONNECTIONS = frozenset((b"keep-alive", b"Keep-Alive", b"close"))
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_KNOWN_NAMES: set[bytes] = set()
_MAX_KNOWN_NAMES = 1024
_UNSAFE_TARGET = re.compile(rb"[\x00-\x20\x7f-\xff]")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources that one client may take from a server; times in seconds."""

    head_bytes: int = 32_768
    """Largest head of a request in bytes (first line and headers). Also limits the trailers."""
    headers: int = 100
    """Most headers of a request."""
    body_bytes: int = 4 << 20
    """Largest body of a request in bytes, unless the check of the head returns another limit."""
    head_s: float = 10.0
    """Time in which a whole head must arrive, from the opening of the connection or the head's first byte."""
    body_s: float = 30.0
    """Time in which a whole body must arrive, from the end of its head."""
    idle_s: float = 75.0
    """Time that a connection is kept open without a request."""
    write_s: float = 60.0
    """Time that a client may leave a full write buffer unread."""
    connections: int = 1024
    """Most connections at a time; further ones get 503."""
    connections_per_peer: int = 0
    """Most connections from one IP address at a time; 0 for no limit."""

    def __post_init__(self) -> None:
        check_at_least(1, head_bytes=self.head_bytes, headers=self.headers, connections=self.connections)
        check_not_negative(body_bytes=self.body_bytes, connections_per_peer=self.connections_per_peer)
        check_positive(head_s=self.head_s, body_s=self.body_s, idle_s=self.idle_s, write_s=self.write_s)


@dataclass(slots=True)
class ServerCounters:
    """Counts of a server's events since it started."""

    accepted: int = 0
    refused: int = 0
    """Connections refused because a connection limit was reached."""
    requests: int = 0
    timeouts: Counter[str] = field(default_factory=Counter)
    """Timeouts by kind: head, body, idle, write."""
    malformed: int = 0
    disconnects: int = 0
    """Clients that disconnected before their answer ended."""
    errors: int = 0
    """Handlers that raised an exception other than HttpError."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request, with its whole body (empty while its head is checked)."""

    method: str
    path: str
    """Path as sent, without the query and not percent-decoded."""
    query: str
    headers: Headers
    body: bytes
    peer: str
    """IP address of the client."""
    context: Any = None
    """Value that the check of the head passes to the handler."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, given its name in lower case."""
        for known, value in self.headers:
            if known == name:
                return value
        return None


class HttpError(CoterieError):
    """An answer with an error status and a body in OpenAI's error format."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        message = " ".join(str(self).split()).encode(errors="backslashreplace").decode()  # half a surrogate pair
        error = {"message": message, "type": _error_type(self.status), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Return the error as last event of a broken stream, in OpenAI's format.

        Starts with a blank line, which ends the event before it even if that was cut short.
        """
        return b"\n\ndata: " + self.body() + b"\n\n"


def check_http(holds: object, status: int, message: str, param: str | None = None) -> None:
    """Raise HttpError unless `holds`; for problems that can be put into words at once, and cheaply."""
    if not holds:
        raise HttpError(status, message, param=param)


def _error_type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def status_line(status: int) -> bytes:
    if not 200 <= status <= 599:
        raise ConfigError(f"status={status} of an answer must be in 200 … 599")
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


_STATUS_LINES = {
    int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus if status >= 200
}


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as lines, each ended by CR LF; raise ConfigError for one that would break the framing."""
    lines, count = b"", 0
    for name, value in headers:
        if name not in _KNOWN_NAMES:
            _check_name(name)
        lines += b"%b: %b\r\n" % (name, value)
        count += 1
    check(
        lines.count(b"\n") == count and lines.count(b"\r") == count and b"\0" not in lines,
        "a header value must not hold CR, LF or NUL",
    )
    return lines


def _check_name(name: bytes) -> None:
    if not _TOKEN.fullmatch(name):
        raise ConfigError(f"header name {name!r} must be a token: letters, digits and !#$%&'*+-.^_`|~")
    if name.lower() in FRAMING:
        raise ConfigError(f"header {name.decode()} is set by the connection itself: leave it out")
    if len(_KNOWN_NAMES) < _MAX_KNOWN_NAMES and len(name) <= 64:
        _KNOWN_NAMES.add(name)


def size_of(headers: Headers) -> int:
    """Return the number of bytes that headers take in a message."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


def check_target(target: bytes) -> bytes:
    """Return the bytes; raise ConfigError for a method or target that would end the request line early."""
    check(
        not _UNSAFE_TARGET.search(target),
        "a method or a target must not hold spaces, control characters or bytes above 126",
    )
    return target


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:  # noqa: SIM110 (the loop takes a third of the time of any())
        if name == b"content-type" and value.startswith(b"text/event-stream"):
            return True
    return False


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Turn Nagle's algorithm off: asyncio leaves it on for sockets with protocol number 0, at 40 ms a write."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def passed_on(headers: Sequence[tuple[bytes, bytes]], but: bytes = b"") -> Headers:
    """Return the headers that a proxy passes on: all but hop-by-hop headers, Content-Length, Host and Expect.

    `but` is the name of one more header to leave out.
    """
    kept: Headers = []
    named: set[bytes] = set()
    for pair in headers:
        name, value = pair
        if name not in _NOT_PASSED_ON:
            if name != but:
                kept.append(pair)
        elif name == b"connection" and value not in _PLAIN_CONNECTIONS:
            named.update(option.strip().lower() for option in value.split(b","))
    return [pair for pair in kept if pair[0] not in named] if named else kept


_NAMES = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"))


class Framing:
    """Length, transfer encoding, content encoding and expectation of a request's body, parsed from its headers."""

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
                check_http(value.isdigit(), 400, "Content-Length must be a number")
                self.length = int(value)
            elif name == b"transfer-encoding":
                check_http(
                    not self.chunked and value.lower() == b"chunked" and version == "1.1",
                    400,
                    "Transfer-Encoding must be chunked, once",
                )
                self.chunked = True
            elif name == b"content-encoding":
                self.encoding = value.lower()
            else:
                self.expect = value.lower()
        self.expects = bool(self.expect)
        check_http(
            lengths + self.chunked <= 1, 400, "a request must have one Content-Length or Transfer-Encoding, not both"
        )
        check_http(hosts <= 1 and (hosts or version != "1.1"), 400, "a request must have one Host")

    def check_supported(self) -> None:
        check_http(
            self.encoding in (b"", b"identity"), 415, "Content-Encoding is not supported: send the body as it is"
        )
        check_http(self.expect in (b"", b"100-continue"), 417, "only Expect: 100-continue is supported")


@lru_cache(64)  # most clients use few targets
def split_target(url: bytes) -> tuple[str, str]:
    """Return path and query of a request target; a scheme and a host in it are dropped."""
    target = url.decode("latin-1")
    if not target.startswith("/") and target != "*":
        _, scheme, rest = target.partition("://")
        slash = rest.find("/")
        check_http(scheme and slash >= 0, 400, "the target of a request must be a path")
        target = rest[slash:]
    check_http("#" not in target, 400, "the target of a request has no fragment")
    path, _, query = target.partition("?")
    return path, query
