"""The calibrated step time as tables, so that a step of a fleet is timed from exact counts by looking up.

An expert's share of a layer depends on its rows alone once the tile is chosen, so `layer_us` over counts is a sum of
table entries: the same number, without its powers. Attention keeps its law, projections and routing are tables over
tokens. What :class:`~coterie.sim.execution.StepTimer` says is what this says, up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.roofline import Roofline
from coterie.costs.step import ATTENTION_BLOCKS, ATTENTION_TILE, StepModel, attention_work, dense_shapes
from coterie.errors import ConfigError
from coterie.sim.execution import StepTimer
from coterie.types import Placement


class StepTables(NamedTuple):
    """A step model for steps of up to a number of tokens; times in microseconds."""

    shape: NDArray[np.int64]
    """MoE layers, experts, ranks, slots a rank."""
    layer: NDArray[np.float64]
    """Overhead and per-token time of a layer, rows an expert above which the large tile is taken, overlap of
    streaming with compute, overlap of the all-to-all, rows of a tile."""
    experts: NDArray[np.float64]
    """[3, tile, rows] one expert's time by itself, its weights' way in, its compute."""
    dense: NDArray[np.float64]
    """[2, tokens] projections and routing of all layers; the output head by outputs."""
    padded: NDArray[np.int64]
    """[tokens] the batch that really runs where all of it decodes."""
    attention: NDArray[np.float64]
    """Laws and work of decode and prefill attention, as `_attention_us` takes them."""
    slots: NDArray[np.int64]
    """[3, layer, slot] expert, turn among its replicas, replicas."""
    links: NDArray[np.float64]
    blend: NDArray[np.float64]
    """[part + 1] by how much the larger of streaming and compute grows by the other, over their ratio."""
    spans: NDArray[np.uint64]
    """[layer, 4] first and last word of its experts in a row of bits, and which bits of the two are its."""
    union: NDArray[np.uint64]
    """[word] working memory."""
    having: NDArray[np.uint64]
    """[count] working memory."""


MOST_DECODING = 63
"""Tokens of a step whose experts are counted in bits: six binary digits."""
WORD = 64


BLEND_PARTS = 1 << 13
"""Straight lines that stand for ``(1 + x ** s) ** (1 / s)`` on 0 … 1: off by less than 1e-7 of a layer's time."""


def step_tables(model: StepModel, most_tokens: int, placement: Placement | None = None) -> StepTables:
    """Tables for steps of up to `most_tokens` tokens, of all ranks together."""
    spec, options = model.spec, model.options
    if options.cache_resident:
        raise ConfigError("cache_resident=True holds for one layer that repeats; a fleet's steps pass through all")
    timer = StepTimer(model, placement)
    most_tokens = max(most_tokens, options.padded(most_tokens), MOST_DECODING)
    p = model.moe.array()
    experts = np.zeros((3, 2, most_tokens + 1))
    _fill_experts(p, spec.expert_bytes(model.dtype) / p[2], 2.0 * spec.expert_params, experts)
    shapes = dense_shapes(spec)
    n, k, times = (np.array([row[at] for row in _dense_rows(shapes)], np.float64) for at in range(3))
    dense = np.zeros((2, most_tokens + 1))
    _fill_dense(_law(model.gemm), n, k, times, dense[0])
    _fill_dense(
        _law(model.gemm), np.array([float(spec.vocab_size)]), np.array([float(spec.hidden_size)]), np.ones(1), dense[1]
    )
    if model.routing is not None:
        dense[0] += spec.num_moe_layers * np.array([model.routing.us(tokens) for tokens in range(most_tokens + 1)])
    padded = np.array([options.padded(tokens) for tokens in range(most_tokens + 1)], np.int64)
    ranks = timer._ranks
    return StepTables(
        np.array([spec.num_moe_layers, spec.num_experts, ranks, timer._slots.shape[1] // ranks], np.int64),
        np.array([p[0], p[1], p[8], p[12], options.overlap, min(p[6], p[7])]),
        experts,
        dense,
        padded,
        _attention_numbers(model),
        np.stack([timer._slots, timer._turn, timer._replicas]),
        timer._links,
        _blends(p[9]),
        _spans(spec.num_moe_layers, spec.num_experts),
        np.zeros(-(-spec.num_moe_layers * spec.num_experts // WORD), np.uint64),
        np.zeros(MOST_DECODING + 1, np.uint64),
    )


def _blends(sharpness: float) -> NDArray[np.float64]:
    ratio = np.linspace(0.0, 1.0, BLEND_PARTS + 1)
    return np.asarray((1.0 + ratio**sharpness) ** (1.0 / sharpness))


def _spans(layers: int, experts: int) -> NDArray[np.uint64]:
    first = np.arange(layers) * experts
    last = first + experts - 1
    everything = np.uint64(0xFFFFFFFFFFFFFFFF)
    from_first = everything << (first % WORD).astype(np.uint64)
    to_last = everything >> (WORD - 1 - last % WORD).astype(np.uint64)
    return np.stack([(first // WORD).astype(np.uint64), (last // WORD).astype(np.uint64), from_first, to_last], axis=1)


def _dense_rows(shapes: list[tuple[list[tuple[int, int]], int]]) -> list[tuple[int, int, int]]:
    return [(n, k, times) for pairs, times in shapes for n, k in pairs]


def _law(law: Roofline) -> NDArray[np.float64]:
    return np.array([law.overhead_us, law.bytes_per_us, law.flops_per_us, law.sharpness])


def _attention_numbers(model: StepModel) -> NDArray[np.float64]:
    spec = model.spec
    cached, asking = attention_work(spec, 0, 1, 1.0), attention_work(spec, 1, 1, 0.0)
    width = spec.head_dim + spec.rope_head_dim
    kv_heads = spec.num_heads if spec.kv_lora_rank else spec.num_kv_heads
    numbers = [spec.num_layers, cached.nbytes, asking.nbytes, cached.flops, spec.num_heads, kv_heads, width]
    return np.concatenate([numbers, _law(model.decode_attention), _law(model.prefill_attention)])


@helper()
def _soft_max(a: float, b: float, sharpness: float) -> float:
    top = max(a, b)
    return float(top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness))


@helper()
def _blended(a: float, b: float, blend: NDArray[np.float64]) -> float:
    """`_soft_max` by table, since powers would take most of a step."""
    top, low = max(a, b), min(a, b)
    at = low / top * BLEND_PARTS
    part = min(np.uint64(at), np.uint64(BLEND_PARTS - 1))
    share = at - part
    return float(top * (blend[part] + share * (blend[part + np.uint64(1)] - blend[part])))


@helper()
def _roofline_us(law: NDArray[np.float64], nbytes: float, flops: float) -> float:
    return float(law[0] + _soft_max(nbytes / law[1] + 1e-9, flops / law[2] + 1e-9, law[3]))


@njit()
def _fill_experts(p: NDArray[np.float64], stream: float, flops: float, out: NDArray[np.float64]) -> None:
    """One expert's terms of `layer_us`, for the small tile and the large."""
    for large in range(2):
        tile = p[6 + large]
        compute = tile * flops / p[4 + large]
        for rows in range(1, out.shape[2]):
            first_rows = min(float(rows), tile)
            weights = stream * (1.0 + p[10] * max(0.0, 1.0 - first_rows / p[6])) + p[3] * first_rows
            tiles, more = np.ceil(rows / tile), 0.0
            if tiles > 1.0:
                empty = 0.0 if large else p[11] * (1.0 - (rows - (tiles - 1.0) * tile) / tile)
                more = max(compute, p[3] * tile) * (tiles - 1.0 + empty)
            out[0, large, rows] = _soft_max(weights, compute, p[9]) + more
            out[1, large, rows] = weights
            out[2, large, rows] = compute + more


@njit()
def _fill_dense(
    law: NDArray[np.float64],
    n: NDArray[np.float64],
    k: NDArray[np.float64],
    times: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    for tokens in range(len(out)):
        for at in range(len(n)):
            nbytes = 2.0 * (n[at] * k[at] + tokens * (n[at] + k[at]))
            out[tokens] += times[at] * _roofline_us(law, nbytes, 2.0 * tokens * n[at] * k[at])


@helper()
def _attention_us(
    a: NDArray[np.float64], decoding: int, decode_context: int, prefill: int, prefill_context: int, prompts: int
) -> float:
    """All layers; as StepModel.attention_s."""
    total = 0.0
    if decoding > 0:
        context = float(decode_context + decoding)
        total += _roofline_us(a[7:11], a[1] * context + a[2] * decoding, a[3] * context)
    if prefill > 0:
        each = (prefill + prompts - 1) // prompts
        context = prefill_context + prefill / 2
        if each == 1:
            total += _roofline_us(a[7:11], a[1] * context + a[2] * prompts, a[3] * context)
        else:
            tiles = (each + ATTENTION_TILE - 1) // ATTENTION_TILE
            blocks = max(float(ATTENTION_BLOCKS), prompts * a[4] * tiles)
            nbytes = 4.0 * (context * a[5] + prompts * each * a[4]) * a[6]
            total += _roofline_us(a[11:15], nbytes, 4.0 * context / prompts * blocks * ATTENTION_TILE * a[6])
    return float(total * a[0])


@helper()
def _alone_us(alone: NDArray[np.float64], counts: NDArray[np.uint32]) -> float:
    """Experts of all layers, each by itself. Four sums, since adding waits for the sum before."""
    total, total_1, total_2, total_3 = 0.0, 0.0, 0.0, 0.0
    quarter = len(counts) // 4
    for cell in range(quarter):
        total += alone[counts[cell]]
        total_1 += alone[counts[cell + quarter]]
        total_2 += alone[counts[cell + 2 * quarter]]
        total_3 += alone[counts[cell + 3 * quarter]]
    for cell in range(4 * quarter, len(counts)):
        total += alone[counts[cell]]
    return total + total_1 + (total_2 + total_3)


@helper()
def _touched(row: NDArray[np.uint32]) -> int:
    touched = np.uint32(0)
    for expert in range(len(row)):
        touched += np.uint32(1) if row[expert] > 0 else np.uint32(0)
    return int(touched)


@helper()
def _together_us(
    experts: NDArray[np.float64],
    blend: NDArray[np.float64],
    counts: NDArray[np.uint32],
    large: int,
    rows: int,
    one_tile: bool,
) -> tuple[float, int]:
    """Experts of all layers, streaming and compute of a layer side by side, and how many; `rows` of a layer.

    As long as no expert has more than a tile (decode), its streaming rises in a straight line with its rows and its
    compute is a tile's: their sums follow from how many experts a layer touches.
    """
    total, distinct = 0.0, 0
    slope = experts[1, large, 2] - experts[1, large, 1] if experts.shape[2] > 2 else 0.0
    first, tile = experts[1, large, 1] - slope, experts[2, large, 1]
    for number in range(counts.shape[0]):
        row = counts[number]
        touched = _touched(row)
        distinct += touched
        if one_tile:
            total += _blended(first * touched + slope * rows, tile * touched, blend)
            continue
        arrive, work = 0.0, 0.0
        for expert in range(len(row)):
            arrive += experts[1, large, row[expert]]
            work += experts[2, large, row[expert]]
        total += _blended(arrive, work, blend)
    return total, distinct


@helper()
def _ranks_us(
    shape: NDArray[np.int64],
    layer: NDArray[np.float64],
    experts: NDArray[np.float64],
    slots: NDArray[np.int64],
    links: NDArray[np.float64],
    blend: NDArray[np.float64],
    counts: NDArray[np.uint32],
    number: int,
    tokens: float,
) -> float:
    """The slowest rank of one layer and the all-to-all, replicas sharing an expert's rows."""
    ranks, each, hidden = shape[2], shape[3], layer[3]
    slowest, busiest = 0.0, 0
    for rank in range(ranks):
        here = 0
        for slot in range(rank * each, rank * each + each):
            rows, share = np.int64(counts[number, slots[0, number, slot]]), slots[2, number, slot]
            here += rows // share + (slots[1, number, slot] < rows % share)
        if here == 0:
            continue
        large = 1 if here / each > layer[2] else 0
        alone, arrive, work = 0.0, 0.0, 0.0
        for slot in range(rank * each, rank * each + each):
            rows, share = np.int64(counts[number, slots[0, number, slot]]), slots[2, number, slot]
            mine = rows // share + (slots[1, number, slot] < rows % share)
            alone += experts[0, large, mine]
            arrive += experts[1, large, mine]
            work += experts[2, large, mine]
        us = layer[0] + layer[1] * tokens + (1.0 - hidden) * alone + hidden * _blended(arrive, work, blend)
        slowest, busiest = max(slowest, us), max(busiest, here)
    intra = links[0] + busiest * links[1] if links[1] > 0.0 and busiest > 0 else 0.0
    inter = links[2] + busiest * links[3] if links[3] > 0.0 and busiest > 0 else 0.0
    return float(slowest + max(0.0, 2.0 * max(intra, inter) - layer[4] * slowest))


@njit()
def step_us(
    shape: NDArray[np.int64],
    layer: NDArray[np.float64],
    experts: NDArray[np.float64],
    dense: NDArray[np.float64],
    padded: NDArray[np.int64],
    attention: NDArray[np.float64],
    slots: NDArray[np.int64],
    links: NDArray[np.float64],
    blend: NDArray[np.float64],
    counts: NDArray[np.uint32],
    decoding: int,
    decode_context: int,
    prefill: int,
    prefill_context: int,
    prompts: int,
) -> tuple[float, float]:
    """Microseconds of a step, and experts touched in a layer on average; clears counts [layer, expert] rows."""
    layers, each, ranks = shape[0], shape[1], shape[2]
    if ranks > 1:
        decoding, decode_context = (decoding + ranks - 1) // ranks, decode_context // ranks
        prefill, prefill_context = (prefill + ranks - 1) // ranks, prefill_context // ranks
        prompts = (prompts + ranks - 1) // ranks
    tokens = decoding + prefill
    if prefill == 0:
        tokens = padded[tokens]
    total, distinct = 0.0, 0
    if ranks > 1:
        for number in range(layers):
            distinct += _touched(counts[number])
            total += _ranks_us(shape, layer, experts, slots, links, blend, counts, number, float(tokens))
    else:
        rows = 0
        for expert in range(each):
            rows += int(counts[0, expert])  # of every layer: a token activates as many in each
        large, hidden = 1 if rows / each > layer[2] else 0, layer[3]
        one_tile = decoding + prefill <= layer[5]
        together, distinct = _together_us(experts, blend, counts, large, rows, one_tile)
        alone = _alone_us(experts[0, large], counts.reshape(counts.size))
        total = layers * (layer[0] + layer[1] * tokens) + (1.0 - hidden) * alone + hidden * together
    for number in range(layers):
        row = counts[number]
        for expert in range(each):
            row[expert] = 0
    outputs = decoding + (prompts if prefill > 0 else 0)
    total += _attention_us(attention, decoding, decode_context, prefill, prefill_context, prompts)
    return total + dense[0, tokens] + dense[1, outputs], distinct / layers


@njit()
def fill_bits(cells: NDArray[np.unsignedinteger], bits: NDArray[np.uint64]) -> None:
    """bits [token, word]: bit c where a token activates cell c."""
    for token in range(cells.shape[0]):
        for at in range(cells.shape[1]):
            cell = np.uint64(cells[token, at])
            bits[token, cell >> np.uint64(6)] |= np.uint64(1) << (cell & np.uint64(63))


@helper()
def _ones(word: np.uint64) -> np.uint64:
    """Bits that are set; compilers know this pattern as one instruction."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@helper()
def _count_bits(
    bits: NDArray[np.uint64],
    starts: NDArray[np.uint64],
    tokens: int,
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
) -> None:
    """having [count]: how many cells that many of the tokens activate; union [word]: cells that any of them does.

    64 cells are counted at a time, in binary: digit d of all their counts is one word. Eight tokens are added by full
    adders (a sum of three bits is their parity and their majority) before they join the digits. `starts` are where
    tokens begin in `bits`; those past the tokens name an empty one, up to a multiple of eight.
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
        c1 += _ones(n0 & ~(p1 | p2))
        c2 += _ones(n1 & q1)
        c3 += _ones(n0 & q1)
        c4 += _ones(n1 & q2)
        c5 += _ones(n0 & q2)
        c6 += _ones(n1 & q3)
        c7 += _ones(n0 & q3)
        while many:  # few cells have eight rows or more
            bit = _ones(~many & (many - np.uint64(1)))  # the lowest that is set
            many &= many - np.uint64(1)
            low = (p0 >> bit & one) | (p1 >> bit & one) << one | (p2 >> bit & one) << two
            high = (p3 >> bit & one) | (p4 >> bit & one) << one | (p5 >> bit & one) << two
            having[low | high << three] += one
    having[1], having[2], having[3], having[4] = c1, c2, c3, c4
    having[5], having[6], having[7] = c5, c6, c7


@njit()
def decode_us(
    shape: NDArray[np.int64],
    layer: NDArray[np.float64],
    experts: NDArray[np.float64],
    dense: NDArray[np.float64],
    padded: NDArray[np.int64],
    attention: NDArray[np.float64],
    blend: NDArray[np.float64],
    spans: NDArray[np.uint64],
    union: NDArray[np.uint64],
    having: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    starts: NDArray[np.uint64],
    top_k: int,
    decoding: int,
    context: int,
) -> tuple[float, float]:
    """`step_us` of a step that only decodes, at most MOST_DECODING tokens and no expert more than a tile, on one
    device: experts are counted 64 at a time. `starts` as `_count_bits` takes them."""
    layers, hidden = shape[0], layer[3]
    tokens, activations = padded[decoding], top_k * decoding
    large = 1 if activations / shape[1] > layer[2] else 0
    _count_bits(bits, starts, decoding, union, having)
    alone = 0.0
    for count in range(1, decoding + 1):
        alone += np.float64(having[count]) * experts[0, large, count]
    slope = experts[1, large, 2] - experts[1, large, 1]
    first, tile = experts[1, large, 1] - slope, experts[2, large, 1]
    together, distinct = 0.0, np.uint64(0)
    for number in range(layers):
        begin, last = spans[number, 0], spans[number, 1]
        here = union[begin] & spans[number, 2]
        touched = np.uint64(0)
        for word in range(begin, last):
            touched += _ones(here)
            here = union[np.uint64(word) + np.uint64(1)]
        touched += _ones(here & spans[number, 3])
        distinct += touched
        together += _blended(first * touched + slope * activations, tile * touched, blend)
    total = layers * (layer[0] + layer[1] * tokens) + (1.0 - hidden) * alone + hidden * together
    total += _attention_us(attention, decoding, context, 0, 0, 1)
    return total + dense[0, tokens] + dense[1, decoding], np.float64(distinct) / layers
