"""The block table: the prefix that each KV block holds, its users, and the order of eviction.

A block is *used* (held by requests or staged for another worker), *cached* (held by no request, but a later request
with the same prefix may reuse it) or *empty*. Its hash covers its own tokens, all tokens before them (through the hash
of its parent) and the tenant's cache salt: the same prefix has the same hash in every worker, and tenants cannot find
each other's blocks. When no block is empty, the cached block released longest ago is evicted. KV events record what is
stored, removed and cleared, in order.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import groupby, takewhile

import numpy as np

from coterie.errors import CoterieError, check
from coterie.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MEDIUM = "GPU"
"""vLLM's name for the cache that requests are served from, also on a CPU; other media are slower cache tiers."""
GROUP = 0


class OutOfBlocksError(CoterieError):
    """More blocks were requested than are empty or cached."""


def salt_digest(salt: str | None) -> bytes:
    """Return the bytes hashed before a prompt's first block; empty without a salt."""
    return b"" if salt is None else hashlib.sha256(b"cache salt\0" + salt.encode()).digest()


def block_digests(
    tokens: Sequence[int], block_size: int, known: Sequence[bytes] = (), salt: str | None = None
) -> list[bytes]:
    """Return the hash of each full block; the first len(known) hashes are given. Each salt gives different hashes."""
    digests = list(known)
    for index in range(len(digests), len(tokens) // block_size):
        block = np.asarray(tokens[index * block_size : (index + 1) * block_size], "<i4").tobytes()
        digests.append(hashlib.sha256((digests[-1] if digests else salt_digest(salt)) + block).digest())
    return digests


def wire_hash(digest: bytes) -> int:
    """Return the first 64 bits of a hash, the form in KV events."""
    return int.from_bytes(digest[:8], "big")


class BlockTable:
    """KV blocks by number. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._users = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._empty = deque(range(num_blocks))
        self._cached: OrderedDict[int, bytes] = OrderedDict()  # block → hash, oldest release first
        self._events: list[KVEvent] = []

    @property
    def available(self) -> int:
        """Number of blocks that can be taken, empty or cached; taking a cached block evicts its prefix."""
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Number of blocks without users whose prefix can be found again."""
        return len(self._cached)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix."""
        return [self._by_digest[digest] for digest in takewhile(self._by_digest.__contains__, digests)]

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one user to each block."""
        for block in blocks:
            self._cached.pop(block, None)
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Take `count` blocks for a new user; raise OutOfBlocksError, and take none, if there are too few."""
        if count > self.available:
            raise OutOfBlocksError(
                f"{count} KV blocks are wanted; {self.available} of {self.num_blocks} are not in use"
            )
        taken = [self._empty.popleft() for _ in range(min(count, len(self._empty)))]
        evicted = [self._cached.popitem(last=False) for _ in range(count - len(taken))]
        if evicted:
            self._forget(evicted)
        taken += [block for block, _ in evicted]
        for block in taken:
            self._users[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one user from each block. The end of a prefix is evicted first: more requests share its start."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                digest = self._digest[block]
                if digest is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = digest

    def store(
        self,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        tokens: Sequence[int],
        start: int,
        salt: str | None = None,
    ) -> None:
        """Make a request's full blocks findable, from index `start` on.

        `blocks`, `digests` and `tokens` start at the request's beginning; `salt` is already in the digests. A prefix
        that another block already holds is not stored again.
        """
        for known, run in groupby(range(start, len(digests)), lambda index: digests[index] in self._by_digest):
            fresh = [] if known else list(run)
            for index in fresh:
                self._digest[blocks[index]] = digests[index]
                self._by_digest[digests[index]] = blocks[index]
            if fresh:
                self._note_stored(fresh[0], fresh[-1] + 1, digests, tokens, salt)

    def clear(self) -> None:
        """Forget every prefix. No block may be in use: a block stored later would have an unknown parent."""
        check(
            not self.used, f"{self.used} of {self.num_blocks} KV blocks are in use; the cache is cleared when none is"
        )
        self._by_digest.clear()
        self._digest = [None] * self.num_blocks
        self._empty.extend(self._cached)
        self._cached.clear()
        self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVEvent]:
        """Return the KV events since the last call."""
        events, self._events = self._events, []
        return events

    def _forget(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Make the evicted blocks, with their hashes, unfindable."""
        for block, digest in evicted:
            self._digest[block] = None
            del self._by_digest[digest]
        hashes: list[int | bytes] = [wire_hash(digest) for _, digest in evicted]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=GROUP))

    def _note_stored(
        self, first: int, end: int, digests: Sequence[bytes], tokens: Sequence[int], salt: str | None
    ) -> None:
        # As in vLLM: the salt is an extra key of the prompt's first block; later blocks inherit it by their parents.
        salted = salt is not None and first == 0
        self._events.append(
            BlockStored(
                block_hashes=[wire_hash(digest) for digest in digests[first:end]],
                parent_block_hash=wire_hash(digests[first - 1]) if first else None,
                token_ids=[int(token) for token in tokens[first * self.block_size : end * self.block_size]],
                block_size=self.block_size,
                medium=MEDIUM,
                extra_keys=[[salt], *[None] * (end - first - 1)] if salted else None,
                group_idx=GROUP,
            )
        )
