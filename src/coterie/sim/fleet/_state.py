"""The state of a fleet's run: tables of records with named fields.

Compiled functions pass tables and indices: `workers[worker].running` is the field of one worker. Python reads a field
of all workers at once: `workers["running"]`. Passing one object with all tables between functions instead made a step a
hundred times slower.

Queues are linked lists through the field `next` of requests: a request waits in at most one queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

PREFILL, DECODE, BOTH = 0, 1, 2
"""Roles of workers."""
ABSENT, QUEUED, PREFILLING, HANDED, DECODING, DONE, DROPPED = 0, 1, 2, 3, 4, 5, 6
"""Phases of requests; `HANDED` lasts from the end of prefill until the request runs on its decoder."""
DECIDE, GROW, ENDED, DUPLICATE, CHOOSE_WAITING, CHOOSE_HANDED = 0, 1, 2, 3, 4, 5
"""Reasons for the compiled loop to return. CHOOSE_…: a strategy chooses from that queue of worker `subject`."""
SOONEST, LEAST_QUEUED, ROUND_ROBIN = 0, 1, 2
"""Prefill policies."""
REFUSE, POSTPONE, ALLOW = 0, 1, 2
"""Policies for a request whose recording is in flight already."""
NONE = np.int64(-1)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Records = NDArray[Any]
"""A table of records."""
Record = Any
"""A record of a table, by reference."""

QUEUE = np.dtype([("head", int), ("tail", int)], align=True)
HELD = np.dtype([("hits", int), ("cached", int), ("private", int)], align=True)
"""What a request holds of a worker's KV memory: blocks and prompt tokens that were in its cache, and private blocks."""
LOOP = np.dtype(
    [
        # Settings.
        ("prefill_workers", int),
        ("step_tokens", int),
        ("block_tokens", int),
        ("policy", int),
        ("closed", int),  # requests in flight in a closed loop, 0 in an open run
        ("duplicates", int),
        ("ahead", int),  # 1 if the requests that join a step are chosen when the previous step starts
        ("batching", int),  # 1 if a strategy chooses from the queues
        ("overhead_s", float),  # per step
        ("latency_s", float),  # of a link
        ("token_s", float),  # link time per token of KV
        ("until_s", float),  # end of the run
        # Clock and counters.
        ("clock_s", float),
        ("asked", int),
        ("decided", int),
        ("finished", int),
        ("arrived", int),
        ("in_flight", int),
        ("most_in_flight", int),
        ("steps", int),
        ("turn", int),
        ("subject", int),
        ("postponed", int),
        ("stuck", int),  # 1 if no request of a closed loop may start until one ends
    ],
    align=True,
)
WORKER = np.dtype(
    [
        ("role", int),
        ("places", int),
        ("capacity", int),  # blocks, as are kv_used and kv_most
        ("speed", float),  # relative
        ("running", int),
        ("staged", int),  # the last of the running requests, which run from the next step on
        ("context", int),
        ("step_end_s", float),
        ("waiting", QUEUE),  # for a place
        ("handed", QUEUE),  # for KV memory
        ("sending", QUEUE),  # whose KV is on its way to a decoder
        ("queued_tokens", int),
        ("kv_used", int),
        ("kv_most", int),
        ("evictable", int),  # cached, unpinned blocks
        ("link_free_s", float),  # time at which the link is free
        ("chosen_s", float),  # time at which a strategy last chose who joins
    ],
    align=True,
)
REQUEST = np.dtype(
    [
        ("prompt_tokens", int),  # what a decode step needs of a request is side by side: one or two cache lines
        ("output_tokens", int),
        ("decode_row", int),
        ("decode_rows", int),
        ("decoded", int),
        ("phase", int),
        ("next", int),
        ("recorded", int),
        ("prompt_row", int),
        ("prompt_rows", int),
        ("block_first", int),
        ("block_end", int),
        ("prefiller", int),
        ("decoder", int),
        ("computed", int),
        ("chunk", int),
        ("computes", HELD),  # on the worker that computes the prompt
        ("gets", HELD),  # on the decoder that gets the prompt's KV: both hold it during the transfer
        ("arrival_s", float),
        ("prefill_start_s", float),
        ("prefill_end_s", float),
        ("ready_s", float),
        ("decode_start_s", float),
        ("first_token_s", float),
        ("finish_s", float),
        ("decision", int),  # record i has the request that is the i-th to need a decision, not its own
        ("ending", int),  # record i has the request that is the i-th to end
    ],
    align=True,
)
BLOCK = np.dtype([("pins", np.int32), ("older", np.int32), ("newer", np.int32)], align=True)
"""A block of a prefix cache; `pins` is -1 if it is not cached."""
RECORDING = np.dtype([("busy", bool), ("postponed", QUEUE)], align=True)
"""Whether a recording is in flight, and the requests that wait for it."""
STEP = np.dtype(
    [
        ("worker", np.int32),
        ("decoding", np.int32),
        ("prefill", np.int32),
        ("start_s", float),
        ("s", float),
        ("distinct", float),
    ],
    align=True,
)
"""A step in the log; the fields are those of FleetRun that begin with `step_`."""


class World(NamedTuple):
    """State of a run, and the recordings that it replays."""

    loop: Records
    """[] an array of one record: passing a record itself from Python to a compiled function takes ten times as long."""
    workers: Records
    requests: Records
    run: Ints
    """[worker, place] running request."""
    cache: Records
    """[worker, block + 1] prefix cache. Unpinned blocks form a ring in order of last use; the last index is its
    head."""
    blocks: Ints
    """Block numbers of all prompts, concatenated."""
    recordings: Records
    expert_indices: NDArray[np.unsignedinteger]
    """[token, layer x k] expert index of each activation: layer x experts + expert."""
    counts: NDArray[np.uint32]
    """[layer, expert] rows of a step; working memory."""
    bits: NDArray[np.uint64]
    """[token + 1, word] the same as `expert_indices`, one bit per expert index; the last row is all 0."""
    rows: NDArray[np.uint64]
    """[place] rows of the recorded tokens of a decode step; working memory."""


@helper()
def push(queue: Record, requests: Records, request: int) -> None:
    requests[request].next = NONE
    if queue.head < 0:
        queue.head = request
    else:
        requests[queue.tail].next = request
    queue.tail = request


@helper()
def pop(queue: Record, requests: Records) -> int:
    request = queue.head
    queue.head = requests[request].next
    return int(request)


# A worker's KV memory, in blocks. With a prefix cache it has three kinds of blocks: private blocks of a prompt that is
# not computed yet (and of output), pinned blocks that running requests share, and unpinned blocks in order of last use,
# which are evicted as needed.


@helper()
def blocks_of(loop: Record, workers: Records, requests: Records, worker: int, request: int) -> int:
    """Return the blocks that a request needs on a worker: its prompt, and its output if the worker decodes."""
    tokens = requests[request].prompt_tokens
    if workers[worker].role != PREFILL:
        tokens += requests[request].output_tokens
    return int((tokens + loop.block_tokens - 1) // loop.block_tokens)


@helper()
def hit_blocks(requests: Records, cache: Records, blocks: Ints, worker: int, request: int) -> int:
    """Return the number of leading prompt blocks in a worker's cache."""
    first, last = requests[request].block_first, requests[request].block_end
    for at in range(first, last):
        if cache[worker, blocks[at]].pins < 0:
            return int(at - first)
    return int(last - first)


@njit()
def hit_tokens(block_tokens: int, requests: Records, cache: Records, blocks: Ints, worker: int, request: int) -> int:
    """Return the cached prompt tokens; the last token is always computed, since it gives the first output."""
    hits = hit_blocks(requests, cache, blocks, worker, request)
    return int(min(hits * block_tokens, requests[request].prompt_tokens - 1))


@helper()
def _unlink(workers: Records, cache: Records, worker: int, block: int) -> None:
    older, newer = cache[worker, block].older, cache[worker, block].newer
    cache[worker, older].newer = newer
    cache[worker, newer].older = older
    workers[worker].evictable -= 1


@helper()
def reserve(
    loop: Record,
    workers: Records,
    requests: Records,
    cache: Records,
    blocks: Ints,
    worker: int,
    request: int,
    held: Record,
) -> bool:
    """Pin the cached prefix and reserve the rest, evicting least recently used blocks; False if too few are free."""
    hits = hit_blocks(requests, cache, blocks, worker, request)
    first, unpinned = requests[request].block_first, 0
    for at in range(first, first + hits):
        unpinned += cache[worker, blocks[at]].pins == 0
    need = blocks_of(loop, workers, requests, worker, request) - hits
    free = workers[worker].capacity - workers[worker].kv_used
    if need > free + workers[worker].evictable - unpinned:
        return False
    for at in range(first, first + hits):
        block = blocks[at]
        if cache[worker, block].pins == 0:
            _unlink(workers, cache, worker, block)
        cache[worker, block].pins += 1
    end = cache.shape[1] - 1
    for _ in range(max(0, need - free)):
        block = cache[worker, end].newer
        _unlink(workers, cache, worker, block)
        cache[worker, block].pins = NONE
        workers[worker].kv_used -= 1
    workers[worker].kv_used += need
    workers[worker].kv_most = max(workers[worker].kv_most, workers[worker].kv_used)
    held.private, held.hits = need, hits
    held.cached = min(hits * loop.block_tokens, requests[request].prompt_tokens - 1)
    return True


@helper()
def commit(
    workers: Records, requests: Records, cache: Records, blocks: Ints, worker: int, request: int, held: Record
) -> None:
    """Make the blocks of a complete prompt hittable; a block that another request cached meanwhile is stored once."""
    first = requests[request].block_first
    for at in range(first + held.hits, requests[request].block_end):
        block = blocks[at]
        pins = cache[worker, block].pins
        held.private -= 1
        if pins < 0:
            cache[worker, block].pins = 1
            continue
        workers[worker].kv_used -= 1
        if pins == 0:
            _unlink(workers, cache, worker, block)
        cache[worker, block].pins = pins + 1


@helper()
def release(
    workers: Records, requests: Records, cache: Records, blocks: Ints, worker: int, request: int, held: Record
) -> None:
    """Free private blocks and unpin shared ones, which stay cached until evicted, the end of a prompt first."""
    workers[worker].kv_used -= held.private
    held.private = 0
    end = cache.shape[1] - 1
    first = requests[request].block_first
    for back in range(requests[request].block_end - first):
        block = blocks[requests[request].block_end - 1 - back]
        cache[worker, block].pins -= 1
        if cache[worker, block].pins == 0:
            newest = cache[worker, end].older
            cache[worker, block].older, cache[worker, block].newer = newest, end
            cache[worker, newest].newer, cache[worker, end].older = block, block
            workers[worker].evictable += 1
