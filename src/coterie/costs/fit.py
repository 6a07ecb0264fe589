"""Fit cost models to measured cells, and report the error of the fit on held-out cells.

Errors are relative, so a 50 µs decode cell weighs as much as a 10 ms prefill cell. The quality of a fit is always the
error on held-out cells: the cells are split into folds, and each fold is predicted by a fit to the others. Tile sizes
are the exception: they are properties of the kernel, not of a cell, and are chosen once per table from all cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.cells import MoeCell, expert_tokens
from coterie.costs.experts import (
    OVERLAP,
    RESIDENT,
    SHARPNESS,
    MoeParams,
    expert_us,
    fixed_us,
    overlapped_us,
    stream_us,
    tile_size,
    tile_us,
    tile_values,
)
from coterie.costs.roofline import Quality, soft_max
from coterie.errors import ConfigError, check

FOLDS = 5
NEVER = 1e12
TILINGS = (
    *(((small, large), switch) for small, large in ((16, 64), (16, 128), (32, 128)) for switch in (1.0, 2.0, 4.5, 9.0)),
    *(
        ((small, large), switch)
        for small, large in ((64, 128), (64, 256), (128, 256), (128, 512))
        for switch in (64.0, 128.0, 160.0, 200.0, 255.0)
    ),
    *(((rows, rows), NEVER) for rows in (16, 64, 128)),
)
"""Candidate tilings: rows of the small and the large tile, and the average rows per expert above which kernels switch.
First those of Triton's fused MoE kernels, then those of CUTLASS's grouped GEMMs, then kernels with one tile size."""
MIN_CELLS = 8
"""Cells needed on either side of `switch`: without cells, the rate of that tile size would be undetermined."""

_START = [25.0, 0.01, 3e6, 0.005, 5e8, 6e8, 4.0, 0.3, 0.2, 0.3]
_LOW = [0.01, 1e-6, 1e3, 1e-7, 1e4, 1e4, 1.0, 1e-4, 1e-4, 1e-3]
_HIGH = [1e5, 1e3, 2e7, 1e3, 1e10, 1e10, 30.0, 1.5, 2.0, 1.0]


class FitError(Quality, frozen=True):
    """Error of a fit on held-out cells, with the cell of the largest error in words."""

    worst_cell: str


class MoeFit(msgspec.Struct, frozen=True):
    """Parameters fitted to all cells, with the cross-validation error of fits to some of them."""

    params: MoeParams
    held_out: FitError


class _Table(NamedTuple):
    """Cells as flat arrays.

    `cell`, `rows` and `experts` have one entry per distinct token count within a cell: the index of the cell, the token
    count, and the number of experts that have it. The other arrays are [cell].
    """

    cell: NDArray[np.int64]
    rows: NDArray[np.float64]
    experts: NDArray[np.float64]
    tokens: NDArray[np.float64]
    mean_rows: NDArray[np.float64]
    active: NDArray[np.float64]
    warm: NDArray[np.bool_]
    us: NDArray[np.float64]
    nbytes: float
    flops: float
    cache_limit: float


def _table(
    cells: Sequence[MoeCell], top_k: int, num_experts: int, nbytes: float, flops: float, cache_limit: float
) -> _Table:
    cell, rows, experts = [], [], []
    for index, of in enumerate(cells):
        values, repeats = np.unique(expert_tokens(of.tokens, top_k, of.active, of.zipf), return_counts=True)
        cell += [index] * len(values)
        rows += values.tolist()
        experts += repeats.tolist()
    tokens = np.array([c.tokens for c in cells], float)
    return _Table(
        cell=np.array(cell),
        rows=np.array(rows, float),
        experts=np.array(experts, float),
        tokens=tokens,
        mean_rows=tokens * top_k / num_experts,
        active=np.array([c.active for c in cells], float),
        warm=np.array([c.warm for c in cells]),
        us=np.array([c.us for c in cells]),
        nbytes=nbytes,
        flops=flops,
        cache_limit=cache_limit,
    )


def _take(table: _Table, keep: NDArray[np.bool_]) -> _Table:
    entries = keep[table.cell]
    return table._replace(
        cell=(np.cumsum(keep) - 1)[table.cell[entries]],
        rows=table.rows[entries],
        experts=table.experts[entries],
        tokens=table.tokens[keep],
        mean_rows=table.mean_rows[keep],
        active=table.active[keep],
        warm=table.warm[keep],
        us=table.us[keep],
    )


class _Shape(NamedTuple):
    """Discrete parameters, which are searched, not fitted by least squares."""

    tiles: tuple[int, int]
    switch: float
    cached: bool


def _predict(x: NDArray[np.float64], t: _Table, shape: _Shape) -> NDArray[np.float64]:
    """Return [cell] predicted microseconds."""
    out = np.zeros((3, len(t.us)))
    cache = x[10:] if shape.cached else (0.0, 1.0)
    tiles = tile_values((x[4], x[5]), shape.tiles, (shape.switch,))
    p = np.array([*x[:4], *x[6:10], *cache, t.nbytes, t.flops, 0.0, 0.0, 0.0, 1.0, 1.0, *tiles])
    _predict_us(p, t.cell, t.rows, t.experts, t.tokens, t.mean_rows, t.active, t.warm, out)
    return np.asarray(out[0])


@njit()
def _predict_us(
    p: NDArray[np.float64],
    cell: NDArray[np.int64],
    rows: NDArray[np.float64],
    experts: NDArray[np.float64],
    tokens: NDArray[np.float64],
    mean_rows: NDArray[np.float64],
    active: NDArray[np.float64],
    warm: NDArray[np.bool_],
    out: NDArray[np.float64],
) -> None:
    """Fill out[0] [cell] with `rank_us`. `out` [3, cell] must be all 0; its other rows are working memory."""
    for entry in range(len(cell)):
        at = cell[entry]
        size = tile_size(p, mean_rows[at])
        p[RESIDENT] = warm[at]
        alone, arrival, busy = expert_us(p, rows[entry], size, stream_us(p, active[at]), tile_us(p, size))
        out[0, at] += experts[entry] * alone
        out[1, at] += experts[entry] * arrival
        out[2, at] += experts[entry] * busy
    for at in range(len(tokens)):
        together = soft_max(out[1, at], out[2, at], p[SHARPNESS])
        out[0, at] = overlapped_us(fixed_us(p, tokens[at]), p[OVERLAP], out[0, at], together)


class _Solution(NamedTuple):
    cost: float
    x: NDArray[np.float64]
    shape: _Shape


def _solve(table: _Table, shape: _Shape, steps: int, cache: float) -> _Solution:
    """Fit the continuous parameters by least squares on their logarithms: all are positive and span decades.

    `cache` is the initial guess of the cache size, as a share of its upper limit.
    """
    from scipy.optimize import least_squares  # slow to import

    low, high, first = list(_LOW), list(_HIGH), list(_START)
    # Initial guess of the right order on any device: the largest cell is compute-bound, the median cell is
    # streaming-bound.
    busiest = int(np.argmax(table.tokens))
    rows = np.bincount(table.cell, table.rows * table.experts)[busiest]
    first[4] = first[5] = float(np.clip(rows * table.flops / table.us[busiest], 2 * low[4], high[4] / 2))
    first[2] = float(np.clip(np.median(table.active * table.nbytes / table.us), 2 * low[2], high[2] / 2))
    first[0] = float(np.clip(table.us.min() / 2, 2 * low[0], high[0] / 2))
    if shape.cached:
        limit = min(float((table.active * table.nbytes).max()) / 2, table.cache_limit)
        low, high, first = [*low, 1e4, low[2]], [*high, limit, 10 * high[2]], [*first, limit * cache, 4 * first[2]]
    begin = np.log(first)

    def residual(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(_predict(np.exp(logs), table, shape) / table.us)

    bounds = (np.log(low), np.log(high))
    best = least_squares(residual, np.clip(begin, bounds[0] + 1e-9, bounds[1] - 1e-9), bounds=bounds, max_nfev=steps)
    return _Solution(float(best.cost), np.exp(best.x), shape)


# The fit has no gradient in the cache size while all cells fit in the cache, or none does: try two starting points,
# as shares of the limit.
_CACHE_GUESSES = (0.45, 0.75)


def _finish(table: _Table, shape: _Shape, steps: int = 200) -> _Solution:
    guesses = _CACHE_GUESSES if shape.cached else _CACHE_GUESSES[:1]
    return min((_solve(table, shape, steps, guess) for guess in guesses), key=lambda s: s.cost)


def _shown(table: _Table, switch: float) -> bool:
    past = int((table.mean_rows > switch).sum())
    return min(past, len(table.us) - past) >= MIN_CELLS


def _search(table: _Table) -> _Solution:
    """Fit every tiling for 15 steps, then fit the best 6 fully and return the best."""
    cached = bool(table.warm.any())
    shapes = [_Shape(tiles, switch, cached) for tiles, switch in TILINGS if switch == NEVER or _shown(table, switch)]
    rough = sorted((_finish(table, shape, steps=15) for shape in shapes), key=lambda s: s.cost)
    return min((_finish(table, s.shape) for s in rough[:6]), key=lambda s: s.cost)


def fit_moe(
    cells: Sequence[MoeCell],
    top_k: int,
    num_experts: int,
    nbytes: float,
    flops: float,
    cache_limit: float = float("inf"),
) -> MoeFit:
    """Fit one shape's cells. `nbytes` is the size of one expert's weights, `flops` the work of one row in one expert.

    `cache_limit` is the size of the device's last-level cache in bytes, infinite if unknown.
    """
    check(
        len(cells) >= 2 * FOLDS,
        f"{len(cells)} MoE cells are too few to fit and hold out; at least {2 * FOLDS} are needed",
    )
    bad = [c for c in cells if not (np.isfinite(c.us) and c.us > 0)]
    if bad:
        raise ConfigError(f"us={bad[0].us} of cell tokens={bad[0].tokens}, active={bad[0].active} must be positive")
    table = _table(cells, top_k, num_experts, nbytes, flops, cache_limit)
    best = _search(table)
    predicted = np.empty(len(cells))
    fold = np.random.default_rng(0).permutation(len(cells)) % FOLDS
    for number in range(FOLDS):
        held = fold == number
        part = _finish(_take(table, ~held), best.shape)
        predicted[held] = _predict(part.x, _take(table, held), part.shape)
    return MoeFit(_params(best, table), fit_error(predicted, cells))


def fit_error(predicted: NDArray[np.float64], cells: Sequence[MoeCell]) -> FitError:
    error = 100.0 * np.abs(predicted / np.array([c.us for c in cells]) - 1.0)
    worst = int(error.argmax())
    cell = cells[worst]
    skew = f", zipf {cell.zipf:g}" if cell.zipf else ""
    return FitError(
        round(float(error.mean()), 2),
        round(float(error[worst]), 2),
        len(cells),
        f"{cell.tokens} tokens, {cell.active} active{skew}: {cell.us:.0f} us, predicted {predicted[worst]:.0f}",
    )


def _params(solution: _Solution, table: _Table) -> MoeParams:
    x = [float(f"{value:.6g}") for value in solution.x]
    # A cache that is slower than memory, or that no warm cell fits in, is an artefact of the fit.
    fits = bool((table.warm & (table.active * table.nbytes <= x[10])).any()) if solution.shape.cached else False
    cache_bytes, cache_rate = (x[10], x[11]) if fits and x[11] > x[2] else (0.0, 1.0)
    return MoeParams(
        overhead_us=x[0],
        token_us=x[1],
        stream_bytes_per_us=x[2],
        row_us=x[3],
        tile_flops_per_us=(x[4], x[5] if solution.shape.switch < NEVER else x[4]),
        sharpness=x[6],
        fill_penalty=x[7],
        partial_penalty=x[8],
        overlap=x[9],
        tile_rows=solution.shape.tiles,
        switch_rows=solution.shape.switch,
        cache_bytes=cache_bytes,
        cache_bytes_per_us=cache_rate,
    )
