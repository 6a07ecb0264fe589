"""Messages between a gateway and the process of its control loop, on a socket pair: a 4-byte length, then msgpack.

The gateway sends :data:`ToLoop`, the process :data:`FromLoop`. Messages carry the generation of their set-up, so that
those in transit when the router changed are recognised as outdated.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from coterie.errors import InputError, check
from coterie.gateway.config import ControlSection
from coterie.gateway.fleet.spec import RouterSpec
from coterie.wire.expert_events import ExpertMap

HEAD_BYTES = 4
MOST_BYTES = 64 << 20
"""Most bytes of a message: the loads of 64 workers with 64 layers of 256 experts take 9 MB."""

MOST_KEPT_BYTES = 40 << 20
"""Most bytes of counts of kept requests that are sent, the newest: as text in JSON they take a third more."""


class HeatMap(msgspec.Struct, frozen=True):
    """Tokens in a worker's last window, by layer and expert."""

    layers: int
    experts: int
    values: bytes
    """JSON list of layers x experts integers, layer by layer; the gateway passes it on unparsed."""
    layers_left_out: int = 0


class ControlView(msgspec.Struct):
    """Snapshot of the loop, as endpoints and the dashboard show it; sent at most once a second."""

    status: dict[str, Any]
    """State of the loop: the values of `ControlLoop.status()`, and the counters of the event streams in `streams`."""
    events: list[dict[str, Any]] = []
    """Decisions of the loop, newest last: at_s (seconds since the epoch), kind, reason, values."""
    advice: dict[str, Any] | None = None
    """The last placement advice; its `reason` says why to apply it or not. None before the first."""
    loads: dict[str, HeatMap] = {}
    """Worker id → heat map of its load."""


class StreamEntry(msgspec.Struct, frozen=True):
    """A worker's stream of expert events."""

    worker: str
    endpoint: str
    secure: bool = False
    """Whether the stream is encrypted with the fleet secret."""
    rank: int | None = None
    """The worker's `placement_rank`; None if it has none."""
    row: int | None = None
    """The worker's row in the decode pool; None if it is not there."""


class SetUp(msgspec.Struct, tag=True, kw_only=True):
    """Start the loop, or restart it, with this router and these settings.

    With the generation of the loop that runs, only the workers have changed, and it continues.
    """

    generation: int
    spec: RouterSpec
    """Router of the decode pool, with the fit in force."""
    rows: int
    """Number of rows of the decode pool, up to its last worker."""
    section: ControlSection
    folder: str
    """Folder to which fits are written."""
    streams: list[StreamEntry]


class Swapped(msgspec.Struct, tag=True):
    """Notice that the fit with this number is in force, or of the problem that keeps it from being used."""

    generation: int
    fit: int
    problem: str | None = None


class SentNames(msgspec.Struct, tag=True):
    """Requests that the gateway has sent to workers: events about other requests do not count."""

    requests: list[tuple[str, str]]
    """Pairs of request name and worker id."""


class AskKept(msgspec.Struct, tag=True):
    """Ask for the kept requests; the process answers in order of asking."""


class KeptRequests(msgspec.Struct, frozen=True):
    """Finished requests that the loop keeps, oldest first, for `coterie advise`."""

    model: str
    """Model that the router was fitted for, or that its config names; empty if neither does."""
    top_k: Annotated[int, msgspec.Meta(ge=1)]
    shape: tuple[int, int, int, int]
    """Sizes of the counts: requests, 2 phases (prefill, decode), layers, experts."""
    finished_s: list[float]
    """[request] time at which it finished, in seconds since the epoch."""
    counts: bytes
    """[request, phase, layer, expert] activations, as little-endian uint32."""


class KeptAnswer(msgspec.Struct, tag=True):
    """Answer to :class:`AskKept`."""

    kept: bytes
    """:class:`KeptRequests` as JSON, which the gateway passes on unparsed; empty if no request was seen yet."""


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
    """Encoded :class:`ControlView`, decoded only when read; empty if there is none."""


class UseFit(msgspec.Struct, tag=True):
    """Request to put the fit in this file in force."""

    generation: int
    fit: int
    path: str


class MapSeen(msgspec.Struct, tag=True):
    """The expert map in force at a worker."""

    generation: int
    worker: str
    map: ExpertMap


class Connected(msgspec.Struct, tag=True):
    """The workers whose streams of expert events have a connection; sent when they change."""

    generation: int
    workers: list[str]


class Unable(msgspec.Struct, tag=True):
    """Notice that the loop cannot run with its set-up; it waits for another."""

    generation: int
    problem: str


T = TypeVar("T")
ToLoop = SetUp | Swapped | SentNames | AskKept
FromLoop = Told | UseFit | MapSeen | Connected | Unable | KeptAnswer

_encoder = msgspec.msgpack.Encoder()
to_loop: msgspec.msgpack.Decoder[ToLoop] = msgspec.msgpack.Decoder(ToLoop)
from_loop: msgspec.msgpack.Decoder[FromLoop] = msgspec.msgpack.Decoder(FromLoop)


def pack_message(message: ToLoop | FromLoop) -> bytes:
    """Encode a message, with its length in front. Raises InputError if it is too long."""
    data = _encoder.encode(message)
    return check_length(len(data)).to_bytes(HEAD_BYTES, "big") + data


def check_length(length: int) -> int:
    check(
        length <= MOST_BYTES,
        f"a message of the control loop has {length} bytes, must be at most {MOST_BYTES}",
        InputError,
    )
    return length


def unpack_message(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode a message, by :data:`to_loop` or :data:`from_loop`. Raises InputError for invalid bytes."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(f"is no message of the control loop: {error}") from None
