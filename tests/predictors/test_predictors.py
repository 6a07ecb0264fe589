"""What every predictor must do, and the simple ones by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie.predictors as package
from coterie.errors import ConfigError, UnknownNameError
from coterie.footprints import footprint
from coterie.predictors import (
    DomainPredictor,
    FittablePredictor,
    PopularityPredictor,
    Predictor,
    PredictRequest,
    Prefix,
    RecordedLoads,
    TokenTable,
    per_step,
    predictors,
)
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 2, 6, 2
LENGTHS = np.array([4, 8, 2, 6])
DOMAINS = ["code", "law", "code", "law"]

every_predictor = pytest.mark.parametrize("name", ["domain", "popularity", "prefix", "recorded", "token_table"])


def make_trace(seed: int = 0, with_ids: bool = True) -> ActivationTrace:
    """Four requests, each half prefill and half decode."""
    rng = np.random.default_rng(seed)
    total = int(LENGTHS.sum())
    ids = np.argsort(rng.random((total, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    phase = np.concatenate([np.repeat([PREFILL, DECODE], n // 2) for n in LENGTHS]).astype(np.uint8)
    table = RequestTrace(LENGTHS // 2, LENGTHS // 2, ids=list("abcd") if with_ids else None, domains=DOMAINS)
    token_ids = rng.integers(0, 9, total).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    meta = TraceMeta("model", EXPERTS, LAYERS, TOP_K)
    return ActivationTrace.from_arrays(meta, ids, offsets, table, phase, token_ids)


def counts(trace: ActivationTrace, index: Any, phase: Any = None) -> np.ndarray:
    tokens = trace.request(index)
    return footprint(tokens.expert_ids if phase is None else tokens.only(phase), EXPERTS)


def test_all_are_registered() -> None:
    assert set(predictors.names()) >= {"domain", "popularity", "prefix", "recorded", "token_table"}
    with pytest.raises(UnknownNameError, match="Did you mean 'token_table'"):
        predictors["token_tabel"]
    assert predictors.group == "coterie.predictors"
    for name in package.__all__:
        assert getattr(package, name) is not None


@every_predictor
@settings(max_examples=15)
@given(seed=st.integers(0, 2**20))
def test_contract(name: str, seed: int) -> None:
    """A layer sums to tokens x top_k, nothing is negative, and neither input nor fit is changed by predicting."""
    trace = make_trace(seed)
    made = predictors.make(name)
    assert made.fit(trace, np.array([0, 1, 2])) is made
    assert isinstance(made, Predictor)
    assert isinstance(made, FittablePredictor)
    assert (made.num_layers, made.num_experts) == (LAYERS, EXPERTS)
    known = trace.request(3)
    before = counts(trace, 3, PREFILL)
    for request, tokens in (
        (PredictRequest(), 1),
        (PredictRequest(num_tokens=5, id="nobody", domain="none"), 5),
        (PredictRequest(num_tokens=0), 0),
        (PredictRequest(known.token_ids, domain="law"), 6),
        (PredictRequest(known.token_ids, before, "law", "d", 10), 10),
        (PredictRequest(footprint=before), 3),
        (PredictRequest(footprint=np.zeros_like(before), num_tokens=2), 2),
    ):
        found = made.predict(request)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found.sum(axis=1), tokens * TOP_K)
        assert found.min() >= 0
        found[:] = -1  # a new array each time
        np.testing.assert_allclose(made.predict(request).sum(axis=1), tokens * TOP_K)
    np.testing.assert_array_equal(before, counts(trace, 3, PREFILL))


@every_predictor
def test_contract_errors(name: str) -> None:
    trace = make_trace()
    made = predictors.make(name)
    for use in (lambda: made.predict(PredictRequest()), lambda: made.num_layers, lambda: made.num_experts):
        with pytest.raises(ConfigError, match=f"predictor '{name}' is not fitted: call fit"):
            use()
    with pytest.raises(ConfigError, match="request 4 must be in 0 … 3"):
        made.fit(trace, np.array([0, 4]))
    with pytest.raises(ConfigError, match="request -1 must be"):
        made.fit(trace, np.array([-1]))
    with pytest.raises(ConfigError, match="no token to fit on"):
        made.fit(trace, np.empty(0, np.int64))
    made.fit(trace)
    with pytest.raises(ConfigError, match=r"request 'q': footprint has shape \(1, 6\)"):
        made.predict(PredictRequest(footprint=np.ones((1, 6)), id="q"))
    with pytest.raises(ConfigError, match="request 'q': num_tokens=-1 must not be negative"):
        made.predict(PredictRequest(num_tokens=-1, id="q"))
    asked = PredictRequest(np.array([1, 2]), counts(trace, 3), "law", "a")
    once, twice = (predictors.make(name).fit(trace, np.array(r)).predict(asked) for r in ([0, 1], [1, 0, 1]))
    np.testing.assert_array_equal(once, twice, "a request named twice counts once")


def test_popularity_counts_every_request_alike() -> None:
    trace = make_trace()
    shares = [counts(trace, r, DECODE) / (LENGTHS[r] // 2) for r in (0, 1, 3)]
    made = PopularityPredictor().fit(trace, np.array([0, 1, 3]), DECODE)
    np.testing.assert_allclose(made.predict(PredictRequest(num_tokens=7)), 7 * np.mean(shares, axis=0))


def test_domain_is_the_mean_of_its_own() -> None:
    trace = make_trace()
    made = DomainPredictor().fit(trace, np.array([0, 1, 2]))
    code = np.mean([counts(trace, r) / LENGTHS[r] for r in (0, 2)], axis=0)
    np.testing.assert_allclose(made.predict(PredictRequest(domain="code", num_tokens=3)), 3 * code)
    np.testing.assert_allclose(made.predict(PredictRequest(domain="law")), counts(trace, 1) / LENGTHS[1])
    floor = PopularityPredictor().fit(trace, np.array([0, 1, 2])).predict(PredictRequest())
    np.testing.assert_allclose(made.predict(PredictRequest(domain="music")), floor)
    np.testing.assert_allclose(made.predict(PredictRequest()), floor)
    bare = ActivationTrace.from_arrays(trace.meta, *(trace.arrays()[0].expert_ids, trace.arrays()[1]))
    with pytest.raises(ConfigError, match="has no domains"):
        DomainPredictor().fit(bare)


def test_recorded_gives_back_what_was_recorded() -> None:
    trace = make_trace()
    made = RecordedLoads().fit(trace, np.array([0, 1]))
    for index, name in enumerate("ab"):
        np.testing.assert_array_equal(made.predict(PredictRequest(id=name)), counts(trace, index))
    floor = PopularityPredictor().fit(trace, np.array([0, 1])).predict(PredictRequest(num_tokens=2))
    np.testing.assert_allclose(made.predict(PredictRequest(id="c", num_tokens=2)), floor)
    own = counts(trace, 3)
    np.testing.assert_array_equal(made.predict(PredictRequest(footprint=own, id="a")), own)
    halved = made.predict(PredictRequest(footprint=own, num_tokens=3))
    np.testing.assert_allclose(halved, own / 2)


def test_recorded_goes_by_index_where_there_are_no_ids() -> None:
    trace = make_trace(with_ids=False)
    made = RecordedLoads().fit(trace, phase=DECODE)
    np.testing.assert_array_equal(made.predict(PredictRequest(id="2")), counts(trace, 2, DECODE))
    twice = RequestTrace(LENGTHS // 2, LENGTHS // 2, ids=["a", "b", "a", "c"])
    tokens, offsets = trace.arrays()
    again = ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets, twice, tokens.phase)
    with pytest.raises(ConfigError, match="request id 'a' is in the trace twice"):
        RecordedLoads().fit(again)


def test_prefix_by_hand() -> None:
    trace = make_trace()
    made = Prefix(smoothing=6.0).fit(trace, np.array([0, 1, 2]))
    before, after = (PopularityPredictor().fit(trace, np.array([0, 1, 2]), p).predict(PredictRequest()) for p in (0, 1))
    own = counts(trace, 3, PREFILL)  # 3 tokens
    shares = np.maximum(after + 3 / 9 * (own / 3 - before), 0)
    shares *= TOP_K / shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(made.predict(PredictRequest(footprint=own)), 3 * shares)
    np.testing.assert_allclose(made.predict(PredictRequest()), after)


def test_prefix_limits() -> None:
    """Theory: all smoothing is popularity; none, where both phases are spread alike, is the prefix itself."""
    trace = make_trace()
    own = counts(trace, 3, PREFILL)
    tokens, offsets = trace.arrays()
    one_phase = ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets)
    np.testing.assert_allclose(Prefix(0.0).fit(one_phase).predict(PredictRequest(footprint=own)), own, atol=1e-12)
    far = Prefix(1e12).fit(trace)
    floor = PopularityPredictor().fit(trace, phase=DECODE).predict(PredictRequest(num_tokens=3))
    np.testing.assert_allclose(far.predict(PredictRequest(footprint=own)), floor, atol=1e-9)
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="smoothing="):
            Prefix(value)


def test_per_step_is_a_probability() -> None:
    trace = make_trace()
    load = RecordedLoads().fit(trace).predict(PredictRequest(id="b"))
    step = per_step(load, 8)
    assert step.max() <= 1
    np.testing.assert_allclose(step.sum(axis=1), TOP_K)
    for tokens in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0"):
            per_step(load, tokens)


def test_constructors_do_no_work() -> None:
    for kind in (PopularityPredictor, DomainPredictor, RecordedLoads, Prefix, TokenTable):
        fields = {name: getattr(kind(), name) for name in kind.__dataclass_fields__ if name.endswith("_")}
        assert fields
        assert not any(fields.values()), fields
