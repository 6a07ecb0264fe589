"""The event loop of a fleet, on flat arrays: it leaves compiled code only when a router or a strategy decides.

All events of one moment (ends of steps, KV transfers, arrivals, decisions) precede the steps that start at that moment.
At equal times, steps end in order of workers, then transfers end, then requests arrive. So a run has exactly one order,
which a Python reference can reproduce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.sim.fleet._events import arrivals, end_decode, end_mixed, make_ready, next_arrival, place
from coterie.sim.fleet._gathering import count_token, frees_memory, gather, has_choice
from coterie.sim.fleet._state import (
    ASKED,
    BATCHING,
    CHOOSE,
    CHOSEN,
    CLOCK,
    COMPUTES,
    CONTEXT,
    DECIDE,
    DECIDED,
    DECISION,
    DECODE,
    DECODER,
    DUPLICATE,
    ENDED,
    GETS,
    GROW,
    KV_HEAD,
    OVERHEAD,
    PREFILL_WORKERS,
    QUEUE,
    READY,
    ROLE,
    RUNNING,
    SEND_HEAD,
    SPEED,
    STEP_END,
    STEPS,
    SUBJECT,
    UNTIL,
    WAIT_HEAD,
    Floats,
    Ints,
    commit,
    pop,
    release,
)
from coterie.sim.fleet._steps import MOST_DECODING, bit_step_us, counted_step_us, one_tile_rows


@helper()
def _next_event(c: Ints, f: Floats, w: Ints, wt: Floats, r: Ints, rt: Floats, recordings: Ints) -> float:
    when = next_arrival(c, f, r, rt, recordings)
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
    """Process all events of one moment; return False if a recording would be in flight twice."""
    for worker in range(w.shape[1]):
        if wt[STEP_END, worker] <= now:
            wt[STEP_END, worker] = np.inf
            if w[ROLE, worker] == DECODE:
                end_decode(c, f, w, wt, r, rt, run, cache, blocks, recordings, worker, now)
            else:
                end_mixed(c, f, w, wt, r, rt, run, cache, blocks, recordings, worker, now)
    for worker in range(c[PREFILL_WORKERS]):
        while w[SEND_HEAD, worker] >= 0 and rt[w[SEND_HEAD, worker], READY] <= now:
            request = pop(w, SEND_HEAD, worker, r)
            release(w, r, cache, blocks, worker, request, COMPUTES)
            decoder = c[PREFILL_WORKERS] + r[request, DECODER]
            commit(w, r, cache, blocks, decoder, request, GETS)
            make_ready(w, r, rt, decoder, request, now)
    return arrivals(c, w, r, rt, cache, blocks, recordings, now)


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
    expert_indices: NDArray[np.unsignedinteger],
    counts: NDArray[np.uint32],
    bits: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    p: Floats,
    experts: Floats,
    blend: Floats,
    dense: Floats,
    padded: Floats,
    attention: Floats,
    shape: Ints,
    slots: Ints,
    links: Floats,
    spans: NDArray[np.uint64],
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
    slot_rows: Ints,
    rank_tokens: Ints,
    parts: Floats,
    log: Floats,
    answer: int,
) -> int:
    """Run until a decision is needed, the log is full, or the run ends; return the reason (DECIDE, GROW, …).

    `answer` is the decoder chosen for the last DECIDE, else -1. The arrays of World, StepTables and StepCounts are
    passed one by one, since a call with tuples takes three times as long. log [step, 6] holds worker, start, seconds,
    tokens decoded, prompt tokens, distinct experts.
    """
    flat = counts.reshape(counts.size)
    all_bits, words, layers = bits.reshape(bits.size), np.uint64(bits.shape[1]), shape[0]
    nobody = np.uint64(bits.shape[0] - 1) * words
    most = min(float(MOST_DECODING), one_tile_rows(p)) if shape[2] == 1 and slots.shape[2] == shape[1] else 0.0
    if answer >= 0:
        request = r[c[DECIDED], DECISION]
        c[DECIDED] += 1
        place(c, f, w, wt, r, rt, cache, blocks, request, answer)
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
                if c[BATCHING] and wt[CHOSEN, worker] < now and has_choice(w, r, worker):
                    c[SUBJECT], c[QUEUE], wt[CHOSEN, worker] = worker, WAIT_HEAD, now
                    return CHOOSE
                decoding, prefill, before, prompts = gather(
                    c, w, r, rt, run, cache, blocks, expert_indices, flat, bits, rows, worker, now
                )
                if decoding + prefill == 0:
                    continue
                if prefill == 0 and decoding <= most:
                    for at in range(decoding):
                        rows[at] *= words
                    for at in range(decoding, (decoding + 7) // 8 * 8):
                        rows[at] = nobody
                    us, distinct = bit_step_us(
                        p,
                        experts,
                        blend,
                        dense,
                        padded,
                        attention,
                        shape,
                        spans,
                        union,
                        having,
                        all_bits,
                        rows,
                        expert_indices.shape[1] // layers,
                        decoding,
                        w[CONTEXT, worker],
                    )
                else:
                    for at in range(decoding):
                        count_token(expert_indices, flat, rows[at], np.uint32(1))
                    us, distinct = counted_step_us(
                        p,
                        experts,
                        blend,
                        dense,
                        padded,
                        attention,
                        shape,
                        slots,
                        links,
                        slot_rows,
                        rank_tokens,
                        parts,
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
                if c[BATCHING] and frees_memory(w, r, run, worker):
                    c[SUBJECT], c[QUEUE] = worker, KV_HEAD
                    return CHOOSE
            when = _next_event(c, f, w, wt, r, rt, recordings)
            if when > f[UNTIL] or when == np.inf:
                return ENDED
            f[CLOCK] = when
        if not _happen(c, f, w, wt, r, rt, run, cache, blocks, recordings, f[CLOCK]):
            return DUPLICATE
