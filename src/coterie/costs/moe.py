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


class MoeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted to one kernel, shape and weight dtype. Times in microseconds, sizes in bytes."""

    overhead_us: float
    """Per layer, whatever the tokens: launches and the slowest start."""
    token_us: float
    """Per token of the batch."""
    stream_bytes_per_us: float
    row_us: float
    """Per token-and-expert pair: activations read and written."""
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
        """As plain numbers, in the order the loops below take them."""
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


CACHE_SHARPNESS = 4.0
"""Past the cache's size the share of hits falls as (cache ÷ weights) to this power: replacement is not perfect."""


@helper()
def _soft_max(a: float, b: float, sharpness: float) -> float:
    top = max(a, b)
    return float(top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness))


@helper()
def _stream_us(p: NDArray[np.float64], nbytes: float, active: int, resident: bool) -> float:
    """Time to bring one expert's weights in, when `active` experts of this size are used in turn."""
    if not resident or p[13] <= 0.0:
        return float(nbytes / p[2])
    hit = min(1.0, (p[13] / (nbytes * active)) ** CACHE_SHARPNESS)
    return float(nbytes * ((1.0 - hit) / p[2] + hit / p[14]))


@njit()
def layer_us(
    p: NDArray[np.float64], counts: NDArray[np.float64], tokens: float, nbytes: float, flops: float, resident: bool
) -> float:
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
    large = total / len(counts) > p[8]
    tile = p[7] if large else p[6]
    compute = tile * flops / (p[5] if large else p[4])
    stream = _stream_us(p, nbytes, active, resident)
    alone, arrive, work = 0.0, 0.0, 0.0
    for rows in counts:
        if rows <= 0:
            continue
        first_rows = min(rows, tile)
        weights = stream * (1.0 + p[10] * max(0.0, 1.0 - first_rows / p[6])) + p[3] * first_rows
        tiles, more = np.ceil(rows / tile), 0.0
        if tiles > 1.0:
            empty = 0.0 if large else p[11] * (1.0 - (rows - (tiles - 1.0) * tile) / tile)
            more = max(compute, p[3] * tile) * (tiles - 1.0 + empty)
        alone += _soft_max(weights, compute, p[9]) + more
        arrive += weights
        work += compute + more
    return float(p[0] + p[1] * tokens + (1.0 - p[12]) * alone + p[12] * _soft_max(arrive, work, p[9]))
