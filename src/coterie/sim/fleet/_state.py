"""The state of a fleet's run, as flat arrays.

`w` (integers) and `wt` (times) are [field, worker], `r` (integers) and `rt` (times) are [request, field], `c`
(integers) and `f` (floats) are lists of single numbers. The constants below are their indices. Passing one object with
forty arrays between functions instead made a step a hundred times slower.

Queues are linked lists through the NEXT column of `r`: a request waits in at most one queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

PREFILL, DECODE, BOTH = 0, 1, 2
"""Roles of workers."""
ABSENT, QUEUED, PREFILLING, HANDED, DECODING, DONE, DROPPED = 0, 1, 2, 3, 4, 5, 6
"""Phases of requests; `HANDED` lasts from the end of prefill until the request runs on its decoder."""
DECIDE, GROW, ENDED, DUPLICATE, CHOOSE = 0, 1, 2, 3, 4
"""Reasons for the compiled loop to return."""
SOONEST, LEAST_QUEUED, ROUND_ROBIN = 0, 1, 2
"""Prefill policies."""
REFUSE, POSTPONE, ALLOW = 0, 1, 2
"""Policies for a request whose recording is in flight already."""
NONE = np.int64(-1)

ASKED, DECIDED, FINISHED, ARRIVED, IN_FLIGHT, STEPS, TURN, SUBJECT, POSTPONED, MOST = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
"""Indices of counters in `c`."""
PREFILL_WORKERS, STEP_TOKENS, BLOCK_TOKENS, POLICY, CLOSED, DUPLICATES, STUCK, AHEAD = 10, 11, 12, 13, 14, 15, 16, 17
BATCHING, QUEUE = 18, 19
"""Indices of settings in `c`. CLOSED: requests in flight in a closed loop, 0 in an open run. STUCK: 1 if none may
start until one ends. AHEAD: 1 if the requests that join a step are chosen when the previous step starts. BATCHING: 1 if
a strategy chooses from the queues; QUEUE is the one to choose from, of worker SUBJECT."""
CLOCK, OVERHEAD, LATENCY, TOKEN_S, UNTIL = 0, 1, 2, 3, 4
"""Indices in `f`, in seconds: now, overhead per step, link latency, link time per token of KV, end of the run."""
ROLE, PLACES, CAPACITY, RUNNING, CONTEXT, KV_USED, KV_MOST, EVICTABLE, QUEUED_TOKENS = 0, 1, 2, 3, 4, 5, 6, 7, 8
WAIT_HEAD, WAIT_TAIL, KV_HEAD, KV_TAIL, SEND_HEAD, SEND_TAIL, STAGED = 9, 10, 11, 12, 13, 14, 15
"""Rows of `w`. CAPACITY, KV_USED and KV_MOST are in blocks; EVICTABLE counts cached, unpinned blocks. The last
STAGED of the RUNNING requests run from the next step on."""
STEP_END, LINK_FREE, SPEED, CHOSEN = 0, 1, 2, 3
"""Rows of `wt`: end of the running step, time at which the link is free, relative speed, time at which a strategy last
chose who joins; times in seconds."""
PROMPT_TOKENS, OUTPUT_TOKENS, PROMPT_ROW, PROMPT_ROWS, DECODE_ROW, DECODE_ROWS, RECORDED = 0, 1, 2, 3, 4, 5, 6
BLOCK_FIRST, BLOCK_END, PHASE, NEXT, PREFILLER, DECODER, COMPUTED, CHUNK, HITS = 7, 8, 9, 10, 11, 12, 13, 14, 15
CACHED, PRIVATE, DECODED, DECISION, ENDING = 16, 17, 18, 19, 20
"""Columns of `r`. Columns DECISION and ENDING list requests in the order in which they need a decision, or end."""
COMPUTES, GETS = 0, 6
"""What is added to HITS, CACHED and PRIVATE: for the worker that computes a prompt, and for the decoder that gets its
KV, since both hold it during the transfer."""
ARRIVAL, PREFILL_START, PREFILL_END, READY, JOIN, FIRST_TOKEN, FINISH = 0, 1, 2, 3, 4, 5, 6
"""Columns of `rt`."""
PINS, OLDER, NEWER = 0, 1, 2
"""First index of `cache`; PINS is -1 if the block is not cached."""
BUSY, HOLD_HEAD, HOLD_TAIL = 0, 1, 2
"""Rows of `recordings`: BUSY is 1 while a recording is in flight, HOLD_… is the queue of its postponed requests."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class World(NamedTuple):
    """State of a run, and the recordings that it replays."""

    c: Ints
    f: Floats
    w: Ints
    wt: Floats
    r: Ints
    rt: Floats
    run: Ints
    """[worker, place] running request."""
    cache: NDArray[np.int32]
    """[3, worker, block + 1] prefix cache. Unpinned blocks form a ring in order of last use; the
    last index is its head."""
    blocks: Ints
    """Block numbers of all prompts, concatenated."""
    recordings: Ints
    expert_indices: NDArray[np.unsignedinteger]
    """[token, layer x k] expert index of each activation: layer x experts + expert."""
    counts: NDArray[np.uint32]
    """[layer, expert] rows of a step; working memory."""
    bits: NDArray[np.uint64]
    """[token + 1, word] the same as `expert_indices`, one bit per expert index; the last row is all 0."""
    rows: NDArray[np.uint64]
    """[place] rows of the recorded tokens of a decode step; working memory."""


@helper()
def push(heads: Ints, head: int, queue: int, r: Ints, request: int) -> None:
    """Append a request to a queue; the queue's tail is in row head + 1 of `heads`."""
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


# A worker's KV memory, in blocks. With a prefix cache it has three kinds of blocks: private blocks of a prompt that is
# not computed yet (and of output), pinned blocks that running requests share, and unpinned blocks in order of last use,
# which are evicted as needed.


@helper()
def blocks_of(c: Ints, w: Ints, r: Ints, worker: int, request: int) -> int:
    """Return the blocks that a request needs on a worker: its prompt, and its output if the worker decodes."""
    tokens = r[request, PROMPT_TOKENS]
    if w[ROLE, worker] != PREFILL:
        tokens += r[request, OUTPUT_TOKENS]
    return int((tokens + c[BLOCK_TOKENS] - 1) // c[BLOCK_TOKENS])


@helper()
def hit_blocks(r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> int:
    """Return the number of leading prompt blocks in a worker's cache."""
    first, last = r[request, BLOCK_FIRST], r[request, BLOCK_END]
    for at in range(first, last):
        if cache[PINS, worker, blocks[at]] < 0:
            return int(at - first)
    return int(last - first)


@njit()
def hit_tokens(c: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> int:
    """Return the cached prompt tokens; the last token is always computed, since it gives the first output."""
    return int(min(hit_blocks(r, cache, blocks, worker, request) * c[BLOCK_TOKENS], r[request, PROMPT_TOKENS] - 1))


@helper()
def _unlink(w: Ints, cache: NDArray[np.int32], worker: int, block: int) -> None:
    older, newer = cache[OLDER, worker, block], cache[NEWER, worker, block]
    cache[NEWER, worker, older] = newer
    cache[OLDER, worker, newer] = older
    w[EVICTABLE, worker] -= 1


@helper()
def reserve(
    c: Ints, w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int, side: int
) -> bool:
    """Pin the cached prefix and reserve the rest, evicting least recently used blocks; False if too few are free."""
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
    r[request, PRIVATE + side], r[request, HITS + side] = need, hits
    r[request, CACHED + side] = min(hits * c[BLOCK_TOKENS], r[request, PROMPT_TOKENS] - 1)
    return True


@helper()
def commit(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int, side: int) -> None:
    """Make the blocks of a complete prompt hittable; a block that another request cached meanwhile is stored once."""
    first = r[request, BLOCK_FIRST]
    for at in range(first + r[request, HITS + side], r[request, BLOCK_END]):
        block = blocks[at]
        pins = cache[PINS, worker, block]
        r[request, PRIVATE + side] -= 1
        if pins < 0:
            cache[PINS, worker, block] = 1
            continue
        w[KV_USED, worker] -= 1
        if pins == 0:
            _unlink(w, cache, worker, block)
        cache[PINS, worker, block] = pins + 1


@helper()
def release(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int, side: int) -> None:
    """Free private blocks and unpin shared ones, which stay cached until evicted, the end of a prompt first."""
    w[KV_USED, worker] -= r[request, PRIVATE + side]
    r[request, PRIVATE + side] = 0
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
