"""Pass a worker's answer on: whole, or piece by piece as it arrives.

The head is sent with the first piece of the body, not before: until then the request can be retried elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from coterie.net.http1 import Answer, Headers, HttpError, Responder, UpstreamError, passed_on

USAGE = b'"usage"'
TAIL_BYTES = 32
"""Last bytes of a stream that are kept: enough for its last event and the line ends after it."""
_LAST = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]\s*\Z")

MOST_TOKENS = 1 << 31
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Cached(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts that a worker reports for a request."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the worker's cache; None if not reported."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_USAGE = msgspec.json.Decoder(_Answer)


class Relayed(msgspec.Struct, frozen=True):
    """Record of an answer that was passed on."""

    first_s: float
    """Time of the first piece, by the monotonic clock."""
    last_s: float
    events: int
    """Number of events in a stream; 1 for a whole answer."""
    usage: Usage | None = None
    problem: UpstreamError | None = None
    """Error if the stream broke after its first byte; the client has received it as last event."""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per event after the first; None below three events, or two tokens where the worker counts them.

        Workers send about one event per token; the events that end an answer of one token come at once.
        """
        short = self.events <= 2 or (self.usage is not None and self.usage.completion_tokens == 1)
        return None if short else (self.last_s - self.first_s) / (self.events - 1)


async def pass_whole(
    answer: Answer, sink: Responder, own: tuple[bytes, bytes], limit: int, came: Callable[[int], None]
) -> Relayed:
    """Read the whole answer, then send it with the header `own`. Raises UpstreamError before anything is sent."""
    body = await answer.read(limit)
    now, usage = time.monotonic(), usage_of(body)
    came(0 if usage is None else usage.completion_tokens)
    sink.send(answer.status, body, b"", head_of(answer, own))
    return Relayed(now, now, 1, usage)


async def pass_stream(
    answer: Answer, sink: Responder, own: tuple[bytes, bytes], came: Callable[[int], None]
) -> Relayed:
    """Send each piece as it arrives. Raises UpstreamError if the stream breaks before the first piece.

    `came` is called with the number of events of each piece: workers send about one per token. A stream that ends
    without ``[DONE]`` is broken too: a failing worker or proxy may close it properly. One with it is whole, even if its
    connection breaks after it.
    """
    first = last = 0.0
    events, usage_piece, tail = 0, b"", b""
    try:
        async for piece in answer:
            last = time.monotonic()
            if USAGE in piece:
                usage_piece = piece
            if not sink.started:
                first = last
                sink.start(answer.status, head_of(answer, own))
            found = piece.count(b"\n\n")
            events += found
            came(found)
            tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (tail + piece)[-TAIL_BYTES:]
            sink.write(piece)
            await sink.drain()
        if answer.status == 200 and not is_whole(tail):
            raise UpstreamError("incomplete", "the stream ended before its last event", answered=True)
    except UpstreamError as error:
        if not sink.started:
            raise
        if answer.status != 200 or not is_whole(tail):
            sink.fail(HttpError(502, f"the worker's answer broke off: {WHY[error.kind]}", "worker_failed"))
            return Relayed(first, last, events, problem=error)
        if not tail.endswith((b"\n\n", b"\r\n\r\n")):
            sink.write(b"\n\n")
    finally:
        answer.close()  # also if the client left while its buffer was full: the worker must stop generating
    if not sink.started:  # an empty stream
        first = last = time.monotonic()
        sink.start(answer.status, head_of(answer, own))
    sink.end()
    return Relayed(first, last, events, usage_in(usage_piece))


def is_whole(tail: bytes) -> bool:
    """Whether a stream whose last bytes these are has come to its last event, ``data: [DONE]``."""
    return _LAST.search(tail) is not None


def usage_of(body: bytes) -> Usage | None:
    """Return the token counts in an answer; None if it has none or is not a completion."""
    try:
        return _USAGE.decode(body).usage
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def usage_in(piece: bytes) -> Usage | None:
    """Return the token counts in the last event of a piece that has any; None if no event has."""
    events = (event for event in reversed(piece.split(b"\n\n")) if USAGE in event and event.startswith(b"data: "))
    return next((usage_of(event[6:]) for event in events), None)


def head_of(answer: Answer, own: tuple[bytes, bytes]) -> Headers:
    """Return the headers to pass on: the worker's, with the header `own` replaced by the gateway's."""
    return [*passed_on(answer.headers, own[0]), own]


WHY = {
    "connect": "it cannot be reached",
    "reset": "it closed the connection",
    "timeout": "it was silent too long",
    "protocol": "its answer cannot be read",
    "too_large": "its answer is too large",
    "incomplete": "it ended before its last event",
    "unhealthy": "it was found not to be well",
}
"""Kind of a failure → message for clients. The error itself holds the worker's address, which clients may not see."""
