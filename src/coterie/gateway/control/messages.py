"""Messages between a gateway and the process of its control loop, on a socket pair: a length, then msgpack.

The gateway's are :data:`ToLoop`, the process's :data:`FromLoop`. Each names the generation of the set-up it belongs to,
so that what was on its way when the router changed is known for what it is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from coterie.errors import InputError
from coterie.gateway.config import ControlSection
from coterie.gateway.fleet.spec import RouterSpec

HEAD_BYTES = 4
MOST_BYTES = 64 << 20
"""Longest message: the loads of 64 workers with 64 layers of 256 experts take 9 MB."""


class StreamEntry(msgspec.Struct, frozen=True):
    """A worker's stream of expert events."""

    worker: str
    endpoint: str
    secure: bool = False
    """Whether it is encrypted with the fleet's secret."""


class SetUp(msgspec.Struct, tag=True, kw_only=True):
    """Begin anew with this router."""

    generation: int
    spec: RouterSpec
    """Router of the decode pool, with the fit that serves."""
    rows: int
    """Rows of the decode pool up to its last worker."""
    section: ControlSection
    folder: str
    """Where fits are written."""
    streams: list[StreamEntry]


class FleetChanged(msgspec.Struct, tag=True, kw_only=True):
    """Workers joined or left."""

    generation: int
    rows: int
    streams: list[StreamEntry]


class Swapped(msgspec.Struct, tag=True):
    """The fit routes requests now."""

    generation: int
    fit: int


class SwapFailed(msgspec.Struct, tag=True):
    generation: int
    fit: int
    problem: str


class SentNames(msgspec.Struct, tag=True):
    """Requests that the gateway has sent: what workers tell of others does not count."""

    requests: list[tuple[str, str]]
    """(name, worker)"""


class Told(msgspec.Struct, tag=True, kw_only=True):
    """What happened since the last one."""

    generation: int
    events: list[dict[str, Any]] = []
    """New decisions of the loop, oldest first."""
    counters: dict[str, int] = {}
    """What was counted since the last one, by ``ignored.REASON`` and ``streams.KIND``."""
    fit_s: float | None = None
    """Seconds that the last fit took."""
    view: bytes = b""
    """A :class:`~coterie.gateway.control.views.ControlView`, encoded: decoded only where it is asked for."""


class UseFit(msgspec.Struct, tag=True):
    """Route by the fit in this file from now on."""

    generation: int
    fit: int
    path: str


class Unable(msgspec.Struct, tag=True):
    """The loop cannot run as it was set up; it waits for another set-up."""

    generation: int
    problem: str


T = TypeVar("T")
ToLoop = SetUp | FleetChanged | Swapped | SwapFailed | SentNames
FromLoop = Told | UseFit | Unable

_encoder = msgspec.msgpack.Encoder()
_to_loop: msgspec.msgpack.Decoder[ToLoop] = msgspec.msgpack.Decoder(ToLoop)
_from_loop: msgspec.msgpack.Decoder[FromLoop] = msgspec.msgpack.Decoder(FromLoop)


def pack_message(message: ToLoop | FromLoop) -> bytes:
    """A message with its length before it. Raises InputError if it is too long."""
    data = _encoder.encode(message)
    return check_length(len(data)).to_bytes(HEAD_BYTES, "big") + data


def check_length(length: int) -> int:
    if length > MOST_BYTES:
        raise InputError(f"a message of the control loop has {length} bytes, must be at most {MOST_BYTES}")
    return length


def for_loop(data: bytes) -> ToLoop:
    """Raises InputError for bytes that are no such message."""
    return _decoded(_to_loop, data)


def from_loop(data: bytes) -> FromLoop:
    """Raises InputError for bytes that are no such message."""
    return _decoded(_from_loop, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(f"is no message of the control loop: {error}") from None
