"""Events between steps: arrival and choice of a prefill worker, end of a step, handover to a decoder."""

from __future__ import annotations

import numpy as np

from coterie._numba import helper
from coterie.sim.fleet._state import (
    ABSENT,
    ALLOW,
    BOTH,
    DECODE,
    DECODING,
    DONE,
    DROPPED,
    HANDED,
    PREFILL,
    QUEUED,
    REFUSE,
    ROUND_ROBIN,
    SOONEST,
    Ints,
    Record,
    Records,
    blocks_of,
    commit,
    hit_tokens,
    pop,
    push,
    release,
    reserve,
)


@helper()
def _choose_prefiller(
    loop: Record, workers: Records, requests: Records, cache: Records, blocks: Ints, request: int
) -> int:
    if loop.policy == ROUND_ROBIN:
        turn = loop.turn
        loop.turn = (turn + 1) % loop.prefill_workers
        return int(turn)
    best, least = 0, np.int64(0)
    for worker in range(loop.prefill_workers):
        tokens = workers[worker].queued_tokens
        if loop.policy == SOONEST:
            tokens -= hit_tokens(loop.block_tokens, requests, cache, blocks, worker, request)
        if worker == 0 or tokens < least:
            best, least = worker, tokens
    return best


@helper()
def _fits(loop: Record, workers: Records, requests: Records, request: int) -> bool:
    fits = True
    for worker in (0, loop.prefill_workers):  # a prefill worker if there are any, and a decoder
        fits = fits and blocks_of(loop, workers, requests, worker, request) <= workers[worker].capacity
    return fits


@helper()
def arrive(
    loop: Record,
    workers: Records,
    requests: Records,
    cache: Records,
    blocks: Ints,
    recordings: Records,
    request: int,
    now: float,
) -> None:
    requests[request].arrival_s = now
    if not _fits(loop, workers, requests, request):
        requests[request].phase = DROPPED
        return
    recordings[requests[request].recorded].busy = True
    loop.in_flight += 1
    loop.most_in_flight = max(loop.most_in_flight, loop.in_flight)
    requests[request].phase = QUEUED
    if loop.prefill_workers > 0:
        worker = _choose_prefiller(loop, workers, requests, cache, blocks, request)
        requests[request].prefiller = worker
        workers[worker].queued_tokens += requests[request].prompt_tokens
        push(workers[worker].waiting, requests, request)
        return
    if workers[0].role == DECODE:
        requests[request].prefill_start_s = requests[request].prefill_end_s = now
        requests[request].phase = HANDED
    requests[loop.asked].decision = request
    loop.asked += 1


@helper()
def _candidate(loop: Record, requests: Records, recordings: Records) -> int:
    """Return the next request of a closed loop whose recording is not in flight, or -1."""
    for request in range(loop.arrived, len(requests)):
        if requests[request].phase == ABSENT and (
            loop.duplicates == ALLOW or not recordings[requests[request].recorded].busy
        ):
            return request
    loop.stuck = 1
    return -1


@helper()
def next_arrival(loop: Record, requests: Records, recordings: Records) -> float:
    """Return the time of the next arrival, infinite if there is none.

    In a closed loop it is now if fewer than `closed` requests are in flight and one may start.
    """
    if loop.closed == 0:
        return float(requests[loop.arrived].arrival_s) if loop.arrived < len(requests) else np.inf
    if loop.in_flight >= loop.closed or loop.stuck or _candidate(loop, requests, recordings) < 0:
        return np.inf
    return float(loop.clock_s)


@helper()
def arrivals(
    loop: Record, workers: Records, requests: Records, cache: Records, blocks: Ints, recordings: Records, now: float
) -> bool:
    """Admit all requests that arrive now; return False if a recording would be in flight twice and this is refused."""
    if loop.closed > 0:
        while loop.in_flight < loop.closed and not loop.stuck:
            request = _candidate(loop, requests, recordings)
            if request < 0:
                break
            arrive(loop, workers, requests, cache, blocks, recordings, request, now)
            while loop.arrived < len(requests) and requests[loop.arrived].phase != ABSENT:
                loop.arrived += 1
        return True
    while loop.arrived < len(requests) and requests[loop.arrived].arrival_s <= now:
        request = loop.arrived
        loop.arrived += 1
        recording = recordings[requests[request].recorded]
        if loop.duplicates != ALLOW and (recording.busy or recording.postponed.head >= 0):
            if loop.duplicates == REFUSE:
                loop.subject = request
                return False
            loop.postponed += 1
            push(recording.postponed, requests, request)
            continue
        arrive(loop, workers, requests, cache, blocks, recordings, request, now)
    return True


# Handover to a decoder after a routing decision: reserve its memory, transfer the KV cache, join its queue.


@helper()
def make_ready(workers: Records, requests: Records, worker: int, request: int, now: float) -> None:
    requests[request].ready_s = now
    push(workers[worker].waiting, requests, request)


@helper()
def drain(
    loop: Record, workers: Records, requests: Records, cache: Records, blocks: Ints, worker: int, now: float
) -> None:
    """Reserve the decoder's memory for the requests handed to it, in order, and start the transfers of KV it lacks."""
    while workers[worker].handed.head >= 0:
        request = workers[worker].handed.head
        if not reserve(loop, workers, requests, cache, blocks, worker, request, requests[request].gets):
            return
        pop(workers[worker].handed, requests)
        sender = requests[request].prefiller
        if sender < 0:
            commit(workers, requests, cache, blocks, worker, request, requests[request].gets)
            make_ready(workers, requests, worker, request, now)
            continue
        lacking = requests[request].prompt_tokens - requests[request].gets.cached
        sent = max(now, workers[sender].link_free_s) + loop.token_s * lacking
        workers[sender].link_free_s = sent
        requests[request].ready_s = sent + loop.latency_s
        push(workers[sender].sending, requests, request)


@helper()
def place(
    loop: Record, workers: Records, requests: Records, cache: Records, blocks: Ints, request: int, decoder: int
) -> None:
    """Hand a request to the decoder that the router chose."""
    now, worker = loop.clock_s, loop.prefill_workers + decoder
    requests[request].decoder = decoder
    if workers[worker].role == BOTH:
        requests[request].prefiller = worker
        workers[worker].queued_tokens += requests[request].prompt_tokens
        push(workers[worker].waiting, requests, request)
        return
    push(workers[worker].handed, requests, request)
    drain(loop, workers, requests, cache, blocks, worker, now)


@helper()
def _finish(
    loop: Record,
    workers: Records,
    requests: Records,
    cache: Records,
    blocks: Ints,
    recordings: Records,
    worker: int,
    request: int,
    now: float,
) -> None:
    requests[request].finish_s = now
    requests[request].phase = DONE
    requests[loop.finished].ending = request
    loop.finished += 1
    loop.in_flight -= 1
    loop.stuck = 0
    if workers[worker].role == BOTH:
        release(workers, requests, cache, blocks, worker, request, requests[request].computes)
    else:
        release(workers, requests, cache, blocks, worker, request, requests[request].gets)
        drain(loop, workers, requests, cache, blocks, worker, now)
    recording = recordings[requests[request].recorded]
    recording.busy = False
    while recording.postponed.head >= 0 and not recording.busy:  # a dropped request makes room at once
        arrive(loop, workers, requests, cache, blocks, recordings, pop(recording.postponed, requests), now)


@helper()
def end_decode(
    loop: Record,
    workers: Records,
    requests: Records,
    run: Ints,
    cache: Records,
    blocks: Ints,
    recordings: Records,
    worker: int,
    now: float,
) -> None:
    """End a step of a worker that only decodes."""
    kept, active = 0, workers[worker].running - workers[worker].staged
    for at in range(active):
        request = run[worker, at]
        done = requests[request].decoded + 1
        requests[request].decoded = done
        if done == 1:
            requests[request].first_token_s = now
        if done == requests[request].output_tokens:
            workers[worker].context -= requests[request].prompt_tokens + done - 1
            _finish(loop, workers, requests, cache, blocks, recordings, worker, request, now)
        else:
            run[worker, kept] = request
            kept += 1
    workers[worker].context += kept
    for at in range(active, active + workers[worker].staged):
        run[worker, kept] = run[worker, at]
        kept += 1
    workers[worker].running = kept


@helper()
def end_mixed(
    loop: Record,
    workers: Records,
    requests: Records,
    run: Ints,
    cache: Records,
    blocks: Ints,
    recordings: Records,
    worker: int,
    now: float,
) -> None:
    """End a step of a worker that computes prompts."""
    kept = 0
    for at in range(workers[worker].running):
        request = run[worker, at]
        stays = True
        if requests[request].phase == DECODING:
            requests[request].decoded += 1
            workers[worker].context += 1
            if requests[request].decoded == requests[request].output_tokens - 1:
                workers[worker].context -= requests[request].prompt_tokens + requests[request].decoded
                _finish(loop, workers, requests, cache, blocks, recordings, worker, request, now)
                stays = False
        else:
            requests[request].computed += requests[request].chunk
            workers[worker].queued_tokens -= requests[request].chunk
            if requests[request].computed == requests[request].prompt_tokens:
                requests[request].prefill_end_s = now
                commit(workers, requests, cache, blocks, worker, request, requests[request].computes)
                if workers[worker].role == PREFILL:
                    requests[request].phase = HANDED
                    requests[loop.asked].decision = request
                    loop.asked += 1
                    stays = False
                else:
                    requests[request].first_token_s = requests[request].ready_s = requests[request].decode_start_s = now
                    if requests[request].output_tokens == 1:
                        _finish(loop, workers, requests, cache, blocks, recordings, worker, request, now)
                        stays = False
                    else:
                        requests[request].phase = DECODING
                        workers[worker].context += requests[request].prompt_tokens
        if stays:
            run[worker, kept] = request
            kept += 1
    workers[worker].running = kept
