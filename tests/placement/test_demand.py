"""Demand trackers against sums over the whole history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement import DemandTracker

LAYERS, EXPERTS, WORKERS = 2, 5, 3


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, WORKERS - 1), max_size=25), st.floats(0.05, 1.0))
def test_decayed_demand_is_the_decayed_sum(seed: int, workers: list[int], decay: float) -> None:
    tracker, rng = DemandTracker(LAYERS, EXPERTS, WORKERS, decay=decay), np.random.default_rng(seed)
    history = [(worker, rng.integers(0, 9, (LAYERS, EXPERTS))) for worker in workers]
    for worker, counts in history:
        tracker.record(worker, counts)
    for worker in range(WORKERS):
        own = [counts for recorded, counts in history if recorded == worker]
        expected = sum((counts * decay**age for age, counts in enumerate(reversed(own))), np.zeros((LAYERS, EXPERTS)))
        np.testing.assert_allclose(tracker.worker(worker), expected, rtol=1e-9)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="decay=0"):
        DemandTracker(1, 1, 1, decay=0)
    with pytest.raises(ConfigError, match="num_workers=0"):
        DemandTracker(1, 1, 0)
    tracker = DemandTracker(1, 2, 1)
    with pytest.raises(ConfigError, match="worker=1"):
        tracker.record(1, np.ones((1, 2)))
    with pytest.raises(ConfigError, match=r"\(2, 2\)"):
        tracker.record(0, np.ones((2, 2)))
    with pytest.raises(ConfigError, match="finite"):
        tracker.record(0, np.array([[np.nan, 1.0]]))
    assert not tracker.worker(0).any(), "a refused record leaves nothing behind"
