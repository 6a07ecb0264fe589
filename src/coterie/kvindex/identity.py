"""Identity of blocks: an engine's hash, and the context in which tokens were computed.

Each engine has its own hash function, so a hash is valid on one worker only, unless the fleet shares the function and
its seed. Tokens are comparable between all workers within one context: the LoRA adapter and the extra keys of a block
(images, prompt embeddings and, for the first block, the cache salt).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.kvindex import _tables
from coterie.wire.kv_events import BlockHash, BlockStored

_WORD = 8
NO_CONTEXTS = np.zeros((0, 2), np.uint64)
"""Contexts of blocks without LoRA or extra keys."""
_ENCODER = msgspec.msgpack.Encoder()


def hash_keys(hashes: Sequence[BlockHash] | NDArray[np.uint64], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute keys [block, 2] of engine hashes; a tag of their type and length keeps integers and bytes apart."""
    keys = np.empty((len(hashes), 2), np.uint64)
    if isinstance(hashes, np.ndarray):
        _fold(writeable(np.ascontiguousarray(hashes, np.uint64)).reshape(-1, 1), 0, seeds, keys)
        return keys
    if not hashes:
        return keys
    try:
        if isinstance(hashes[0], bytes):
            joined = bytearray().join(hashes)  # type: ignore[arg-type]
            lengths = set(map(len, hashes))  # type: ignore[arg-type]
            if len(lengths) == 1 and len(hashes[0]) % _WORD == 0:
                words = np.frombuffer(joined, np.uint64).reshape(len(hashes), len(hashes[0]) // _WORD)
                _fold(words, 1 + 4 * len(hashes[0]), seeds, keys)
                return keys
        else:
            numbers = array("Q", hashes)  # type: ignore[type-var]
            _fold(np.frombuffer(numbers, np.uint64).reshape(-1, 1), 0, seeds, keys)
            return keys
    except (TypeError, OverflowError):
        pass  # mixed types, or an integer outside 64 bits: fold each hash by itself
    for index, item in enumerate(hashes):
        _fold_one(item, seeds, keys[index : index + 1])
    return keys


def writeable(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the array, copied if read-only: numba would compile again for a read-only array, which takes seconds."""
    return words if words.flags.writeable else words.copy()


def _fold(words: NDArray[np.uint64], tag: int, seeds: NDArray[np.uint64], keys: NDArray[np.uint64]) -> None:
    _tables.fold(words, np.uint64(tag), seeds, keys)


def _fold_one(item: BlockHash, seeds: NDArray[np.uint64], keys: NDArray[np.uint64]) -> None:
    if isinstance(item, bytes):
        kind, raw = 1, item
    elif 0 <= item < 1 << 64:
        kind, raw = 0, item.to_bytes(_WORD, sys.byteorder)
    else:
        kind, raw = 2, item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
    padded = bytearray(raw + b"\0" * (-len(raw) % _WORD))
    words = np.frombuffer(padded, np.uint64).reshape(1, len(padded) // _WORD)
    _fold(words, kind + 4 * len(raw) if kind else 0, seeds, keys)


def event_tokens(event: BlockStored, block_size: int) -> NDArray[np.uint64] | None:
    """Return the token ids [token] of the event's blocks; None if they do not fill blocks of `block_size`."""
    blocks = len(event.block_hashes)
    if event.block_size != block_size or len(event.token_ids) != blocks * block_size:
        return None
    try:
        return np.frombuffer(array("q", event.token_ids), np.uint64)
    except OverflowError:
        return None


def event_contexts(event: BlockStored) -> NDArray[np.uint64] | None:
    """Return contexts [block, 2] of the event's blocks, [0, 2] if no block has any; None if its keys are unreadable."""
    lora = event.lora_id if event.lora_name is None else event.lora_name
    salt = event.cache_salt if event.parent_block_hash is None else None
    extra_keys = event.extra_keys
    if extra_keys is not None and not (
        isinstance(extra_keys, list | tuple) and len(extra_keys) == len(event.block_hashes)
    ):
        return None
    return contexts(len(event.block_hashes), lora, salt, extra_keys)


def contexts(
    blocks: int, lora: str | int | None, cache_salt: str | None, extra_keys: Sequence[Any] | None
) -> NDArray[np.uint64] | None:
    """Compute contexts [block, 2] from the first block on, [0, 2] if no block has any; None if a key is unencodable."""
    if lora is None and not cache_salt and not extra_keys:
        return NO_CONTEXTS
    special = {block: keys for block, keys in enumerate(map(_listed, extra_keys or ())) if keys and block < blocks}
    if cache_salt and blocks and cache_salt not in special.get(0, ()):
        special[0] = [*special.get(0, ()), cache_salt]
    if lora is None and not special:
        return NO_CONTEXTS
    out = np.zeros((blocks, 2), np.uint64)
    try:
        if lora is not None:
            out[:] = _context(lora, [])
        for block, keys in special.items():
            out[block] = _context(lora, keys)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return out


def _listed(entry: Any) -> list[Any]:
    if isinstance(entry, list | tuple):
        return list(entry)
    return [] if entry is None else [entry]


def _context(lora: str | int | None, keys: list[Any]) -> NDArray[np.uint64]:
    """Hash a LoRA and a block's extra keys to a context [2]. vLLM repeats the LoRA in the extra keys: drop it there."""
    if lora is None and not keys:
        return np.zeros(2, np.uint64)
    others = sorted(_ENCODER.encode(key) for key in keys if lora is None or key != lora)
    return np.frombuffer(hashlib.blake2b(_ENCODER.encode((lora, others)), digest_size=16).digest(), np.uint64)
