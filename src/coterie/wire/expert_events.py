"""The expert-event stream: each finished request's experts, the load of all requests, and the map in force.

It is published on ZMQ beside the KV events and framed the same way (:mod:`coterie.wire.framing`). A payload is msgpack
``[timestamp, [events], rank]``, and an event is a map with its ``type``. A subscriber may join at any time, because
every event carries its own shape. The vLLM plugin sends a message without events whenever a subscriber joins.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError, InputError, check
from coterie.types import Placement, narrowest_uint

TOPIC = b"experts"
DEFAULT_PORT = 5602
MAX_EXPERTS = 1 << 16
"""Upper bound on experts per layer: far above any model, and small enough that a wrong number cannot overflow."""

MAX_LAYERS = 1 << 10
MAX_EVENTS = 1 << 12
"""Upper bounds on layers per event and events per message, checked before their elements are decoded."""

Layers = Annotated[list[int], msgspec.Meta(max_length=MAX_LAYERS)]


class RequestExperts(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """A finished request: the experts of every token except the last, which was never an input of the model."""

    request_id: str
    model: str
    num_experts: int
    layer_ids: Layers
    """Index of each recorded layer in the model, dense layers counted."""
    top_k: int
    prompt_tokens: int
    token_ids: bytes
    """[token] ids as little-endian int32, one per row of `expert_ids`."""
    expert_ids: bytes
    """[token, layer, k] ids, little-endian, in the narrowest dtype that holds num_experts - 1; 0 if not known."""
    known: bytes = b""
    """One bit per token, as numpy.packbits packs them: 0 if this worker never saw the token's experts. Empty: all 1."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    output_tokens: int = 0
    finish: str = ""
    """Finish reason in the engine's words: stop, length, abort …"""

    @classmethod
    def pack(
        cls,
        expert_ids: NDArray[np.integer],
        token_ids: NDArray[np.integer],
        known: NDArray[np.bool_],
        num_experts: int,
        **fields: Any,
    ) -> RequestExperts:
        """Make an event from arrays [token, layer, k], [token] and [token]; raises InputError if shapes disagree."""
        check(
            expert_ids.ndim == 3 and len(expert_ids) == len(token_ids) == len(known),
            f"expert_ids {expert_ids.shape} must be [token, layer, k] with one row a token; "
            f"token_ids has {len(token_ids)}, known {len(known)}",
            InputError,
        )
        all_known = bool(known.all())
        if not all_known:
            expert_ids = np.where(known[:, None, None], expert_ids, 0)
        if expert_ids.size and not 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < num_experts:
            low, high = expert_ids.min(), expert_ids.max()
            raise InputError(f"expert_ids from {low} to {high}, expected 0 … {num_experts - 1}")
        return cls(
            expert_ids=np.ascontiguousarray(expert_ids, narrowest_uint(num_experts - 1).newbyteorder("<")).tobytes(),
            token_ids=np.ascontiguousarray(token_ids, "<i4").tobytes(),
            known=b"" if all_known else np.packbits(known).tobytes(),
            num_experts=num_experts,
            top_k=expert_ids.shape[2],
            **fields,
        )

    def ids(self) -> NDArray[np.unsignedinteger]:
        """Decode expert ids [token, layer, k]; raises InputError if bytes and shape disagree or an id is too large."""
        check(
            1 <= self.top_k <= self.num_experts <= MAX_EXPERTS and self.layer_ids,
            f"num_experts={self.num_experts}, top_k={self.top_k}, {len(self.layer_ids)} layers: "
            f"expected 1 <= top_k <= num_experts <= {MAX_EXPERTS} and a layer",
            InputError,
        )
        dtype = narrowest_uint(self.num_experts - 1).newbyteorder("<")
        shape = (len(self.tokens()), len(self.layer_ids), self.top_k)
        check(
            len(self.expert_ids) == math.prod(shape) * dtype.itemsize,
            f"expert_ids has {len(self.expert_ids)} bytes; {dtype.name} {shape} is expected",
            InputError,
        )
        ids = np.frombuffer(self.expert_ids, dtype)
        if ids.size and int(ids.max()) >= self.num_experts:
            raise InputError(f"expert_ids holds {ids.max()}, expected 0 … {self.num_experts - 1}")
        return ids.reshape(shape)

    def tokens(self) -> NDArray[np.int32]:
        """Decode the token ids, [token]."""
        check(
            len(self.token_ids) % 4 == 0, f"token_ids has {len(self.token_ids)} bytes, not a multiple of 4", InputError
        )
        return np.frombuffer(self.token_ids, "<i4")

    def seen(self) -> NDArray[np.bool_]:
        """Decode `known`: [token] whether the token's experts are known."""
        count = len(self.tokens())
        if not self.known:
            return np.ones(count, np.bool_)
        check(
            len(self.known) == -(-count // 8),
            f"known has {len(self.known)} bytes for {count} tokens, expected {-(-count // 8)}",
            InputError,
        )
        return np.unpackbits(np.frombuffer(self.known, np.uint8), count=count).astype(np.bool_)


class ExpertLoad(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Tokens per expert since the previous ExpertLoad event, summed over all requests."""

    model: str
    layer_ids: Layers
    num_experts: int
    seconds: float
    """Seconds over which the tokens were counted."""
    steps: int
    tokens: int
    counts: bytes
    """[layer, expert] uint32, little-endian."""

    def load(self) -> NDArray[np.uint32]:
        """Decode the counts: [layer, expert] tokens."""
        shape = (len(self.layer_ids), self.num_experts)
        check(
            min(shape) >= 1 and len(self.counts) == 4 * math.prod(shape),
            f"counts has {len(self.counts)} bytes; uint32 {shape} is expected",
            InputError,
        )
        return np.frombuffer(self.counts, "<u4").reshape(shape)


class ExpertMap(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """The expert map in force in an expert-parallel group: published when it changes, and to every new subscriber."""

    num_experts: int
    num_ranks: int
    version: int
    """Number of maps that this publisher has seen, this one included; starts anew with the engine."""
    slots: list[bytes]
    """[layer] expert of each slot, uint16, little-endian; ranks own equal blocks of slots."""

    def placement(self) -> Placement:
        """Decode the map; raises InputError for one that no group can hold."""
        try:
            rows = np.stack([np.frombuffer(row, "<u2") for row in self.slots]).astype(np.int32)
            return Placement(rows, self.num_ranks, min(self.num_experts, MAX_EXPERTS))
        except (ValueError, CoterieError) as error:
            raise InputError(f"is no map: {error}") from None


Event = RequestExperts | ExpertLoad | ExpertMap


class ExpertEvents(msgspec.Struct, array_like=True):
    """One message of the stream."""

    timestamp: float
    """Seconds since the epoch."""
    events: Annotated[list[Event], msgspec.Meta(max_length=MAX_EVENTS)]
    rank: int = 0
    """Data-parallel rank of the engine."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ExpertEvents)


def encode_expert_events(batch: ExpertEvents) -> bytes:
    return _ENCODER.encode(batch)


def decode_expert_events(payload: bytes) -> ExpertEvents:
    """Decode a message; raises InputError with a one-line message for malformed bytes."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise InputError(f"is not an expert event: {error}") from None
