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
def test_idle_ranks_get_one_request_a_round(scores: np.ndarray) -> None:
    """The published algorithm: a rank is masked once it has its request, and all open when all have one."""
    schedule = schedule_requests(scores)
    ranks = scores.shape[1]
    np.testing.assert_array_equal(schedule.rounds, np.arange(len(scores)) // ranks)
    for number in range(len(scores) // ranks):
        assert sorted(schedule.ranks[schedule.rounds == number]) == list(range(ranks))
    for request, rank in enumerate(schedule.ranks):
        mask = schedule.open_ranks[request]
        assert scores[request, rank] == scores[request][mask].max()


@given(requests(), st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_loads_come_together(scores: np.ndarray, given_load: list[int]) -> None:
    """A whole number of rounds later no rank with a new request is more than one ahead of the least loaded."""
    ranks = scores.shape[1]
    scores = scores[: len(scores) // ranks * ranks]
    load = np.array(given_load[:ranks], np.float64)
    schedule = schedule_requests(scores, load)
    assert schedule.load.sum() == load.sum() + len(scores)
    got = schedule.load > load
    assert not got.any() or schedule.load[got].max() - schedule.load.min() <= 1


@given(requests(), st.integers(0, 25))
def test_one_by_one_is_as_all_at_once(scores: np.ndarray, cut: int) -> None:
    whole = schedule_requests(scores)
    first = schedule_requests(scores[:cut])
    second = schedule_requests(scores[cut:], first.load, turns=first.turns)
    np.testing.assert_array_equal(np.concatenate([first.ranks, second.ranks]), whole.ranks)


def test_reasons_name_what_was_masked() -> None:
    schedule = schedule_requests([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2]])
    assert schedule.ranks.tolist() == [0, 1, 0]
    assert schedule.reason(0) == "rank 0 (score 0.9) in round 0: the highest score"
    assert (
        schedule.reason(1) == "rank 1 (score 0.3) in round 0: rank 0 (score 0.8) had no turn left; 1 ranks were masked"
    )


def test_a_loaded_rank_waits() -> None:
    schedule = schedule_requests(np.tile([1.0, 0.0], (6, 1)), load=[4, 0])
    assert schedule.ranks.tolist() == [1, 1, 1, 1, 0, 1]
    heavy = schedule_requests(np.tile([1.0, 0.0], (4, 1)), work=[10, 1, 1, 1])
    assert heavy.ranks.tolist() == [0, 1, 1, 1], "the second round sees that the first request was heavy"


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scores has shape \(3,\)"):
        schedule_requests([1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match=r"load=\[1.0\] must be 2 "):
        schedule_requests([[1.0, 2.0]], load=[1.0])
    with pytest.raises(ConfigError, match="turns="):
        schedule_requests([[1.0, 2.0]], turns=[-1, 2])
    with pytest.raises(ConfigError, match="finite"):
        schedule_requests([[np.nan, 2.0]])
