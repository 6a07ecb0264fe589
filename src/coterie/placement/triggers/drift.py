"""Estimate how fast a load drifts from window to window, and forecast the load from the windows so far.

Let x(w) be the load shares of window w per layer, minus the even share. The product x(w) · x(w - lag), averaged over
windows, falls as ``stays + fades x 2^(-(lag / half-life)^power)``. The power is 1 for a load that follows a random
walk, and 2 for a load that changes smoothly. The sampling noise of two windows is independent, so noise raises only the
product of a window with itself; the size of that rise is the noise of a window. The averages forget old products, so
that faster drift is noticed. An update takes one pass over [layer, expert] for each of a fixed set of lags.

Windows should be about equally long. Wrong for periodic loads: a daily cycle looks like drift until a day has passed.
Drift much slower than the longest lag is reported as no drift.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_given

Array = NDArray[np.float64]

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Lags in windows: dense enough to fit half-lives of one to a hundred windows."""
MIN_WINDOWS = 4
"""Fewest windows for an estimate: with fewer, there are less than three lags and any curve fits."""
UNSEEN = 4.0
"""Half-lives above this multiple of the longest lag cannot be distinguished from no drift."""
POWERS = (1.0, 1.5, 2.0)
SURE = 2.0
"""Number of standard errors by which the products must fall before the fall counts as drift."""


class Decay(NamedTuple):
    """A fitted curve ``level x (floor + (1 - floor) x 2^(-(lag / half_life)^power))``."""

    half_life: float
    """Half-life in the unit of the lags; infinite if nothing fades."""
    floor: float
    """Share of the level that never fades."""
    level: float
    """Value of the curve at lag 0."""
    power: float = 1.0

    def left(self, lag: Array | float) -> Array:
        """Return the share of the level that is left after a lag."""
        fades = 2.0 ** -((np.asarray(lag) / self.half_life) ** self.power)
        return np.asarray(self.floor + (1.0 - self.floor) * fades)


def fit_decay(
    lags: NDArray[np.integer] | Array, product: Array, weight: Array | None = None, powers: tuple[float, ...] = (1.0,)
) -> Decay:
    """Fit ``stays + fades x 2^(-(lag / half_life)^power)`` by least squares over a grid of half-lives and `powers`.

    Both `stays` and `fades` are at least 0. Lags whose product is not finite are left out.
    """
    good = np.isfinite(product)
    lag, y = np.asarray(lags, np.float64)[good], np.asarray(product, np.float64)[good]
    w = np.ones(len(y)) if weight is None else np.asarray(weight, np.float64)[good]
    steady = Decay(np.inf, 1.0, float(w @ y / w.sum()) if w.sum() > 0 else 0.0)
    if len(y) < 2:
        return steady
    half_lives = np.geomspace(0.1, 16 * max(len(lags), float(lag.max())), 600)
    best, least = steady, np.inf
    for power in powers:
        q = 2.0 ** -((lag[None, :] / half_lives[:, None]) ** power)  # [half-life, lag]
        stays, fades = _two_terms(q, y, w)
        error = (w * (stays[:, None] + fades[:, None] * q - y) ** 2).sum(axis=1)
        error[~(fades > 0)] = np.inf
        at = int(np.argmin(error))
        if error[at] < least:
            level, least = float(stays[at] + fades[at]), float(error[at])
            best = Decay(float(half_lives[at]), float(stays[at]) / level, level, power)
    return best


def _two_terms(q: Array, y: Array, w: Array) -> tuple[Array, Array]:
    """Return the least-squares `stays` and `fades` [curve] for each row of q [curve, lag]; stays is at least 0."""
    sw, sq, sqq = w.sum(), q @ w, (q * q) @ w
    sy, sqy = float(w @ y), q @ (w * y)
    alone = sqy / np.where(sqq > 0, sqq, 1.0)  # the best `fades` if `stays` is 0
    determinant = sw * sqq - sq * sq
    # With half-lives far above the lags both terms are nearly constant: only their sum is known, so all is `fades`.
    solvable = determinant > 1e-12 * sw * sqq
    safe = np.where(solvable, determinant, 1.0)
    stays = np.where(solvable, (sqq * sy - sq * sqy) / safe, 0.0)
    fades = np.where(solvable, (sw * sqy - sq * sy) / safe, alone)
    return np.maximum(stays, 0.0), np.where(stays < 0, alone, fades)


class DriftEstimate(NamedTuple):
    """Drift estimated from the windows so far."""

    decay: Decay | None
    """Fitted curve with lags in windows. None until enough windows were seen; infinite half-life if no drift shows."""
    noise: float
    """Variance of one window's sampling noise ÷ variance of the load's shape; at 1, half of the variance is noise."""
    span: float
    """Longest lag compared so far, in windows; much slower drift cannot be seen yet."""
    reason: str
    """Explanation in words."""

    @property
    def half_life(self) -> float:
        """Half-life in windows; infinite if unknown."""
        return np.inf if self.decay is None else self.decay.half_life

    @property
    def cautious(self) -> Decay | None:
        """Decay to decide by; if no drift shows, a decay with the shortest half-life that cannot be detected yet."""
        if self.decay is None or np.isfinite(self.decay.half_life):
            return self.decay
        return Decay(UNSEEN * self.span, 0.0, self.decay.level)


class DriftEstimator:
    """Estimator of a load's half-life, updated with every window."""

    def __init__(self, num_layers: int, num_experts: int, *, memory: float = 256.0) -> None:
        """Start without windows; `memory` is the time constant of the averages, in windows."""
        check_at_least(1, num_layers=num_layers, num_experts=num_experts, memory=memory)
        self.shape = (num_layers, num_experts)
        self.windows = 0
        self._keep = 1.0 - 1.0 / memory
        self._ring = np.zeros((max(LAGS) + 1, num_layers * num_experts), np.float32)
        self._lags = np.array((0, *LAGS))
        # Decayed sums over windows, per lag: the number of products, their sum and the sum of their squares.
        self._count, self._sum, self._square = np.zeros((3, len(self._lags)))

    def update(self, tokens: NDArray[np.integer] | NDArray[np.floating]) -> None:
        """Add the tokens [layer, expert] of the next window. A window without tokens is ignored."""
        check(tokens.shape == self.shape, f"window has shape {tokens.shape}; expected [layer, expert] = {self.shape}")
        total = tokens.sum(axis=1, keepdims=True, dtype=np.float64)
        if not total.any():
            return
        even = 1.0 / self.shape[1]
        row = self.windows % len(self._ring)
        share = np.where(total > 0, tokens / np.where(total > 0, total, 1.0), even) - even
        self._ring[row] = share.ravel()
        lags = self._lags[self._lags <= self.windows]
        product = self._ring[(self.windows - lags) % len(self._ring)] @ self._ring[row]
        for sums, value in ((self._count, 1.0), (self._sum, product), (self._square, product.astype(np.float64) ** 2)):
            sums[: len(lags)] = sums[: len(lags)] * self._keep + value
        self.windows += 1

    def estimate(self) -> DriftEstimate:
        if self.windows < MIN_WINDOWS:
            return DriftEstimate(None, 0.0, 0.0, f"{self.windows} windows seen; {MIN_WINDOWS} are needed to see drift")
        seen = self._count > 0
        mean = self._sum[seen] / self._count[seen]
        lags, product, count = self._lags[seen][1:], mean[1:], self._count[seen][1:]
        variance = np.maximum(self._square[seen][1:] / count - product**2, 0.0)
        span = float(lags[-1])
        half = max(1, len(product) // 2)
        if float(product[:half] @ count[:half]) <= 0:
            return DriftEstimate(None, np.inf, span, "the load is even, or windows are too small to show a shape")
        decay = fit_decay(lags, product, count, POWERS)
        steady = Decay(np.inf, 1.0, float(count @ product / count.sum()))
        # The noise-free product at lag 0 is at least the product at lag 1, whatever curve was fitted to few lags.
        noise = max(float(mean[0]) / max(decay.level, float(product[0])) - 1.0, 0.0)
        fall, error = _fall(product, variance, count)
        if fall <= SURE * error:
            return DriftEstimate(steady, noise, span, f"no drift above the noise over {span:g} windows")
        if decay.half_life > UNSEEN * span:
            slow = f"drift slower than {span:g} windows can tell: half takes more than {UNSEEN * span:g}"
            return DriftEstimate(steady, noise, span, slow)
        return DriftEstimate(decay, noise, span, f"half of what fades is gone in {decay.half_life:.3g} windows")


def _fall(product: Array, variance: Array, count: Array) -> tuple[float, float]:
    """Return the fall of the mean product from the shorter half of the lags to the longer, and its standard error."""
    half = max(1, len(product) // 2)

    def mean(part: slice) -> tuple[float, float]:
        weight = count[part] / count[part].sum()
        # Products of neighbouring lags share windows, so they are not independent: add errors, not their squares.
        return float(weight @ product[part]), float(weight @ np.sqrt(variance[part] / count[part]))

    (near, near_error), (far, far_error) = mean(slice(None, half)), mean(slice(half, None))
    return near - far, float(np.hypot(near_error, far_error))


class Forecast:
    """The load to plan for: an average of windows whose weights follow from drift and noise.

    A Kalman-style filter for a load with estimated half-life and noise: the noisier a window and the slower the drift,
    the longer the average. Until drift is known, the forecast is the plain mean of all windows.
    """

    def __init__(self) -> None:
        self._mean: Array | None = None
        self._count = 0
        self._error = 1.0

    @property
    def tokens(self) -> Array:
        """Forecast tokens per step, [layer, expert]."""
        return check_given(self._mean, "no window was seen yet")

    def update(self, per_step: Array, drift: DriftEstimate) -> float:
        """Add the next window, in tokens per step [layer, expert]; return the weight it got."""
        self._count += 1
        if self._mean is None:
            self._mean = per_step.astype(np.float64)
            return 1.0
        decay = drift.cautious
        if decay is None:
            weight = 1.0 / self._count
        else:
            carried = float(decay.left(1.0))  # correlation of neighbouring windows
            self._error = carried**2 * self._error + 1.0 - carried**2
            # Keep the weight away from 0 and 1: noise and drift are only estimates.
            weight = min(max(self._error / (self._error + drift.noise), 0.02), 0.98)
            self._error *= 1.0 - weight
        self._mean = self._mean + weight * (per_step - self._mean)
        return weight
