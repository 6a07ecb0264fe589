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

from typing import Any

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

    def array(self, nbytes: float = 0.0, flops: float = 0.0, resident: bool = False) -> NDArray[np.float64]:
        """[18] values in the order that the loops below take.

        `nbytes` are one expert's weights, `flops` those of one row through one expert, `resident` whether weights that
        fit in the cache stay there.
        """
        return np.array(
            [
                self.overhead_us,
                self.token_us,
                self.stream_bytes_per_us,
                self.row_us,
                *self.tile_flops_per_us,
                *self.tile_rows,
                self.switch_rows,
                self.sharpness,
                self.fill_penalty,
                self.partial_penalty,
                self.overlap,
                self.cache_bytes,
                self.cache_bytes_per_us,
                nbytes,
                flops,
                float(resident),
            ]
        )


OVERHEAD, TOKEN, STREAM, ROW, RATE, TILE, SWITCH = 0, 1, 2, 3, 4, 6, 8
SHARPNESS, FILL, PARTIAL, OVERLAP, CACHE, CACHE_RATE, NBYTES, FLOPS, RESIDENT = range(9, 18)
"""Indices in :meth:`MoeParams.array`; RATE and TILE are the small tile's, the large one's follow them."""

CACHE_SHARPNESS = 4.0
"""Past the cache's size the share of hits falls as (cache ÷ weights) to this power: replacement is not perfect."""

BLEND_PARTS = 1 << 13
"""Straight lines that stand for ``(1 + x ** s) ** (1 / s)`` on 0 … 1: off by less than 1e-7 of a layer's time."""


@helper()
def stream_us(p: Array, active: float) -> float:
    """Time to bring in one expert's weights; resident weights of `active` experts come from the cache in part."""
    if p[RESIDENT] == 0.0 or p[CACHE] == 0.0:
        return float(p[NBYTES] / p[STREAM])
    hits = min(1.0, (p[CACHE] / (p[NBYTES] * active)) ** CACHE_SHARPNESS)
    return float(p[NBYTES] * ((1.0 - hits) / p[STREAM] + hits / p[CACHE_RATE]))


@helper()
def tile_us(p: Array, large: int) -> float:
    """Compute of one tile, full or not; `large` is 1 for the large tile, else 0."""
    return float(p[TILE + large] * p[FLOPS] / p[RATE + large])


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


@helper()
def blended(a: float, b: float, blend: Array) -> float:
    """:func:`soft_max` by the table of :func:`blend_table`, since powers would take most of a simulated step."""
    top, low = max(a, b), min(a, b)
    at = low / top * BLEND_PARTS
    part = min(np.uint64(at), np.uint64(BLEND_PARTS - 1))
    share = at - part
    return float(top * (blend[part] + share * (blend[part + np.uint64(1)] - blend[part])))


def blend_table(sharpness: float) -> Array:
    """[part + 1] by how much the larger of two times grows by the other, over their ratio."""
    ratio = np.linspace(0.0, 1.0, BLEND_PARTS + 1)
    return np.asarray((1.0 + ratio**sharpness) ** (1.0 / sharpness))


@njit()
def expert_table(p: Array, out: Array) -> None:
    """Fill out [3, tile, rows] with :func:`expert_us`, the small tile and the large; no rows take no time."""
    stream = stream_us(p, 1.0)
    for large in range(2):
        compute = tile_us(p, large)
        for rows in range(1, out.shape[2]):
            mine, arrival, busy = expert_us(p, float(rows), large, stream, compute)
            out[0, large, rows], out[1, large, rows], out[2, large, rows] = mine, arrival, busy


@helper()
def rank_us(p: Array, table: Array, blend: Array, rows: Any, tokens: float) -> float:
    """One device's experts of one layer, from the rows of its slots; 0 without any. `tokens` is the size of its batch.

    With the tables of :func:`expert_table` and :func:`blend_table` times are looked up; with empty ones, computed.
    """
    active, total = 0, 0
    for count in rows:
        active += count > 0
        total += count
    if active == 0:
        return 0.0
    large = 1 if total / len(rows) > p[SWITCH] else 0
    alone, arrive, work = 0.0, 0.0, 0.0
    if len(blend) > 0:
        for count in rows:
            at = np.int64(count)
            alone += table[0, large, at]
            arrive += table[1, large, at]
            work += table[2, large, at]
        together = blended(arrive, work, blend)
    else:
        compute, stream = tile_us(p, large), stream_us(p, float(active))
        for count in rows:
            if count > 0:
                mine, arrival, busy = expert_us(p, float(count), large, stream, compute)
                alone += mine
                arrive += arrival
                work += busy
        together = soft_max(arrive, work, p[SHARPNESS])
    return float(overlapped_us(fixed_us(p, tokens), p[OVERLAP], alone, together))


@njit()
def layer_us(p: Array, rows: Array, tokens: float) -> float:
    """:func:`rank_us` for Python, computed, of rows that need not be whole."""
    return rank_us(p, np.empty((3, 2, 0)), np.empty(0), rows, tokens)
