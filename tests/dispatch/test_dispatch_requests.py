"""Requests to ranks: every round gives every rank its share, and within that the best score wins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.dispatch.requests import schedule_requests
from coterie.errors import ConfigError


@st.composite
def requests(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(0, 25), st.integers(1, 5)))
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 6, shape).astype(np.float64)


@given(requests())
def test_ranks_get_one_request_a_round(scores: np.ndarray) -> None:
    """The published algorithm: a rank is masked once it has its request, and all open when all have one."""
    chosen = schedule_requests(scores).tolist()
    ranks, left = scores.shape[1], set[int]()
    for request, rank in enumerate(chosen):
        left = left or set(range(ranks))
        assert rank == min(left, key=lambda other: (-scores[request, other], other))
        left.remove(rank)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scores has shape \(3,\)"):
        schedule_requests([1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="finite"):
        schedule_requests([[np.nan, 2.0]])
