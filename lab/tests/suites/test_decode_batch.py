from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie_lab.suites.joint.decode_batch import DecodeBatcher, DecodePrices

PRICES = DecodePrices(fixed_us=100.0, request_us=10.0, remote_us=5.0)


def test_the_most_local_come_first_and_the_budget_holds() -> None:
    remote = np.array([7.0, 0.0, 3.0, 1.0])
    batch = DecodeBatcher(PRICES, budget_us=150.0).select(remote, np.zeros(4, np.int64))
    assert batch.chosen.tolist() == [1, 3, 2]  # 100 + 10 + 15 + 25 = 150
    assert batch.step_us == pytest.approx(150.0)
    assert "the budget" in batch.reason


def test_who_is_long_due_goes_first_longest_first() -> None:
    batch = DecodeBatcher(PRICES, budget_us=155.0, max_skips=2).select(
        np.array([0.0, 7.0, 0.0, 1.0]), np.array([0, 2, 0, 3])
    )
    assert batch.chosen.tolist() == [3]  # 1 would be next, and does not fit


def test_one_always_runs() -> None:
    batch = DecodeBatcher(PRICES, budget_us=1.0).select(np.array([3.0, 2.0]), np.array([0, 0]))
    assert batch.chosen.tolist() == [1]
    assert "breaks the budget" in batch.reason


@given(
    remote=st.lists(st.floats(0, 8), min_size=1, max_size=30),
    budget=st.floats(50, 1000),
    tokens=st.integers(1, 40),
    data=st.data(),
)
def test_keeps_its_limits(remote: list[float], budget: float, tokens: int, data: st.DataObject) -> None:
    skipped = np.array([data.draw(st.integers(0, 9)) for _ in remote])
    batch = DecodeBatcher(PRICES, budget, tokens).select(np.array(remote), skipped)
    assert 1 <= len(batch.chosen) <= tokens
    assert len(set(batch.chosen.tolist())) == len(batch.chosen)
    cost = 100.0 + sum(10.0 + 5.0 * remote[i] for i in batch.chosen)
    assert batch.step_us == pytest.approx(cost)
    assert cost <= budget + 1e-6 or len(batch.chosen) == 1
    left = set(range(len(remote))) - set(batch.chosen.tolist())
    if left and len(batch.chosen) < tokens:  # the next in order would not have fitted
        rest = min((not skipped[i] >= 4, -skipped[i] if skipped[i] >= 4 else 0, remote[i]) for i in left)
        following = next(
            i for i in left if (not skipped[i] >= 4, -skipped[i] if skipped[i] >= 4 else 0, remote[i]) == rest
        )
        assert cost + 10.0 + 5.0 * remote[following] > budget - 1e-6


@given(st.integers(2, 24), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_nobody_starves(requests: int, at_once: int, seed: int) -> None:
    """With room for `at_once`, everybody runs again within max_skips steps and the queue of those due before him."""
    remote = np.random.default_rng(seed).uniform(0, 8, requests)
    batcher = DecodeBatcher(PRICES, budget_us=1e9, max_tokens=at_once, max_skips=3)
    skipped, worst = np.zeros(requests, np.int64), 0
    for _ in range(60):
        chosen = batcher.select(remote, skipped).chosen
        skipped += 1
        skipped[chosen] = 0
        worst = max(worst, int(skipped.max()))
    assert worst <= 3 + -(-requests // at_once)


@pytest.mark.parametrize("remote", [[np.nan], [-1.0], [np.inf], []])
def test_bad_numbers_are_refused(remote: list[float]) -> None:
    with pytest.raises(ConfigError):
        DecodeBatcher(PRICES).select(np.array(remote), np.zeros(len(remote), np.int64))


def test_bad_settings_are_refused() -> None:
    for wrong in ({"budget_us": 0.0}, {"max_tokens": 0}, {"max_skips": 0}):
        with pytest.raises(ConfigError):
            DecodeBatcher(PRICES, **wrong)
    with pytest.raises(ConfigError):
        DecodePrices(-1.0, 0.0, 0.0)
