from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie_lab.suites.joint.decode_batch import DecodeBatcher, DecodePrices

PRICES = DecodePrices(fixed_us=100.0, request_us=10.0, remote_us=5.0)


def test_the_most_local_come_first_and_the_budget_holds() -> None:
    remote = np.array([7.0, 0.0, 3.0, 1.0])
    chosen = DecodeBatcher(PRICES, budget_us=150.0).select(remote, np.zeros(4, np.int64))
    assert chosen.tolist() == [1, 3, 2]  # 100 + 10 + 15 + 25 = 150


def test_who_is_long_due_goes_first_longest_first() -> None:
    batcher = DecodeBatcher(PRICES, budget_us=155.0, max_skips=2)
    chosen = batcher.select(np.array([0.0, 7.0, 0.0, 1.0]), np.array([0, 2, 0, 3]))
    assert chosen.tolist() == [3]  # 1 would be next, and does not fit


def test_one_always_runs() -> None:
    assert DecodeBatcher(PRICES, budget_us=1.0).select(np.array([3.0, 2.0]), np.array([0, 0])).tolist() == [1]


@given(
    remote=st.lists(st.floats(0, 8), min_size=1, max_size=30),
    budget=st.floats(50, 1000),
    tokens=st.integers(1, 40),
    data=st.data(),
)
def test_keeps_its_limits(remote: list[float], budget: float, tokens: int, data: st.DataObject) -> None:
    skipped = np.array([data.draw(st.integers(0, 9)) for _ in remote])
    chosen = DecodeBatcher(PRICES, budget, tokens).select(np.array(remote), skipped).tolist()
    assert 1 <= len(chosen) <= tokens
    assert len(set(chosen)) == len(chosen)
    cost = 100.0 + sum(10.0 + 5.0 * remote[i] for i in chosen)
    assert cost <= budget + 1e-6 or len(chosen) == 1
    left = set(range(len(remote))) - set(chosen)
    if left and len(chosen) < tokens:  # the next in order would not have fitted
        following = min(left, key=lambda i: (skipped[i] < 4, -skipped[i] if skipped[i] >= 4 else 0, remote[i]))
        assert cost + 10.0 + 5.0 * remote[following] > budget - 1e-6


@given(st.integers(2, 24), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_nobody_starves(requests: int, at_once: int, seed: int) -> None:
    """With room for `at_once`, everybody runs again within max_skips steps and the queue of those due before him."""
    remote = np.random.default_rng(seed).uniform(0, 8, requests)
    batcher = DecodeBatcher(PRICES, budget_us=1e9, max_tokens=at_once, max_skips=3)
    skipped, worst = np.zeros(requests, np.int64), 0
    for _ in range(60):
        chosen = batcher.select(remote, skipped)
        skipped += 1
        skipped[chosen] = 0
        worst = max(worst, int(skipped.max()))
    assert worst <= 3 + -(-requests // at_once)
