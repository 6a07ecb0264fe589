"""The experts of one MoE layer on one device: time from tokens per expert.

Each active expert's weights are streamed once and its tokens are computed in tiles of a few rows, so an expert costs

    first tile:   soft_max(stream + rows, compute)        the weights arrive while the tile is computed
    further tile: max(rows, compute)                      the weights are in the cache by now

with ``stream`` = bytes ÷ bandwidth, ``compute`` = a *whole* tile's flops ÷ rate (a partly filled tile costs as much as
a full one), ``rows`` = the time to read and write the tile's activations. A layer takes the sum over its active experts
plus a fixed overhead. A kernel that prefetches also hides an `overlap` share of the streaming behind other experts'
compute. In decode the first term dominates: distinct experts decide, tokens hardly matter. In prefill the second does.

Kernels choose one of up to five tile sizes by the average rows per expert. Two more effects were large enough on an
H200 to need a term: streaming is slower when the first small tile is barely filled, and a partly filled last small tile
costs extra. Wrong for kernels that split one expert over several passes, and on a device where other work shares the
memory bus.

Some kernels run in *waves*: every tile is cut into columns, as many columns as the device has multiprocessors run at a
time, and the time is a staircase in the number of waves (:class:`Waves`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.roofline import soft_max
from coterie.errors import check

Array = NDArray[np.float64]


TILES = 5
"""Largest number of tile sizes of one kernel."""


class Waves(msgspec.Struct, frozen=True):
    """A kernel of two products that runs in waves; a product takes ⌈tiles x columns ÷ places⌉ of them."""

    wave_us: tuple[float, ...]
    """Time of a wave, by tile size."""
    columns: tuple[int, int]
    """Columns of a tile in each product: gate and up, down."""
    places: int
    """Columns that run at the same time: the multiprocessors of the device."""
    least: int = 1
    """Fewest waves of the first product."""


class MoeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters fitted to one kernel, shape and weight dtype. Times in microseconds, sizes in bytes."""

    overhead_us: float
    """Fixed time per layer: launches and the slowest start."""
    token_us: float
    """Time per token of the batch."""
    stream_bytes_per_us: float
    row_us: float
    """Time per token-and-expert pair: activations read and written."""
    tile_flops_per_us: tuple[float, ...]
    """Compute rate by tile size, from the smallest tile on."""
    tile_rows: tuple[int, ...]
    switch_rows: float | tuple[float, ...]
    """Average rows per expert of the layer above which the kernel uses the second tile size, the third, …"""
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
    waves: Waves | None = None
    """Set for kernels that run in waves: then only the overhead, the time per token and the tiles' rows count too."""

    def __post_init__(self) -> None:
        sizes, waves = len(self.tile_rows), self.waves.wave_us if self.waves else self.tile_rows
        switches = np.size(self.switch_rows)
        check(
            1 <= sizes <= TILES and {len(self.tile_flops_per_us), len(waves)} == {sizes} and switches >= sizes - 1,
            f"tile_rows={self.tile_rows} must be 1 to {TILES} sizes, with rates and switches for each",
            ValueError,
        )

    def array(self, nbytes: float = 0.0, flops: float = 0.0, resident: bool = False) -> NDArray[np.float64]:
        """Return [31] values in the order of the indices below, for compiled loops.

        `nbytes` is the size of one expert's weights, `flops` the work of one row through one expert, `resident` whether
        weights that fit in the cache stay there.
        """
        waves = self.waves or Waves((), (0, 0), 1)
        return np.array(
            [
                self.overhead_us,
                self.token_us,
                self.stream_bytes_per_us,
                self.row_us,
                self.sharpness,
                self.fill_penalty,
                self.partial_penalty,
                1.0 if self.waves else self.overlap,
                self.cache_bytes,
                self.cache_bytes_per_us,
                nbytes,
                flops,
                float(resident),
                *waves.columns,
                waves.places,
                waves.least,
                *tile_values(
                    waves.wave_us or self.tile_flops_per_us, self.tile_rows, tuple(np.atleast_1d(self.switch_rows))
                ),
            ]
        )


def tile_values(rates: tuple[float, ...], rows: tuple[int, ...], switches: tuple[float, ...]) -> tuple[float, ...]:
    """Return [14] values: rates and rows of TILES tile sizes, the last one repeated, and where they change."""
    more = TILES - len(rows)
    return *rates, *rates[-1:] * more, *rows, *rows[-1:] * more, *switches[: len(rows) - 1], *(np.inf,) * more


OVERHEAD, TOKEN, STREAM, ROW, SHARPNESS, FILL, PARTIAL, OVERLAP, CACHE, CACHE_RATE, NBYTES, FLOPS, RESIDENT = range(13)
COLUMNS, PLACES, LEAST, RATE, TILE, SWITCH = 13, 15, 16, 17, 17 + TILES, 17 + 2 * TILES
"""Indices in :meth:`MoeParams.array`. COLUMNS has two values, 0 unless the kernel runs in waves. RATE, flops per
microsecond or microseconds of a wave, and TILE have a value for each tile size, SWITCH one less."""

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
def tile_size(p: Array, mean_rows: float) -> int:
    """Return which tile size the kernel uses, by the mean rows per expert: 0 is the smallest."""
    size = 0
    for switch in p[SWITCH:]:
        size += mean_rows > switch
    return size


@helper()
def tile_us(p: Array, size: int) -> float:
    """Return the compute time of one tile, full or not; for kernels that run in waves, 1 to count tiles."""
    return 1.0 if p[COLUMNS] > 0.0 else float(p[TILE + size] * p[FLOPS] / p[RATE + size])


@helper()
def waves_us(p: Array, size: int, tiles: float) -> float:
    """Return the time of `tiles` tiles in a kernel that runs in waves."""
    first = max(p[LEAST], np.ceil(tiles * p[COLUMNS] / p[PLACES]))
    return float(p[RATE + size] * (first + np.ceil(tiles * p[COLUMNS + 1] / p[PLACES])))


@helper()
def arrival_us(p: Array, rows: float, tile: float, stream: float) -> float:
    """Return the time until an expert's weights and the rows of its first tile are loaded."""
    first_rows = min(rows, tile)
    return float(stream * (1.0 + p[FILL] * max(0.0, 1.0 - first_rows / p[TILE])) + p[ROW] * first_rows)


@helper()
def expert_us(p: Array, rows: float, size: int, stream: float, compute: float) -> tuple[float, float, float]:
    """Return one active expert's whole time, the time to load its weights and first rows, and its compute time.

    `stream` is :func:`stream_us`, `compute` is :func:`tile_us`.
    """
    tile = p[TILE + size]
    arrival = arrival_us(p, rows, tile, stream)
    tiles, more = np.ceil(rows / tile), 0.0
    if tiles > 1.0:
        empty = 0.0 if size else p[PARTIAL] * (1.0 - (rows - (tiles - 1.0) * tile) / tile)
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
def blended(p: Array, size: int, a: float, b: float, blend: Array) -> float:
    """Return the time if all streaming, `a`, overlaps all compute, `b`: :func:`waves_us` of `b` tiles, or
    :func:`soft_max` from :func:`blend_table`, because computing powers would take most of a simulated step.
    """
    if p[COLUMNS] > 0.0:
        return waves_us(p, size, b)
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
    """Fill out [3, tile size, rows] with :func:`expert_us`; 0 rows take no time."""
    stream = stream_us(p, 1.0)
    for size in range(out.shape[1]):
        compute = tile_us(p, size)
        for rows in range(1, out.shape[2]):
            mine, arrival, busy = expert_us(p, float(rows), size, stream, compute)
            out[0, size, rows], out[1, size, rows], out[2, size, rows] = mine, arrival, busy


@helper()
def rank_us(
    p: Array, table: Array, blend: Array, rows: Any, tokens: float, size: int, touched: float, share: float = 1.0
) -> float:
    """Return the time of one device's experts in one layer from `rows` [slot], 0 if it has none.

    `tokens` is the size of the device's batch, `size` the kernel's tile size (:func:`tile_size`), `touched` the share
    of the other slots to which padding rows add a row, `share` the device's part of the experts' work.
    Times are looked up in the tables of :func:`expert_table` and :func:`blend_table`, or computed if these are empty.
    """
    active = 0
    for count in rows:
        active += count > 0
    more = touched * (len(rows) - active)
    if active + more == 0.0:
        return 0.0
    alone, arrive, work = 0.0, 0.0, 0.0
    if len(blend) > 0:
        if more > 0.0:
            alone, arrive, work = more * table[0, size, 1], more * table[1, size, 1], more * table[2, size, 1]
        for count in rows:
            at = np.int64(count)
            alone += table[0, size, at]
            arrive += table[1, size, at]
            work += table[2, size, at]
        together = blended(p, size, share * arrive, share * work, blend)
    else:
        compute, stream = tile_us(p, size), stream_us(p, active + more)
        if more > 0.0:
            mine, arrival, busy = expert_us(p, 1.0, size, stream, compute)
            alone, arrive, work = more * mine, more * arrival, more * busy
        for count in rows:
            if count > 0:
                mine, arrival, busy = expert_us(p, float(count), size, stream, compute)
                alone += mine
                arrive += arrival
                work += busy
        arrive, work = share * arrive, share * work
        together = waves_us(p, size, work) if p[COLUMNS] > 0.0 else soft_max(arrive, work, p[SHARPNESS])
    return float(overlapped_us(fixed_us(p, tokens), p[OVERLAP], share * alone, together))


@njit()
def layer_us(p: Array, rows: Array, tokens: float) -> float:
    """Return :func:`rank_us` computed without tables, so that rows may be fractions; callable from Python."""
    return rank_us(p, np.empty((3, TILES, 0)), np.empty(0), rows, tokens, tile_size(p, rows.sum() / len(rows)), 0.0)
