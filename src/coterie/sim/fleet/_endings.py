"""What the end of a step changes: tokens, prompts and requests that are done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.sim.fleet._arrivals import arrive
from coterie.sim.fleet._memory import blocks_of, commit, release
from coterie.sim.fleet._state import (
    ASKED,
    BOTH,
    BUSY,
    CAPACITY,
    CHUNK,
    CLOCK,
    COMPUTED,
    CONTEXT,
    DECISION,
    DECODED,
    DECODER,
    DECODING,
    DONE,
    ENDING,
    FINISH,
    FINISHED,
    FIRST_TOKEN,
    HANDED,
    HOLD_HEAD,
    IN_FLIGHT,
    JOIN,
    KV_HEAD,
    KV_MOST,
    KV_USED,
    LATENCY,
    LINK_FREE,
    OUTPUT_TOKENS,
    PHASE,
    PREFILL,
    PREFILL_END,
    PREFILL_WORKERS,
    PREFILLER,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    READY,
    RECORDED,
    ROLE,
    RUNNING,
    SEND_HEAD,
    STAGED,
    STUCK,
    TOKEN_S,
    WAIT_HEAD,
    Floats,
    Ints,
    pop,
    push,
)

# Handover to the decoder after a routing decision: its memory, the KV transfer, its queue.


@helper()
def make_ready(w: Ints, r: Ints, rt: Floats, worker: int, request: int, now: float) -> None:
    rt[request, READY] = now
    push(w, WAIT_HEAD, worker, r, request)


@helper()
def drain(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, worker: int, now: float) -> None:
    """Requests handed to a decoder get its memory in order, then their KV is sent."""
    while w[KV_HEAD, worker] >= 0:
        request = w[KV_HEAD, worker]
        need = blocks_of(c, w, r, worker, request)
        if w[KV_USED, worker] + need > w[CAPACITY, worker]:
            return
        pop(w, KV_HEAD, worker, r)
        w[KV_USED, worker] += need
        w[KV_MOST, worker] = max(w[KV_MOST, worker], w[KV_USED, worker])
        sender = r[request, PREFILLER]
        if sender < 0:
            make_ready(w, r, rt, worker, request, now)
            continue
        sent = max(now, wt[LINK_FREE, sender]) + f[TOKEN_S] * r[request, PROMPT_TOKENS]
        wt[LINK_FREE, sender] = sent
        rt[request, READY] = sent + f[LATENCY]
        push(w, SEND_HEAD, sender, r, request)


@helper()
def place(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, request: int, decoder: int) -> None:
    """Hand the request to the decoder that the router chose."""
    now, worker = f[CLOCK], c[PREFILL_WORKERS] + decoder
    r[request, DECODER] = decoder
    if w[ROLE, worker] == BOTH:
        r[request, PREFILLER] = worker
        w[QUEUED_TOKENS, worker] += r[request, PROMPT_TOKENS]
        push(w, WAIT_HEAD, worker, r, request)
        return
    push(w, KV_HEAD, worker, r, request)
    drain(c, f, w, wt, r, rt, worker, now)


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
        release(w, r, cache, blocks, worker, request)
    else:
        w[KV_USED, worker] -= blocks_of(c, w, r, worker, request)
        drain(c, f, w, wt, r, rt, worker, now)
    number = r[request, RECORDED]
    recordings[BUSY, number] = False
    while recordings[HOLD_HEAD, number] >= 0 and not recordings[BUSY, number]:  # one that is dropped makes room at once
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
                commit(w, r, cache, blocks, worker, request)
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
