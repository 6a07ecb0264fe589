"""The token table: a plain reference, theory, its limits, and files that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from coterie.errors import ConfigError, TraceError
from coterie.footprints import footprint, footprints
from coterie.predictors import PopularityPredictor, PredictRequest, TokenTable
from coterie.traces import ActivationTrace
from coterie.types import DECODE, PREFILL
from described_files import rewritten
from token_traces import EXPERTS, LAYERS, TOP_K, distinct, random_trace, trace_of


def reference(trace: ActivationTrace, requests: Any, asked: Any, smoothing: Any) -> np.ndarray:
    """Token by token, in plain NumPy, nothing cut off."""
    shares: list[Any] = []
    means: dict[Any, Any] = {}
    for r in requests:
        tokens = trace.request(int(r))
        shares.append(footprint(tokens.expert_ids, EXPERTS) / len(tokens.phase))
        assert tokens.token_ids is not None
        for token, ids in zip(tokens.token_ids, tokens.expert_ids, strict=True):
            means.setdefault(int(token), []).append(footprint(ids[None], EXPERTS))
    popularity = np.mean(shares, axis=0)
    load = np.zeros((LAYERS, EXPERTS))
    for token in asked:
        seen = means.get(int(token), [])
        n = len(seen)
        known = np.mean(seen, axis=0) if n else 0.0
        load += n / (n + smoothing) * known + smoothing / (n + smoothing) * popularity if n else popularity
    return load


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), smoothing=st.sampled_from([0.0, 0.5, 3.0]))
def test_it_is_the_plain_reference(seed: int, smoothing: float) -> None:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    chosen = rng.permutation(trace.num_requests)[: int(rng.integers(1, 12))]
    asked = rng.integers(0, 25, int(rng.integers(1, 40)))  # 20 … 24 were never seen
    table = TokenTable(smoothing=smoothing, experts_kept=EXPERTS).fit(trace, chosen)
    found = table.predict(PredictRequest(asked))
    # Weights are cut to 2^-15: below that a token and expert.
    np.testing.assert_allclose(found, reference(trace, chosen, asked, smoothing), atol=len(asked) * EXPERTS * 2.0**-15)
    np.testing.assert_allclose(found.sum(axis=1), len(asked) * TOP_K)
    assert found.min() >= 0
    assert (table.num_layers, table.num_experts) == (LAYERS, EXPERTS)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20))
def test_where_the_token_decides_it_is_exact(seed: int) -> None:
    """Theory: experts are a function of the token id, so one occurrence tells all."""
    rng = np.random.default_rng(seed)
    function = distinct(rng, 40)
    lengths = np.full(10, 60)
    token_ids = rng.integers(0, 40, 600)
    trace = trace_of(function[token_ids], token_ids, lengths)
    table = TokenTable(smoothing=0).fit(trace, np.arange(9))
    seen = np.unique(token_ids[:540])
    asked = seen[rng.integers(0, len(seen), 100)]
    np.testing.assert_array_equal(table.predict(PredictRequest(asked)), footprint(function[asked], EXPERTS))


def test_smoothing_runs_from_the_tokens_own_to_popularity(rng: np.random.Generator) -> None:
    trace = random_trace(rng)
    ids = trace.request(0).token_ids
    assert ids is not None
    token = int(ids[0])
    asked = PredictRequest(np.array([token] * 5))
    own = TokenTable(smoothing=0, experts_kept=EXPERTS).fit(trace).predict(asked)
    popular = PopularityPredictor().fit(trace).predict(asked)
    away = [
        np.abs(TokenTable(smoothing=s, experts_kept=EXPERTS).fit(trace).predict(asked) - popular).max()
        for s in (0, 0.5, 2, 20, 1e9)
    ]
    assert np.all(np.diff(away) < 0), "the more smoothing, the nearer to popularity"
    assert away[-1] < 1e-6
    assert np.abs(own - popular).max() == away[0] > 0


def test_a_token_seen_often_is_trusted_more(rng: np.random.Generator) -> None:
    ids = distinct(rng, 11)
    ids[1:] = ids[1]
    trace = trace_of(ids, [7] + [8] * 10, [11])
    table = TokenTable(smoothing=1).fit(trace)
    popular = PopularityPredictor().fit(trace).predict(PredictRequest(num_tokens=1))
    for token, n, at in ((7, 1, 0), (8, 10, 1)):
        expected = n / (n + 1) * footprint(ids[at : at + 1], EXPERTS) + 1 / (n + 1) * popular
        np.testing.assert_allclose(table.predict(PredictRequest(np.array([token]))), expected)


def test_without_tokens_it_is_popularity_scaled(rng: np.random.Generator) -> None:
    trace = random_trace(rng)
    table, floor = TokenTable().fit(trace), PopularityPredictor().fit(trace)
    before = footprint(trace.request(3).expert_ids, EXPERTS)
    for request, tokens in (
        (PredictRequest(), 1),
        (PredictRequest(np.empty(0, np.int64), num_tokens=4), 4),
        (PredictRequest(num_tokens=9), 9),
        (PredictRequest(np.array([10**6, -1])), 2),
        (PredictRequest(footprint=before), trace.lengths[3]),
    ):
        np.testing.assert_allclose(table.predict(request), floor.predict(request))
        np.testing.assert_allclose(table.predict(request).sum(axis=1), tokens * TOP_K)


def test_num_tokens_scales_and_the_input_stays(rng: np.random.Generator) -> None:
    trace = random_trace(rng)
    asked = np.array([3, 3, 1], np.int64)
    table = TokenTable().fit(trace)
    once = table.predict(PredictRequest(asked))
    np.testing.assert_allclose(table.predict(PredictRequest(asked, num_tokens=12)), 4 * once)
    assert asked.tolist() == [3, 3, 1]


def test_what_is_cut_off_goes_by_popularity() -> None:
    """A token has experts a (always), b and c (half the time each); keeping two leaves half an activation."""
    ids = np.array([[[0, 1]], [[0, 2]], [[5, 6]], [[5, 6]]])
    trace = trace_of(ids, [4, 4, 9, 9], [4])
    popular = np.bincount(ids.ravel(), minlength=EXPERTS) / 4
    found = TokenTable(experts_kept=2).fit(trace).predict(PredictRequest(np.array([4])))
    kept = np.zeros(EXPERTS)
    kept[[0, 1]] = 1, 0.5
    np.testing.assert_allclose(found[0], kept + 0.5 * popular / TOP_K)
    assert TokenTable(experts_kept=99).fit(trace).rows.experts.shape == (2, 1, EXPERTS)
    assert TokenTable().fit(trace).rows.experts.shape == (2, 1, 2 * TOP_K)


def test_past_max_bytes_the_rarest_tokens_go(rng: np.random.Generator) -> None:
    token_ids = np.repeat(np.arange(50), np.arange(50) + 1)
    trace = trace_of(distinct(rng, len(token_ids)), token_ids, [len(token_ids)])
    whole = TokenTable().fit(trace)
    small = TokenTable(max_bytes=whole.rows.nbytes // 5).fit(trace)
    np.testing.assert_array_equal(small.rows.token_ids, np.arange(40, 50))
    assert small.rows.nbytes <= whole.rows.nbytes // 5
    popular = PopularityPredictor().fit(trace)
    for token in (0, 39, 40, 49):
        asked = PredictRequest(np.array([token]))
        expected = whole if token >= 40 else popular
        np.testing.assert_allclose(small.predict(asked), expected.predict(asked))


def test_only_the_phase_and_the_requests_asked_for_count(rng: np.random.Generator) -> None:
    ids, token_ids = distinct(rng, 12), np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4, 4])
    phase = np.array([PREFILL, PREFILL, DECODE] * 4, np.uint8)
    trace = trace_of(ids, token_ids, [6, 3, 3], phase)
    table = TokenTable().fit(trace, np.array([0, 1]), PREFILL)
    assert table.rows.token_ids.tolist() == [1, 2]
    assert table.rows.counts.tolist() == [3, 3]
    pre = footprints(ids[phase == PREFILL], np.array([0, 4, 6]), EXPERTS) / np.array([4, 2])[:, None, None]
    np.testing.assert_allclose(table.rows.popularity.per_token, pre.mean(axis=0))


def test_a_trace_that_repeats_an_id_stays_within_bounds() -> None:
    trace = trace_of(np.array([[[3, 3]]]), [0], [1])
    found = TokenTable().fit(trace).predict(PredictRequest(np.array([0])))
    np.testing.assert_allclose(found, 2 * (np.arange(EXPERTS) == 3)[None])


# Errors ---------------------------------------------------------------------------------------------------------------


def test_not_fitted_says_so() -> None:
    uses: list[Callable[[TokenTable], object]] = [
        lambda t: t.predict(PredictRequest()),
        lambda t: t.num_layers,
        lambda t: t.save("x"),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="'token_table' is not fitted: call fit"):
            use(TokenTable())


def test_bad_input_is_refused(rng: np.random.Generator) -> None:
    trace = random_trace(rng)
    without = ActivationTrace.from_arrays(trace.meta, distinct(rng, 4), np.array([0, 4]))
    with pytest.raises(ConfigError, match="has no token_ids"):
        TokenTable().fit(without)
    with pytest.raises(ConfigError, match="request 12 must be in 0 … 11"):
        TokenTable().fit(trace, np.array([12]))
    with pytest.raises(ConfigError, match="no token to fit on"):
        TokenTable().fit(trace, phase=PREFILL)
    with pytest.raises(ConfigError, match="no token to fit on"):
        TokenTable().fit(trace, np.empty(0, np.int64))
    with pytest.raises(ConfigError, match="token_ids holds -3"):
        TokenTable().fit(trace_of(distinct(rng, 2), [-3, 1], [2]))
    with pytest.raises(ConfigError, match=r"footprint has shape \(2, 2\)"):
        TokenTable().fit(trace).predict(PredictRequest(footprint=np.ones((2, 2))))
    for settings_, problem in (
        ({"smoothing": -1}, "smoothing=-1 must"),
        ({"smoothing": float("nan")}, "smoothing=nan must"),
        ({"confidence_smoothing": -1}, "confidence_smoothing=-1 must"),
        ({"experts_kept": 0}, "experts_kept=0 must"),
        ({"max_bytes": 0}, "max_bytes=0 must"),
    ):
        with pytest.raises(ConfigError, match=problem):
            TokenTable(**settings_)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(rng: np.random.Generator, tmp_path: Path) -> tuple[Any, Any]:
    table = TokenTable(smoothing=0.5, experts_kept=5).fit(random_trace(rng))
    table.save(tmp_path / "table.safetensors")
    return table, tmp_path / "table.safetensors"


def test_round_trip_is_exact(saved: tuple[TokenTable, Path], tmp_path: Path, rng: np.random.Generator) -> None:
    table, file = saved
    again = TokenTable.load(file)
    assert (again.smoothing, again.experts_kept, again.max_bytes) == (0.5, 5, table.max_bytes)
    assert (again.rows.model, again.rows.layer_ids) == ("model", (0, 1, 2))
    for one, other in zip(cast(Any, table.rows[:4]), cast(Any, again.rows[:4]), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    asked = PredictRequest(rng.integers(0, 25, 50))
    np.testing.assert_array_equal(again.predict(asked), table.predict(asked))
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "table.safetensors"]


def test_nothing_is_replaced(saved: tuple[Any, Any]) -> None:
    table, file = saved
    with pytest.raises(ConfigError, match="exists already; choose another name"):
        table.save(file)


def test_a_cut_file_is_refused_wherever_it_is_cut(saved: tuple[Any, Any], tmp_path: Path) -> None:
    data = saved[1].read_bytes()
    for length in [0, 4, 8, 100, *range(200, len(data), 97), len(data) - 1]:
        (tmp_path / "part").write_bytes(data[:length])
        with pytest.raises(TraceError) as caught:
            TokenTable.load(tmp_path / "part")
        assert caught.value.path == tmp_path / "part"
        assert "byte" in caught.value.problem
    (tmp_path / "part").write_bytes(data + b"x")
    with pytest.raises(TraceError, match="its header describes"):
        TokenTable.load(tmp_path / "part")
    with pytest.raises(TraceError, match="does not exist"):
        TokenTable.load(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="file"):
        TokenTable.load(tmp_path)


@pytest.mark.parametrize(
    ("about", "field"),
    [
        ({"format": "other"}, "metadata format: found 'other' version 1"),
        ({"version": 2}, "metadata format"),
        ({"top_k": 0}, "metadata top_k: is 0"),
        ({"top_k": 13}, "metadata top_k: is 13"),
        ({"top_k": None}, "metadata: "),
        ({"top_k": "x"}, "metadata: "),
        ({"top_k": float("inf")}, "metadata: "),
        ({"smoothing": -1}, "metadata: smoothing=-1"),
        ({"smoothing": float("nan")}, "metadata: smoothing=nan"),
        ({"confidence_smoothing": -1}, "metadata: confidence_smoothing=-1"),
        ({"confidence_smoothing": "x"}, "metadata: "),
        ({"layer_ids": [1]}, "metadata layer_ids: has 1 entries"),
        ({"layer_ids": 3}, "metadata: "),
        ({"experts_kept": 0}, "metadata: experts_kept=0"),
    ],
)
def test_wrong_metadata_is_named(saved: tuple[Any, Any], about: dict[str, Any], field: str) -> None:
    file = rewritten(saved[1], about)
    with pytest.raises(TraceError, match=f"table.safetensors: {field}"):
        TokenTable.load(file)


@pytest.mark.parametrize("name", ["top_k", "smoothing", "experts_kept", "model", "layer_ids", "max_bytes"])
def test_missing_metadata_is_named(saved: tuple[Any, Any], name: str) -> None:
    with pytest.raises(TraceError, match=f"metadata {name}: is missing"):
        TokenTable.load(rewritten(saved[1], drop=(name,)))


@pytest.mark.parametrize("name", ["token_ids", "counts", "experts", "weights", "popularity"])
def test_missing_or_misshapen_arrays_are_named(saved: tuple[Any, Any], name: str) -> None:
    table, file = saved
    whole = file.read_bytes()
    array = load_safetensors(whole)[name]
    for other in (array[:-1], array[..., None], array.astype(np.float32), array[:0]):
        file.write_bytes(whole)
        with pytest.raises(TraceError, match=r"table\.safetensors: "):
            TokenTable.load(rewritten(file, arrays={name: other}))
    file.write_bytes(whole)
    with pytest.raises(TraceError, match=f"{name}: is missing"):
        TokenTable.load(rewritten(file, drop=(name,)))
    file.write_bytes(whole)
    np.testing.assert_array_equal(TokenTable.load(file).rows.counts, table.rows.counts)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("token_ids", lambda a: a[::-1], "must rise"),
        ("token_ids", lambda a: a - 5, "must rise"),
        ("counts", lambda a: a - a.min(), "holds 0"),
        ("experts", lambda a: a + 12, r"it must be in 0 … 11"),
        ("weights", lambda a: a | 0x8000, "sum past top_k=2"),
        ("popularity", lambda a: a * 2, "sum to top_k=2"),
        ("popularity", lambda a: a * np.nan, "sum to top_k=2"),
        ("popularity", lambda a: a - 1, "must not be negative"),
    ],
)
def test_damaged_values_are_named(saved: tuple[Any, Any], name: str, change: Callable[..., Any], problem: str) -> None:
    file = saved[1]
    changed = np.ascontiguousarray(change(load_safetensors(file.read_bytes())[name]))
    with pytest.raises(TraceError, match=f"{name}: .*{problem}"):
        TokenTable.load(rewritten(file, arrays={name: changed}))


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    for meta in (None, {"coterie": "x"}, {"coterie": "[1]"}, {"format": "pt"}):
        (tmp_path / "other").write_bytes(save_safetensors({"a": np.zeros(3)}, meta))
        with pytest.raises(TraceError, match="other: metadata: is not that of a coterie-token-table file"):
            TokenTable.load(tmp_path / "other")
