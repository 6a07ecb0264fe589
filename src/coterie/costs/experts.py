"""The experts of one MoE layer on one device: time from tokens per expert.

Each active expert's weights are streamed once and its tokens are computed in tiles of a few rows, so an expert costs

    first tile:   soft_max(stream + rows, compute)        the weights arrive while the tile is computed
    further tile: max(rows, compute)                      the weights are in the cache by now

with ``stream`` = bytes ÷ bandwidth, ``compute`` = a *whole* tile's flops ÷ rate (a partly filled tile costs as much as
a full one), ``rows`` = activations read and written. A layer is the sum over its active experts plus a fixed overhead;
a kernel that prefetches hides an `overlap` share of the streaming behind other experts' compute as well. Decode lives
in the first term: distinct experts decide, tokens hardly matter. Prefill lives in the second.

Kernels choose between a small and a large tile by how many rows an expert has on average; both are fitted. Two more
effects were large enough on an H200 to need a term: a small tile that is barely filled streams slower, and a last
small tile that is partly filled costs extra. Wrong for kernels that split one expert over several passes, and on a
device where other work shares the memory bus.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.roofline import soft_max

Array = NDArray[np.float64]


class MoeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted to one kernel, shape and weight dtype. Times in microseconds, sizes in bytes."""

    overhead_us: float
    """Fixed time per layer: launches and the slowest start."""
    token_us: float
    """Time per token of the batch."""
    stream_bytes_per_us: float
    row_us: float
    """Time per token-and-expert pair: activations read and written."""
    tile_flops_per_us: tuple[float, float]
    """Compute rate with the small and with the large tile."""
    tile_rows: tuple[int, int]
    switch_rows: float
    """Average rows per expert of the layer above which the kernel takes the large tile."""
    sharpness: float
    """How sharply the larger of stream and compute wins; 1 adds them, 30 is a plain maximum."""
    fill_penalty: float
    """Share by which an almost empty first tile streams slower than a full one."""
    partial_penalty: float
    """Share of a tile that an almost empty last tile costs on top."""
    overlap: float = 0.0
    """Share of the streaming that hides behind other experts' compute, not only behind an expert's own first tile."""
    cache_bytes: float = 0.0
    """Weights of this size stay in the cache between calls; used only where residency is switched on."""
    cache_bytes_per_us: float = 1.0

    def array(self) -> NDArray[np.float64]:
        """Values in the order that the loops below take."""
        return np.array(
            [
                self.overhead_us,
                self.token_us,
                self.stream_bytes_per_us,
                self.row_us,
                self.tile_flops_per_us[0],
                self.tile_flops_per_us[1],
                self.tile_rows[0],
                self.tile_rows[1],
                self.switch_rows,
                self.sharpness,
                self.fill_penalty,
                self.partial_penalty,
                self.overlap,
                self.cache_bytes,
                self.cache_bytes_per_us,
            ]
        )


OVERHEAD, TOKEN, STREAM, ROW, RATE, TILE, SWITCH = 0, 1, 2, 3, 4, 6, 8
SHARPNESS, FILL, PARTIAL, OVERLAP, CACHE, CACHE_RATE = 9, 10, 11, 12, 13, 14
"""Places in :meth:`MoeParams.array`; RATE and TILE are those of the small tile, the large one's stand after them."""

CACHE_SHARPNESS = 4.0
"""Past the cache's size the share of hits falls as (cache ÷ weights) to this power: replacement is not perfect."""


@helper()
def cache_hits(p: Array, weight_bytes: float) -> float:
    """Share of weights of this size in all that a cache still holds when they are used in turn."""
    return float(min(1.0, (p[CACHE] / weight_bytes) ** CACHE_SHARPNESS))


@helper()
def cached_stream_us(p: Array, nbytes: float, hits: float) -> float:
    """Time to bring one expert's weights in, a share `hits` of them from the cache."""
    return float(nbytes * ((1.0 - hits) / p[STREAM] + hits / p[CACHE_RATE]))


@helper()
def tile_us(p: Array, large: int, flops: float) -> float:
    """Compute of one tile, full or not; `large` is 1 for the large tile, else 0."""
    return float(p[TILE + large] * flops / p[RATE + large])


@helper()
def arrival_us(p: Array, rows: float, tile: float, stream: float) -> float:
    """Time until an expert's weights and the rows of its first tile are there."""
    first_rows = min(rows, tile)
    return float(stream * (1.0 + p[FILL] * max(0.0, 1.0 - first_rows / p[TILE])) + p[ROW] * first_rows)


@helper()
def expert_us(p: Array, rows: float, large: int, stream: float, compute: float) -> tuple[float, float, float]:
    """One expert with at least one row: by itself, the arrival of its weights, and its compute.

    `compute` is :func:`tile_us`.
    """
    tile = p[TILE + large]
    arrival = arrival_us(p, rows, tile, stream)
    tiles, more = np.ceil(rows / tile), 0.0
    if tiles > 1.0:
        empty = 0.0 if large else p[PARTIAL] * (1.0 - (rows - (tiles - 1.0) * tile) / tile)
        more = max(compute, p[ROW] * tile) * (tiles - 1.0 + empty)
    return soft_max(arrival, compute, p[SHARPNESS]) + more, arrival, compute + more


@helper()
def fixed_us(p: Array, tokens: float) -> float:
    """Fixed time of a layer and its tokens, without its experts."""
    return float(p[OVERHEAD] + p[TOKEN] * tokens)


@helper()
def overlapped_us(fixed: float, overlap: float, alone: float, together: float) -> float:
    """A layer from its experts' times each by itself, and with all streaming beside all compute."""
    return fixed + (1.0 - overlap) * alone + overlap * together


@njit()
def layer_us(p: Array, counts: Array, tokens: float, nbytes: float, flops: float, resident: bool) -> float:
    """One device's time for counts [expert] rows of the experts it holds; 0 without any.

    `tokens` is the size of the batch, `nbytes` one expert's weights, `flops` those of one row through one expert.
    """
    active, total = 0, 0.0
    for count in counts:
        if count > 0:
            active += 1
            total += count
    if active == 0:
        return 0.0
    large = 1 if total / len(counts) > p[SWITCH] else 0
    compute, stream = tile_us(p, large, flops), nbytes / p[STREAM]
    if resident and p[CACHE] > 0.0:
        stream = cached_stream_us(p, nbytes, cache_hits(p, nbytes * active))
    alone, arrive, work = 0.0, 0.0, 0.0
    for rows in counts:
        if rows > 0:
            mine, arrival, busy = expert_us(p, rows, large, stream, compute)
            alone += mine
            arrive += arrival
            work += busy
    together = soft_max(arrive, work, p[SHARPNESS])
    return float(overlapped_us(fixed_us(p, tokens), p[OVERLAP], alone, together))


@njit()
def slowest_us(p: Array, counts: Array, tokens: Array, nbytes: float, flops: float, resident: bool) -> float:
    """The slowest rank's experts in one layer; counts [rank, slot of the rank] rows, tokens [rank]."""
    slowest = 0.0
    for rank in range(len(counts)):
        slowest = max(slowest, layer_us(p, counts[rank], tokens[rank], nbytes, flops, resident))
    return slowest


@njit()
def expert_table(p: Array, nbytes: float, flops: float, out: Array) -> None:
    """Fill out [3, tile, rows] with :func:`expert_us`, the small tile and the large; no rows take no time."""
    stream = nbytes / p[STREAM]
    for large in range(2):
        compute = tile_us(p, large, flops)
        for rows in range(1, out.shape[2]):
            mine, arrival, busy = expert_us(p, float(rows), large, stream, compute)
            out[0, large, rows], out[1, large, rows], out[2, large, rows] = mine, arrival, busy
