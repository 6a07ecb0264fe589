"""Messages between a gateway and the process of its control loop, on a socket pair: a 4-byte length, then msgpack.

The gateway sends :data:`ToLoop`, the process :data:`FromLoop`. Messages carry the generation of their set-up, so that
those in transit when the router changed are recognised as outdated.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from coterie.errors import InputError
from coterie.gateway.config import ControlSection
from coterie.gateway.fleet.spec import RouterSpec

HEAD_BYTES = 4
MOST_BYTES = 64 << 20
"""Most bytes of a message: the loads of 64 workers with 64 layers of 256 experts take 9 MB."""


class StreamEntry(msgspec.Struct, frozen=True):
    """A worker's stream of expert events."""

    worker: str
    endpoint: str
    secure: bool = False
    """Whether the stream is encrypted with the fleet secret."""


class SetUp(msgspec.Struct, tag=True, kw_only=True):
    """Start the loop, or restart it, with this router and these settings."""

    generation: int
    spec: RouterSpec
    """Router of the decode pool, with the fit in force."""
    rows: int
    """Number of rows of the decode pool, up to its last worker."""
    section: ControlSection
    folder: str
    """Folder to which fits are written."""
    streams: list[StreamEntry]


class FleetChanged(msgspec.Struct, tag=True, kw_only=True):
    """Notice that workers joined or left."""

    generation: int
    rows: int
    streams: list[StreamEntry]


class Swapped(msgspec.Struct, tag=True):
    """Notice that the fit with this number is in force."""

    generation: int
    fit: int


class SwapFailed(msgspec.Struct, tag=True):
    generation: int
    fit: int
    problem: str


class SentNames(msgspec.Struct, tag=True):
    """Requests that the gateway has sent to workers: events about other requests do not count."""

    requests: list[tuple[str, str]]
    """Pairs of request name and worker id."""


class Told(msgspec.Struct, tag=True, kw_only=True):
    """Report of the loop on what happened since its last report."""

    generation: int
    events: list[dict[str, Any]] = []
    """New decisions of the loop, oldest first."""
    counters: dict[str, int] = {}
    """Increments of counters since the last report, by ``ignored.REASON`` and ``streams.KIND``."""
    fit_s: float | None = None
    """Duration of the last fit in seconds; None before the first."""
    view: bytes = b""
    """Encoded :class:`~coterie.gateway.control.views.ControlView`, decoded only when read; empty if there is none."""


class UseFit(msgspec.Struct, tag=True):
    """Request to put the fit in this file in force."""

    generation: int
    fit: int
    path: str


class Unable(msgspec.Struct, tag=True):
    """Notice that the loop cannot run with its set-up; it waits for another."""

    generation: int
    problem: str


T = TypeVar("T")
ToLoop = SetUp | FleetChanged | Swapped | SwapFailed | SentNames
FromLoop = Told | UseFit | Unable

_encoder = msgspec.msgpack.Encoder()
_to_loop: msgspec.msgpack.Decoder[ToLoop] = msgspec.msgpack.Decoder(ToLoop)
_from_loop: msgspec.msgpack.Decoder[FromLoop] = msgspec.msgpack.Decoder(FromLoop)


def pack_message(message: ToLoop | FromLoop) -> bytes:
    """Encode a message, with its length in front. Raises InputError if it is too long."""
    data = _encoder.encode(message)
    return check_length(len(data)).to_bytes(HEAD_BYTES, "big") + data


def check_length(length: int) -> int:
    if length > MOST_BYTES:
        raise InputError(f"a message of the control loop has {length} bytes, must be at most {MOST_BYTES}")
    return length


def for_loop(data: bytes) -> ToLoop:
    """Decode a message to the loop. Raises InputError for invalid bytes."""
    return _decoded(_to_loop, data)


def from_loop(data: bytes) -> FromLoop:
    """Decode a message from the loop. Raises InputError for invalid bytes."""
    return _decoded(_from_loop, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(f"is no message of the control loop: {error}") from None
