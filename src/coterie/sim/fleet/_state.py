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

from coterie._numba import helper

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
