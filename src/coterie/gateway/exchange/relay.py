"""Pass a worker's answer on: whole, or piece by piece as it arrives.

The head is sent with the first piece of the body, not before: until then the request can be retried elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from coterie.gateway.exchange.call import CHAT, COMPLETIONS, RESPONSES
from coterie.net.http1 import Answer, Headers, HttpError, Responder, UpstreamError, passed_on

USAGE = b'"usage"'
TAIL_BYTES = 32
"""Last bytes of a stream that are kept: enough for its last event and the line ends after it."""
_LAST = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]\s*\Z")
_LAST_RESPONSE = re.compile(rb"(?:\A|\n)event: ?response\.(?:completed|incomplete|failed)\r?\n")
NAME_BYTES = 64
"""Last bytes of a stream of named events that are kept: a name that comes in two pieces fits."""
MOST_LAST = 4 << 20
"""Most bytes of a stream's last event that are kept: of a longer one the usage is not read."""

MOST_TOKENS = 1 << 31
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Cached(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """Token counts that a worker reports for a request."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    prompt_tokens_details: _Cached | None = None
    input_tokens: Tokens = 0
    """`input_tokens`, `output_tokens` and `input_tokens_details` are the names of ``/v1/responses``."""
    output_tokens: Tokens = 0
    input_tokens_details: _Cached | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or self.input_tokens
        self.completion_tokens = self.completion_tokens or self.output_tokens
        self.prompt_tokens_details = self.prompt_tokens_details or self.input_tokens_details

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the worker's cache; None if not reported."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    response: _Answer | None = None
    """What the last event of a streamed response holds."""


_USAGE = msgspec.json.Decoder(_Answer)


class Relayed(msgspec.Struct, frozen=True):
    """Record of an answer that was passed on."""

    first_s: float
    """Time of the first token, by the monotonic clock."""
    last_s: float
    events: int
    """Number of events with tokens in a stream; 1 for a whole answer."""
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


class Stream:
    """What pieces of a stream say of it. Base of the known formats: of any other, no end is known and events count."""

    ends = False
    """Whether the format has a last event."""
    heralds = False
    """Whether events come before the first token."""

    def __init__(self) -> None:
        self.tail = b""
        """Last bytes."""

    def read(self, piece: bytes) -> int:
        """Take the next piece; return the number of its tokens, as well as events tell."""
        self.tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self.tail + piece)[-TAIL_BYTES:]
        return piece.count(b"\n\n")

    @property
    def whole(self) -> bool:
        """Whether the last event has come."""
        return False

    @property
    def usage(self) -> Usage | None:
        return None


class Completions(Stream):
    """Ends with ``data: [DONE]``; workers send about one event per token."""

    ends = True

    def __init__(self) -> None:
        super().__init__()
        self._counted = b""
        """Last piece with a usage."""

    def read(self, piece: bytes) -> int:
        if USAGE in piece:
            self._counted = piece
        return super().read(piece)

    @property
    def whole(self) -> bool:
        return is_whole(self.tail)

    @property
    def usage(self) -> Usage | None:
        return usage_in(self._counted)


class Responses(Stream):
    """``/v1/responses``: named events. The first come before any token, the last holds the whole response."""

    ends = True
    heralds = True

    def __init__(self) -> None:
        super().__init__()
        self._last = bytearray()
        """The last event from its name on; empty before it."""

    def read(self, piece: bytes) -> int:
        seen = self.tail + piece
        if self._last:
            self._last += piece
        elif (last := _LAST_RESPONSE.search(seen)) is not None:
            self._last += seen[last.start() :].lstrip(b"\n")
        self.tail = seen[-NAME_BYTES:]
        if len(self._last) > MOST_LAST:
            del self._last[:-NAME_BYTES]
        return piece.count(b".delta\n")

    @property
    def whole(self) -> bool:
        return self._last.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def usage(self) -> Usage | None:
        return usage_of(bytes(self._last).partition(b"\ndata: ")[2])


STREAMS = {COMPLETIONS: Completions, CHAT: Completions, RESPONSES: Responses}


async def pass_stream(
    answer: Answer, sink: Responder, own: tuple[bytes, bytes], came: Callable[[int], None], path: str
) -> Relayed:
    """Send each piece as it arrives. Raises UpstreamError if the stream breaks before the first piece.

    `came` is called with the number of tokens of each piece, from the first byte or token on. `path` tells the stream's
    last event: one that ends without it is broken, since a failing worker or proxy may close it properly. One with it
    is whole, even if its connection breaks after it.
    """
    first = last = 0.0
    tokens, stream = 0, STREAMS.get(path, Stream)()
    try:
        async for piece in answer:
            last = time.monotonic()
            if not sink.started:
                sink.start(answer.status, head_of(answer, own))
            found = stream.read(piece)
            if found or not stream.heralds:
                first = first or last
                tokens += found
                came(found)
            sink.write(piece)
            await sink.drain()
        if answer.status == 200 and stream.ends and not stream.whole:
            raise UpstreamError("incomplete", "the stream ended before its last event", answered=True)
    except UpstreamError as error:
        if not sink.started:
            raise
        if answer.status != 200 or not stream.whole:
            sink.fail(HttpError(502, f"the worker's answer broke off: {WHY[error.kind]}", "worker_failed"))
            return Relayed(first or last, last, tokens, problem=error)
        if not stream.tail.endswith((b"\n\n", b"\r\n\r\n")):
            sink.write(b"\n\n")
    finally:
        answer.close()  # also if the client left while its buffer was full: the worker must stop generating
    if not sink.started:  # an empty stream
        first = last = time.monotonic()
        sink.start(answer.status, head_of(answer, own))
    sink.end()
    return Relayed(first or last, last, tokens, stream.usage)


def is_whole(tail: bytes) -> bool:
    """Whether a stream whose last bytes these are has come to its last event, ``data: [DONE]``."""
    return _LAST.search(tail) is not None


def usage_of(body: bytes) -> Usage | None:
    """Return the token counts in an answer; None if it has none or is not a completion."""
    try:
        answer = _USAGE.decode(body)
        return answer.usage if answer.response is None else answer.response.usage
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
