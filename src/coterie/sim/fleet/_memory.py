"""A worker's KV memory, in blocks.

A worker with a prefix cache holds blocks of three kinds: private ones of a prompt that is not computed yet (and of
output), pinned ones that running requests share, and free ones in order of last use, which are evicted as needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.sim.fleet._state import (
    BLOCK_END,
    BLOCK_FIRST,
    BLOCK_TOKENS,
    CACHED,
    CAPACITY,
    EVICTABLE,
    HITS,
    KV_MOST,
    KV_USED,
    NEWER,
    NONE,
    OLDER,
    OUTPUT_TOKENS,
    PINS,
    PREFILL,
    PRIVATE,
    PROMPT_TOKENS,
    ROLE,
    Ints,
)


@helper()
def blocks_of(c: Ints, w: Ints, r: Ints, worker: int, request: int) -> int:
    """Blocks a request needs on a worker: its prompt, and where it decodes its output too."""
    tokens = r[request, PROMPT_TOKENS]
    if w[ROLE, worker] != PREFILL:
        tokens += r[request, OUTPUT_TOKENS]
    return int((tokens + c[BLOCK_TOKENS] - 1) // c[BLOCK_TOKENS])


@helper()
def hit_blocks(r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> int:
    """Leading blocks of the prompt that a worker caches."""
    first, last = r[request, BLOCK_FIRST], r[request, BLOCK_END]
    for at in range(first, last):
        if cache[PINS, worker, blocks[at]] < 0:
            return int(at - first)
    return int(last - first)


@njit()
def hit_tokens(c: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> int:
    """Prompt tokens a worker need not compute; the last one always is, since it gives the first output."""
    return int(min(hit_blocks(r, cache, blocks, worker, request) * c[BLOCK_TOKENS], r[request, PROMPT_TOKENS] - 1))


@helper()
def _unlink(w: Ints, cache: NDArray[np.int32], worker: int, block: int) -> None:
    older, newer = cache[OLDER, worker, block], cache[NEWER, worker, block]
    cache[NEWER, worker, older] = newer
    cache[OLDER, worker, newer] = older
    w[EVICTABLE, worker] -= 1


@helper()
def reserve(c: Ints, w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> bool:
    """Pin the cached prefix and take blocks for the rest, evicting the least recent; False if too few are free."""
    hits = hit_blocks(r, cache, blocks, worker, request)
    first, unpinned = r[request, BLOCK_FIRST], 0
    for at in range(first, first + hits):
        unpinned += cache[PINS, worker, blocks[at]] == 0
    need = blocks_of(c, w, r, worker, request) - hits
    free = w[CAPACITY, worker] - w[KV_USED, worker]
    if need > free + w[EVICTABLE, worker] - unpinned:
        return False
    for at in range(first, first + hits):
        block = blocks[at]
        if cache[PINS, worker, block] == 0:
            _unlink(w, cache, worker, block)
        cache[PINS, worker, block] += 1
    end = cache.shape[2] - 1
    for _ in range(max(0, need - free)):
        block = cache[NEWER, worker, end]
        _unlink(w, cache, worker, block)
        cache[PINS, worker, block] = NONE
        w[KV_USED, worker] -= 1
    w[KV_USED, worker] += need
    w[KV_MOST, worker] = max(w[KV_MOST, worker], w[KV_USED, worker])
    r[request, PRIVATE], r[request, HITS] = need, hits
    r[request, CACHED] = min(hits * c[BLOCK_TOKENS], r[request, PROMPT_TOKENS] - 1)
    return True


@helper()
def commit(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> None:
    """A computed prompt becomes a prefix others can hit; a block that another computed meanwhile is kept once."""
    first = r[request, BLOCK_FIRST]
    for at in range(first + r[request, HITS], r[request, BLOCK_END]):
        block = blocks[at]
        pins = cache[PINS, worker, block]
        r[request, PRIVATE] -= 1
        if pins < 0:
            cache[PINS, worker, block] = 1
            continue
        w[KV_USED, worker] -= 1
        if pins == 0:
            _unlink(w, cache, worker, block)
        cache[PINS, worker, block] = pins + 1


@helper()
def release(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> None:
    """Private blocks are free, shared ones stay until they are evicted, the end of a prompt first."""
    w[KV_USED, worker] -= r[request, PRIVATE]
    r[request, PRIVATE] = 0
    end = cache.shape[2] - 1
    first = r[request, BLOCK_FIRST]
    for back in range(r[request, BLOCK_END] - first):
        block = blocks[r[request, BLOCK_END] - 1 - back]
        cache[PINS, worker, block] -= 1
        if cache[PINS, worker, block] == 0:
            newest = cache[OLDER, worker, end]
            cache[OLDER, worker, block], cache[NEWER, worker, block] = newest, end
            cache[NEWER, worker, newest], cache[OLDER, worker, end] = block, block
            w[EVICTABLE, worker] += 1
