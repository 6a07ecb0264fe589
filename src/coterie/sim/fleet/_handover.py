"""Handover to the decoder after a routing decision: its memory, the KV transfer, its queue."""

from __future__ import annotations

from coterie._numba import helper
from coterie.sim.fleet._memory import blocks_of
from coterie.sim.fleet._state import (
    BOTH,
    CAPACITY,
    CLOCK,
    DECODER,
    KV_HEAD,
    KV_MOST,
    KV_USED,
    LATENCY,
    LINK_FREE,
    PREFILL_WORKERS,
    PREFILLER,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    READY,
    ROLE,
    SEND_HEAD,
    TOKEN_S,
    WAIT_HEAD,
    Floats,
    Ints,
    pop,
    push,
)


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
