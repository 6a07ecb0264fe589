"""Measure how fast a load drifts: the share of its initial skew that is left, as a function of lag.

The skew x(w) of window w is its load share per [layer, expert] minus the even share. The skew left at a lag is the mean
of x(s) · x(s + lag) over the first windows s, divided by the mean of x(s) · x(s). The product x(s) · x(s) is taken
between two random halves of the window's requests: the product of a window with itself contains sampling noise, which
raises it and looks like drift. Unlike a cosine, this projection falls as 2^(-lag / half-life) both for loads that
wander randomly and for loads that move from one state to another. Also unlike a cosine, it can exceed 1: the load is
then skewed towards the same experts, and more than at the start. All lags use the same start windows, so that lags
are comparable.

The result describes the recorded time only: a daily cycle recorded for less than a day looks like drift without return.
Without arrival times drift is not measured, because the order of a file may be by topic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.inspect.loads import numbers
from coterie.placement.triggers.drift import fit_decay

MIN_WINDOWS = 8
MIN_DROP = 0.02
"""Smallest loss of skew that counts as drift, as a share of the initial skew."""
SIGNIFICANCE = 0.01
PERMUTATIONS = 499


@dataclass(frozen=True, slots=True)
class Drift:
    half_life: float | None
    """Lag after which half of the total loss of skew has happened, in `unit`; None if no drift was found."""
    reason: str | None
    """Reason why `half_life` is None; None if there is a half-life."""
    floor: float | None
    """Share of the skew that remains at long lags: skew_left = floor + (1 - floor) · 2^(-lag / half_life)."""
    unit: str
    """Unit of lags: "s" or "windows"."""
    window: float | None
    """Length of a window, in `unit`."""
    p_value: float | None
    """Share of random orders of the windows that drift at least as much as the recorded order."""
    lag: list[float] = field(default_factory=list)
    """[lag] lags in `unit`."""
    skew_left: list[float | None] = field(default_factory=list)
    """[lag] share of the initial skew that is left, without sampling noise. 1: as at the start; above 1: more skewed
    towards the same experts; 0: nothing in common."""


def no_drift(unit: str, reason: str, window: float | None = None) -> Drift:
    return Drift(half_life=None, reason=reason, floor=None, unit=unit, window=window, p_value=None)


def measure_drift(counts: NDArray[np.integer], width: float, unit: str, rng: Generator) -> Drift:
    """Measure the drift of counts [window, part, layer, expert].

    A window has two parts, random halves of its requests, or one. `width` is the length of a window in `unit`.
    """
    windows = len(counts)
    if windows < MIN_WINDOWS:
        return no_drift(unit, f"the trace fills {windows} windows; {MIN_WINDOWS} are needed to see a trend", width)
    dots, pairs = _dots(counts), _pairs(windows, counts.shape[1])
    product, lags = _products(dots, pairs), pairs.lags
    if not np.isfinite(product[0]) or product[0] <= 0:
        return no_drift(unit, "the load is even, or windows are too small to show a shape that could drift", width)
    left = product / product[0]
    p_value = _p_value(dots, pairs, rng)
    fit = fit_decay(lags, product)
    span = float(lags[-1]) * width
    half_life, floor, reason = fit.half_life * width, fit.floor, None
    fallen = 1.0 - float(np.nanmean(left[len(left) // 2 :]))
    if p_value > SIGNIFICANCE:
        reason = f"no drift above the sampling noise over {_amount(span, unit)} (p = {p_value:.2g})"
    elif (1 - floor) * (1 - 2 ** (-lags[-1] / fit.half_life)) < MIN_DROP or fallen < MIN_DROP:
        reason = f"the skew falls by less than {MIN_DROP} of what it was over {_amount(span, unit)}"
    elif fit.half_life < 1:
        reason = f"the load differs between windows of {_amount(width, unit)} but has no trend: bursts, not drift"
    elif half_life > 2 * span:
        reason = f"slower than {_amount(span, unit)} of trace can tell: {fallen:.0%} of the first skew is gone"
    return Drift(
        half_life=None if reason else half_life,
        reason=reason,
        floor=None if reason else floor,
        unit=unit,
        window=width,
        p_value=p_value,
        lag=[float(v * width) for v in lags],
        skew_left=numbers(left),
    )


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _dots(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the products of skews [window * part, window * part], mean over layers; NaN if either part is empty."""
    windows, parts, layers, experts = counts.shape
    values = counts.reshape(windows * parts, layers, experts).astype(np.float64)
    total = values.sum(axis=2, keepdims=True)
    shape = np.divide(values, total, out=np.full(values.shape, 1 / experts), where=total > 0) - 1 / experts
    flat = shape.reshape(windows * parts, -1)
    dots = flat @ flat.T / layers
    empty = total.sum(axis=(1, 2)) == 0
    dots[empty, :] = np.nan
    dots[:, empty] = np.nan
    return np.asarray(dots, np.float64)


class _Pairs(NamedTuple):
    """Index pairs of the products of each lag, computed once: a random order of the windows only re-indexes them."""

    lags: NDArray[np.int64]
    earlier: NDArray[np.int64]
    """[lag, pair] index (window * parts + part) of the earlier part; `later` likewise."""
    later: NDArray[np.int64]


def _pairs(windows: int, parts: int) -> _Pairs:
    """Return the pairs of each lag. The first lag is 0 with halves, 1 with whole windows: the least without noise."""
    starts = np.arange(max(2, windows // 8))
    lags = np.arange(0 if parts == 2 else 1, windows - len(starts) + 1)
    # Pair every part of the start window with every part of the later one; at lag 0, only the two different halves.
    first, second = (v.ravel() for v in np.indices((parts, parts)))
    earlier = (starts[:, None] * parts + first).ravel()
    later = ((lags[:, None, None] + starts[:, None]) * parts + second).reshape(len(lags), -1)
    if parts == 2:
        later[0] = (starts[:, None] * parts + (1 - first)).ravel()
    return _Pairs(lags, np.broadcast_to(earlier, later.shape), later)


def _products(dots: NDArray[np.float64], pairs: _Pairs, order: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Return the mean of x(s) · x(s + lag) [lag], with the parts in `order` (None: as recorded); NaN without a pair."""
    order = np.arange(len(dots)) if order is None else order
    chosen = dots[order[pairs.earlier], order[pairs.later]]
    present = np.isfinite(chosen)
    product = np.full(len(pairs.lags), np.nan)
    np.divide(np.where(present, chosen, 0.0).sum(axis=1), present.sum(axis=1), out=product, where=present.any(axis=1))
    return product


def _p_value(dots: NDArray[np.float64], pairs: _Pairs, rng: Generator) -> float:
    """Return the share of random orders of the parts whose products fall at least as much from near to far lags."""
    present = np.flatnonzero(np.isfinite(np.diag(dots)))  # empty parts keep their place
    order = np.arange(len(dots))
    fall = _fall(_products(dots, pairs), pairs.lags)
    as_much = 0
    for _ in range(PERMUTATIONS):
        order[present] = rng.permutation(present)
        as_much += _fall(_products(dots, pairs, order), pairs.lags) >= fall
    return (1 + as_much) / (1 + PERMUTATIONS)


def _fall(product: NDArray[np.float64], lags: NDArray[np.int64]) -> float:
    half = len(lags) // 2
    near, far = product[:1] if lags[0] == 0 else product[:half], product[half:]
    near, far = near[np.isfinite(near)], far[np.isfinite(far)]
    return float(near.mean() - far.mean()) if len(near) and len(far) else -np.inf
