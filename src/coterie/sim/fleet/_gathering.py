"""Composition of a step: the requests that join, their tokens, and the experts that the tokens activate."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.sim.fleet._state import DECODE, DECODING, PREFILL, PREFILLING, Ints, Record, Records, pop, reserve

CACHE_LINE = 64


@helper()
def count_token(
    expert_indices: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], row: int, weight: np.uint32
) -> None:
    for at in range(expert_indices.shape[1]):
        counts[expert_indices[row, at]] += weight


@helper()
def _decode_row(requests: Records, request: int) -> int:
    """Return the row of the recorded token that a request decodes next."""
    at, rows = requests[request].decoded, requests[request].decode_rows
    if at >= rows:
        at %= rows
    return int(requests[request].decode_row + at)


@helper()
def _count_chunk(
    requests: Records, expert_indices: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], request: int
) -> None:
    """Count the experts of the prompt tokens of a chunk; a long prompt repeats its recorded tokens."""
    rows, chunk = requests[request].prompt_rows, requests[request].chunk
    laps, rest = chunk // rows, chunk % rows
    start = requests[request].computed % rows
    for at in range(min(rows, chunk)):
        count_token(
            expert_indices, counts, requests[request].prompt_row + (start + at) % rows, np.uint32(laps + (at < rest))
        )


@helper()
def has_choice(workers: Records, requests: Records, worker: int) -> bool:
    """Return whether a worker that decodes has a free place and may not be able to admit all who wait.

    Steps with prompts may run out of tokens or memory before they run out of places.
    """
    free, request = workers[worker].places - workers[worker].running, workers[worker].waiting.head
    if workers[worker].role == PREFILL or free == 0:
        return False
    for _ in range(free if workers[worker].role == DECODE else 1):
        if request >= 0:
            request = requests[request].next
    return bool(request >= 0)


@helper()
def frees_memory(workers: Records, requests: Records, run: Ints, worker: int) -> bool:
    """Return whether a request ends with the step that just started while at least two wait for its memory."""
    request = workers[worker].handed.head
    if request < 0 or requests[request].next < 0:
        return False
    ends = False
    for at in range(workers[worker].running - workers[worker].staged):
        ends = ends or requests[run[worker, at]].decoded + 1 == requests[run[worker, at]].output_tokens
    return ends


@helper()
def _join(workers: Records, requests: Records, run: Ints, worker: int) -> int:
    """Give free places to requests whose KV is on the decoder; return the number of requests that joined."""
    joined = 0
    while workers[worker].running < workers[worker].places and workers[worker].waiting.head >= 0:
        request = pop(workers[worker].waiting, requests)
        run[worker, workers[worker].running] = request
        workers[worker].running += 1
        requests[request].phase = DECODING
        joined += 1
    return joined


@helper()
def _admit(
    loop: Record, workers: Records, requests: Records, run: Ints, cache: Records, blocks: Ints, worker: int, now: float
) -> bool:
    """Admit the prompt that has waited longest; return False if no place is free or memory is short."""
    at, request = workers[worker].running, workers[worker].waiting.head
    if (
        at == workers[worker].places
        or request < 0
        or not reserve(loop, workers, requests, cache, blocks, worker, request, requests[request].computes)
    ):
        return False
    pop(workers[worker].waiting, requests)
    run[worker, at] = request
    workers[worker].running += 1
    requests[request].phase = PREFILLING
    requests[request].prefill_start_s = now
    requests[request].computed = requests[request].computes.cached
    requests[request].chunk = 0
    workers[worker].queued_tokens -= requests[request].computes.cached
    return True


@helper()
def gather(
    loop: Record,
    workers: Records,
    requests: Records,
    run: Ints,
    cache: Records,
    blocks: Ints,
    expert_indices: NDArray[np.unsignedinteger],
    counts: NDArray[np.uint32],
    bits: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    worker: int,
    now: float,
) -> tuple[int, int, int, int]:
    """Admit waiting requests in order and compose a step.

    Return the numbers of decoded tokens, prompt tokens, tokens that precede these in their prompts, and prompts.
    Decoded tokens are listed in `rows`; the experts of prompt tokens are added to `counts`.
    """
    prefill = prefill_context = prompts = decoding = 0
    workers[worker].staged = 0
    settled = loop.ahead and workers[worker].running > 0
    if workers[worker].role == DECODE:
        if not settled:
            _join(workers, requests, run, worker)
        decoding = workers[worker].running
        for at in range(decoding):
            request = run[worker, at]
            if requests[request].decoded == 0:
                requests[request].decode_start_s = now
                workers[worker].context += requests[request].prompt_tokens
            row = _decode_row(requests, request)
            rows[at] = row
            for word in range(0, bits.shape[1], CACHE_LINE // 8):
                prefetch(bits, row + 1, word)
        if loop.ahead:
            workers[worker].staged = _join(workers, requests, run, worker)
        return decoding, prefill, prefill_context, prompts
    left, at = loop.step_tokens, 0
    while True:
        if at == workers[worker].running and (
            settled or left == 0 or not _admit(loop, workers, requests, run, cache, blocks, worker, now)
        ):
            break
        request = run[worker, at]
        at += 1
        if requests[request].phase == DECODING:
            rows[decoding] = _decode_row(requests, request)
            decoding += 1
            left -= 1
            continue
        chunk = min(requests[request].prompt_tokens - requests[request].computed, left)
        requests[request].chunk = chunk
        if chunk > 0:
            left -= chunk
            prefill += chunk
            prefill_context += requests[request].computed
            prompts += 1
            _count_chunk(requests, expert_indices, counts, request)
    if loop.ahead:
        while _admit(loop, workers, requests, run, cache, blocks, worker, now):
            workers[worker].staged += 1
    return decoding, prefill, prefill_context, prompts


# Memory prefetch in compiled code.
#
# A fleet decodes hundreds of requests at once, each from its own row of recordings too large for the CPU cache: waiting
# for these rows took half of the counting time. Prefetching changes no result.


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:  # noqa: ARG001  (numba's signature)
    """Prefetch the cache line of array[row, column]; the indices may be past the end of the array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        held = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, held, list(arguments[1:]), wraparound=False)
        address = builder.bitcast(place, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        builder.call(call, [address, word(0), word(3), word(1)])  # 0 = read, 3 = high locality, 1 = data cache
        return context.get_dummy_value()

    return types.void(array, row, column), generate
