"""Recent popularity against its definition: every record's weight written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.footprints import footprint
from coterie.predictors import (
    FittablePredictor,
    PopularityPredictor,
    Predictor,
    PredictRequest,
    RecentPopularity,
    predictors,
)
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 2, 6, 2
LENGTHS = np.array([4, 8, 2, 6])


def some(
    rng: np.random.Generator, tokens: Any, layers: Any = LAYERS, experts: Any = EXPERTS, top_k: Any = TOP_K
) -> np.ndarray:
    return footprint(np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :top_k], experts)


def written_out(records: Any, decay: Any) -> np.ndarray:
    """Mean activations a token; the last record weighs 1, the one before it `decay` …"""
    weights = [decay ** (len(records) - 1 - i) for i in range(len(records))]
    parts = [w * counts / tokens for w, (counts, tokens) in zip(weights, records, strict=True)]
    found: np.ndarray = sum(parts) / sum(weights)
    return found


def make_trace(arrival_s: Any = None) -> ActivationTrace:
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((int(LENGTHS.sum()), LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    phase = np.concatenate([np.repeat([PREFILL, DECODE], n // 2) for n in LENGTHS]).astype(np.uint8)
    table = RequestTrace(LENGTHS // 2, LENGTHS // 2, arrival_s=arrival_s)
    meta = TraceMeta("model", EXPERTS, LAYERS, TOP_K)
    return ActivationTrace.from_arrays(meta, ids, np.concatenate([[0], np.cumsum(LENGTHS)]), table, phase)


def counts(trace: ActivationTrace, index: Any, phase: Any = None) -> np.ndarray:
    tokens = trace.request(index)
    return footprint(tokens.expert_ids if phase is None else tokens.only(phase), EXPERTS)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.floats(0.01, 1.0), st.integers(0, 2**20))
def test_it_is_the_decayed_mean(drawn: list[int], decay: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = RecentPopularity(decay)
    records = [(some(rng, tokens), tokens) for tokens in drawn]
    for record in records:
        made.observe(*record)
    expected = written_out(records, decay)
    np.testing.assert_allclose(made.predict(PredictRequest()), expected, atol=1e-12)
    np.testing.assert_allclose(made.predict(PredictRequest(num_tokens=5)), 5 * expected, atol=1e-11)
    assert (made.num_layers, made.num_experts) == (LAYERS, EXPERTS)


@pytest.mark.parametrize("decay", [1e-300, 0.5, 0.99, 1.0])
def test_nothing_overflows_and_nothing_wears_off(decay: float) -> None:
    """Theory: 6,000 records in a cycle of three leave the geometric series of that cycle."""
    rng = np.random.default_rng(0)
    cycle = [some(rng, 4) / 4 for _ in range(3)]
    made = RecentPopularity(decay)
    for i in range(6_000):
        made.observe(cycle[i % 3], 1)
    weights = [decay**2, decay, 1.0]
    expected = sum(w * c for w, c in zip(weights, cycle, strict=True)) / sum(weights)
    found = made.predict(PredictRequest())
    np.testing.assert_allclose(found, expected, atol=1e-11)
    np.testing.assert_allclose(found.sum(axis=1), TOP_K, rtol=1e-13)
    assert found.min() >= 0


def test_without_decay_it_is_popularity() -> None:
    trace = make_trace()
    for phase in (None, PREFILL, DECODE):
        mean = PopularityPredictor().fit(trace, np.array([0, 1, 3]), phase).predict(PredictRequest(num_tokens=7))
        made = RecentPopularity(decay=1.0).fit(trace, np.array([3, 0, 1, 1]), phase)
        np.testing.assert_allclose(made.predict(PredictRequest(num_tokens=7)), mean)


def test_fit_follows_arrival_and_forgets_what_was_before() -> None:
    listed, late_first = make_trace(), make_trace(np.array([3.0, 1.0, 2.0, 0.0]))
    for trace, order in ((listed, [0, 1, 2, 3]), (late_first, [3, 1, 2, 0])):
        records = [(counts(trace, r, DECODE), LENGTHS[r] // 2) for r in order]
        made = RecentPopularity(0.5)
        made.observe(some(np.random.default_rng(1), 3), 3)
        assert made.fit(trace, phase=DECODE) is made
        expected = written_out(records, 0.5)
        np.testing.assert_allclose(made.predict(PredictRequest()), expected)


def test_a_fit_that_fails_leaves_the_last_one() -> None:
    trace = make_trace()
    made = RecentPopularity().fit(trace)
    before = made.predict(PredictRequest())
    with pytest.raises(ConfigError, match="no token to fit on: the requests chosen of 4 have none"):
        made.fit(trace, np.empty(0, np.int64))
    with pytest.raises(ConfigError, match="request 4 must be in 0 … 3"):
        made.fit(trace, np.array([4]))
    np.testing.assert_array_equal(made.predict(PredictRequest()), before)


def test_contract() -> None:
    assert predictors["recent_popularity"] is RecentPopularity
    made = RecentPopularity()
    asks: tuple[Callable[[Any], object], ...] = (lambda one: one.predict(PredictRequest()), lambda one: one.num_layers)
    for ask in asks:
        with pytest.raises(ConfigError, match="predictor 'recent_popularity' is not fitted: call fit"):
            ask(made)
    trace = make_trace()
    made.fit(trace)
    assert isinstance(made, FittablePredictor)
    assert isinstance(made, Predictor)
    own = counts(trace, 1)
    for request, tokens in (
        (PredictRequest(num_tokens=5, id="nobody"), 5),
        (PredictRequest(num_tokens=0), 0),
        (PredictRequest(np.arange(6)), 6),
        (PredictRequest(footprint=own), 8),
    ):
        found = made.predict(request)
        np.testing.assert_allclose(found.sum(axis=1), tokens * TOP_K)
        found[:] = -1  # a new array each time
        np.testing.assert_allclose(made.predict(request).sum(axis=1), tokens * TOP_K)
    with pytest.raises(ConfigError, match=r"request 'q': footprint has shape \(1, 6\)"):
        made.predict(PredictRequest(footprint=np.ones((1, 6)), id="q"))


def test_what_was_predicted_stays_as_it_was() -> None:
    """A snapshot taken by one reader does not move when another record comes."""
    rng = np.random.default_rng(0)
    made = RecentPopularity()
    given = some(rng, 3)
    made.observe(given, 3)
    snapshot, copied = made.popularity.per_token, made.popularity.per_token.copy()
    given[:] = 0
    made.observe(some(rng, 3), 3)
    np.testing.assert_array_equal(snapshot, copied)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    for decay in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=f"decay={decay} must be above 0 and at most 1"):
            RecentPopularity(decay)
    made = RecentPopularity()
    good = np.full((2, 4), 1.5)  # 3 tokens, top-2
    for bad, tokens, message in (
        (good, 0, "tokens=0 must be a finite number above 0"),
        (good, float("inf"), "tokens=inf must be"),
        (np.ones(4), 2, r"footprint has shape \(4,\); expected \[layer, expert\], none 0"),
        (np.zeros((2, 0)), 2, "none 0"),
        (good * [[1], [np.nan]], 3, "finite and not negative"),
        (good * [[1], [-1]], 3, "finite and not negative"),
        (good * [[1], [2]], 3, "footprint sums to 12 in layer 1; expected tokens=3 x top_k=2"),
        (good * 0, 3, "footprint sums to 0 in layer 0; expected tokens=3 x top_k=1"),
        (good, 4, "footprint sums to 6 in layer 0; expected tokens=4 x top_k=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            made.observe(bad, tokens)
    assert made.popularity_ is None
    made.observe(good, 3)
    before = made.predict(PredictRequest())
    with pytest.raises(ConfigError, match=r"footprint has shape \(3, 4\); expected .* \(2, 4\) as before"):
        made.observe(np.full((3, 4), 1.5), 3)
    with pytest.raises(ConfigError, match="expected tokens=2 x top_k=2"):
        made.observe(good, 2)
    np.testing.assert_array_equal(made.predict(PredictRequest()), before)
