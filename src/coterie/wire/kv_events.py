"""KV events, as vLLM and SGLang publish them: which blocks of which prefix a worker holds.

A payload is msgpack ``[timestamp, [events], data-parallel rank]``. An event is a map with a ``type`` (vLLM since 0.24,
recent SGLang) or, in older versions of both engines, an array that begins with the type. Both forms decode to the same
structs. Unknown fields are skipped. An unknown event type raises: a directory that ignored a removal would report
blocks that are gone. A hash is an integer or bytes, depending on the engine's hash function. `group_idx` (KV cache
group of a hybrid model), `medium` (GPU, CPU …), `locality` and `cache_salt` matter: a block that differs in any of them
is not a hit.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from coterie.errors import InputError

BlockHash = int | bytes
MAX_BLOCKS = 1 << 16
"""Upper bound on blocks per event: a prompt of a million tokens in blocks of 16. Checked before decoding the hashes."""
MAX_TOKENS = 1 << 20
"""Upper bound on token ids per event."""
MAX_EVENTS = 1 << 12
"""Upper bound on events per message."""
OLD_FORM_BYTES = 1 << 20
"""Upper bound on the bytes of a message in an older form: decoding without a schema takes up to 64x its memory."""

Hashes = Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_BLOCKS)]


# No omit_defaults: vLLM's own structs have no default for most of these fields, and refuse an event without them.
class BlockStored(msgspec.Struct, tag=True, tag_field="type", kw_only=True):
    block_hashes: Hashes
    parent_block_hash: BlockHash | None = None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    """Kind of the KV cache group: full_attention, sliding_window …"""
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, seen from the publisher."""
    cache_salt: str | None = None
    """Cache salt as SGLang sends it; vLLM puts the salt into `extra_keys`."""


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", kw_only=True):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type", kw_only=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_TYPES: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_ARRAY_FIELDS = {"BlockStored": 9, "BlockRemoved": 3, "AllBlocksCleared": 0}
"""Number of fields in the array form: vLLM added later fields to the map form only, in another order."""


class KVEvents(msgspec.Struct, array_like=True):
    """One message of the stream."""

    timestamp: float
    events: Annotated[list[KVEvent], msgspec.Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _Raw(msgspec.Struct, array_like=True):
    timestamp: float
    events: Annotated[list[dict[str, Any] | list[Any]], msgspec.Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(KVEvents)
_RAW_DECODER = msgspec.msgpack.Decoder(_Raw)


def encode_kv_events(batch: KVEvents) -> bytes:
    """Encode in the form of vLLM 0.24 and later."""
    return _ENCODER.encode(batch)


def decode_kv_events(payload: bytes) -> KVEvents:
    """Decode either form; raises InputError with a one-line message for malformed bytes or exceeded limits."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        # The array form, SGLang's token pairs, or malformed bytes: the slow path below distinguishes them.
        if len(payload) > OLD_FORM_BYTES:
            raise InputError(f"is not a batch of KV events: {error}") from None
    try:
        raw = _RAW_DECODER.decode(payload)
        return KVEvents(raw.timestamp, [_event(event) for event in raw.events], raw.rank)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise InputError(f"is not a batch of KV events: {error}") from None


def _event(raw: dict[str, Any] | list[Any]) -> KVEvent:
    name = raw.get("type") if isinstance(raw, dict) else (raw[0] if raw else None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"holds a KV event of type {repr(name)[:80]}, expected one of {', '.join(_TYPES)}")
    fields = raw if isinstance(raw, dict) else _named(kind, raw[1:])
    tokens = fields.get("token_ids")
    if isinstance(tokens, list) and tokens and all(isinstance(token, list) and len(token) == 2 for token in tokens):
        fields = {**fields, "token_ids": [first for first, _ in tokens]}  # SGLang's bigrams: [token, next token]
    # With bytes as a built-in type, msgspec does not decode text as base64.
    return msgspec.convert({**fields, "type": name}, kind, builtin_types=(bytes,))


def _named(kind: type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared], values: list[Any]) -> dict[str, Any]:
    names = kind.__struct_fields__[: _ARRAY_FIELDS[kind.__name__]]
    if kind is BlockStored and len(values) == 7 and isinstance(values[6], dict):  # SGLang's metadata, not lora_name
        return {**dict(zip(names, values[:6], strict=False)), "cache_salt": values[6].get("cache_salt")}
    return dict(zip(names, values, strict=False))
