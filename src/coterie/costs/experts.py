"""The experts of one MoE layer on one device: time from tokens per expert.

Each active expert's weights are streamed once and its tokens are computed in tiles of a few rows, so an expert costs

    first tile:   soft_max(stream + rows, compute)        the weights arrive while the tile is computed
    further tile: max(rows, compute)                      the weights are in the cache by now

with ``stream`` = bytes ÷ bandwidth, ``compute`` = a *whole* tile's flops ÷ rate (a partly filled tile costs as much as
a full one), ``rows`` = the time to read and write the tile's activations. A layer takes the sum over its active experts
plus a fixed overhead. A kernel that prefetches also hides an `overlap` share of the streaming behind other experts'
compute. In decode the first term dominates: distinct experts decide, tokens hardly matter. In prefill the second does.

Kernels choose between a small and a large tile by the average rows per expert; both are fitted. Two more effects were
large enough on an H200 to need a term: streaming is slower when the first small tile is barely filled, and a partly
filled last small tile costs extra. Wrong for kernels that split one expert over several passes, and on a device where
other work shares the memory bus.
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
    """Parameters fitted to one kernel, shape and weight dtype. Times in microseconds, sizes in bytes."""

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
    """Average rows per expert of the layer above which the kernel uses the large tile."""
    sharpness: float
    """Exponent of the smooth maximum of stream and compute: 1 adds the two, 30 is nearly a plain maximum."""
    fill_penalty: float
    """Relative slowdown of streaming when the first tile is almost empty, against a full one."""
    partial_penalty: float
    """Extra cost of an almost empty last tile, as a share of a tile's time."""
    overlap: float = 0.0
    """Share of the streaming that hides behind other experts' compute, not only behind an expert's own first tile."""
    cache_bytes: float = 0.0
    """Size of weights that stay in the cache between calls; used only if `cache_resident` is on."""
    cache_bytes_per_us: float = 1.0

    def array(self, nbytes: float = 0.0, flops: float = 0.0, resident: bool = False) -> NDArray[np.float64]:
        """Return [18] values in the order of the indices below, for compiled loops.

        `nbytes` is the size of one expert's weights, `flops` the work of one row through one expert, `resident` whether
        weights that fit in the cache stay there.
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
"""Indices in :meth:`MoeParams.array`; RATE and TILE are the small tile's, RATE + 1 and TILE + 1 the large tile's."""

CACHE_SHARPNESS = 4.0
"""Exponent of the hit rate (cache ÷ weights) ** 4 for weights larger than the cache: replacement is not perfect."""

BLEND_PARTS = 1 << 13
"""Linear pieces that approximate ``(1 + x ** s) ** (1 / s)`` on 0 … 1; the error is below 1e-7 of a layer's time."""


@helper()
def stream_us(p: Array, active: float) -> float:
    """Return the time to stream one expert's weights; with residency, a share of them is read from the cache."""
    if p[RESIDENT] == 0.0 or p[CACHE] == 0.0:
        return float(p[NBYTES] / p[STREAM])
    hits = min(1.0, (p[CACHE] / (p[NBYTES] * active)) ** CACHE_SHARPNESS)
    return float(p[NBYTES] * ((1.0 - hits) / p[STREAM] + hits / p[CACHE_RATE]))


@helper()
def tile_us(p: Array, large: int) -> float:
    """Return the compute time of one tile, full or not; `large` is 1 for the large tile, else 0."""
    return float(p[TILE + large] * p[FLOPS] / p[RATE + large])


@helper()
def arrival_us(p: Array, rows: float, tile: float, stream: float) -> float:
    """Return the time until an expert's weights and the rows of its first tile are loaded."""
    first_rows = min(rows, tile)
    return float(stream * (1.0 + p[FILL] * max(0.0, 1.0 - first_rows / p[TILE])) + p[ROW] * first_rows)


@helper()
def expert_us(p: Array, rows: float, large: int, stream: float, compute: float) -> tuple[float, float, float]:
    """Return one active expert's whole time, the time to load its weights and first rows, and its compute time.

    `stream` is :func:`stream_us`, `compute` is :func:`tile_us`.
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
    """Return the time of a layer that does not depend on its experts: overhead plus time per token."""
    return float(p[OVERHEAD] + p[TOKEN] * tokens)


@helper()
def overlapped_us(fixed: float, overlap: float, alone: float, together: float) -> float:
    """Return the time of a layer, of which `overlap` is the share that a kernel prefetches.

    `alone` is the sum of the experts' times, `together` the time if all streaming overlaps all compute.
    """
    return fixed + (1.0 - overlap) * alone + overlap * together


@helper()
def blended(a: float, b: float, blend: Array) -> float:
    """Return :func:`soft_max` from :func:`blend_table`: computing powers would take most of a simulated step."""
    top, low = max(a, b), min(a, b)
    at = low / top * BLEND_PARTS
    part = min(np.uint64(at), np.uint64(BLEND_PARTS - 1))
    share = at - part
    return float(top * (blend[part] + share * (blend[part + np.uint64(1)] - blend[part])))


def blend_table(sharpness: float) -> Array:
    """Return [part + 1] the smooth maximum of two times ÷ the larger of them, by the ratio smaller ÷ larger."""
    ratio = np.linspace(0.0, 1.0, BLEND_PARTS + 1)
    return np.asarray((1.0 + ratio**sharpness) ** (1.0 / sharpness))


@njit()
def expert_table(p: Array, out: Array) -> None:
    """Fill out [3, tile, rows] with :func:`expert_us` for the small and the large tile; 0 rows take no time."""
    stream = stream_us(p, 1.0)
    for large in range(2):
        compute = tile_us(p, large)
        for rows in range(1, out.shape[2]):
            mine, arrival, busy = expert_us(p, float(rows), large, stream, compute)
            out[0, large, rows], out[1, large, rows], out[2, large, rows] = mine, arrival, busy


@helper()
def rank_us(p: Array, table: Array, blend: Array, rows: Any, tokens: float) -> float:
    """Return the time of one device's experts in one layer from `rows` [slot], 0 if it has none.

    `tokens` is the size of the device's batch.
    Times are looked up in the tables of :func:`expert_table` and :func:`blend_table`, or computed if these are empty.
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
    """Return :func:`rank_us` computed without tables, so that rows may be fractions; callable from Python."""
    return rank_us(p, np.empty((3, 2, 0)), np.empty(0), rows, tokens)
