"""The event loop of a fleet, on flat arrays: it leaves compiled code only when a request needs a router's decision.

All that happens at one moment (steps end, KV arrives, requests come, decisions are made) happens before the steps that
start at that moment; of equal times, steps end in order of workers, then transfers end, then requests arrive. So a run
has one order, and a Python reference can follow it.

Queues are chains through `next`: a request waits in at most one of them. Memory is counted in blocks. A worker with a
prefix cache holds blocks of three kinds: private ones of a prompt that is not computed yet (and of output), pinned ones
that running requests share, and free ones in order of last use, which are evicted as needed.

State is a few tables: a row a field and a column a worker (`w`, times `wt`), a row a request and a column a field (`r`,
times `rt`), and two lists of single numbers (`c`, `f`); the names of their places stand below. Handing one object with
forty arrays from function to function made a step a hundred times as slow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.sim.fleet._cost import MOST_DECODING, decode_us, step_us
from coterie.sim.fleet._prefetch import prefetch

PREFILL, DECODE, BOTH = 0, 1, 2
"""Roles of workers."""
ABSENT, QUEUED, PREFILLING, HANDED, DECODING, DONE, DROPPED = 0, 1, 2, 3, 4, 5, 6
"""Phases of requests; `HANDED` from the end of prefill until it runs on its decoder."""
DECIDE, GROW, ENDED, DUPLICATE = 0, 1, 2, 3
"""Why the loop came back."""
SOONEST, LEAST_QUEUED, ROUND_ROBIN = 0, 1, 2
"""Prefill policies."""
REFUSE, POSTPONE, ALLOW = 0, 1, 2
"""What to do with a request whose recording is in flight."""
NONE = np.int64(-1)
CACHE_LINE = 64

ASKED, DECIDED, FINISHED, ARRIVED, IN_FLIGHT, STEPS, TURN, SUBJECT, POSTPONED, MOST = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
"""Counts in `c`."""
PREFILL_WORKERS, STEP_TOKENS, BLOCK_TOKENS, POLICY, CLOSED, DUPLICATES, STUCK, AHEAD = 10, 11, 12, 13, 14, 15, 16, 17
"""Settings in `c`; CLOSED is the requests in flight, 0 in an open run, STUCK where none may follow until one ends,
AHEAD where who joins a step is settled when the one before it starts."""
CLOCK, OVERHEAD, LATENCY, TOKEN_S, UNTIL = 0, 1, 2, 3, 4
"""In `f`, seconds: now, then settings of a step, of the link (TOKEN_S a token's KV on it), and the end of the run."""
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
"""Of `cache`; PINS is -1 where a block is not cached."""
BUSY, HOLD_HEAD, HOLD_TAIL = 0, 1, 2
"""Rows of `recordings`."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class World(NamedTuple):
    """All a run changes, and what it replays."""

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
    """Of all prompts, one after the other."""
    recordings: Ints
    cells: NDArray[np.unsignedinteger]
    """[token, layer x k] layer x experts + expert."""
    counts: NDArray[np.uint32]
    """[layer, expert] rows of a step."""
    bits: NDArray[np.uint64]
    """[token + 1, word] the same as `cells`, a bit a cell; the last row is empty."""
    rows: NDArray[np.uint64]
    """[place] tokens of a decode step."""


@helper()
def _push(heads: Ints, head: int, queue: int, r: Ints, request: int) -> None:
    """At the end of a queue, whose tail is in the row after its head."""
    r[request, NEXT] = NONE
    if heads[head, queue] < 0:
        heads[head, queue] = request
    else:
        r[heads[head + 1, queue], NEXT] = request
    heads[head + 1, queue] = request


@helper()
def _pop(heads: Ints, head: int, queue: int, r: Ints) -> int:
    request = heads[head, queue]
    heads[head, queue] = r[request, NEXT]
    return int(request)


@helper()
def _blocks(c: Ints, w: Ints, r: Ints, worker: int, request: int) -> int:
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
def _reserve(c: Ints, w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> bool:
    """Pin the cached prefix and take blocks for the rest, evicting the least recently used; False if they lack."""
    hits = hit_blocks(r, cache, blocks, worker, request)
    first, unpinned = r[request, BLOCK_FIRST], 0
    for at in range(first, first + hits):
        unpinned += cache[PINS, worker, blocks[at]] == 0
    need = _blocks(c, w, r, worker, request) - hits
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
def _commit(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> None:
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
def _release(w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, request: int) -> None:
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


@helper()
def _choose_prefiller(c: Ints, w: Ints, r: Ints, cache: NDArray[np.int32], blocks: Ints, request: int) -> int:
    workers, policy = c[PREFILL_WORKERS], c[POLICY]
    if policy == ROUND_ROBIN:
        turn = c[TURN]
        c[TURN] = (turn + 1) % workers
        return int(turn)
    best, least = 0, np.int64(0)
    for worker in range(workers):
        tokens = w[QUEUED_TOKENS, worker]
        if policy == SOONEST:
            tokens -= hit_tokens(c, r, cache, blocks, worker, request)
        if worker == 0 or tokens < least:
            best, least = worker, tokens
    return best


@helper()
def _fits(c: Ints, w: Ints, r: Ints, request: int) -> bool:
    first = c[PREFILL_WORKERS]
    if first > 0 and _blocks(c, w, r, 0, request) > w[CAPACITY, 0]:
        return False
    return bool(_blocks(c, w, r, first, request) <= w[CAPACITY, first])


@helper()
def _arrive(
    c: Ints,
    w: Ints,
    r: Ints,
    rt: Floats,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    request: int,
    now: float,
) -> None:
    rt[request, ARRIVAL] = now
    if not _fits(c, w, r, request):
        r[request, PHASE] = DROPPED
        return
    recordings[BUSY, r[request, RECORDED]] = True
    c[IN_FLIGHT] += 1
    c[MOST] = max(c[MOST], c[IN_FLIGHT])
    r[request, PHASE] = QUEUED
    if c[PREFILL_WORKERS] > 0:
        worker = _choose_prefiller(c, w, r, cache, blocks, request)
        r[request, PREFILLER] = worker
        w[QUEUED_TOKENS, worker] += r[request, PROMPT_TOKENS]
        _push(w, WAIT_HEAD, worker, r, request)
        return
    if w[ROLE, 0] == DECODE:
        rt[request, PREFILL_START] = rt[request, PREFILL_END] = now
        r[request, PHASE] = HANDED
    r[c[ASKED], DECISION] = request
    c[ASKED] += 1


@helper()
def _candidate(c: Ints, r: Ints, recordings: Ints) -> int:
    """In a closed loop: the next request in order that is not in flight as another already; -1 for none."""
    request = c[ARRIVED]
    while request < r.shape[0]:
        if r[request, PHASE] == ABSENT and (c[DUPLICATES] == ALLOW or not recordings[BUSY, r[request, RECORDED]]):
            return int(request)
        request += 1
    c[STUCK] = 1
    return -1


@helper()
def _next_arrival(c: Ints, f: Floats, r: Ints, rt: Floats, recordings: Ints) -> float:
    """When the next request comes; in a closed loop now, where one is missing and one may come."""
    if c[CLOSED] == 0:
        at = c[ARRIVED]
        return float(rt[at, ARRIVAL]) if at < r.shape[0] else np.inf
    if c[IN_FLIGHT] >= c[CLOSED] or c[STUCK] or _candidate(c, r, recordings) < 0:
        return np.inf
    return float(f[CLOCK])


@helper()
def _arrivals(
    c: Ints, w: Ints, r: Ints, rt: Floats, cache: NDArray[np.int32], blocks: Ints, recordings: Ints, now: float
) -> bool:
    """All that come now; False where a recording would be in flight twice and must not."""
    if c[CLOSED] > 0:
        while c[IN_FLIGHT] < c[CLOSED] and not c[STUCK]:
            request = _candidate(c, r, recordings)
            if request < 0:
                break
            _arrive(c, w, r, rt, cache, blocks, recordings, request, now)
            at = c[ARRIVED]
            while at < r.shape[0] and r[at, PHASE] != ABSENT:
                at += 1
            c[ARRIVED] = at
        return True
    while c[ARRIVED] < r.shape[0] and rt[c[ARRIVED], ARRIVAL] <= now:
        request = c[ARRIVED]
        c[ARRIVED] += 1
        number = r[request, RECORDED]
        if c[DUPLICATES] != ALLOW and (recordings[BUSY, number] or recordings[HOLD_HEAD, number] >= 0):
            if c[DUPLICATES] == REFUSE:
                c[SUBJECT] = request
                return False
            c[POSTPONED] += 1
            _push(recordings, HOLD_HEAD, number, r, request)
            continue
        _arrive(c, w, r, rt, cache, blocks, recordings, request, now)
    return True


@helper()
def _make_ready(w: Ints, r: Ints, rt: Floats, worker: int, request: int, now: float) -> None:
    rt[request, READY] = now
    _push(w, WAIT_HEAD, worker, r, request)


@helper()
def _drain(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, worker: int, now: float) -> None:
    """Requests handed to a decoder get its memory in order, then their KV is sent."""
    while w[KV_HEAD, worker] >= 0:
        request = w[KV_HEAD, worker]
        need = _blocks(c, w, r, worker, request)
        if w[KV_USED, worker] + need > w[CAPACITY, worker]:
            return
        _pop(w, KV_HEAD, worker, r)
        w[KV_USED, worker] += need
        w[KV_MOST, worker] = max(w[KV_MOST, worker], w[KV_USED, worker])
        sender = r[request, PREFILLER]
        if sender < 0:
            _make_ready(w, r, rt, worker, request, now)
            continue
        sent = max(now, wt[LINK_FREE, sender]) + f[TOKEN_S] * r[request, PROMPT_TOKENS]
        wt[LINK_FREE, sender] = sent
        rt[request, READY] = sent + f[LATENCY]
        _push(w, SEND_HEAD, sender, r, request)


@helper()
def _place(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, request: int, decoder: int) -> None:
    """Where the router wants it."""
    now, worker = f[CLOCK], c[PREFILL_WORKERS] + decoder
    r[request, DECODER] = decoder
    if w[ROLE, worker] == BOTH:
        r[request, PREFILLER] = worker
        w[QUEUED_TOKENS, worker] += r[request, PROMPT_TOKENS]
        _push(w, WAIT_HEAD, worker, r, request)
        return
    _push(w, KV_HEAD, worker, r, request)
    _drain(c, f, w, wt, r, rt, worker, now)


@helper()
def _finish(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    worker: int,
    request: int,
    now: float,
) -> None:
    rt[request, FINISH] = now
    r[request, PHASE] = DONE
    r[c[FINISHED], ENDING] = request
    c[FINISHED] += 1
    c[IN_FLIGHT] -= 1
    c[STUCK] = 0
    if w[ROLE, worker] == BOTH:
        _release(w, r, cache, blocks, worker, request)
    else:
        w[KV_USED, worker] -= _blocks(c, w, r, worker, request)
        _drain(c, f, w, wt, r, rt, worker, now)
    number = r[request, RECORDED]
    recordings[BUSY, number] = False
    while recordings[HOLD_HEAD, number] >= 0 and not recordings[BUSY, number]:  # one that is dropped makes room at once
        _arrive(c, w, r, rt, cache, blocks, recordings, _pop(recordings, HOLD_HEAD, number, r), now)


@helper()
def _end_decode(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    worker: int,
    now: float,
) -> None:
    """A step of a worker that only decodes."""
    kept, active = 0, w[RUNNING, worker] - w[STAGED, worker]
    for at in range(active):
        request = run[worker, at]
        done = r[request, DECODED] + 1
        r[request, DECODED] = done
        if done == 1:
            rt[request, FIRST_TOKEN] = now
        if done == r[request, OUTPUT_TOKENS]:
            w[CONTEXT, worker] -= r[request, PROMPT_TOKENS] + done - 1
            _finish(c, f, w, wt, r, rt, cache, blocks, recordings, worker, request, now)
        else:
            run[worker, kept] = request
            kept += 1
    w[CONTEXT, worker] += kept
    for at in range(active, active + w[STAGED, worker]):
        run[worker, kept] = run[worker, at]
        kept += 1
    w[RUNNING, worker] = kept


@helper()
def _end_mixed(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    worker: int,
    now: float,
) -> None:
    """A step with prompts in it."""
    kept = 0
    for at in range(w[RUNNING, worker]):
        request = run[worker, at]
        stays = True
        if r[request, PHASE] == DECODING:
            r[request, DECODED] += 1
            w[CONTEXT, worker] += 1
            if r[request, DECODED] == r[request, OUTPUT_TOKENS] - 1:
                w[CONTEXT, worker] -= r[request, PROMPT_TOKENS] + r[request, DECODED]
                _finish(c, f, w, wt, r, rt, cache, blocks, recordings, worker, request, now)
                stays = False
        else:
            r[request, COMPUTED] += r[request, CHUNK]
            w[QUEUED_TOKENS, worker] -= r[request, CHUNK]
            if r[request, COMPUTED] == r[request, PROMPT_TOKENS]:
                rt[request, PREFILL_END] = now
                _commit(w, r, cache, blocks, worker, request)
                if w[ROLE, worker] == PREFILL:
                    r[request, PHASE] = HANDED
                    r[c[ASKED], DECISION] = request
                    c[ASKED] += 1
                    stays = False
                else:
                    rt[request, FIRST_TOKEN] = rt[request, READY] = rt[request, JOIN] = now
                    if r[request, OUTPUT_TOKENS] == 1:
                        _finish(c, f, w, wt, r, rt, cache, blocks, recordings, worker, request, now)
                        stays = False
                    else:
                        r[request, PHASE] = DECODING
                        w[CONTEXT, worker] += r[request, PROMPT_TOKENS]
        if stays:
            run[worker, kept] = request
            kept += 1
    w[RUNNING, worker] = kept


@helper()
def _count_token(cells: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], row: int, weight: np.uint32) -> None:
    for at in range(cells.shape[1]):
        counts[cells[row, at]] += weight


@helper()
def _decode_row(r: Ints, request: int) -> int:
    """The recorded token a request decodes next."""
    at, rows = r[request, DECODED], r[request, DECODE_ROWS]
    if at >= rows:
        at %= rows
    return int(r[request, DECODE_ROW] + at)


@helper()
def _count_chunk(r: Ints, cells: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], request: int) -> None:
    """Positions `computed` to `computed + chunk` of a prompt that repeats its recorded tokens."""
    rows, chunk = r[request, PROMPT_ROWS], r[request, CHUNK]
    laps, rest = chunk // rows, chunk % rows
    start = r[request, COMPUTED] % rows
    for at in range(min(rows, chunk)):
        _count_token(cells, counts, r[request, PROMPT_ROW] + (start + at) % rows, np.uint32(laps + (at < rest)))


@helper()
def _join(w: Ints, r: Ints, run: Ints, worker: int) -> int:
    """Whose KV is on a decoder takes a place; how many did."""
    joined = 0
    while w[RUNNING, worker] < w[PLACES, worker] and w[WAIT_HEAD, worker] >= 0:
        request = _pop(w, WAIT_HEAD, worker, r)
        run[worker, w[RUNNING, worker]] = request
        w[RUNNING, worker] += 1
        r[request, PHASE] = DECODING
        joined += 1
    return joined


@helper()
def _admit(
    c: Ints, w: Ints, r: Ints, rt: Floats, run: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, now: float
) -> bool:
    """The prompt that waits longest takes a place, if there are one and memory."""
    at, request = w[RUNNING, worker], w[WAIT_HEAD, worker]
    if at == w[PLACES, worker] or request < 0 or not _reserve(c, w, r, cache, blocks, worker, request):
        return False
    _pop(w, WAIT_HEAD, worker, r)
    run[worker, at] = request
    w[RUNNING, worker] += 1
    r[request, PHASE] = PREFILLING
    rt[request, PREFILL_START] = now
    r[request, COMPUTED] = r[request, CACHED]
    r[request, CHUNK] = 0
    w[QUEUED_TOKENS, worker] -= r[request, CACHED]
    return True


@helper()
def _gather(
    c: Ints,
    w: Ints,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
    blocks: Ints,
    cells: NDArray[np.unsignedinteger],
    counts: NDArray[np.uint32],
    bits: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    worker: int,
    now: float,
) -> tuple[int, int, int, int]:
    """Admit who may join, in order, and make up a step: tokens decoded, prompt tokens, those before them in their
    prompts, and prompts. Decoded tokens are listed in `rows`, prompts are counted."""
    prefill = prefill_context = prompts = decoding = 0
    w[STAGED, worker] = 0
    settled = c[AHEAD] and w[RUNNING, worker] > 0
    if w[ROLE, worker] == DECODE:
        if not settled:
            _join(w, r, run, worker)
        decoding = w[RUNNING, worker]
        for at in range(decoding):
            request = run[worker, at]
            if r[request, DECODED] == 0:
                rt[request, JOIN] = now
                w[CONTEXT, worker] += r[request, PROMPT_TOKENS]
            row = _decode_row(r, request)
            rows[at] = row
            for word in range(0, bits.shape[1], CACHE_LINE // 8):
                prefetch(bits, row + 1, word)
        if c[AHEAD]:
            w[STAGED, worker] = _join(w, r, run, worker)
        return decoding, prefill, prefill_context, prompts
    left, at = c[STEP_TOKENS], 0
    while True:
        if at == w[RUNNING, worker] and (
            settled or left == 0 or not _admit(c, w, r, rt, run, cache, blocks, worker, now)
        ):
            break
        request = run[worker, at]
        at += 1
        if r[request, PHASE] == DECODING:
            rows[decoding] = _decode_row(r, request)
            decoding += 1
            left -= 1
            continue
        chunk = min(r[request, PROMPT_TOKENS] - r[request, COMPUTED], left)
        r[request, CHUNK] = chunk
        if chunk > 0:
            left -= chunk
            prefill += chunk
            prefill_context += r[request, COMPUTED]
            prompts += 1
            _count_chunk(r, cells, counts, request)
    if c[AHEAD]:
        while _admit(c, w, r, rt, run, cache, blocks, worker, now):
            w[STAGED, worker] += 1
    return decoding, prefill, prefill_context, prompts


@helper()
def _next_event(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, recordings: Ints) -> float:
    when = _next_arrival(c, f, r, rt, recordings)
    for worker in range(w.shape[1]):
        when = min(when, wt[STEP_END, worker])
    for worker in range(c[PREFILL_WORKERS]):
        if w[SEND_HEAD, worker] >= 0:
            when = min(when, rt[w[SEND_HEAD, worker], READY])
    return float(when)


@helper()
def _happen(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    now: float,
) -> bool:
    """All events of a moment; False where a recording would be in flight twice."""
    for worker in range(w.shape[1]):
        if wt[STEP_END, worker] <= now:
            wt[STEP_END, worker] = np.inf
            if w[ROLE, worker] == DECODE:
                _end_decode(c, f, w, wt, r, rt, run, cache, blocks, recordings, worker, now)
            else:
                _end_mixed(c, f, w, wt, r, rt, run, cache, blocks, recordings, worker, now)
    for worker in range(c[PREFILL_WORKERS]):
        while w[SEND_HEAD, worker] >= 0 and rt[w[SEND_HEAD, worker], READY] <= now:
            request = _pop(w, SEND_HEAD, worker, r)
            _release(w, r, cache, blocks, worker, request)
            _make_ready(w, r, rt, c[PREFILL_WORKERS] + r[request, DECODER], request, now)
    return _arrivals(c, w, r, rt, cache, blocks, recordings, now)


@njit()
def advance(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
    blocks: Ints,
    recordings: Ints,
    cells: NDArray[np.unsignedinteger],
    counts: NDArray[np.uint32],
    bits: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    shape: Ints,
    layer: Floats,
    experts: Floats,
    dense: Floats,
    padded: Ints,
    attention: Floats,
    slots: Ints,
    links: Floats,
    blend: Floats,
    spans: NDArray[np.uint64],
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
    log: Floats,
    answer: int,
) -> int:
    """Go on until a decision is needed (answered by the next call: a decoder, else -1), the log is full, or the end.

    Takes a World and StepTables array by array, since a call with tuples of them takes three times as long; log
    [step, 6]: worker, start, seconds, tokens decoded, prompt tokens, distinct experts.
    """
    flat = counts.reshape(counts.size)
    all_bits, words, layers = bits.reshape(bits.size), np.uint64(bits.shape[1]), shape[0]
    nobody = np.uint64(bits.shape[0] - 1) * words
    most = min(float(MOST_DECODING), layer[5]) if shape[2] == 1 else 0.0
    if answer >= 0:
        request = r[c[DECIDED], DECISION]
        c[DECIDED] += 1
        _place(c, f, w, wt, r, rt, request, answer)
    while True:
        if c[DECIDED] < c[ASKED]:
            return DECIDE
        now, when = f[CLOCK], _next_event(c, f, w, wt, r, rt, recordings)
        if when > now:
            if c[STEPS] + w.shape[1] > len(log):
                return GROW
            for worker in range(w.shape[1]):
                if wt[STEP_END, worker] < np.inf or (w[RUNNING, worker] == 0 and w[WAIT_HEAD, worker] < 0):
                    continue
                decoding, prefill, before, prompts = _gather(
                    c, w, r, rt, run, cache, blocks, cells, flat, bits, rows, worker, now
                )
                if decoding + prefill == 0:
                    continue
                if prefill == 0 and decoding <= most:
                    for at in range(decoding):
                        rows[at] *= words
                    for at in range(decoding, (decoding + 7) // 8 * 8):
                        rows[at] = nobody
                    us, distinct = decode_us(
                        shape,
                        layer,
                        experts,
                        dense,
                        padded,
                        attention,
                        blend,
                        spans,
                        union,
                        having,
                        all_bits,
                        rows,
                        cells.shape[1] // layers,
                        decoding,
                        w[CONTEXT, worker],
                    )
                else:
                    for at in range(decoding):
                        _count_token(cells, flat, rows[at], np.uint32(1))
                    us, distinct = step_us(
                        shape,
                        layer,
                        experts,
                        dense,
                        padded,
                        attention,
                        slots,
                        links,
                        blend,
                        counts,
                        decoding,
                        w[CONTEXT, worker],
                        prefill,
                        before,
                        max(1, prompts),
                    )
                spent = us * 1e-6 / wt[SPEED, worker] + f[OVERHEAD]
                wt[STEP_END, worker] = now + spent
                step = c[STEPS]
                c[STEPS] = step + 1
                log[step, 0], log[step, 1], log[step, 2] = worker, now, spent
                log[step, 3], log[step, 4], log[step, 5] = decoding, prefill, distinct
            when = _next_event(c, f, w, wt, r, rt, recordings)
            if when > f[UNTIL] or when == np.inf:
                return ENDED
            f[CLOCK] = when
        if not _happen(c, f, w, wt, r, rt, run, cache, blocks, recordings, f[CLOCK]):
            return DUPLICATE
