"""Set scores and kurtosis against plain Python, and what theory fixes."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.errors import ConfigError
from coterie.traces import ActivationTrace
from coterie_lab.suites.sem_moe import token_sets
from coterie_lab.suites.sem_moe.token_sets import TokenCounts, count_tokens, kurtosis, set_scores
from token_traces import EXPERTS, LAYERS, TOP_K, random_trace

VOCABULARY = 20


def counted(trace: ActivationTrace) -> TokenCounts:
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    return count_tokens(tokens.expert_ids, tokens.token_ids, VOCABULARY, EXPERTS)


Sums = dict[str, list[float]]
"""Definition → sizes of hits, predicted and right sets."""


def add(sums: Sums, name: str, predicted: set[int], right: set[int], weight: float = 1.0) -> None:
    for i, size in enumerate((len(predicted & right), len(predicted), len(right))):
        sums[name][i] += weight * size


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), popular=st.booleans())
def test_scores_are_those_of_sets_in_plain_python(seed: int, popular: bool) -> None:
    rng = np.random.default_rng(seed)
    first, second = random_trace(rng, 2), random_trace(rng, 4)
    fit, test = counted(first), counted(second)
    found = set_scores(fit, test, TOP_K, popular)
    assert tuple(found) == token_sets.DEFINITIONS
    everyone = fit.activations.sum(axis=0) / fit.occurrences.sum()
    tokens, _ = second.arrays()
    assert tokens.token_ids is not None
    for layer in range(LAYERS):
        sums: Sums = defaultdict(lambda: [0.0, 0.0, 0.0])

        shares, tops = {}, {}
        for token in range(VOCABULARY):
            n = int(fit.occurrences[token])
            own = everyone[layer] if popular or not n else fit.activations[token, layer] / n
            shares[token] = own
            tops[token] = {e for e in sorted(range(EXPERTS), key=lambda e: (-own[e], e))[:TOP_K] if own[e] > 0}
        for token, experts in zip(tokens.token_ids.tolist(), tokens.expert_ids[:, layer].tolist(), strict=True):
            add(sums, "occurrence", tops[token], set(experts))
            for share in (50, 75, 90):
                often = {e for e in range(EXPERTS) if shares[token][e] >= share / 100 - 1e-12}
                add(sums, f"often_{share}", often, set(experts))
        for token in range(VOCABULARY):
            after = test.activations[token, layer]
            if not fit.occurrences[token] or not after.sum():
                continue
            ever = set(np.flatnonzero(after).tolist())
            right_top = {e for e in sorted(range(EXPERTS), key=lambda e: (-int(after[e]), e))[:TOP_K] if after[e] > 0}
            add(sums, "static", tops[token], right_top)
            add(sums, "ever", tops[token], ever)
            add(sums, "ever_weighted", tops[token], ever, float(test.occurrences[token]))
            add(sums, "all_ever", set(np.flatnonzero(shares[token] > 0).tolist()), ever)
        for name, (hits, predicted, right) in sums.items():
            score = found[name]
            if predicted:
                assert score.precision[layer] == pytest.approx(hits / predicted), name
            else:
                assert np.isnan(score.precision[layer])
            assert score.recall[layer] == pytest.approx(hits / right), name
    for name in ("occurrence",):
        np.testing.assert_array_equal(found[name].precision, found[name].recall)


def test_where_the_token_decides_all_definitions_but_thresholds_are_perfect(rng: np.random.Generator) -> None:
    function = np.argsort(rng.random((VOCABULARY, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    ids = np.arange(VOCABULARY).repeat(3)
    both = count_tokens(function[ids], ids, VOCABULARY, EXPERTS)
    for score in set_scores(both, both, TOP_K).values():
        np.testing.assert_array_equal(score.precision, 1)
        np.testing.assert_array_equal(score.f1, 1)


def test_more_occurrences_raise_precision_and_lower_recall_of_ever(rng: np.random.Generator) -> None:
    """Why the size of the test part decides `ever`: sooner or later every expert is used once."""
    precision, recall = [], []
    for times in (1, 5, 40):
        ids = np.arange(VOCABULARY).repeat(times)
        draw = np.argsort(rng.random((2, len(ids), 1, EXPERTS)), axis=-1)[..., :TOP_K]
        fit, test = (count_tokens(one, ids, VOCABULARY, EXPERTS) for one in draw)
        found = set_scores(fit, test, TOP_K)["ever"]
        precision.append(float(found.precision[0]))
        recall.append(float(found.recall[0]))
    assert precision[0] < precision[1] < precision[2]
    assert precision[2] > 0.95
    assert recall[2] == pytest.approx(TOP_K / EXPERTS, abs=0.02)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), k=st.integers(1, 6))
def test_the_top_is_that_of_a_sort(seed: int, k: int) -> None:
    values = np.random.default_rng(seed).integers(0, 4, (8, 6)).astype(np.float64)
    for row, mask in zip(values.tolist(), token_sets.top_mask(values, k), strict=True):
        right = [e for e in sorted(range(6), key=lambda e: (-row[e], e))[:k] if row[e] > 0]
        assert sorted(np.flatnonzero(mask).tolist()) == sorted(right)


def test_counts_are_those_of_a_counter(rng: np.random.Generator) -> None:
    trace = random_trace(rng)
    found = counted(trace)
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    times = Counter(tokens.token_ids.tolist())
    assert found.occurrences.tolist() == [times[token] for token in range(VOCABULARY)]
    np.testing.assert_array_equal(found.activations.sum(axis=2), found.occurrences[:, None].repeat(LAYERS, 1) * TOP_K)
    assert found.top_k == TOP_K
    with pytest.raises(ConfigError, match="must be below num_tokens=3"):
        count_tokens(tokens.expert_ids, tokens.token_ids, 3, EXPERTS)


def test_kurtosis_is_scipys(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (20, 3, 16))
    np.testing.assert_allclose(kurtosis(counts), stats.kurtosis(counts, axis=-1, fisher=False))
    assert kurtosis(np.full((2, 5), 3)).tolist() == [0, 0]


@pytest.mark.parametrize(("experts", "k"), [(64, 6), (128, 8), (32, 4), (8, 2)])
def test_a_fixed_set_has_the_kurtosis_of_the_formula(experts: int, k: int) -> None:
    counts = np.where(np.arange(experts) < k, 7, 0)
    assert kurtosis(counts) == pytest.approx(token_sets.fixed_set_kurtosis(experts, k))
