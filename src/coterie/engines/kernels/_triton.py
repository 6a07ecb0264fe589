"""Triton kernels: stable counting sorts without atomics on global memory, row copies, and the top k of each row.

An entry is one expert of one token, ``token x k + slot``. A place is an entry's index in the order by expert.

``pairs_kernel``, for small batches, takes one launch: a program compares its entries with all others and copies its
rows at once. Its work grows with the square of the batch, but a second launch or a barrier would cost more.

``histogram_kernel``, ``places_kernel`` and ``copy_kernel`` are for large batches: count entries per expert in each
chunk, compute places from the counts of earlier chunks, then copy. Every row is read once and written k times.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expert(ids, index, inside, experts):  # type: ignore[no-untyped-def]
    """Return the expert of an entry; an id out of range is clamped, so that no place is ever out of bounds."""
    found = tl.load(ids + index, mask=inside, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(found, 0), experts - 1)


@triton.jit  # type: ignore[untyped-decorator]
def pairs_kernel(  # type: ignore[no-untyped-def]
    ids,
    hidden,
    rows,
    order,
    places,
    counts,
    ends,
    tokens,
    experts,
    width,
    stride,
    parts,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort and copy in one launch; with BLOCK 0, only sort.

    Grid: (tokens + ceil(experts / EXPERTS)) x parts programs.
    """
    program = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    entries = tokens * K
    every = tl.arange(0, PADDED)
    inside = every < entries
    found = _expert(ids, every, inside, experts)
    key = tl.where(inside, found * PADDED + every, 0x7FFFFFFF)  # order by expert, then by entry: a stable sort
    if program < tokens:
        columns = part * BLOCK + tl.arange(0, BLOCK if BLOCK > 0 else 1)
        keep = columns < width
        if BLOCK > 0:
            row = tl.load(hidden + program.to(tl.int64) * stride + columns, mask=keep)
        for slot in tl.static_range(K):
            entry = program * K + slot
            mine = _expert(ids, entry, entry < entries, experts) * PADDED + entry
            place = tl.sum((key < mine).to(tl.int32), axis=0)
            if part == 0:
                tl.store(places + entry, place)
                tl.store(order + place, entry)
            if BLOCK > 0:
                tl.store(rows + place.to(tl.int64) * width + columns, row, mask=keep)
    elif part == 0:
        for at in tl.static_range(EXPERTS):
            expert = (program - tokens) * EXPERTS + at
            if expert < experts:
                end = tl.sum((key < (expert + 1) * PADDED).to(tl.int32), axis=0)
                start = tl.sum((key < expert * PADDED).to(tl.int32), axis=0)
                tl.store(ends + expert, end)
                tl.store(counts + expert, end - start)


@triton.jit  # type: ignore[untyped-decorator]
def histogram_kernel(ids, table, entries, experts, CHUNK: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count each chunk's entries per expert into table [chunk, BINS]. Grid: chunks."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < entries
    counted = tl.histogram(_expert(ids, index, inside, experts), BINS)
    bins = tl.arange(0, BINS)
    padding = CHUNK - tl.sum(inside.to(tl.int32), axis=0)  # masked entries were counted as expert 0
    tl.store(table + chunk * BINS + bins, counted - tl.where(bins == 0, padding, 0))


@triton.jit  # type: ignore[untyped-decorator]
def places_kernel(  # type: ignore[no-untyped-def]
    ids,
    table,
    order,
    places,
    counts,
    ends,
    entries,
    experts,
    chunks,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    SUB: tl.constexpr,
):
    """Compute the place of each entry. Grid: chunks x SPLIT.

    Place = entries of smaller experts + the same expert's entries in earlier chunks + those earlier in this chunk.
    """
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, chunks, ROWS):
        row = first + tl.arange(0, ROWS)
        block = tl.load(table + row[:, None] * BINS + bins[None, :], mask=(row < chunks)[:, None], other=0)
        total += tl.sum(block, axis=0)
        before += tl.sum(tl.where((row < chunk)[:, None], block, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    if (chunk == 0) & (part == 0):
        tl.store(counts + bins, total, mask=bins < experts)
        tl.store(ends + bins, end, mask=bins < experts)
    start = end - total + before
    here = tl.arange(0, CHUNK)
    index = chunk * CHUNK + here
    others = _expert(ids, index, index < entries, experts)
    for first in range(0, CHUNK // SPLIT, SUB):
        local = part * (CHUNK // SPLIT) + first + tl.arange(0, SUB)
        entry = chunk * CHUNK + local
        inside = entry < entries
        mine = _expert(ids, entry, inside, experts)
        place = tl.sum(tl.where(mine[:, None] == bins[None, :], start[None, :], 0), axis=1)
        earlier = (mine[:, None] == others[None, :]) & (here[None, :] < local[:, None])
        place += tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(places + entry, place, mask=inside)
        tl.store(order + place, entry, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(hidden, places, rows, width, stride, parts, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy each hidden row to its k places; every row is read once. Grid: tokens x parts."""
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < width
    row = tl.load(hidden + token * stride + columns, mask=keep)
    for slot in tl.static_range(K):
        place = tl.load(places + token * K + slot).to(tl.int64)
        tl.store(rows + place * width + columns, row, mask=keep)


@triton.jit  # type: ignore[untyped-decorator]
def top_k_kernel(logits, ids, experts, logits_stride, ids_stride, K: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write each row's k largest logits' indices, largest first; of equal logits the smaller index. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED)
    inside = every < experts
    wide: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 32
    number = tl.load(logits + row * logits_stride + every, mask=inside, other=0)
    bits = number.to(tl.int32, bitcast=True) if wide else number.to(tl.int16, bitcast=True).to(tl.int32)
    ordered = bits ^ ((bits >> 31) & (0x7FFFFFFF if wide else 0x7FFF))  # order of integers = order of floats
    # The smaller index has the larger low bits. A 16-bit number and its index fit into 32 bits.
    key = ((ordered.to(tl.int64) if wide else ordered) << 16) | (0xFFFF - every)
    lowest: tl.constexpr = -0x7FFFFFFFFFFFFFFF if wide else -0x7FFFFFFF
    key = tl.where(inside, key, lowest)
    for slot in tl.static_range(K):
        largest = tl.max(key, axis=0)
        tl.store(ids + row * ids_stride + slot, (0xFFFF - (largest & 0xFFFF)).to(ids.dtype.element_ty))
        key = tl.where(key == largest, lowest, key)
