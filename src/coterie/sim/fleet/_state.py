"""The state of a fleet's run, as flat arrays.

A few tables: a row a field and a column a worker (`w`, times `wt`), a row a request and a column a field (`r`, times
`rt`), and two lists of single numbers (`c`, `f`); the names of their places stand below. Handing one object with forty
arrays from function to function made a step a hundred times as slow.

Queues are chains through `next`: a request waits in at most one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

PREFILL, DECODE, BOTH = 0, 1, 2
"""Roles of workers."""
ABSENT, QUEUED, PREFILLING, HANDED, DECODING, DONE, DROPPED = 0, 1, 2, 3, 4, 5, 6
"""Phases of requests; `HANDED` from the end of prefill until it runs on its decoder."""
DECIDE, GROW, ENDED, DUPLICATE = 0, 1, 2, 3
"""Reasons for the compiled loop to return."""
SOONEST, LEAST_QUEUED, ROUND_ROBIN = 0, 1, 2
"""Prefill policies."""
REFUSE, POSTPONE, ALLOW = 0, 1, 2
"""What to do with a request whose recording is in flight."""
NONE = np.int64(-1)

ASKED, DECIDED, FINISHED, ARRIVED, IN_FLIGHT, STEPS, TURN, SUBJECT, POSTPONED, MOST = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
"""Counts in `c`."""
PREFILL_WORKERS, STEP_TOKENS, BLOCK_TOKENS, POLICY, CLOSED, DUPLICATES, STUCK, AHEAD = 10, 11, 12, 13, 14, 15, 16, 17
"""Settings in `c`; CLOSED is the requests in flight, 0 in an open run, STUCK where none may follow until one ends,
AHEAD where who joins a step is settled when the one before it starts."""
CLOCK, OVERHEAD, LATENCY, TOKEN_S, UNTIL = 0, 1, 2, 3, 4
"""Indices in `f`, seconds: now, a step's overhead, the link's latency, its time per token of KV, the run's end."""
ROLE, PLACES, CAPACITY, RUNNING, CONTEXT, KV_USED, KV_MOST, EVICTABLE, QUEUED_TOKENS = 0, 1, 2, 3, 4, 5, 6, 7, 8
WAIT_HEAD, WAIT_TAIL, KV_HEAD, KV_TAIL, SEND_HEAD, SEND_TAIL, STAGED = 9, 10, 11, 12, 13, 14, 15
"""Rows of `w`; CAPACITY and KV_… are in blocks, EVICTABLE of them are cached and unpinned. The last STAGED of those
RUNNING run from the next step on."""
STEP_END, LINK_FREE, SPEED = 0, 1, 2
"""Rows of `wt`."""
PROMPT_TOKENS, OUTPUT_TOKENS, PROMPT_ROW, PROMPT_ROWS, DECODE_ROW, DECODE_ROWS, RECORDED = 0, 1, 2, 3, 4, 5, 6
BLOCK_FIRST, BLOCK_END, PHASE, NEXT, PREFILLER, DECODER, COMPUTED, CHUNK, HITS = 7, 8, 9, 10, 11, 12, 13, 14, 15
CACHED, PRIVATE, DECODED, DECISION, ENDING = 16, 17, 18, 19, 20
"""Columns of `r`; DECISION and ENDING are lists of requests in the order in which they need a decision, and end."""
ARRIVAL, PREFILL_START, PREFILL_END, READY, JOIN, FIRST_TOKEN, FINISH = 0, 1, 2, 3, 4, 5, 6
"""Columns of `rt`."""
PINS, OLDER, NEWER = 0, 1, 2
"""Columns of `cache`; PINS is -1 where a block is not cached."""
BUSY, HOLD_HEAD, HOLD_TAIL = 0, 1, 2
"""Rows of `recordings`."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class World(NamedTuple):
    """State of a run, and the recordings it replays."""

    c: Ints
    f: Floats
    w: Ints
    wt: Floats
    r: Ints
    rt: Floats
    run: Ints
    """[worker, place]"""
    cache: NDArray[np.int32]
    """[3, worker that computes prompts, block + 1]: unpinned blocks are a ring through the last place."""
    blocks: Ints
    """Block hashes of all prompts, concatenated."""
    recordings: Ints
    expert_indices: NDArray[np.unsignedinteger]
    """[token, layer x k] expert index of each activation: layer x experts + expert."""
    counts: NDArray[np.uint32]
    """[layer, expert] rows of a step."""
    bits: NDArray[np.uint64]
    """[token + 1, word] the same as `expert_indices`, one bit per index; the last row is empty."""
    rows: NDArray[np.uint64]
    """[place] tokens of a decode step."""


@helper()
def push(heads: Ints, head: int, queue: int, r: Ints, request: int) -> None:
    """At the end of a queue, whose tail is in the row after its head."""
    r[request, NEXT] = NONE
    if heads[head, queue] < 0:
        heads[head, queue] = request
    else:
        r[heads[head + 1, queue], NEXT] = request
    heads[head + 1, queue] = request


@helper()
def pop(heads: Ints, head: int, queue: int, r: Ints) -> int:
    request = heads[head, queue]
    heads[head, queue] = r[request, NEXT]
    return int(request)


# A worker's KV memory, in blocks. With a prefix cache it holds blocks of three kinds: private ones of a prompt that is
# not computed yet (and of output), pinned ones that running requests share, and free ones in order of last use, which
# are evicted as needed.


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
