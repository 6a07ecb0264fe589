"""The time of any step of a fleet, from the rows of every expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.attention import attention_us
from coterie.costs.exchange import exchange_us, exposed
from coterie.costs.experts import overlapped_us
from coterie.costs.replicas import slot_rows
from coterie.sim.fleet._tables import blended


@helper()
def one_tile_line(experts: NDArray[np.float64], large: int) -> tuple[float, float, float]:
    """Time of an expert with at most one tile of rows: arrival of its weights, arrival per row, compute."""
    slope = experts[1, large, 2] - experts[1, large, 1]
    return experts[1, large, 1] - slope, slope, experts[2, large, 1]


@helper()
def all_attention_us(
    a: NDArray[np.float64], decoding: int, decode_context: int, prefill: int, prefill_context: int, prompts: int
) -> float:
    return float(attention_us(a[:7], a[7:11], a[11:15], decoding, decode_context, prefill, prefill_context, prompts))


@helper()
def _alone_us(alone: NDArray[np.float64], counts: NDArray[np.uint32]) -> float:
    """Experts of all layers, each by itself. Four sums, since each addition waits for the one before."""
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
    first, slope, tile = one_tile_line(experts, large)
    for number in range(counts.shape[0]):
        row = counts[number]
        touched = _touched(row)
        distinct += touched
        if one_tile:
            total += blended(first * touched + slope * rows, tile * touched, blend)
            continue
        arrive, work = 0.0, 0.0
        for expert in range(len(row)):
            arrive += experts[1, large, row[expert]]
            work += experts[2, large, row[expert]]
        total += blended(arrive, work, blend)
    return total, distinct


@helper()
def rank_us(
    layer: NDArray[np.float64],
    experts: NDArray[np.float64],
    blend: NDArray[np.float64],
    rows: NDArray[np.int64],
    tokens: float,
) -> float:
    """Experts of one rank in one layer, from the rows of its slots; 0 without rows."""
    here = 0
    for mine in rows:
        here += mine
    if here == 0:
        return 0.0
    large = 1 if here / len(rows) > layer[2] else 0
    alone, arrive, work = 0.0, 0.0, 0.0
    for mine in rows:
        alone += experts[0, large, mine]
        arrive += experts[1, large, mine]
        work += experts[2, large, mine]
    return float(overlapped_us(layer[0] + layer[1] * tokens, layer[3], alone, blended(arrive, work, blend)))


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
    ranks, per_rank = shape[2], shape[3]
    slowest, busiest, rows = 0.0, 0, np.empty(per_rank, np.int64)
    for rank in range(ranks):
        here = 0
        for at in range(per_rank):
            rows[at] = _rows_at(slots, counts, number, rank * per_rank + at)
            here += rows[at]
        slowest = max(slowest, rank_us(layer, experts, blend, rows, tokens))
        busiest = max(busiest, here)
    return float(slowest + exposed(exchange_us(links, busiest), layer[4], slowest))


@helper()
def _rows_at(slots: NDArray[np.int64], counts: NDArray[np.uint32], number: int, slot: int) -> int:
    """Rows of a slot in layer `number`."""
    rows = np.int64(counts[number, slots[0, number, slot]])
    return int(slot_rows(rows, slots[2, number, slot], slots[1, number, slot]))


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
    layers, per_rank, ranks = shape[0], shape[1], shape[2]
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
        for expert in range(per_rank):
            rows += int(counts[0, expert])  # the same in every layer: a token activates k experts in each
        large, hidden = 1 if rows / per_rank > layer[2] else 0, layer[3]
        one_tile = decoding + prefill <= layer[5]
        together, distinct = _together_us(experts, blend, counts, large, rows, one_tile)
        alone = _alone_us(experts[0, large], counts.reshape(counts.size))
        total = overlapped_us(layers * (layer[0] + layer[1] * tokens), hidden, alone, together)
    for number in range(layers):
        row = counts[number]
        for expert in range(per_rank):
            row[expert] = 0
    outputs = decoding + (prompts if prefill > 0 else 0)
    total += all_attention_us(attention, decoding, decode_context, prefill, prefill_context, prompts)
    return total + dense[0, tokens] + dense[1, outputs], distinct / layers
