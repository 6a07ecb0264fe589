"""Scores against brute force and theory."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.predictors import PredictRequest
from coterie_lab.suites.predictors.scores import recall, score


class Given:
    """Predicts the footprint that comes with a request."""

    def __init__(self, layers: int, experts: int) -> None:
        self.num_layers, self.num_experts = layers, experts

    def predict(self, request: PredictRequest) -> np.ndarray:
        return np.asarray(request.footprint, np.float64)


def scored(predicted: Any, truth: Any, top_k: Any, groups: Any = None, seed: int = 0) -> Any:
    requests = [PredictRequest(footprint=one) for one in predicted]
    return score(Given(*truth.shape[1:]), requests, truth, top_k, np.random.default_rng(seed), groups)


@st.composite
def loads(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Predicted and true [request, layer, expert], with many ties and zeros; no true layer is empty."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 7)))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    predicted, truth = rng.integers(0, 4, shape), rng.integers(0, 4, shape)
    truth[..., 0] += truth.sum(axis=-1) == 0
    return predicted, truth, draw(st.integers(1, shape[2]))


def brute_recall(predicted: Any, truth: Any, k: Any) -> Any:
    """The best over all ways to break the truth's ties; predictions tie by id."""
    ranked = sorted(range(len(truth)), key=lambda e: (-predicted[e], e))[:k]
    chosen = {e for e in ranked if predicted[e] > 0}
    used = [e for e in range(len(truth)) if truth[e] > 0]
    size = min(k, len(used))
    best = 0
    for tops in combinations(used, size):
        if all(truth[t] >= truth[e] for t in tops for e in used if e not in tops):
            best = max(best, len(chosen & set(tops)))
    return best / size


@given(loads())
def test_measures_are_brute_force(drawn: tuple[Any, Any, Any]) -> None:
    predicted, truth, k = drawn
    experts = truth.shape[2]
    found = scored(predicted, truth, k)
    expected = np.zeros((4, *truth.shape[:2]))
    for r, layer in np.ndindex(truth.shape[:2]):
        p, t = predicted[r, layer], truth[r, layer]
        norms = np.sqrt(sum(float(x) ** 2 for x in p)) * np.sqrt(sum(float(x) ** 2 for x in t))
        expected[0, r, layer] = sum(float(a) * float(b) for a, b in zip(p, t, strict=True)) / norms if norms else 0
        expected[1, r, layer] = brute_recall(p, t, k)
        expected[2, r, layer] = brute_recall(p, t, min(2 * k, experts))
        expected[3, r, layer] = brute_recall(p, t, min(16, experts))
    for measure, values in zip(found[1:], expected, strict=True):
        np.testing.assert_allclose(measure.mean, values.mean())
        assert values.mean(axis=1).min() - 1e-9 <= measure.low <= measure.high
        assert measure.high <= values.mean(axis=1).max() + 1e-9
    assert found.requests == len(truth)


@settings(max_examples=20)
@given(loads(), st.floats(0.01, 100))
def test_the_truth_scores_one_at_any_scale(drawn: tuple[Any, Any, Any], scale: float) -> None:
    _, truth, k = drawn
    for measure in scored(truth * scale, truth, k)[1:]:
        np.testing.assert_allclose(measure, 1.0)


def test_by_hand() -> None:
    truth = np.array([[[5, 4, 1, 0]]])
    assert recall(np.array([[[1, 0, 9, 8]]]), truth, 2)[0, 0] == 0
    assert recall(np.array([[[9, 0, 8, 1]]]), truth, 2)[0, 0] == 0.5
    assert recall(np.array([[[9, 8, 0, 0]]]), truth, 4)[0, 0] == 2 / 3  # three were used, two of them predicted
    assert recall(np.zeros((1, 1, 4)), truth, 2)[0, 0] == 0


def test_sixteen_are_sixteen_whatever_top_k_is() -> None:
    """20 experts are used, less and less; the last 16 are predicted: 12 of the first 16 are among them."""
    truth = np.arange(20, 0, -1).reshape(1, 1, 20)
    for top_k in (1, 2, 20):
        found = scored(truth[..., ::-1].clip(5) - 4, truth, top_k)
        assert found.recall_16.mean == 12 / 16


def test_interval_is_the_bootstraps() -> None:
    """Theory: means of n values drawn anew have the standard deviation of the values over the root of n."""
    rng = np.random.default_rng(1)
    angle = rng.uniform(0, np.pi / 2, 400)
    predicted = np.stack([np.cos(angle), np.sin(angle)], axis=-1)[:, None]
    truth = np.tile([1, 0], (400, 1, 1))
    found = scored(predicted, truth, 1).cosine
    spread = np.cos(angle).std() / np.sqrt(400)
    np.testing.assert_allclose([found.mean - found.low, found.high - found.mean], 1.96 * spread, rtol=0.15)
    assert found == scored(predicted, truth, 1).cosine, "the same seed gives the same interval"


def test_copies_of_a_request_add_no_certainty() -> None:
    """Theory: with every request ten times, groups give the interval of the requests once."""
    rng = np.random.default_rng(2)
    predicted, truth = rng.random((30, 2, 8)), rng.integers(1, 9, (30, 2, 8))
    once = scored(predicted, truth, 2).cosine
    tenfold = (np.repeat(predicted, 10, axis=0), np.repeat(truth, 10, axis=0), 2)
    grouped = scored(*tenfold, groups=np.repeat(np.arange(30), 10).tolist()).cosine
    np.testing.assert_allclose(grouped, once)
    alone = scored(*tenfold).cosine
    assert alone.high - alone.low < 0.5 * (once.high - once.low)


def test_bad_input_is_refused() -> None:
    truth = np.ones((2, 1, 3))
    with pytest.raises(ConfigError, match=r"truth has shape \(2, 1, 3\); expected .* = \(1, 1, 3\)"):
        scored(truth[:1], truth, 1)
    with pytest.raises(ConfigError, match="none 0"):
        scored(truth[:0], truth[:0], 1)
    for top_k in (0, 4):
        with pytest.raises(ConfigError, match=f"top_k={top_k} must be in 1 … num_experts=3"):
            scored(truth, truth, top_k)
    with pytest.raises(ConfigError, match="request 1 has a layer without tokens"):
        scored(truth, truth * [[[1]], [[0]]], 1)
    with pytest.raises(ConfigError, match="groups has 1 entries; there are 2 requests"):
        scored(truth, truth, 1, groups=[0])
