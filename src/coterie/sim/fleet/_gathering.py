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
from coterie.sim.fleet._state import (
    AHEAD,
    CACHED,
    CHUNK,
    COMPUTED,
    COMPUTES,
    CONTEXT,
    DECODE,
    DECODE_ROW,
    DECODE_ROWS,
    DECODED,
    DECODING,
    JOIN,
    KV_HEAD,
    NEXT,
    OUTPUT_TOKENS,
    PHASE,
    PLACES,
    PREFILL,
    PREFILL_START,
    PREFILLING,
    PROMPT_ROW,
    PROMPT_ROWS,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    ROLE,
    RUNNING,
    STAGED,
    STEP_TOKENS,
    WAIT_HEAD,
    Floats,
    Ints,
    pop,
    reserve,
)

CACHE_LINE = 64


@helper()
def count_token(
    expert_indices: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], row: int, weight: np.uint32
) -> None:
    for at in range(expert_indices.shape[1]):
        counts[expert_indices[row, at]] += weight


@helper()
def _decode_row(r: Ints, request: int) -> int:
    """Return the row of the recorded token that a request decodes next."""
    at, rows = r[request, DECODED], r[request, DECODE_ROWS]
    if at >= rows:
        at %= rows
    return int(r[request, DECODE_ROW] + at)


@helper()
def _count_chunk(
    r: Ints, expert_indices: NDArray[np.unsignedinteger], counts: NDArray[np.uint32], request: int
) -> None:
    """Count the experts of prompt tokens COMPUTED … COMPUTED + CHUNK; a long prompt repeats its recorded tokens."""
    rows, chunk = r[request, PROMPT_ROWS], r[request, CHUNK]
    laps, rest = chunk // rows, chunk % rows
    start = r[request, COMPUTED] % rows
    for at in range(min(rows, chunk)):
        count_token(expert_indices, counts, r[request, PROMPT_ROW] + (start + at) % rows, np.uint32(laps + (at < rest)))


@helper()
def has_choice(w: Ints, r: Ints, worker: int) -> bool:
    """Return whether a worker that decodes has a free place and may not be able to admit all who wait.

    Steps with prompts may run out of tokens or memory before they run out of places.
    """
    free, request = w[PLACES, worker] - w[RUNNING, worker], w[WAIT_HEAD, worker]
    if w[ROLE, worker] == PREFILL or free == 0:
        return False
    for _ in range(free if w[ROLE, worker] == DECODE else 1):
        if request >= 0:
            request = r[request, NEXT]
    return bool(request >= 0)


@helper()
def frees_memory(w: Ints, r: Ints, run: Ints, worker: int) -> bool:
    """Return whether a request ends with the step that just started while at least two wait for its memory."""
    request = w[KV_HEAD, worker]
    if request < 0 or r[request, NEXT] < 0:
        return False
    ends = False
    for at in range(w[RUNNING, worker] - w[STAGED, worker]):
        ends = ends or r[run[worker, at], DECODED] + 1 == r[run[worker, at], OUTPUT_TOKENS]
    return ends


@helper()
def _join(w: Ints, r: Ints, run: Ints, worker: int) -> int:
    """Give free places to requests whose KV is on the decoder; return the number of requests that joined."""
    joined = 0
    while w[RUNNING, worker] < w[PLACES, worker] and w[WAIT_HEAD, worker] >= 0:
        request = pop(w, WAIT_HEAD, worker, r)
        run[worker, w[RUNNING, worker]] = request
        w[RUNNING, worker] += 1
        r[request, PHASE] = DECODING
        joined += 1
    return joined


@helper()
def _admit(
    c: Ints, w: Ints, r: Ints, rt: Floats, run: Ints, cache: NDArray[np.int32], blocks: Ints, worker: int, now: float
) -> bool:
    """Admit the prompt that has waited longest; return False if no place is free or memory is short."""
    at, request = w[RUNNING, worker], w[WAIT_HEAD, worker]
    if at == w[PLACES, worker] or request < 0 or not reserve(c, w, r, cache, blocks, worker, request, COMPUTES):
        return False
    pop(w, WAIT_HEAD, worker, r)
    run[worker, at] = request
    w[RUNNING, worker] += 1
    r[request, PHASE] = PREFILLING
    rt[request, PREFILL_START] = now
    r[request, COMPUTED] = r[request, CACHED]
    r[request, CHUNK] = 0
    w[QUEUED_TOKENS, worker] -= r[request, CACHED]
    return True


@helper()
def gather(
    c: Ints,
    w: Ints,
    r: Ints,
    rt: Floats,
    run: Ints,
    cache: NDArray[np.int32],
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
            _count_chunk(r, expert_indices, counts, request)
    if c[AHEAD]:
        while _admit(c, w, r, rt, run, cache, blocks, worker, now):
            w[STAGED, worker] += 1
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
