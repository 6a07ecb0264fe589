"""The forecast of decode: against ridge regression written out, and against what it must beat on other requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.routing.calibration import calibration, counted_tokens
from coterie.routing.forecast import RIDGES, SCALE, DecodeForecast
from coterie.traces.readers import read_trace


def phases(
    rng: np.random.Generator, requests: int, tokens: np.ndarray, cells: int = 60
) -> tuple[np.ndarray, np.ndarray]:
    """Prefill and decode probabilities: requests mix four tastes; decode turns them into others."""
    tastes, turned = rng.random((4, cells)) ** 3, rng.random((4, cells)) ** 3
    mix = rng.dirichlet(np.full(4, 0.4), requests)
    before = rng.binomial(tokens[:, None], np.minimum(mix @ tastes, 1.0)) / tokens[:, None]
    after = rng.binomial(400, np.minimum(mix @ (0.5 * tastes + 0.5 * turned), 1.0)) / 400
    return before, after


def predict(forecast: DecodeForecast, counts: np.ndarray, tokens: float) -> np.ndarray:
    profile, _ = forecast.read(counts)
    forecast.apply(profile, tokens)
    return profile


def predictions(forecast: DecodeForecast, prefill: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.stack([predict(forecast, p * n, n) for p, n in zip(prefill, tokens, strict=True)])


def test_full_rank_is_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 200, 24)
    before, after = phases(rng, 24, tokens)
    forecast = DecodeForecast(rank=60, ridge=2.0).fit(before, after, tokens, rng)
    trust = (tokens / (tokens + forecast.map.noise))[:, None]
    z = trust * (before - before.mean(axis=0))
    y = after - after.mean(axis=0) - forecast.map.own * z
    trusted = z.T * (tokens / (2.0 * SCALE))
    weights = np.linalg.solve(trusted @ z + np.eye(60), trusted @ y)
    expected = np.clip(after.mean(axis=0) + forecast.map.own * z + z @ weights, 0, 1)
    np.testing.assert_allclose(predictions(forecast, before, tokens), expected, atol=2e-3)


@pytest.mark.parametrize("rank", [1, 4, 7, 8, 9, 19])
@pytest.mark.parametrize("cells", [1, 16, 37, 300])
def test_predictions_are_the_formula(rank: int, cells: int) -> None:
    """In double precision, for maps of any size and counts of any type."""
    rng = np.random.default_rng(cells)
    before, after = rng.random((2, cells)).astype(np.float32)
    inward, outward = (rng.standard_normal((2, rank, cells)) / np.sqrt(cells)).astype(np.float32)
    forecast = DecodeForecast.restored(
        before=before, after=after, inward=inward, outward=outward, own=0.6, noise=30.0, ridge=1.0
    )
    for dtype in (np.int64, np.uint32, np.float32):
        counts: Any = rng.integers(0, 100, cells).astype(dtype)
        z = 80 / 110 * (counts / 80.0 - before)
        right = after + 0.6 * z + (inward.astype(np.float64) @ z) @ outward
        np.testing.assert_allclose(predict(forecast, counts, 80), np.clip(right, 0, 1), atol=1e-5)


def test_beats_the_prefill_and_popularity_on_other_requests() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(20, 300, 400)
    before, after = phases(rng, 400, tokens)
    forecast = DecodeForecast().fit(before[:200], after[:200], tokens[:200], rng)
    error = ((predictions(forecast, before[200:], tokens[200:]) - after[200:]) ** 2).mean()
    raw = ((before[200:] - after[200:]) ** 2).mean()
    popularity = ((after[:200].mean(axis=0) - after[200:]) ** 2).mean()
    assert error < 0.5 * min(raw, popularity)


def test_short_prefixes_predict_what_is_popular() -> None:
    rng = np.random.default_rng(2)
    tokens = np.full(100, 60)
    before, after = phases(rng, 100, tokens)
    forecast = DecodeForecast().fit(before, after, tokens, rng)
    np.testing.assert_array_equal(predict(forecast, np.zeros(60), 0), forecast.map.after)
    far = [np.abs(predict(forecast, before[0] * n, n) - forecast.map.after).sum() for n in (0.5, 5, 50, 5000)]
    assert far == sorted(far)
    assert far[0] < 0.5 * far[-1]


def test_the_left_out_error_chooses_the_ridge() -> None:
    """Brute force: fit without each request in turn."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(5, 30, 40)
    before, after = phases(rng, 40, tokens)
    chosen = DecodeForecast(rank=39).fit(before, after, tokens, rng)

    def left_out(ridge: float) -> float:
        trust = (tokens / (tokens + chosen.map.noise))[:, None]
        z = trust * (before - before.mean(axis=0))
        y = after - after.mean(axis=0) - chosen.map.own * z
        total = 0.0
        for out in range(40):
            rest = np.arange(40) != out
            dual = np.linalg.solve(z[rest] @ z[rest].T + np.diag(ridge * SCALE / tokens[rest]), y[rest])
            total += float(((y[out] - z[out] @ z[rest].T @ dual) ** 2).sum())
        return total

    assert chosen.map.ridge == min(RIDGES, key=left_out)


def test_predictions_are_probabilities() -> None:
    rng = np.random.default_rng(4)
    tokens = rng.integers(1, 5, 30)
    before, after = phases(rng, 30, tokens)
    predicted = predictions(DecodeForecast(ridge=0.01).fit(before, after, tokens, rng), before, tokens)
    assert predicted.min() >= 0
    assert predicted.max() <= 1


def top(values: np.ndarray, k: int) -> np.ndarray:
    chosen = np.zeros(values.shape, np.bool_)
    np.put_along_axis(chosen, np.argsort(-values, axis=2, kind="stable")[..., :k], True, axis=2)
    return chosen


def test_real_routing(data_dir: Path) -> None:
    """gpt-oss-20b, first half of a request to second, half the requests to fit and half to test."""
    known = calibration(read_trace(data_dir / "activations/gpt-oss-20b/routing.npz"))  # type: ignore[arg-type]
    order = np.random.default_rng(0).permutation(len(known.prefill))
    fit, test = known.take(order[:205]), known.take(order[205:])
    before, after = fit.probabilities
    forecast = DecodeForecast().fit(before, after, cast(Any, counted_tokens(fit.prefill, 4)), np.random.default_rng(0))
    raw, truth = test.probabilities
    guess = predictions(forecast, raw, counted_tokens(test.prefill, 4))
    popular = np.tile(after.mean(axis=0), (len(truth), 1))
    error = {name: ((p - truth) ** 2).mean() for name, p in (("us", guess), ("raw", raw), ("popular", popular))}
    assert error["us"] < 0.7 * error["raw"]
    assert error["us"] < 0.4 * error["popular"]
    wanted = top(truth.reshape(-1, 24, 32), 16)
    recall = {
        name: (wanted & top(p.reshape(-1, 24, 32), 16)).sum() / wanted.sum()
        for name, p in (("us", guess), ("raw", raw), ("popular", popular))
    }
    assert recall["us"] > recall["raw"] + 0.01
    assert recall["us"] > recall["popular"] + 0.1


def test_what_cannot_be_fitted_is_refused() -> None:
    rng = np.random.default_rng(5)
    with pytest.raises(ConfigError, match="both be"):
        DecodeForecast().fit(np.zeros((4, 3)), np.zeros((4, 2)), np.ones(4, int), rng)
    with pytest.raises(ConfigError, match="needed"):
        DecodeForecast().fit(np.zeros((4, 3)), np.zeros((4, 3)), np.array([1, 1, 0, 1]), rng)
    forecast = DecodeForecast().fit(rng.random((5, 3)), rng.random((5, 3)), np.full(5, 9), rng)
    with pytest.raises(ConfigError, match="3 expert indices"):
        predict(forecast, np.zeros(4), 1)
    with pytest.raises(ConfigError, match="must match"):
        DecodeForecast.restored(
            before=np.zeros(2, np.float32),
            after=forecast.map.after,
            inward=forecast.map.inward,
            outward=forecast.map.outward,
            own=1.0,
            noise=1.0,
            ridge=1.0,
        )
