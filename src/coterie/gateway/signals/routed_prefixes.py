"""Guess cached prefixes from the gateway's own routing, for workers that publish no KV events or prompts without ids.

A prompt that went to a worker left its prefix in that worker's cache, for a while. Prompts are cut into blocks of
bytes, of their token ids or of their text; a block's key covers all before it. *Approximate*: a worker may have evicted
the prefix, or never have stored it, and tokens are counted by the length of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_at_least, check_positive

BLOCK_BYTES = 256
"""Bytes of text in a block: about 64 tokens."""
ID_BYTES = 8
TEXT_BYTES = 4
"""Bytes of text a token has, about."""
MOST_BLOCKS = 512
"""Blocks of a prompt that are compared."""
_PACK = msgspec.msgpack.Encoder().encode


class PromptKeys(NamedTuple):
    """Blocks of a prompt."""

    keys: tuple[bytes, ...]
    """[block] key of the prompt up to the end of the block."""
    block_tokens: float
    """Tokens of a block; an estimate for text."""
    tokens: int
    """Tokens of the prompt; an estimate for text."""


def keys_of_ids(ids: NDArray[np.int64], cache_salt: str | None = None, lora: str | None = None) -> PromptKeys:
    """Keys of token ids: they are the worker's, its cache is not known."""
    block = BLOCK_BYTES // TEXT_BYTES
    return PromptKeys(
        _keys(np.ascontiguousarray(ids, np.int64).tobytes(), block * ID_BYTES, cache_salt, lora), block, len(ids)
    )


def keys_of_body(body: Mapping[str, Any], lora: str | None = None) -> PromptKeys:
    """Keys of a body's text, in the order in which templates write it: tools, then messages, or the prompt."""
    salt = body.get("cache_salt")
    try:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            text = prompt.encode("utf-8", "surrogatepass")
        else:
            # No outer list: its length stands at its head, and a turn more would change the first block.
            rows = [body.get("tools"), *(body.get("messages") or [prompt])]
            text = b"".join(map(_PACK, rows))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        text = b""
    tokens = len(text) // TEXT_BYTES
    return PromptKeys(
        _keys(text, BLOCK_BYTES, salt if isinstance(salt, str) else None, lora), BLOCK_BYTES / TEXT_BYTES, tokens
    )


class RoutedPrefixes:
    """Which rows got which prefixes lately: the least recently used blocks go first, and all after `keep_s`."""

    def __init__(self, *, max_blocks: int = 1 << 17, keep_s: float = 600.0) -> None:
        check_at_least(1, max_blocks=max_blocks)
        check_positive(keep_s=keep_s)
        self.max_blocks, self.keep_s = max_blocks, keep_s
        self._blocks: dict[bytes, dict[int, float]] = {}  # key → row → time; the latest used last

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, prompt: PromptKeys, rows: int, now: float) -> NDArray[np.int64]:
        """[row] leading tokens that each worker may hold, never all of the prompt."""
        found = np.zeros(rows, np.int64)
        alive: set[int] | None = None
        for number, key in enumerate(prompt.keys, 1):
            told = self._blocks.get(key)
            if told is None:
                break
            fresh = {row for row, then in told.items() if now - then <= self.keep_s and row < rows}
            alive = fresh if alive is None else alive & fresh
            if not alive:
                break
            for row in alive:
                found[row] = int(number * prompt.block_tokens)
        np.minimum(found, max(0, prompt.tokens - 1), out=found)
        return found

    def routed(self, prompt: PromptKeys, row: int, now: float) -> None:
        """A prompt went to a worker."""
        for key in prompt.keys:
            told = self._blocks.pop(key, None) or {}
            told[row] = now
            self._blocks[key] = told
        while len(self._blocks) > self.max_blocks:
            del self._blocks[next(iter(self._blocks))]

    def drop(self, row: int) -> None:
        """Forget a worker that left or restarted."""
        for key in [key for key, told in self._blocks.items() if told.pop(row, None) is not None and not told]:
            del self._blocks[key]


def _keys(data: bytes, block: int, cache_salt: str | None, lora: str | None) -> tuple[bytes, ...]:
    running = hashlib.blake2b(_PACK((cache_salt, lora)), digest_size=16)
    keys = []
    for start in range(0, min(len(data) // block, MOST_BLOCKS) * block, block):
        running.update(data[start : start + block])
        keys.append(running.copy().digest())
    return tuple(keys)
