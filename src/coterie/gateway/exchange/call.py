"""A client's request as the fleet gets it, the place its answer goes to, and what came of it.

What a client may not decide is taken out of its body here: where KV comes from, which rank serves it, under which id.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from coterie.gateway.watching.spans import NO_SPAN, Span
from coterie.net.http1.messages import Headers, HttpError
from coterie.wire.footprints import WireFootprint
from coterie.wire.handoff import REQUEST_ID_HEADER

OWNED = frozenset(
    (
        "kv_transfer_params",
        "request_id",
        "rid",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "routed_dp_rank",
        "routed_data_parallel_rank",
        "disagg_prefill_dp_rank",
    )
)
"""Fields of a body that only the gateway may set: they make a worker fetch KV, or name a request or a rank."""
PASSED = frozenset((b"accept", b"content-type", b"user-agent", b"traceparent", b"tracestate", b"baggage"))
"""Headers of a client that workers get."""
NO_HEADERS: Headers = []
MAX_ID = 256
_PROCESS, _NUMBERS = secrets.token_hex(12), itertools.count()
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


Pairs = Sequence[tuple[bytes, bytes]]


class Sink(Protocol):
    """Where an answer goes: a client's connection, or a buffer."""

    @property
    def started(self) -> bool: ...

    def send(
        self, status: int, body: bytes = b"", content_type: bytes = b"application/json", headers: Pairs = ...
    ) -> None: ...

    def start(self, status: int, headers: Pairs, length: int | None = None) -> None: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def end(self) -> None: ...

    def abort(self) -> None: ...


class Call(NamedTuple):
    """A request, checked."""

    key: str
    """Name inside the gateway: no other request ever has it."""
    name: str
    """Name towards workers: no other request in flight has it."""
    id: str
    """The client's own id, or `name`."""
    path: str
    body: dict[str, Any]
    raw: bytes
    """Body as it goes to a worker that needs nothing added."""
    stream: bool
    headers: Headers
    """Headers for the worker."""
    caller: str = ""
    """Name of the caller's key."""
    domain: str | None = None
    span: Span = NO_SPAN

    def with_fields(self, **fields: Any) -> bytes:
        """Body with further fields."""
        return encode_object({**self.body, **fields})


class Outcome(NamedTuple):
    """What came of a request."""

    status: int
    """Status that the client got; 499 if it went away."""
    worker: str | None = None
    prefill: str | None = None
    """Prefill worker, if there was a handoff."""
    footprint: WireFootprint | None = None
    reason: str = ""
    """Reason of the last decision."""
    tokens: int = 0
    """Prompt tokens; 0 if unknown."""
    output_tokens: int = 0
    """Tokens generated, as the worker reports them."""
    cached_tokens: int | None = None
    """Prompt tokens in the worker's cache, as it reports them; None if it does not."""
    prefill_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    problem: str | None = None
    """Why it failed."""
    cut: bool = False
    """The answer ended after its first byte, before its end."""


class Collected:
    """A sink that keeps the answer, for callers without a connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.pieces: list[bytes] = []
        self.started = self.ended = self.aborted = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def send(
        self, status: int, body: bytes = b"", content_type: bytes = b"application/json", headers: Pairs = ()
    ) -> None:
        self.start(status, [*([(b"content-type", content_type)] if content_type else []), *headers], len(body))
        self.pieces.append(body)
        self.end()

    def start(self, status: int, headers: Pairs, length: int | None = None) -> None:
        del length
        self.status, self.headers, self.started = status, list(headers), True

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    async def drain(self) -> None:
        return

    def end(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.aborted = True


def parse_object(data: bytes) -> dict[str, Any]:
    """The body of a request; HttpError unless it is a JSON object."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HttpError(400, f"the body must be a JSON object, found {type(body).__name__}")
    return body


def new_name() -> str:
    """A name that no other request has, in this process or in another, and that nobody can guess."""
    return f"{_PROCESS}-{next(_NUMBERS):x}"


def checked_id(given: bytes) -> str:
    """A request's id, which goes into headers and logs; HttpError unless it is short and printable."""
    if not 0 < len(given) <= MAX_ID or not given.isascii() or not given.decode().isprintable():
        raise HttpError(400, f"{REQUEST_ID_HEADER} must be 1 to {MAX_ID} printable ASCII characters")
    return given.decode()


def encode_object(body: Mapping[str, Any]) -> bytes:
    """A body as it goes to a worker; HttpError for numbers and nesting that can be read but not written."""
    try:
        return msgspec.json.encode(body)
    except (OverflowError, RecursionError, ValueError) as error:
        raise HttpError(400, f"the body cannot be passed on: {error}") from None


def make_call(
    path: str,
    data: bytes,
    *,
    request_id: str | None = None,
    name: str | None = None,
    headers: Headers = NO_HEADERS,
    caller: str = "",
    domain: str | None = None,
    span: Span = NO_SPAN,
    salt: str | None = None,
    body: Mapping[str, Any] | None = None,
) -> Call:
    """Check a body, and take out what only the gateway may set; `salt` keeps this caller's cached prefixes apart.

    `request_id` is the client's; `name` is used towards workers in its place. `headers` go to the worker.
    """
    found = dict(body) if body is not None else parse_object(data)
    changed = body is not None
    if not OWNED.isdisjoint(found):
        found = {field: value for field, value in found.items() if field not in OWNED}
        changed = True
    stream = found.get("stream") or False
    if not isinstance(stream, bool):
        raise HttpError(400, "stream must be true or false", param="stream")
    own = found.get("cache_salt")
    if own is not None and not isinstance(own, str):
        raise HttpError(400, "cache_salt must be a text", param="cache_salt")
    if salt is not None:
        found["cache_salt"] = salt if own is None else f"{salt}/{own}"
        changed = True
    if not isinstance(found.get("model"), str | None):
        raise HttpError(400, "model must be a text", param="model")
    key = new_name()
    return Call(
        key,
        name or request_id or key,
        request_id or key,
        path,
        found,
        encode_object(found) if changed else data,
        stream,
        headers,
        caller,
        domain,
        span,
    )
