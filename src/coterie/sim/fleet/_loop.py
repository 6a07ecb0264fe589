"""The event loop of a fleet, on tables of records: it leaves compiled code only when a router or a strategy decides.

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
    CHOOSE_HANDED,
    CHOOSE_WAITING,
    DECIDE,
    DECODE,
    DUPLICATE,
    ENDED,
    GROW,
    Floats,
    Ints,
    Record,
    Records,
    commit,
    pop,
    release,
)
from coterie.sim.fleet._steps import MOST_DECODING, bit_step_us, counted_step_us, one_tile_rows


@helper()
def _next_event(loop: Record, workers: Records, requests: Records, recordings: Records) -> float:
    when = next_arrival(loop, requests, recordings)
    for worker in range(len(workers)):
        when = min(when, workers[worker].step_end_s)
    for worker in range(loop.prefill_workers):
        if workers[worker].sending.head >= 0:
            when = min(when, requests[workers[worker].sending.head].ready_s)
    return float(when)


@helper()
def _happen(
    loop: Record,
    workers: Records,
    requests: Records,
    run: Ints,
    cache: Records,
    blocks: Ints,
    recordings: Records,
    now: float,
) -> bool:
    """Process all events of one moment; return False if a recording would be in flight twice."""
    for worker in range(len(workers)):
        if workers[worker].step_end_s <= now:
            workers[worker].step_end_s = np.inf
            if workers[worker].role == DECODE:
                end_decode(loop, workers, requests, run, cache, blocks, recordings, worker, now)
            else:
                end_mixed(loop, workers, requests, run, cache, blocks, recordings, worker, now)
    for worker in range(loop.prefill_workers):
        while workers[worker].sending.head >= 0 and requests[workers[worker].sending.head].ready_s <= now:
            request = pop(workers[worker].sending, requests)
            release(workers, requests, cache, blocks, worker, request, requests[request].computes)
            decoder = loop.prefill_workers + requests[request].decoder
            commit(workers, requests, cache, blocks, decoder, request, requests[request].gets)
            make_ready(workers, requests, decoder, request, now)
    return arrivals(loop, workers, requests, cache, blocks, recordings, now)


@njit()
def advance(
    loops: Records,
    workers: Records,
    requests: Records,
    run: Ints,
    cache: Records,
    blocks: Ints,
    recordings: Records,
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
    log: Records,
    answer: int,
) -> int:
    """Run until a decision is needed, the log is full, or the run ends; return the reason (DECIDE, GROW, …).

    `answer` is the decoder chosen for the last DECIDE, else -1. The arrays of World, StepTables and StepCounts are
    passed one by one, since a call with tuples takes three times as long. `log` is a table of
    STEP records.
    """
    loop: Record = loops[()]
    flat = counts.reshape(counts.size)
    all_bits, words, layers = bits.reshape(bits.size), np.uint64(bits.shape[1]), shape[0]
    nobody = np.uint64(bits.shape[0] - 1) * words
    most = min(float(MOST_DECODING), one_tile_rows(p)) if shape[2] == 1 and slots.shape[2] == shape[1] else 0.0
    if answer >= 0:
        request = requests[loop.decided].decision
        loop.decided += 1
        place(loop, workers, requests, cache, blocks, request, answer)
    while True:
        if loop.decided < loop.asked:
            return DECIDE
        now, when = loop.clock_s, _next_event(loop, workers, requests, recordings)
        if when > now:
            if loop.steps + len(workers) > len(log):
                return GROW
            for worker in range(len(workers)):
                if workers[worker].step_end_s < np.inf or (
                    workers[worker].running == 0 and workers[worker].waiting.head < 0
                ):
                    continue
                if loop.batching and workers[worker].chosen_s < now and has_choice(workers, requests, worker):
                    loop.subject, workers[worker].chosen_s = worker, now
                    return CHOOSE_WAITING
                decoding, prefill, before, prompts = gather(
                    loop, workers, requests, run, cache, blocks, expert_indices, flat, bits, rows, worker, now
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
                        workers[worker].context,
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
                        workers[worker].context,
                        prefill,
                        before,
                        max(1, prompts),
                    )
                spent = us * 1e-6 / workers[worker].speed + loop.overhead_s
                workers[worker].step_end_s = now + spent
                step = log[loop.steps]
                loop.steps += 1
                step.worker, step.start_s, step.s = worker, now, spent
                step.decoding, step.prefill, step.distinct = decoding, prefill, distinct
                if loop.batching and frees_memory(workers, requests, run, worker):
                    loop.subject = worker
                    return CHOOSE_HANDED
            when = _next_event(loop, workers, requests, recordings)
            if when > loop.until_s or when == np.inf:
                return ENDED
            loop.clock_s = when
        if not _happen(loop, workers, requests, run, cache, blocks, recordings, loop.clock_s):
            return DUPLICATE
