"""Signatures against NumPy and SciPy: weights, rho, the greedy layers, and what they gain on requests not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from coterie.errors import ConfigError
from coterie.footprints.signatures import WEIGHTINGS, Signature, pair_cosines, rho, sample_pairs


def domains(
    rng: np.random.Generator, requests: int, layers: int = 6, experts: int = 16, noise_layers: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Prefill and decode counts of requests of four domains; in `noise_layers` prefill says nothing."""
    taste = rng.dirichlet(np.full(experts, 0.3), (4, layers))
    label = rng.integers(4, size=requests)
    prefill = rng.multinomial(60, taste[label])
    decode = rng.multinomial(200, taste[label])
    for layer in noise_layers:
        prefill[:, layer] = rng.multinomial(60, rng.dirichlet(np.full(experts, 0.1), requests))
    return prefill, decode


def test_idf_is_the_published_weight() -> None:
    rng = np.random.default_rng(0)
    prefill, decode = domains(rng, 30)
    found = Signature(mask=False).fit(prefill, decode, rng)
    np.testing.assert_allclose(found.weights, np.log(31 / ((prefill > 0).sum(axis=0) + 1)), rtol=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_transform_is_weighted_counts_of_length_one(weighting: str) -> None:
    rng = np.random.default_rng(1)
    prefill, decode = domains(rng, 30)
    found = Signature(weighting).fit(prefill, decode, rng)
    values = (prefill[3] > 0) if weighting == "binary" else prefill[3]
    expected = (values * found.weights)[found.layers].ravel()
    np.testing.assert_allclose(found.transform(prefill[3]), expected / np.linalg.norm(expected), rtol=1e-5)
    np.testing.assert_array_equal(found.transform_all(prefill)[3], found.transform(prefill[3]))
    assert not found.transform(np.zeros_like(prefill[0])).any(), "no tokens: no direction"


@given(st.integers(3, 12), st.integers(0, 10_000))
def test_rho_is_spearman_of_cosine_distances(requests: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.integers(0, 9, (requests, 5)) + 1.0, rng.random((requests, 7)) + 0.01
    pairs = [(i, j) for i in range(requests) for j in range(i + 1, requests)]

    def distances(rows: np.ndarray) -> list[float]:
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return [round(float(1 - unit[i] @ unit[j]), 7) for i, j in pairs]

    expected = spearmanr(distances(left), distances(right)).statistic
    assert rho(left, right) == pytest.approx(expected, abs=0.02), "ties may be broken by rounding"
    assert rho(left, right) == pytest.approx(rho(left, right, np.array(pairs)), abs=1e-12)


def test_rho_without_any_order_is_zero() -> None:
    assert rho(np.ones((4, 3)), np.random.default_rng(0).random((4, 3))) == 0.0


@given(st.integers(2, 40), st.integers(1, 900), st.integers(0, 99))
def test_pairs_are_all_or_as_many_as_asked_without_repeats(requests: int, limit: int, seed: int) -> None:
    pairs = sample_pairs(requests, limit, np.random.default_rng(seed))
    assert len(pairs) == min(limit, requests * (requests - 1) // 2)
    assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert ((pairs[:, 0] >= 0) & (pairs[:, 0] < pairs[:, 1]) & (pairs[:, 1] < requests)).all()


def test_greedy_layers_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(2)
    prefill, decode = domains(rng, 40, layers=5, noise_layers=(1, 3))
    truth = decode.reshape(40, -1)
    weights = Signature(mask=False).fit(prefill, decode, rng).weights
    taken: list[int] = []
    rhos: list[float] = []
    while len(taken) < 5:
        scores = {
            layer: rho((prefill * weights)[:, [*taken, layer]].reshape(40, -1), truth)
            for layer in range(5)
            if layer not in taken
        }
        taken.append(max(scores, key=lambda layer: scores[layer]))
        rhos.append(scores[taken[-1]])
    best = int(np.argmax(rhos)) + 1
    found = Signature().fit(prefill, decode, rng)
    assert found.layers.tolist() == sorted(taken[:best])
    assert not {1, 3} & set(found.layers.tolist())


def test_the_mask_helps_requests_it_was_not_chosen_on() -> None:
    rng = np.random.default_rng(3)
    prefill, decode = domains(rng, 160, noise_layers=(0, 2, 4))
    fit, test = slice(0, 80), slice(80, 160)
    scores = {
        mask: rho(
            Signature(mask=mask).fit(prefill[fit], decode[fit], rng).transform_all(prefill[test]),
            decode[test].reshape(80, -1),
        )
        for mask in (False, True)
    }
    assert scores[True] > scores[False] + 0.1


def test_the_same_seed_gives_the_same_layers() -> None:
    prefill, decode = domains(np.random.default_rng(4), 250)
    first, again = (Signature().fit(prefill, decode, np.random.default_rng(9)) for _ in range(2))
    np.testing.assert_array_equal(first.layers, again.layers)


def test_cosines_of_empty_rows_are_zero() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    np.testing.assert_allclose(pair_cosines(rows, np.array([[0, 1], [0, 2]])), [0.0, 1.0])


def test_what_cannot_be_fitted_is_refused() -> None:
    rng = np.random.default_rng(5)
    prefill, decode = domains(rng, 10)
    with pytest.raises(ConfigError, match="at least 3"):
        Signature().fit(prefill[:2], decode[:2], rng)
    with pytest.raises(ConfigError, match="both must be"):
        Signature().fit(prefill, decode[:, :2], rng)
    with pytest.raises(ConfigError, match="weighting='count'"):
        Signature().fit(prefill + 1, decode, rng)
    with pytest.raises(ConfigError, match="fitted for"):
        Signature().fit(prefill, decode, rng).transform(prefill[0, :2])
    with pytest.raises(ConfigError, match="one of count_idf"):
        Signature("idf")
    with pytest.raises(ConfigError, match="must rise"):
        Signature.restored("count", np.ones((2, 2), np.float32), np.array([1, 0]))
