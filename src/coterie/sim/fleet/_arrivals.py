"""Arrivals: requests get a worker that computes their prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.sim.fleet._memory import blocks_of, hit_tokens
from coterie.sim.fleet._state import (
    ABSENT,
    ALLOW,
    ARRIVAL,
    ARRIVED,
    ASKED,
    BUSY,
    CAPACITY,
    CLOCK,
    CLOSED,
    DECISION,
    DECODE,
    DROPPED,
    DUPLICATES,
    HANDED,
    HOLD_HEAD,
    IN_FLIGHT,
    MOST,
    PHASE,
    POLICY,
    POSTPONED,
    PREFILL_END,
    PREFILL_START,
    PREFILL_WORKERS,
    PREFILLER,
    PROMPT_TOKENS,
    QUEUED,
    QUEUED_TOKENS,
    RECORDED,
    REFUSE,
    ROLE,
    ROUND_ROBIN,
    SOONEST,
    STUCK,
    SUBJECT,
    TURN,
    WAIT_HEAD,
    Floats,
    Ints,
    push,
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
    first = c[PREFILL_WORKERS]
    if first > 0 and blocks_of(c, w, r, 0, request) > w[CAPACITY, 0]:
        return False
    return bool(blocks_of(c, w, r, first, request) <= w[CAPACITY, first])


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
    """Next request of a closed loop whose recording is not in flight; -1 for none."""
    request = c[ARRIVED]
    while request < r.shape[0]:
        if r[request, PHASE] == ABSENT and (c[DUPLICATES] == ALLOW or not recordings[BUSY, r[request, RECORDED]]):
            return int(request)
        request += 1
    c[STUCK] = 1
    return -1


@helper()
def next_arrival(c: Ints, f: Floats, r: Ints, rt: Floats, recordings: Ints) -> float:
    """Time of the next arrival; in a closed loop it is now, where a place is free and a request may take it."""
    if c[CLOSED] == 0:
        at = c[ARRIVED]
        return float(rt[at, ARRIVAL]) if at < r.shape[0] else np.inf
    if c[IN_FLIGHT] >= c[CLOSED] or c[STUCK] or _candidate(c, r, recordings) < 0:
        return np.inf
    return float(f[CLOCK])


@helper()
def arrivals(
    c: Ints, w: Ints, r: Ints, rt: Floats, cache: NDArray[np.int32], blocks: Ints, recordings: Ints, now: float
) -> bool:
    """Admit all requests that arrive now; False where a recording would be in flight twice and must not."""
    if c[CLOSED] > 0:
        while c[IN_FLIGHT] < c[CLOSED] and not c[STUCK]:
            request = _candidate(c, r, recordings)
            if request < 0:
                break
            arrive(c, w, r, rt, cache, blocks, recordings, request, now)
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
            push(recordings, HOLD_HEAD, number, r, request)
            continue
        arrive(c, w, r, rt, cache, blocks, recordings, request, now)
    return True
