"""Drift: the fit against curves it must find, the estimator against loads whose half-life is known, the forecast."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.triggers.drift import LAGS, Decay, DriftEstimate, DriftEstimator, Forecast, fit_decay

LAYERS, EXPERTS = 4, 32


def windows(count: int, half_life: float, floor: float, rows: float, seed: int) -> np.ndarray:
    """[window, layer, expert] counts whose popularity correlates with itself as the decay says, exactly."""
    rng = np.random.default_rng(seed)
    a = 0.0 if half_life == 0 else 2.0 ** (-1.0 / half_life)
    base, z = rng.normal(size=(2, LAYERS, EXPERTS))
    loads = np.empty((count, LAYERS, EXPERTS))
    for load in loads:
        shape = 1.0 + 0.25 * (np.sqrt(floor) * base + np.sqrt(1 - floor) * z)
        popularity = np.maximum(shape, 0.0)
        load[:] = rng.poisson(popularity / popularity.sum(axis=1, keepdims=True) * rows)
        z = a * z + np.sqrt(1 - a * a) * rng.normal(size=z.shape)
    return loads


def estimated(loads: np.ndarray, memory: float = 256.0) -> DriftEstimate:
    estimator = DriftEstimator(LAYERS, EXPERTS, memory=memory)
    for load in loads:
        estimator.update(load)
    return estimator.estimate()


@settings(deadline=None, max_examples=40)
@given(st.floats(0.5, 40.0), st.floats(0.0, 0.9), st.floats(1e-6, 1e6))
def test_fit_finds_the_curve_it_is_given(half_life: float, floor: float, level: float) -> None:
    lags = np.array(LAGS)
    found = fit_decay(lags, level * Decay(half_life, floor, level).left(lags))
    assert found.half_life == pytest.approx(half_life, rel=0.02)
    assert found.floor == pytest.approx(floor, abs=0.02)
    assert found.level == pytest.approx(level, rel=0.05)


def test_fit_without_a_fall_is_steady() -> None:
    assert fit_decay(np.arange(5), np.ones(5)).half_life > 50
    assert fit_decay(np.arange(5), np.arange(5.0)).half_life == np.inf
    assert fit_decay(np.arange(3), np.array([np.nan, 2.0, np.nan])) == Decay(np.inf, 1.0, 2.0)


def test_weights_tell_which_lags_to_believe() -> None:
    lags = np.arange(1, 12)
    curve = 2.0 ** (-lags / 3.0)
    spoiled = curve.copy()
    spoiled[-1] += 5.0
    weight = np.ones(len(lags))
    weight[-1] = 1e-9
    assert fit_decay(lags, spoiled, weight).half_life == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("rows", [400, 100_000])  # 12 tokens an expert; so many that noise is nothing
@pytest.mark.parametrize("half_life", [3.0, 12.0])
def test_half_life_whatever_the_noise(rows: int, half_life: float) -> None:
    """Small windows are mostly noise, which must not pass for drift."""
    found = [estimated(windows(200, half_life, 0.0, rows, seed)).half_life for seed in range(4)]
    assert np.median(found) == pytest.approx(half_life, rel=0.3)


def test_a_steady_load_does_not_drift_however_noisy() -> None:
    found = [estimated(windows(100, np.inf, 0.0, 200, seed)) for seed in range(5)]
    assert all(estimate.half_life == np.inf for estimate in found)
    assert all("no drift" in estimate.reason or "slower" in estimate.reason for estimate in found)


def test_what_stays_is_told_from_what_fades() -> None:
    found = [estimated(windows(300, 4.0, 0.6, 20_000, seed)) for seed in range(4)]
    floors = [estimate.decay.floor for estimate in found if estimate.decay]
    assert np.median(floors) == pytest.approx(0.6, abs=0.15)


def test_noise_of_a_window_is_measured() -> None:
    """Variance of Poisson counts over that of popularity: known in advance."""
    rows = 640.0  # 20 an expert: 1/20 of relative variance, against 0.25^2 of popularity
    found = np.median([estimated(windows(150, 20.0, 0.0, rows, seed)).noise for seed in range(4)])
    assert found == pytest.approx(1 / 20 / 0.25**2, rel=0.25)


def test_a_faster_drift_is_noticed() -> None:
    slow, fast = windows(150, 40.0, 0.0, 5000, 0), windows(150, 2.0, 0.0, 5000, 1)
    estimator = DriftEstimator(LAYERS, EXPERTS, memory=40.0)
    for load in slow:
        estimator.update(load)
    before = estimator.estimate().half_life
    for load in fast:
        estimator.update(load)
    assert before > 10
    assert estimator.estimate().half_life < 4


def test_too_little_is_said_to_be_too_little() -> None:
    estimator = DriftEstimator(LAYERS, EXPERTS)
    assert estimator.estimate().decay is None
    estimator.update(np.zeros((LAYERS, EXPERTS)))
    assert estimator.windows == 0, "nothing was seen in it"
    for _ in range(6):
        estimator.update(np.ones((LAYERS, EXPERTS)))
    assert "even" in estimator.estimate().reason
    with pytest.raises(ConfigError, match="shape"):
        estimator.update(np.ones((EXPERTS, LAYERS)))
    with pytest.raises(ConfigError, match="memory"):
        DriftEstimator(1, 1, memory=0.5)


def error_of(loads: np.ndarray, weights: list[float] | None) -> float:
    """Mean squared error of the forecast against the next window; fixed weights, or the filter's own."""
    estimator, forecast, total = DriftEstimator(LAYERS, EXPERTS), Forecast(), 0.0
    mean = loads[0]
    for at, (load, following) in enumerate(pairwise(loads)):
        estimator.update(load)
        if weights is None:
            forecast.update(load, estimator.estimate())
            mean = forecast.tokens
        elif at:
            mean = mean + weights[0] * (load - mean)
        if at >= 50:
            total += float(((following - mean) ** 2).sum())
    return total


@pytest.mark.parametrize(("half_life", "rows"), [(2.0, 50_000), (20.0, 500), (200.0, 200)])
def test_the_forecast_is_near_the_best_fixed_weight(half_life: float, rows: int) -> None:
    """Fast and clear: the last window. Slow and noisy: a long average. It finds which without being told."""
    loads = windows(250, half_life, 0.0, rows, 3)
    best = min(error_of(loads, [weight]) for weight in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0))
    assert error_of(loads, None) < 1.05 * best


def test_no_forecast_from_nothing() -> None:
    with pytest.raises(ConfigError, match="no window"):
        _ = Forecast().tokens
