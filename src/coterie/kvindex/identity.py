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


def hash_keys(hashes: Sequence[BlockHash], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute keys [block, 2] of engine hashes; a tag of their type and length keeps integers and bytes apart."""
    try:  # not `suppress`, which takes as long as the rest for an event of one block
        if not isinstance(hashes[0], bytes):
            return _folded(np.frombuffer(array("Q", hashes), np.uint64).reshape(-1, 1), 0, seeds)  # type: ignore[type-var]
        joined = bytearray().join(hashes)  # type: ignore[arg-type]
        length, *others = set(map(len, hashes))  # type: ignore[arg-type]
        if not others and length % _WORD == 0:
            return _folded(np.frombuffer(joined, np.uint64).reshape(len(hashes), -1), 1 + 4 * length, seeds)
    except (TypeError, OverflowError):
        pass  # mixed types, or an integer outside 64 bits: fold each hash by itself
    return np.concatenate([_folded(*_words(item), seeds) for item in hashes])


def writeable(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the array, copied if read-only: numba would compile again for a read-only array, which takes seconds."""
    return words if words.flags.writeable else words.copy()


def _folded(words: NDArray[np.uint64], tag: int, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = np.empty((len(words), 2), np.uint64)
    _tables.fold(words, np.uint64(tag), seeds, keys)
    return keys


def _words(item: BlockHash) -> tuple[NDArray[np.uint64], int]:
    """Return a hash as words [1, word], and its tag."""
    if isinstance(item, bytes):
        kind, raw = 1, item
    elif 0 <= item < 1 << 64:
        kind, raw = 0, item.to_bytes(_WORD, sys.byteorder)
    else:
        kind, raw = 2, item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
    padded = bytearray(raw + b"\0" * (-len(raw) % _WORD))
    return np.frombuffer(padded, np.uint64)[None, :], kind + 4 * len(raw) if kind else 0


def event_tokens(event: BlockStored, block_size: int) -> NDArray[np.uint64] | None:
    """Return the token ids [token] of the event's blocks; None if they do not fill blocks of `block_size`."""
    if event.block_size != block_size or len(event.token_ids) != len(event.block_hashes) * block_size:
        return None
    try:
        return np.frombuffer(array("q", event.token_ids), np.uint64)
    except OverflowError:
        return None


def event_contexts(event: BlockStored) -> NDArray[np.uint64] | None:
    """Return contexts [block, 2] of the event's blocks, [0, 2] if no block has any; None if its keys are unreadable."""
    lora = event.lora_id if event.lora_name is None else event.lora_name
    salt = event.cache_salt if event.parent_block_hash is None else None
    extra_keys, blocks = event.extra_keys, len(event.block_hashes)
    readable = extra_keys is None or (isinstance(extra_keys, list | tuple) and len(extra_keys) == blocks)
    return contexts(blocks, lora, salt, extra_keys) if readable else None


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
    try:
        out = np.tile(_context(lora, []), (blocks, 1))
        for block, keys in special.items():
            out[block] = _context(lora, keys)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return out


def _listed(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, list | tuple) else [] if entry is None else [entry]


def _context(lora: str | int | None, keys: list[Any]) -> NDArray[np.uint64]:
    """Hash a LoRA and a block's extra keys to a context [2]. vLLM repeats the LoRA in the extra keys: drop it there."""
    if lora is None and not keys:
        return np.zeros(2, np.uint64)
    others = sorted(_ENCODER.encode(key) for key in keys if lora is None or key != lora)
    return np.frombuffer(hashlib.blake2b(_ENCODER.encode((lora, others)), digest_size=16).digest(), np.uint64)
