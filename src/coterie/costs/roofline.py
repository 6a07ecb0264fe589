"""Fitted laws of time: a roofline in bytes and flops, a transfer over a link, and an interpolated measured curve.

Dense projections and attention follow the roofline, copies and collectives the transfer, routing the curve. Fits
minimise relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie._numba import helper
from coterie.errors import ConfigError, check

FOLDS = 5

Column = NDArray[np.float64]


@helper()
def soft_max(a: Any, b: Any, sharpness: float) -> Any:
    """Return the smooth maximum of two overlapping times; takes numbers in compiled loops, arrays in fits."""
    top = np.maximum(a, b)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness)


@helper()
def roofline_us(law: Column, nbytes: Any, flops: Any) -> Any:
    """Return microseconds of a kernel without its time per query; law [5] has the fields of :class:`RooflineLaw`."""
    return law[0] + soft_max(nbytes / law[1] + 1e-9, flops / law[2] + 1e-9, law[3])


@helper()
def gemm_work(tokens: Any, n: Any, k: Any) -> Any:
    """Return bytes and flops of a dense 16-bit projection [tokens, k] x [k, n]."""
    return 2.0 * (n * k + tokens * (n + k)), 2.0 * tokens * n * k


class Quality(msgspec.Struct, frozen=True):
    """Error on held-out cells, percent of the measured time."""

    mape_pct: float
    """Mean of the absolute errors."""
    worst_pct: float
    cells: int


class RooflineLaw(msgspec.Struct, frozen=True, omit_defaults=True):
    """overhead + time per query x queries + soft_max(bytes ÷ bandwidth, flops ÷ rate)."""

    overhead_us: float
    bytes_per_us: float
    flops_per_us: float
    sharpness: float
    held_out: Quality
    query_us: float = 0.0
    """Time per decoding request, of attention: each takes a thread block's start, however short its context."""

    def us(self, nbytes: float, flops: float) -> float:
        return float(roofline_us(as_fitted(self), np.array([nbytes]), np.array([flops]))[0])

    def numbers(self) -> Column:
        """Return [5] parameters for compiled loops."""
        return np.array([self.overhead_us, self.bytes_per_us, self.flops_per_us, self.sharpness, self.query_us])


@lru_cache(maxsize=256)
def as_fitted(law: RooflineLaw) -> Column:
    """Return [5] parameters, passed through logarithms as in the fit: predictions are then bit-identical to it.

    The array is read-only and cached, since laws are immutable.
    """
    numbers = np.append(np.exp([float(np.log(number)) for number in law.numbers()[:4]]), law.query_us)
    numbers.flags.writeable = False
    return np.asarray(numbers)


class TransferLaw(msgspec.Struct, frozen=True):
    """latency + bytes ÷ bandwidth, in one direction."""

    latency_us: float
    bytes_per_us: float
    held_out: Quality

    def us(self, nbytes: float) -> float:
        return self.latency_us + nbytes / self.bytes_per_us


class CurveLaw(msgspec.Struct, frozen=True):
    """Linear interpolation of measured points, extrapolated past the last one. For times without a formula."""

    at: tuple[float, ...]
    times_us: tuple[float, ...]
    held_out: Quality

    def __post_init__(self) -> None:
        check(
            len(self.at) >= 2
            and len(self.at) == len(self.times_us)
            and (not any((a >= b for a, b in pairwise(self.at)))),
            "a curve must hold two points at least, at numbers that rise",
            ValueError,
        )

    def us(self, x: float) -> float:
        return _interpolate(x, self.at, self.times_us)


def _interpolate(x: float, at: Sequence[float], us: Sequence[float]) -> float:
    if x > at[-1]:
        slope = (us[-1] - us[-2]) / (at[-1] - at[-2])
        return us[-1] + max(0.0, slope) * (x - at[-1])
    return float(np.interp(x, at, us))


def fit_curve(at: Sequence[float], us: Sequence[float]) -> CurveLaw:
    """Return a curve through the points; its error is that of predicting each inner point from its neighbours."""
    points = sorted(zip(at, us, strict=True))
    check(len(points) >= 3, f"{len(points)} cells are too few to fit; at least 3 are needed")
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    if not all(np.isfinite(y) and y > 0 for y in ys):
        raise ConfigError(f"time us={next(y for y in ys if not (np.isfinite(y) and y > 0))} must be positive")
    error = [
        100.0 * abs(_interpolate(xs[i], xs[:i] + xs[i + 1 :], ys[:i] + ys[i + 1 :]) / ys[i] - 1.0)
        for i in range(1, len(xs) - 1)
    ]
    return CurveLaw(tuple(xs), tuple(ys), Quality(round(float(np.mean(error)), 2), round(max(error), 2), len(error)))


def _roofline(logs: Column, nbytes: Column, flops: Column, queries: Column | None = None) -> Column:
    us = np.asarray(roofline_us(np.exp(logs[-4:]), nbytes, flops))
    return us if queries is None else us + np.exp(logs[0]) * queries


def _linear(logs: Column, nbytes: Column) -> Column:
    return np.asarray(np.exp(logs[0]) + nbytes / np.exp(logs[1]))


def _fit(
    law: Callable[..., Column], start: list[float], high: list[float], us: Column, *inputs: Column
) -> tuple[list[float], Quality]:
    from scipy.optimize import least_squares  # slow to import

    check(len(us) >= 3, f"{len(us)} cells are too few to fit; at least 3 are needed")
    if not (np.isfinite(us).all() and (us > 0).all()):
        raise ConfigError(f"time us={us[~(us > 0) | ~np.isfinite(us)][0]} must be positive")
    low = [-7.0] * (len(start) - 1) + [0.0]

    def solve(keep: NDArray[np.bool_]) -> Column:
        def residual(logs: Column) -> Column:
            return np.log(law(logs, *(column[keep] for column in inputs)) / us[keep])

        # Launch jitter makes outliers of a few small cells: soft_l1 bounds their influence.
        return np.asarray(
            least_squares(residual, np.log(start), bounds=(low, np.log(high)), loss="soft_l1", f_scale=0.1).x
        )

    fold = np.random.default_rng(0).permutation(len(us)) % FOLDS
    predicted = np.empty(len(us))
    for number in np.unique(fold):
        held = fold == number
        predicted[held] = law(solve(~held), *(column[held] for column in inputs))
    error = 100.0 * np.abs(predicted / us - 1.0)
    best = [float(f"{v:.6g}") for v in np.exp(solve(np.ones(len(us), bool)))]
    return best, Quality(round(float(error.mean()), 2), round(float(error.max()), 2), len(us))


def fit_roofline(nbytes: ArrayLike, flops: ArrayLike, us: ArrayLike, queries: ArrayLike | None = None) -> RooflineLaw:
    """Fit a roofline to measured bytes, flops and microseconds, with a time per query if `queries` are given."""
    size, work, time = (np.asarray(v, float) for v in (nbytes, flops, us))
    start = [max(1e-2, time.min() / 2), np.median(size / time), np.median(work / time) * 2, 2.0]
    first, high, more = [float(v) for v in start], [1e6, 1e9, 1e12, 30.0], []
    if queries is not None:
        first, high, more = [0.05, *first], [1e3, *high], [np.asarray(queries, float)]
    best, quality = _fit(_roofline, first, high, time, size, work, *more)
    overhead, bandwidth, rate, sharpness = best[-4:]
    return RooflineLaw(overhead, bandwidth, rate, sharpness, quality, best[0] if more else 0.0)


def fit_transfer(nbytes: ArrayLike, us: ArrayLike) -> TransferLaw:
    """Fit a transfer law to measured bytes and microseconds."""
    size, time = np.asarray(nbytes, float), np.asarray(us, float)
    start = [max(1e-2, float(time.min())), max(1.5, float(size.max() / time.max()))]
    best, quality = _fit(_linear, start, [1e7, 1e9], time, size)
    latency, bandwidth = best
    return TransferLaw(latency, bandwidth, quality)
