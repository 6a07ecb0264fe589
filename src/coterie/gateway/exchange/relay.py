"""Pass a worker's answer on: whole, or piece by piece as it comes.

The head goes out with the first piece of the body, not before: until then a request can still go to another worker.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec

from coterie.gateway.exchange.call import Sink
from coterie.net.http1.messages import Headers, HttpError, passed_on
from coterie.net.http1.upstream import Answer, UpstreamError

USAGE = b'"usage"'
DONE = b"[DONE]"
TAIL_BYTES = 32
"""Bytes of a stream's end that are kept: its last event and the line ends behind it."""


MOST_TOKENS = 1 << 31
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Cached(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """What a worker reports of a request's tokens."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the worker's cache; None if it does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_USAGE = msgspec.json.Decoder(_Answer)


class Relayed(msgspec.Struct, frozen=True):
    """What was passed on."""

    first_s: float
    """Time of the first piece, by the monotonic clock."""
    last_s: float
    events: int
    """Events of a stream; 1 for a whole answer."""
    usage: Usage | None = None
    problem: UpstreamError | None = None
    """The stream broke after its first byte; the client was told."""

    @property
    def tpot_s(self) -> float | None:
        """Time per event after the first; None if there are too few. Workers send one event a token, or nearly."""
        return (self.last_s - self.first_s) / (self.events - 1) if self.events > 2 else None


async def pass_whole(answer: Answer, sink: Sink, own: tuple[bytes, bytes], limit: int) -> Relayed:
    """Read the answer, then send it with a header of our own. Raises UpstreamError before the client got anything."""
    body = await answer.read(limit)
    now = time.monotonic()
    sink.send(answer.status, body, b"", head_of(answer, own))
    return Relayed(now, now, 1, usage_of(body))


async def pass_stream(answer: Answer, sink: Sink, own: tuple[bytes, bytes]) -> Relayed:
    """Send each piece as it comes. Raises UpstreamError if it breaks before the first piece.

    A stream that ends without its last event is broken too: a worker, or a proxy before it, may end one properly.
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
            events += piece.count(b"\n\n")
            tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (tail + piece)[-TAIL_BYTES:]
            sink.write(piece)
            await sink.drain()
        if answer.status == 200 and not tail.rstrip().endswith(DONE):
            raise UpstreamError("incomplete", "the stream ended before its last event", answered=True)
    except UpstreamError as error:
        if not sink.started:
            raise
        sink.fail(HttpError(502, f"the worker's answer broke off: {WHY[error.kind]}", "worker_failed"))
        return Relayed(first, last, events, problem=error)
    finally:
        answer.close()  # also where the client left while its buffer was full: the worker must hear of it
    if not sink.started:  # an empty stream
        first = last = time.monotonic()
        sink.start(answer.status, head_of(answer, own))
    sink.end()
    return Relayed(first, last, events, usage_in(usage_piece))


def usage_of(body: bytes) -> Usage | None:
    """What an answer says of its tokens; None if it does not, or is no completion."""
    try:
        return _USAGE.decode(body).usage
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def usage_in(piece: bytes) -> Usage | None:
    """The same of a stream's events: those that have it come last."""
    for event in reversed(piece.split(b"\n\n")):
        if USAGE in event and event.startswith(b"data: "):
            return usage_of(event[6:])
    return None


def head_of(answer: Answer, own: tuple[bytes, bytes]) -> Headers:
    """Headers of an answer that is passed on: the worker's, but for the one that the gateway itself sets."""
    head = passed_on(answer.headers, own[0])
    head.append(own)
    return head


WHY = {
    "connect": "it cannot be reached",
    "reset": "it closed the connection",
    "timeout": "it was silent too long",
    "protocol": "its answer cannot be read",
    "too_large": "its answer is too large",
    "incomplete": "it ended before its last event",
    "unhealthy": "it was found not to be well",
}
"""Kind of a failure → what clients hear of it. The error itself names the worker's address, which is not theirs."""
