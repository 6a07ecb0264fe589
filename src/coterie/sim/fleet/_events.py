"""Events between steps: arrival and choice of a prefill worker, end of a step, handover to a decoder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.sim.fleet._state import (
    ABSENT,
    ALLOW,
    ARRIVAL,
    ARRIVED,
    ASKED,
    BOTH,
    BUSY,
    CACHED,
    CAPACITY,
    CHUNK,
    CLOCK,
    CLOSED,
    COMPUTED,
    COMPUTES,
    CONTEXT,
    DECISION,
    DECODE,
    DECODED,
    DECODER,
    DECODING,
    DONE,
    DROPPED,
    DUPLICATES,
    ENDING,
    FINISH,
    FINISHED,
    FIRST_TOKEN,
    GETS,
    HANDED,
    HOLD_HEAD,
    IN_FLIGHT,
    JOIN,
    KV_HEAD,
    LATENCY,
    LINK_FREE,
    MOST,
    OUTPUT_TOKENS,
    PHASE,
    POLICY,
    POSTPONED,
    PREFILL,
    PREFILL_END,
    PREFILL_START,
    PREFILL_WORKERS,
    PREFILLER,
    PROMPT_TOKENS,
    QUEUED,
    QUEUED_TOKENS,
    READY,
    RECORDED,
    REFUSE,
    ROLE,
    ROUND_ROBIN,
    RUNNING,
    SEND_HEAD,
    SOONEST,
    STAGED,
    STUCK,
    SUBJECT,
    TOKEN_S,
    TURN,
    WAIT_HEAD,
    Floats,
    Ints,
    blocks_of,
    commit,
    hit_tokens,
    pop,
    push,
    release,
    reserve,
)


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
    fits = True
    for worker in (0, c[PREFILL_WORKERS]):  # a prefill worker if there are any, and a decoder
        fits = fits and blocks_of(c, w, r, worker, request) <= w[CAPACITY, worker]
    return fits


@helper()
def arrive(
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
        push(w, WAIT_HEAD, worker, r, request)
        return
    if w[ROLE, 0] == DECODE:
        rt[request, PREFILL_START] = rt[request, PREFILL_END] = now
        r[request, PHASE] = HANDED
    r[c[ASKED], DECISION] = request
    c[ASKED] += 1


@helper()
def _candidate(c: Ints, r: Ints, recordings: Ints) -> int:
    """Return the next request of a closed loop whose recording is not in flight, or -1."""
    for request in range(c[ARRIVED], r.shape[0]):
        if r[request, PHASE] == ABSENT and (c[DUPLICATES] == ALLOW or not recordings[BUSY, r[request, RECORDED]]):
            return request
    c[STUCK] = 1
    return -1


@helper()
def next_arrival(c: Ints, f: Floats, r: Ints, rt: Floats, recordings: Ints) -> float:
    """Return the time of the next arrival, infinite if there is none.

    In a closed loop it is now if fewer than CLOSED requests are in flight and one may start.
    """
    if c[CLOSED] == 0:
        return float(rt[c[ARRIVED], ARRIVAL]) if c[ARRIVED] < r.shape[0] else np.inf
    if c[IN_FLIGHT] >= c[CLOSED] or c[STUCK] or _candidate(c, r, recordings) < 0:
        return np.inf
    return float(f[CLOCK])


@helper()
def arrivals(
    c: Ints, w: Ints, r: Ints, rt: Floats, cache: NDArray[np.int32], blocks: Ints, recordings: Ints, now: float
) -> bool:
    """Admit all requests that arrive now; return False if a recording would be in flight twice and this is refused."""
    if c[CLOSED] > 0:
        while c[IN_FLIGHT] < c[CLOSED] and not c[STUCK]:
            request = _candidate(c, r, recordings)
            if request < 0:
                break
            arrive(c, w, r, rt, cache, blocks, recordings, request, now)
            while c[ARRIVED] < r.shape[0] and r[c[ARRIVED], PHASE] != ABSENT:
                c[ARRIVED] += 1
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
            push(recordings, HOLD_HEAD, number, r, request)
            continue
        arrive(c, w, r, rt, cache, blocks, recordings, request, now)
    return True


# Handover to a decoder after a routing decision: reserve its memory, transfer the KV cache, join its queue.


@helper()
def make_ready(w: Ints, r: Ints, rt: Floats, worker: int, request: int, now: float) -> None:
    rt[request, READY] = now
    push(w, WAIT_HEAD, worker, r, request)


@helper()
def drain(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    cache: NDArray[np.int32],
    blocks: Ints,
    worker: int,
    now: float,
) -> None:
    """Reserve the decoder's memory for the requests handed to it, in order, and start the transfers of KV it lacks."""
    while w[KV_HEAD, worker] >= 0 and reserve(c, w, r, cache, blocks, worker, w[KV_HEAD, worker], GETS):
        request = pop(w, KV_HEAD, worker, r)
        sender = r[request, PREFILLER]
        if sender < 0:
            commit(w, r, cache, blocks, worker, request, GETS)
            make_ready(w, r, rt, worker, request, now)
            continue
        lacking = r[request, PROMPT_TOKENS] - r[request, CACHED + GETS]
        sent = max(now, wt[LINK_FREE, sender]) + f[TOKEN_S] * lacking
        wt[LINK_FREE, sender] = sent
        rt[request, READY] = sent + f[LATENCY]
        push(w, SEND_HEAD, sender, r, request)


@helper()
def place(
    c: Ints,
    f: Floats,
    w: Ints,
    wt: Floats,
    r: Ints,
    rt: Floats,
    cache: NDArray[np.int32],
    blocks: Ints,
    request: int,
    decoder: int,
) -> None:
    """Hand a request to the decoder that the router chose."""
    now, worker = f[CLOCK], c[PREFILL_WORKERS] + decoder
    r[request, DECODER] = decoder
    if w[ROLE, worker] == BOTH:
        r[request, PREFILLER] = worker
        w[QUEUED_TOKENS, worker] += r[request, PROMPT_TOKENS]
        push(w, WAIT_HEAD, worker, r, request)
        return
    push(w, KV_HEAD, worker, r, request)
    drain(c, f, w, wt, r, rt, cache, blocks, worker, now)


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
    side = COMPUTES if w[ROLE, worker] == BOTH else GETS
    release(w, r, cache, blocks, worker, request, side)
    if side == GETS:
        drain(c, f, w, wt, r, rt, cache, blocks, worker, now)
    number = r[request, RECORDED]
    recordings[BUSY, number] = False
    while recordings[HOLD_HEAD, number] >= 0 and not recordings[BUSY, number]:  # a dropped request makes room at once
        arrive(c, w, r, rt, cache, blocks, recordings, pop(recordings, HOLD_HEAD, number, r), now)


@helper()
def end_decode(
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
    """End a step of a worker that only decodes."""
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
def end_mixed(
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
    """End a step of a worker that computes prompts."""
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
                commit(w, r, cache, blocks, worker, request, COMPUTES)
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
