"""Predicted footprints: the best source that knows something, and no lie is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie.errors import ConfigError, InputError, UnknownNameError
from coterie.gateway.signals.predicted import BOUNDS, Footprints, open_predictor
from coterie.predictors import PredictRequest
from coterie.wire.footprints import WireFootprint, check_possible

LAYERS, EXPERTS, K = 2, 6, 2


def answer(tokens: int, *experts: int, missing: int = 0) -> WireFootprint:
    """A footprint of tokens that all activate the same experts."""
    counts = np.zeros((LAYERS, EXPERTS), np.uint16)
    counts[:, list(experts)] = tokens
    return WireFootprint(counts, tuple(range(LAYERS)), tokens, missing)


def prompt(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 1000, length)


def test_nothing_known() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    assert known.footprint(prompt(10), 10) == (None, "none")


def test_prefix_then_popularity() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    ids = prompt(300)
    assert known.learn(ids, answer(300, 0, 1))
    assert known.learn(prompt(300, 1), answer(300, 4, 5))
    longer = np.concatenate([ids, prompt(100, 2)])
    found = known.footprint(longer, len(longer))
    assert found.source == "prefix"
    assert found.counts is not None
    np.testing.assert_allclose(found.counts[0], [400, 400, 0, 0, 0, 0])
    assert known.footprint(ids, 300).source == "prefix"
    assert known.footprint(ids[:250], 250).source == "prefix", "shares 192 of its 250 tokens"
    other = known.footprint(prompt(300, 3), 300)
    assert other.source == "popularity"
    assert other.counts is not None
    np.testing.assert_allclose(other.counts.sum(axis=1), K, rtol=1e-5, err_msg="of a mean token")
    assert known.footprint(None, 5).source == "popularity"
    mostly_new = np.concatenate([ids[:64], prompt(400, 4)])
    assert known.footprint(mostly_new, len(mostly_new)).source == "popularity", "64 of 464 tokens say little"


def test_requests_with_one_prefix_are_averaged() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    shared = prompt(512)
    for seed, experts in ((1, (0, 1)), (2, (2, 3)), (3, (0, 1)), (4, (2, 3)), (5, (0, 1))):
        known.learn(np.concatenate([shared, prompt(100, seed)]), answer(600, *experts))
    found = known.footprint(np.concatenate([shared, prompt(100, 9)]), 100)
    assert found.counts is not None
    np.testing.assert_allclose(found.counts[0], [50, 50, 50, 50, 0, 0], err_msg="the latest four")
    own = known.footprint(np.concatenate([shared, prompt(100, 2)]), 100)
    assert own.counts is not None
    np.testing.assert_allclose(own.counts[0], [0, 0, 100, 100, 0, 0], err_msg="the same prompt again")


def test_the_same_prompt_is_kept_once() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    for experts in ((0, 1), (2, 3)):
        known.learn(prompt(100), answer(100, *experts))
    assert len(known) == 1
    counts = known.footprint(prompt(100), 2).counts
    assert counts is not None
    np.testing.assert_allclose(counts[0], [1, 1, 1, 1, 0, 0])


def test_more_tokens_than_the_prompt_has_are_not_learned() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    assert not known.learn(prompt(100), answer(101, 0, 1))
    assert known.footprint(prompt(100), 100) == (None, "none")


@st.composite
def footprints_on_the_wire(draw: st.DrawFn) -> WireFootprint:
    """Any counts that a message can carry; half of them are of a real prefill: K experts for every token and layer."""
    layers, experts, tokens = draw(st.integers(1, 6)), draw(st.integers(K, 6)), draw(st.integers(0, 120))
    if draw(st.booleans()):
        return WireFootprint(draw(hnp.arrays(np.uint16, (layers, experts))), (), tokens)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    ids = rng.permuted(np.tile(np.arange(experts), (tokens, layers, 1)), axis=2)[:, :, :K]
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(layers)])
    return WireFootprint(counts.astype(np.uint16), (), tokens)


@given(footprints_on_the_wire())
def test_any_footprint_is_refused_or_leaves_predictions_sound(footprint: WireFootprint) -> None:
    known = Footprints(top_k=K)
    try:
        check_possible(footprint, known.shape, K)
    except InputError:
        return
    learned = known.learn(prompt(100), footprint)
    predicted = known.footprint(prompt(100), 100)
    assert (predicted.counts is not None) == learned == (footprint.tokens <= 100)
    if predicted.counts is not None:
        assert (predicted.counts >= 0).all()
        np.testing.assert_allclose(predicted.counts.sum(axis=1), 100 * K, rtol=0.03)


def test_a_footprint_of_few_tokens_says_nothing_of_the_prefix() -> None:
    known = Footprints((LAYERS, EXPERTS), K)
    assert known.learn(prompt(100), answer(10, 0, 1, missing=90))
    assert known.footprint(prompt(100), 100).source == "popularity"


def test_memory_is_bounded() -> None:
    known = Footprints((LAYERS, EXPERTS), K, max_bytes=20_000)
    first = prompt(200, 0)
    for seed in range(200):
        known.learn(prompt(200, seed), answer(200, 0, 1))
        assert known.footprint(first, 200).source == "prefix", "used, so kept"
    assert 0 < known.nbytes <= 20_000
    assert len(known) < 30
    assert len(known._requests_at) <= 4 * len(known)
    assert known.footprint(prompt(200, 1), 200).source == "popularity"


class Fixed:
    num_layers, num_experts = LAYERS, EXPERTS

    def __init__(self, load: Any) -> None:
        self.load = load

    def predict(self, request: PredictRequest) -> Any:
        assert request.num_tokens is not None
        if isinstance(self.load, Exception):
            raise self.load
        return self.load * request.num_tokens


def test_a_predictor_before_popularity() -> None:
    popularity = np.full((LAYERS, EXPERTS), K / EXPERTS)
    known = Footprints(predictor=Fixed(np.eye(LAYERS, EXPERTS)), popularity=popularity)
    found = known.footprint(prompt(500), 500)
    assert found.source == "predictor"
    assert found.counts is not None
    np.testing.assert_allclose(found.counts, 500 * np.eye(LAYERS, EXPERTS))
    known.learn(prompt(500), answer(500, 0, 1))
    assert known.footprint(prompt(500), 500).source == "prefix"


@pytest.mark.parametrize(
    "wrong", [KeyError("a bug"), np.ones((1, EXPERTS)), np.full((LAYERS, EXPERTS), np.nan), -np.ones((LAYERS, EXPERTS))]
)
def test_a_predictor_that_fails_is_counted(wrong: Any) -> None:
    known = Footprints(predictor=Fixed(wrong), popularity=np.full((LAYERS, EXPERTS), K / EXPERTS))
    assert known.footprint(prompt(5), 5).source == "popularity"
    assert ("a bug" if isinstance(wrong, KeyError) else str(wrong.shape)) in known.last_error


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="must agree"):
        Footprints((LAYERS, EXPERTS), popularity=np.ones((3, 3)))
    with pytest.raises(ConfigError, match="needs a trace"):
        open_predictor("popularity")
    with pytest.raises(UnknownNameError, match="Did you mean 'popularity'"):
        open_predictor("popularty")


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_keys_agree_exactly_on_the_shared_prefix(length: int, differs: int) -> None:
    known = Footprints((LAYERS, EXPERTS), K, seed=0)
    ids = prompt(length)
    other = ids.copy()
    other[min(differs, length) - 1] += 1
    ours, theirs = known._keys(ids), known._keys(other)
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    right = [*(bound < min(differs, length) for bound in BOUNDS if bound <= length), False]
    assert same == right
    assert known._keys(ids.astype(np.int32)) == ours
    ids.flags.writeable = False
    assert known._keys(ids) == ours
