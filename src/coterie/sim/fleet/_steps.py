"""The time of a worker's step, from the exact rows of every expert.

:mod:`coterie.costs.composition` adds up the terms. For workers of one device, the usual case, this module has a faster
order of summation: all experts of all layers are looked up in one pass, and in decode-only steps experts are counted
with bit operations, 64 at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, set_bits
from coterie.costs.composition import layers_us, step_us
from coterie.costs.exchange import arrival_links
from coterie.costs.experts import OVERLAP, TILE, blended, fixed_us, overlapped_us, tile_size
from coterie.costs.replicas import Slots, fill_slots
from coterie.costs.step import StepModel, check_placement
from coterie.types import Placement

MOST_DECODING = 63
"""Largest number of tokens in a step whose experts are counted with bits: counts have six binary digits."""
WORD = 64


class StepCounts(NamedTuple):
    """Arrays for timing the steps of a placement."""

    shape: NDArray[np.int64]
    """[3] number of MoE layers, experts and ranks."""
    slots: NDArray[np.int64]
    """[3, layer, slot] expert, number of earlier slots of the expert, number of its slots."""
    links: NDArray[np.float64]
    """[5] prices of the exchange, for `exchange_us`."""
    spans: NDArray[np.uint64]
    """[layer, 4] first and last word of the layer's experts in a row of bits, and the bit masks of these two words."""
    union: NDArray[np.uint64]
    """[word] working memory."""
    having: NDArray[np.uint64]
    """[count] working memory."""
    slot_rows: NDArray[np.int64]
    """[layer, slot] working memory."""
    rank_tokens: NDArray[np.int64]
    """[rank] working memory."""
    parts: NDArray[np.float64]
    """[2, layer] working memory."""


def step_counts(model: StepModel, placement: Placement | None = None) -> StepCounts:
    """Create the arrays for a placement; without one, all experts are on one device."""
    spec = model.spec
    layers, experts = spec.num_moe_layers, spec.num_experts
    placed = placement or Placement.linear(layers, experts, 1)
    check_placement(model, placed)
    slots = np.stack(Slots.of(placed))
    return StepCounts(
        shape=np.array([layers, experts, placed.num_ranks], np.int64),
        slots=slots,
        links=arrival_links(spec, model.topology, model.options.overlap),
        spans=_spans(layers, experts),
        union=np.zeros(-(-layers * experts // WORD), np.uint64),
        having=np.zeros(MOST_DECODING + 1, np.uint64),
        slot_rows=np.zeros(slots.shape[1:], np.int64),
        rank_tokens=np.zeros(placed.num_ranks, np.int64),
        parts=np.zeros((2, layers)),
    )


def _spans(layers: int, experts: int) -> NDArray[np.uint64]:
    first = np.arange(layers) * experts
    last = first + experts - 1
    everything = np.uint64(0xFFFFFFFFFFFFFFFF)
    from_first = everything << (first % WORD).astype(np.uint64)
    to_last = everything >> (WORD - 1 - last % WORD).astype(np.uint64)
    return np.stack([(first // WORD).astype(np.uint64), (last // WORD).astype(np.uint64), from_first, to_last], axis=1)


@helper()
def one_tile_rows(p: NDArray[np.float64]) -> float:
    """Return the tokens of a step up to which sums over experts follow from the number of touched experts.

    No expert has more than one tile then; if experts do not overlap, the sums are not needed.
    """
    return min(p[TILE], p[TILE + 1], p[TILE + 2], p[TILE + 3]) if p[OVERLAP] > 0.0 else np.inf


@helper()
def _one_tile_line(experts: NDArray[np.float64], size: int) -> tuple[float, float, float]:
    """Return the times of an expert with at most one tile of rows: load of its weights, load per row, compute."""
    slope = experts[1, size, 2] - experts[1, size, 1]
    return experts[1, size, 1] - slope, slope, experts[2, size, 1]


@helper()
def _alone_us(alone: NDArray[np.float64], counts: NDArray[np.uint32]) -> float:
    """Sum the experts' times over all layers, without overlap between experts.

    Four partial sums, since an addition must wait for the previous one to the same variable.
    """
    total, total_1, total_2, total_3 = 0.0, 0.0, 0.0, 0.0
    quarter = len(counts) // 4
    for index in range(quarter):
        total += alone[counts[index]]
        total_1 += alone[counts[index + quarter]]
        total_2 += alone[counts[index + 2 * quarter]]
        total_3 += alone[counts[index + 3 * quarter]]
    for index in range(4 * quarter, len(counts)):
        total += alone[counts[index]]
    return total + total_1 + (total_2 + total_3)


@helper()
def _touched(row: NDArray[np.uint32]) -> int:
    touched = np.uint32(0)
    for expert in range(len(row)):
        touched += np.uint32(1) if row[expert] > 0 else np.uint32(0)
    return int(touched)


@helper()
def _together_us(
    p: NDArray[np.float64],
    experts: NDArray[np.float64],
    blend: NDArray[np.float64],
    counts: NDArray[np.uint32],
    size: int,
    rows: int,
    touched_idle: float,
    one_tile: bool,
) -> tuple[float, int]:
    """Return the experts' time over all layers, streaming and compute of a layer overlapped, and the experts touched.

    `rows` is the number of rows in a layer, `touched_idle` the share of its other experts to which padding adds a row.
    If no expert has more than one tile of rows (`one_tile`, as in decode), its load time is linear in its rows and its
    compute is one tile: the sums follow from the number of touched experts.
    """
    total, distinct = 0.0, 0
    first, slope, tile = _one_tile_line(experts, size)
    for layer in range(counts.shape[0]):
        row = counts[layer]
        touched = _touched(row)
        distinct += touched
        more = touched_idle * (len(row) - touched)
        if one_tile:
            total += blended(p, size, first * (touched + more) + slope * (rows + more), tile * (touched + more), blend)
            continue
        arrive, work = more * experts[1, size, 1], more * experts[2, size, 1]
        for expert in range(len(row)):
            arrive += experts[1, size, row[expert]]
            work += experts[2, size, row[expert]]
        total += blended(p, size, arrive, work, blend)
    return total, distinct


@njit()
def counted_step_us(
    p: NDArray[np.float64],
    experts: NDArray[np.float64],
    blend: NDArray[np.float64],
    dense: NDArray[np.float64],
    padded: NDArray[np.float64],
    attention: NDArray[np.float64],
    shape: NDArray[np.int64],
    slots: NDArray[np.int64],
    links: NDArray[np.float64],
    slot_rows: NDArray[np.int64],
    rank_tokens: NDArray[np.int64],
    parts: NDArray[np.float64],
    counts: NDArray[np.uint32],
    decoding: int,
    decode_context: int,
    prefill: int,
    prefill_context: int,
    prompts: int,
) -> tuple[float, float]:
    """Return microseconds of a step and experts touched per layer, from counts [layer, expert]; clear `counts`."""
    layers, per_layer, ranks = shape[0], shape[1], shape[2]
    one_tile = decoding + prefill <= one_tile_rows(p)
    if ranks > 1:
        decoding, decode_context = (decoding + ranks - 1) // ranks, decode_context // ranks
        prefill, prefill_context = (prefill + ranks - 1) // ranks, prefill_context // ranks
        prompts = (prompts + ranks - 1) // ranks
    tokens = decoding + prefill if prefill > 0 else int(padded[0, decoding])
    touched = 0.0 if prefill > 0 else 1.0 - padded[1, decoding] ** ranks
    total, distinct = 0.0, 0
    if slot_rows.shape[1] > per_layer or ranks > 1:
        fill_slots(counts, slots[0], slots[1], slots[2], slot_rows)
        rank_tokens[:] = tokens
        layers_us(
            p, experts, blend, links, slot_rows, np.empty((0, 0, 0), np.int64), rank_tokens, touched, False, parts
        )
        for layer in range(layers):
            distinct += _touched(counts[layer])
            total += parts[0, layer] + parts[1, layer]
    else:
        rows = 0
        for expert in range(per_layer):
            rows += int(counts[0, expert])  # the same in every layer: a token activates k experts in each
        size = tile_size(p, rows / per_layer)
        together, distinct = _together_us(p, experts, blend, counts, size, rows, touched, one_tile)
        alone = _alone_us(experts[0, size], counts.reshape(counts.size))
        alone += touched * (counts.size - distinct) * experts[0, size, 1]
        total = overlapped_us(layers * fixed_us(p, tokens), p[OVERLAP], alone, together)
    counts[:, :] = 0
    total = step_us(dense, attention, total, tokens, decoding, decode_context, prefill, prefill_context, prompts)
    return total, distinct / layers


@njit()
def fill_bits(expert_indices: NDArray[np.unsignedinteger], bits: NDArray[np.uint64]) -> None:
    """Set bits [token, word]: bit i if the token activates expert index i."""
    for token in range(expert_indices.shape[0]):
        for at in range(expert_indices.shape[1]):
            index = np.uint64(expert_indices[token, at])
            bits[token, index >> np.uint64(6)] |= np.uint64(1) << (index & np.uint64(63))


@helper()
def _count_bits(
    bits: NDArray[np.uint64],
    starts: NDArray[np.uint64],
    tokens: int,
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
) -> None:
    """Fill having [count] with the number of expert indices that exactly `count` tokens activate, and union [word] with
    the bits of the indices that any token activates.

    64 indices are counted at a time, in binary: digit d of their counts is one word (p0 … p5). Eight tokens are summed
    by full adders (the sum of three bits is their parity and their majority), then added to the digits. `starts` are
    the offsets of tokens in `bits`, padded with the offset of an empty row to a multiple of eight.
    """
    for count in range(len(having)):
        having[count] = 0
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    c1 = c2 = c3 = c4 = c5 = c6 = c7 = np.uint64(0)
    for index in range(len(union)):
        word = np.uint64(index)
        p0 = p1 = p2 = p3 = p4 = p5 = np.uint64(0)
        for at in range(0, tokens, 8):
            a, b, c = bits[starts[at] + word], bits[starts[at + 1] + word], bits[starts[at + 2] + word]
            d, e, f = bits[starts[at + 3] + word], bits[starts[at + 4] + word], bits[starts[at + 5] + word]
            g, h = bits[starts[at + 6] + word], bits[starts[at + 7] + word]
            x, y = a ^ b, d ^ e
            s, t = x ^ c, y ^ f
            k0, k1 = (a & b) | (x & c), (d & e) | (y & f)
            x = g ^ h
            u, k2 = x ^ s, (g & h) | (x & s)
            ones, k3 = t ^ u, t & u
            x = k0 ^ k1
            v, m0 = x ^ k2, (k0 & k1) | (x & k2)
            twos, m1 = v ^ k3, v & k3
            fours, eights = m0 ^ m1, m0 & m1
            carry = p0 & ones
            p0 ^= ones
            x = p1 ^ twos
            carry, p1 = (p1 & twos) | (x & carry), x ^ carry
            x = p2 ^ fours
            carry, p2 = (p2 & fours) | (x & carry), x ^ carry
            x = p3 ^ eights
            carry, p3 = (p3 & eights) | (x & carry), x ^ carry
            p5 ^= p4 & carry
            p4 ^= carry
        many = p3 | p4 | p5
        union[word] = p0 | p1 | p2 | many
        n0, n1 = p0 & ~many, ~p0 & ~many
        q1, q2, q3 = p1 & ~p2, ~p1 & p2, p1 & p2
        c1 += set_bits(n0 & ~(p1 | p2))
        c2 += set_bits(n1 & q1)
        c3 += set_bits(n0 & q1)
        c4 += set_bits(n1 & q2)
        c5 += set_bits(n0 & q2)
        c6 += set_bits(n1 & q3)
        c7 += set_bits(n0 & q3)
        while many:  # indices with counts of eight or more: few, so one by one
            bit = set_bits(~many & (many - np.uint64(1)))  # position of the lowest set bit
            many &= many - np.uint64(1)
            low = (p0 >> bit & one) | (p1 >> bit & one) << one | (p2 >> bit & one) << two
            high = (p3 >> bit & one) | (p4 >> bit & one) << one | (p5 >> bit & one) << two
            having[low | high << three] += one
    having[1], having[2], having[3], having[4] = c1, c2, c3, c4
    having[5], having[6], having[7] = c5, c6, c7


@njit()
def bit_step_us(
    p: NDArray[np.float64],
    experts: NDArray[np.float64],
    blend: NDArray[np.float64],
    dense: NDArray[np.float64],
    padded: NDArray[np.float64],
    attention: NDArray[np.float64],
    shape: NDArray[np.int64],
    spans: NDArray[np.uint64],
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    starts: NDArray[np.uint64],
    top_k: int,
    decoding: int,
    context: int,
) -> tuple[float, float]:
    """Return `counted_step_us` of a decode-only step on one device, counting 64 experts at a time.

    The step has at most MOST_DECODING tokens, and no expert has more than one tile of rows. `starts` is that of
    `_count_bits`.
    """
    layers, tokens, activations = shape[0], int(padded[0, decoding]), top_k * decoding
    touched_idle = 1.0 - padded[1, decoding]
    size = tile_size(p, activations / shape[1])
    _count_bits(bits, starts, decoding, union, having)
    alone = 0.0
    for count in range(1, decoding + 1):
        alone += np.float64(having[count]) * experts[0, size, count]
    first, slope, tile = _one_tile_line(experts, size)
    together, distinct = 0.0, np.uint64(0)
    for layer in range(layers):
        begin, last = spans[layer, 0], spans[layer, 1]
        word_bits = union[begin] & spans[layer, 2]
        touched = np.uint64(0)
        for word in range(begin, last):
            touched += set_bits(word_bits)
            word_bits = union[np.uint64(word) + np.uint64(1)]
        touched += set_bits(word_bits & spans[layer, 3])
        distinct += touched
        both = touched + touched_idle * (shape[1] - touched)
        together += blended(p, size, first * both + slope * (activations + both - touched), tile * both, blend)
    alone += touched_idle * (layers * shape[1] - distinct) * experts[0, size, 1]
    total = overlapped_us(layers * fixed_us(p, tokens), p[OVERLAP], alone, together)
    total = step_us(dense, attention, total, tokens, decoding, context, 0, 0, 1)
    return total, np.float64(distinct) / layers
