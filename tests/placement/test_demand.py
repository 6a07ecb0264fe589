"""Demand trackers against sums over the whole history, and mismatch against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.triggers.demand import DemandTracker, WindowTracker, mismatch

LAYERS, EXPERTS, WORKERS = 2, 5, 3


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, np.ndarray, int | None]]:
    """(worker, counts, request) of each record."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    records = draw(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.none() | st.integers(0, 3)), max_size=25))
    return [(worker, rng.integers(0, 9, (LAYERS, EXPERTS)), request) for worker, request in records]


def decayed(counts: list[np.ndarray], decay: float) -> np.ndarray:
    total = np.zeros((LAYERS, EXPERTS))
    for count in counts:
        total = total * decay + count
    return total


@settings(deadline=None, max_examples=60)
@given(histories(), st.floats(0.05, 1.0))
def test_decayed_demand_is_the_decayed_sum(history: list[tuple[int, np.ndarray, int | None]], decay: float) -> None:
    tracker = DemandTracker(LAYERS, EXPERTS, WORKERS, decay=decay)
    for worker, counts, request in history:
        tracker.record(worker, counts, request)
    np.testing.assert_allclose(tracker.overall, decayed([c for _, c, _ in history], decay ** (1 / WORKERS)), rtol=1e-9)
    for worker in range(WORKERS):
        mine = [c for w, c, _ in history if w == worker]
        np.testing.assert_allclose(tracker.worker(worker), decayed(mine, decay), rtol=1e-9)
    for request in range(4):
        own = [c for _, c, r in history if r == request]
        found = tracker.request(request)
        assert (found is None) == (not own)
        if found is not None:
            np.testing.assert_allclose(found, decayed(own, decay), rtol=1e-9)


def test_scale_never_overflows() -> None:
    tracker = DemandTracker(1, 1, 1, decay=0.5)
    for _ in range(3000):  # 0.5^-3000 is past the largest float
        tracker.record(0, np.ones((1, 1)))
    np.testing.assert_allclose(tracker.overall, 2.0)
    np.testing.assert_allclose(tracker.worker(0), 2.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(histories(), min_size=1, max_size=5), st.integers(1, 4))
def test_windows_are_plain_sums(rounds: list[list[tuple[int, np.ndarray, int | None]]], windows: int) -> None:
    tracker = WindowTracker(LAYERS, EXPERTS, WORKERS, windows=windows)
    for number, history in enumerate(rounds):
        if number:
            tracker.roll()
        for worker, counts, request in history:
            tracker.record(worker, counts, request)
    kept = rounds[-windows:]
    zero = np.zeros((LAYERS, EXPERTS))
    expected = [sum((c for _, c, _ in history), zero) for history in kept]
    np.testing.assert_array_equal(tracker.series, np.array(expected))
    np.testing.assert_array_equal(tracker.overall, sum(expected))
    for worker in range(WORKERS):
        mine = sum((c for history in kept for w, c, _ in history if w == worker), zero)
        np.testing.assert_array_equal(tracker.worker(worker), mine)
    for request in range(4):
        own = [c for history in kept for _, c, r in history if r == request]
        found = tracker.request(request)
        assert (found is None) == (not own)
        if found is not None:
            np.testing.assert_array_equal(found, sum(own))


@pytest.mark.parametrize("kind", [DemandTracker, WindowTracker])
def test_the_request_recorded_longest_ago_is_forgotten(kind: Any) -> None:
    tracker = kind(1, 1, 1, max_requests=2)
    one = np.ones((1, 1))
    for request in ("a", "b", "a", "c"):
        tracker.record(0, one, request)
    assert tracker.request("b") is None
    assert tracker.request("a") is not None
    assert tracker.request("c") is not None
    tracker.forget("a")
    tracker.forget("never seen")
    assert tracker.request("a") is None


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_mismatch_by_loops(seed: int, held_share: float) -> None:
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, 4, (3, 6)).astype(np.float64)
    held = rng.random((3, 6)) < held_share
    found = mismatch(demand, held)
    cells = [(demand[at], at) for at in np.ndindex(3, 6)]
    positive = [value for value, _ in cells if value > 0]
    lacking = sorted((-value, at) for value, at in cells if value > 0 and not held[at])
    median = np.median(positive) if positive else 0.0
    spare = sorted((value, at) for value, at in cells if held[at] and value < median)
    assert found.score == pytest.approx(-sum(value for value, _ in lacking) / max(sum(positive), 1))
    assert [tuple(at) for at in found.needed] == [at for _, at in lacking]
    assert [tuple(at) for at in found.underused] == [at for _, at in spare]


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="decay=0 must be above 0"):
        DemandTracker(1, 1, 1, decay=0)
    with pytest.raises(ConfigError, match="windows=0"):
        WindowTracker(1, 1, 1, windows=0)
    with pytest.raises(ConfigError, match="num_workers=0"):
        WindowTracker(1, 1, 0)
    tracker = DemandTracker(1, 2, 1)
    with pytest.raises(ConfigError, match="worker=1 must be in 0 … 0"):
        tracker.record(1, np.ones((1, 2)))
    with pytest.raises(ConfigError, match="shape"):
        tracker.record(0, np.ones((2, 2)))
    with pytest.raises(ConfigError, match="finite"):
        tracker.record(0, np.array([[np.nan, 1.0]]))
    assert not tracker.overall.any(), "a refused record leaves nothing behind"
    with pytest.raises(ConfigError, match="shape"):
        mismatch(np.ones((1, 2)), np.ones((2, 1), np.bool_))
