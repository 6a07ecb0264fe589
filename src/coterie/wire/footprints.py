"""A footprint on the wire: what a prefill answer carries in ``kv_transfer_params`` beside the KV connector's own keys.

One key, so that it cannot clash: ``{"coterie_footprint": "<base64>"}``. Inside: msgpack with the shape and the counts
in the narrowest dtype, deflated. 58 layers x 256 experts, top-8, take 4 KB for a prompt of 16 tokens, 20 KB for one of
1,024 and 30 KB for one of 32,768; 20 to 40 KB stored plain, which takes a tenth of the time.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError
from coterie.types import narrowest_uint

KEY = "coterie_footprint"
VERSION = 1
MAX_COUNTS = 1 << 20
"""Most layers x experts: fifty times any model; a wrong header allocates at most 8 MB."""


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
    """Encode as text. Deflating takes about 0.4 ms for 58 layers x 256 experts: turn it off where that delays a step.

    Raises InputError for what :func:`decode_footprint` would refuse.
    """
    counts = footprint.counts
    if counts.ndim != 2 or not 0 < counts.size <= MAX_COUNTS or len(footprint.layer_ids) != len(counts):
        problem = f"counts {counts.shape} must be [layer, expert] with {len(footprint.layer_ids)} layers"
        raise InputError(f"{problem} and at most {MAX_COUNTS} counts")
    if counts.dtype.kind not in "ui" or int(counts.min()) < 0:
        raise InputError(f"counts are {counts.dtype} from {counts.min()}, expected whole numbers of at least 0")
    narrow = counts.astype(narrowest_uint(int(counts.max())).newbyteorder("<"))
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
    _check(packed)
    return base64.b64encode(msgspec.msgpack.encode(packed)).decode("ascii")


def decode_footprint(text: str | bytes) -> WireFootprint:
    """Inverse of :func:`encode_footprint`; raises InputError in one line, whatever the bytes are."""
    try:
        packed = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=_Packed)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError(f"is not a footprint: {error}") from None
    _check(packed)
    size = packed.layers * packed.experts * packed.itemsize
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(packed.counts, size + 1)  # one byte more: never inflate a longer stream
    except zlib.error as error:
        raise InputError(f"is a damaged footprint: {error}") from None
    if len(data) != size or not inflate.eof or inflate.unused_data:
        raise InputError(f"is a footprint of {len(data)} bytes or more, expected {size} and no more")
    counts = np.frombuffer(data, f"<u{packed.itemsize}").reshape(packed.layers, packed.experts)
    return WireFootprint(counts, tuple(packed.layer_ids), packed.tokens, packed.missing)


def _check(packed: _Packed) -> None:
    if packed.version != VERSION:
        raise InputError(f"is a footprint of version {packed.version}, expected {VERSION}")
    shape_ok = packed.layers > 0 and packed.experts > 0 and packed.layers * packed.experts <= MAX_COUNTS
    if not shape_ok or packed.itemsize not in (1, 2, 4, 8) or len(packed.layer_ids) != packed.layers:
        raise InputError(
            f"is a footprint of {packed.layers} layers ({len(packed.layer_ids)} named) x {packed.experts} experts x "
            f"{packed.itemsize} bytes"
        )
    if packed.tokens < 0 or packed.missing < 0 or min(packed.layer_ids) < 0:
        raise InputError(
            f"is a footprint of {packed.tokens} tokens, {packed.missing} missing, from layer {min(packed.layer_ids)}: "
            "each must be at least 0"
        )


def attach_footprint(params: MutableMapping[str, Any], footprint: WireFootprint) -> None:
    """Add a footprint to a request's or an answer's ``kv_transfer_params``."""
    params[KEY] = encode_footprint(footprint)


def footprint_of(params: Mapping[str, Any] | None) -> WireFootprint | None:
    """The footprint an answer's ``kv_transfer_params`` carries, if any."""
    text = (params or {}).get(KEY)
    return None if text is None else decode_footprint(text)


def without_footprint(params: Mapping[str, Any]) -> dict[str, Any]:
    """``kv_transfer_params`` for the decode worker: without the footprint."""
    return {key: value for key, value in params.items() if key != KEY}
