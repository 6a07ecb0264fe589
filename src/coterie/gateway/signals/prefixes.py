"""How much of a prompt each worker has cached: guesses from the gateway's own routing, and belief in workers' claims.

Guesses are for workers that publish no KV events, and for prompts without ids. A prompt that was sent to a worker
leaves its prefix in that worker's cache for a while. Prompts are cut into blocks of bytes of
their text; a block's key covers all blocks before it. *Approximate*: a worker may have evicted the prefix or never
stored it, and tokens of texts are estimated from their length.

Claims are the KV events of a worker, which are compared with its answers: a worker that claims prefixes it does not
hold is believed less. A router prefers the worker that holds most of a prompt, so a worker with false claims would draw
all traffic. An answer reports how many tokens of its prompt were cached. The share of claimed tokens that answers
confirm, over about the last sixteen, scales the cached tokens that routers see for the worker. Honest workers confirm
nearly all: they lose a little when blocks are evicted between the decision and the prefill. Answers without a report
change nothing, and a worker whose answers are false too is not detected.
"""

from __future__ import annotations

import secrets

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_at_least, check_positive

BLOCK_BYTES = 256
"""Bytes of text in a block: about 64 tokens."""
TEXT_BYTES = 4
"""Approximate bytes of text per token."""
MOST_BLOCKS = 512
"""Most blocks of a prompt that are compared."""
_SEED = secrets.token_bytes(16)
"""Random seed of this process's keys, also if PYTHONHASHSEED is set, so that nobody can search for collisions."""


class PromptKeys(msgspec.Struct, frozen=True):
    """Keys of a prompt's blocks."""

    keys: list[int]
    """Key of the prompt up to the end of each block, [block]; keys differ between processes."""
    block_tokens: float
    """Tokens per block; an estimate for text."""
    tokens: int
    """Number of tokens in the prompt; an estimate for text."""


def keys_of_text(text: bytes, length: int, cache_salt: str | None = None, tokens: int | None = None) -> PromptKeys:
    """Return the block keys of a prompt's text. `text` may be only its beginning; `length` is the whole, in bytes.

    `tokens` is the prompt's number of tokens; None to estimate it.
    """
    # Chained by Python's own hash: random per process, and five times as fast as a digest.
    key, keys, block = hash((_SEED, cache_salt)), [], BLOCK_BYTES
    for end in range(block, min(len(text), MOST_BLOCKS * block) + 1, block):
        key = hash((key, text[end - block : end]))
        keys.append(key)
    block_tokens = block / TEXT_BYTES if tokens is None else block * tokens / max(1, length)
    return PromptKeys(keys, block_tokens, length // TEXT_BYTES if tokens is None else tokens)


class RoutedPrefixes:
    """Prefixes that each row got recently. Least recently used blocks are dropped first; all expire after `keep_s`."""

    def __init__(self, *, max_blocks: int = 1 << 17, keep_s: float = 600.0) -> None:
        check_at_least(1, max_blocks=max_blocks)
        check_positive(keep_s=keep_s)
        self.max_blocks, self.keep_s = max_blocks, keep_s
        self._blocks: dict[int, dict[int, float]] = {}  # key → row → time; most recently used last
        self._none = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, prompt: PromptKeys, rows: int, now: float) -> NDArray[np.int64]:
        """Return the leading tokens that each worker may hold, [row], never the whole prompt. Read-only for callers."""
        since, blocks = now - self.keep_s, self._blocks
        ends: dict[int, int] = {}  # row → leading blocks that it holds
        for number, key in enumerate(prompt.keys):
            told = blocks.get(key)
            if told is None:
                break
            longer = False
            for row, then in told.items():
                if then >= since and row < rows and ends.get(row, 0) == number:
                    ends[row] = number + 1
                    longer = True
            if not longer:
                break
        if not ends:
            if len(self._none) != rows:
                self._none = np.zeros(rows, np.int64)
            return self._none
        found, most = np.zeros(rows, np.int64), max(0, prompt.tokens - 1)
        for row, number in ends.items():
            found[row] = min(int(number * prompt.block_tokens), most)
        return found

    def routed(self, prompt: PromptKeys, row: int, now: float) -> None:
        """Note that a prompt was sent to a worker."""
        blocks = self._blocks
        for key in prompt.keys:
            times = blocks[key] = blocks.pop(key, {})
            times[row] = now
        while len(blocks) > self.max_blocks:
            del blocks[next(iter(blocks))]

    def drop(self, row: int) -> None:
        """Forget the prefixes of a worker that left or restarted."""
        for key in [key for key, told in self._blocks.items() if told.pop(row, None) is not None and not told]:
            del self._blocks[key]


WINDOW = 16.0
"""Window of the moving average of the confirmed share, in answers."""
PRIOR = 4.0
"""Number of fully confirmed answers that a new worker is credited with."""
FULL_TOKENS = 256.0
"""Claimed tokens for which an answer has full weight. Fewer weigh less, so that small true claims hide no big lie."""
NONE, ALL = 0.25, 0.75
"""Confirmed share up to which no claim is believed, and from which on all are; in between belief is linear."""


class Claims:
    """Belief in the claims of one pool's workers, by row."""

    def __init__(self) -> None:
        self._evidence: dict[int, tuple[float, float]] = {}
        self.beliefs: NDArray[np.float64] | None = None
        """Share of each worker's claimed tokens that is believed, [row]; None if all are. Replaced at each change."""

    def answered(self, row: int, claimed: int, cached: int) -> None:
        """Record an answer: the worker had claimed `claimed` tokens of the prompt and reports `cached` as found."""
        if claimed < 1:
            return
        confirmed, answers = self._evidence.get(row, (PRIOR, PRIOR))
        weight = min(1.0, claimed / FULL_TOKENS)
        kept = 1.0 - weight / WINDOW
        share = min(cached, claimed) / claimed
        self._evidence[row] = confirmed * kept + weight * share, answers * kept + weight
        self._refresh()

    def belief(self, row: int) -> float:
        confirmed, answers = self._evidence.get(row, (1.0, 1.0))
        return min(1.0, max(0.0, (confirmed / answers - NONE) / (ALL - NONE)))

    def discounted(self, claimed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Scale claimed tokens by the belief in each worker, [row]: the cached tokens that routers see."""
        if self.beliefs is None:
            return claimed
        believed = claimed.copy()
        rows = min(len(claimed), len(self.beliefs))
        believed[:rows] = (claimed[:rows] * self.beliefs[:rows]).astype(np.int64)
        return believed

    def forget(self, row: int) -> None:
        """Forget a worker that left, as its row may go to another."""
        if self._evidence.pop(row, None) is not None:
            self._refresh()

    def _refresh(self) -> None:
        doubted = {row: self.belief(row) for row in self._evidence if self.belief(row) < 1.0}
        self.beliefs = np.ones(max(doubted) + 1) if doubted else None
        for row, belief in doubted.items():
            self.beliefs[row] = belief  # type: ignore[index]
