"""A footprint on the wire: a prefill answer carries it in ``kv_transfer_params``, beside the KV connector's own keys.

It takes a single key, ``{"coterie_footprint": "<base64>"}``, which clashes with no connector's key. The value is
msgpack with the shape and the counts in the narrowest dtype, deflated. For 58 layers x 256 experts, top-8, it is 4 KB
for a prompt of 16 tokens, 20 KB for 1,024 and 30 KB for 32,768. Without compression it is 20 to 40 KB, and encoding
takes a tenth of the time.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError, check
from coterie.types import narrowest_uint

KEY = "coterie_footprint"
VERSION = 1
MAX_COUNTS = 1 << 20
"""Upper bound on layers x experts: fifty times any model's, so a wrong header allocates at most 8 MB."""

MOST_TOKENS = 1 << 24
"""Upper bound on the tokens of a footprint."""
SLACK = 0.02
"""Accepted relative error of a layer's activations per token: some engines drop tokens of a full expert."""


class WireFootprint(NamedTuple):
    counts: NDArray[np.unsignedinteger]
    """[layer, expert] activations."""
    layer_ids: tuple[int, ...]
    """Index of each row's layer in the model, dense layers counted."""
    tokens: int
    """Tokens counted."""
    missing: int = 0
    """Tokens of the request whose experts this worker never saw (their KV came from another worker)."""


class _Packed(msgspec.Struct, array_like=True):
    version: int
    layers: int
    experts: int
    itemsize: int
    tokens: int
    missing: int
    layer_ids: list[int]
    counts: bytes


def encode_footprint(footprint: WireFootprint, deflate: bool = True) -> str:
    """Encode as text. Deflating 58 layers x 256 experts takes about 0.4 ms: turn it off where that delays a step."""
    narrow = footprint.counts.astype(narrowest_uint(int(footprint.counts.max())).newbyteorder("<"))
    # Counts repeat as values, not as runs: Huffman coding alone is smaller here than matching, and faster.
    packer = zlib.compressobj(1 if deflate else 0, zlib.DEFLATED, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = _Packed(
        VERSION,
        narrow.shape[0],
        narrow.shape[1],
        narrow.itemsize,
        int(footprint.tokens),
        int(footprint.missing),
        [int(layer) for layer in footprint.layer_ids],
        packer.compress(narrow.tobytes()) + packer.flush(),
    )
    return base64.b64encode(msgspec.msgpack.encode(packed)).decode("ascii")


def decode_footprint(text: str | bytes) -> WireFootprint:
    """Invert :func:`encode_footprint`; raises InputError with a one-line message for malformed input."""
    try:
        packed = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=_Packed)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError(f"is not a footprint: {error}") from None
    _check_header(packed)
    size, inflate = packed.layers * packed.experts * packed.itemsize, zlib.decompressobj()
    try:
        data = inflate.decompress(packed.counts, size + 1)  # the extra byte detects a longer stream cheaply
    except zlib.error as error:
        raise InputError(f"is a damaged footprint: {error}") from None
    check(
        len(data) == size and inflate.eof and not inflate.unused_data,
        f"is a footprint of {len(data)} bytes or more, expected {size} and no more",
        InputError,
    )
    counts = np.frombuffer(data, f"<u{packed.itemsize}").reshape(packed.layers, packed.experts)
    return WireFootprint(counts, tuple(packed.layer_ids), packed.tokens, packed.missing)


def _check_header(packed: _Packed) -> None:
    check(packed.version == VERSION, f"is a footprint of version {packed.version}, expected {VERSION}", InputError)
    shape_ok = packed.layers > 0 and packed.experts > 0 and packed.layers * packed.experts <= MAX_COUNTS
    check(
        shape_ok and packed.itemsize in (1, 2, 4, 8) and len(packed.layer_ids) == packed.layers,
        f"is a footprint of {packed.layers} layers ({len(packed.layer_ids)} named) x {packed.experts} experts x "
        f"{packed.itemsize} bytes",
        InputError,
    )
    check(
        packed.tokens >= 0 and packed.missing >= 0 and min(packed.layer_ids) >= 0,
        f"is a footprint of {packed.tokens} tokens, {packed.missing} missing, from layer {min(packed.layer_ids)}: "
        "each must be at least 0",
        InputError,
    )


def check_possible(footprint: WireFootprint, shape: tuple[int, ...] | None = None, top_k: int | None = None) -> None:
    """Raise InputError for impossible counts: every token activates the same number of experts in every layer.

    This is the only check of counts received from another process; later code relies on it. `shape` is the model's
    [layer, expert] and `top_k` its experts per token; None if not known.
    """
    counts, tokens = footprint.counts, footprint.tokens
    check(shape in (None, counts.shape), f"is a footprint {counts.shape}; the model's is {shape}", InputError)
    if not 0 < tokens <= MOST_TOKENS or counts.max() > tokens:  # a token activates an expert at most once
        raise InputError(f"is a footprint of {tokens} tokens, with {counts.max()} activations of one expert")
    per_token = counts.sum(axis=1, dtype=np.float64) / tokens
    k = float(top_k or per_token[0])
    if not 1 - SLACK <= k <= counts.shape[1] or np.abs(per_token - k).max() > SLACK * k:
        low, high = per_token.min(), per_token.max()
        raise InputError(f"is a footprint of {low:g} to {high:g} experts a token, expected {k:g} in every layer")


def attach_footprint(params: MutableMapping[str, Any], footprint: WireFootprint) -> None:
    """Add a footprint to a request's or an answer's ``kv_transfer_params``."""
    params[KEY] = encode_footprint(footprint)


def footprint_of(params: Mapping[str, Any] | None) -> WireFootprint | None:
    """Return the footprint in an answer's ``kv_transfer_params``; None if it has no footprint."""
    text = (params or {}).get(KEY)
    return None if text is None else decode_footprint(text)


class ReadFootprint(NamedTuple):
    footprint: WireFootprint | None
    """None if there is none, or if it was refused."""
    problem: str | None = None
    """Why it was refused; None if it was not."""


def read_footprint(
    params: Mapping[str, Any] | None, shape: tuple[int, ...] | None = None, top_k: int | None = None
) -> ReadFootprint:
    """Read and check the footprint in an answer's ``kv_transfer_params``; see :func:`check_possible`."""
    try:
        footprint = footprint_of(params)
        if footprint is not None:
            check_possible(footprint, shape, top_k)
    except InputError as error:
        return ReadFootprint(None, str(error))
    return ReadFootprint(footprint)


def without_footprint(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kv_transfer_params`` without the footprint, for the decode worker."""
    return {key: value for key, value in params.items() if key != KEY}
