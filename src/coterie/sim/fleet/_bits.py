"""The time of a step that only decodes on one device: experts are counted in bits, 64 at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.experts import overlapped_us
from coterie.sim.fleet._steps import all_attention_us, one_tile_line
from coterie.sim.fleet._tables import blended


@njit()
def fill_bits(expert_indices: NDArray[np.unsignedinteger], bits: NDArray[np.uint64]) -> None:
    """Set bits [token, word]: bit i where the token activates expert index i."""
    for token in range(expert_indices.shape[0]):
        for at in range(expert_indices.shape[1]):
            index = np.uint64(expert_indices[token, at])
            bits[token, index >> np.uint64(6)] |= np.uint64(1) << (index & np.uint64(63))


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
    """Count activations: having [count] expert indices that exactly `count` tokens activate, union [word] those that
    any token does.

    64 indices are counted at a time, in binary: digit d of all their counts is one word. Eight tokens are added by full
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
        while many:  # few experts have eight rows or more
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
    first, slope, tile = one_tile_line(experts, large)
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
        together += blended(first * touched + slope * activations, tile * touched, blend)
    total = overlapped_us(layers * (layer[0] + layer[1] * tokens), hidden, alone, together)
    total += all_attention_us(attention, decoding, context, 0, 0, 1)
    return total + dense[0, tokens] + dense[1, decoding], np.float64(distinct) / layers
