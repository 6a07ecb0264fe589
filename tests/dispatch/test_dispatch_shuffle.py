"""Shuffle schedules: blocks are equal, order comes back, only the least sure tokens move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.dispatch.shuffle import PADDING, ShuffleSchedule, shuffle_schedule
from coterie.errors import ConfigError


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray]:
    num_ranks = draw(st.integers(1, 9))
    ranks = draw(st.lists(st.integers(0, num_ranks - 1), max_size=60))
    sure = draw(st.lists(st.integers(0, 5), min_size=len(ranks), max_size=len(ranks)))
    return np.array(ranks, np.int64), num_ranks, np.array(sure) / 5


def reference_schedule(wanted: np.ndarray, num_ranks: int, sure: np.ndarray) -> ShuffleSchedule:
    """Reference implementation of :func:`shuffle_schedule` in NumPy."""
    per_rank = -(-len(wanted) // num_ranks)
    homes = wanted.copy()
    counts = np.bincount(wanted, minlength=num_ranks)
    leaving = []
    for rank in np.flatnonzero(counts > per_rank):
        tokens = np.flatnonzero(wanted == rank)
        least_sure_first = tokens[np.argsort(sure[tokens], kind="stable")]
        leaving.append(least_sure_first[: counts[rank] - per_rank])
    if leaving:
        moving = np.sort(np.concatenate(leaving))
        room = np.maximum(per_rank - counts, 0)
        homes[moving] = np.repeat(np.arange(num_ranks), room)[: len(moving)]
    by_home = np.argsort(homes, kind="stable")
    counts = np.bincount(homes, minlength=num_ranks)
    starts = np.cumsum(counts) - counts
    places = homes[by_home] * per_rank + np.arange(len(wanted)) - starts[homes[by_home]]
    order = np.full(num_ranks * per_rank, PADDING, np.int64)
    order[places] = by_home
    inverse = np.empty(len(wanted), np.int64)
    inverse[by_home] = places
    return ShuffleSchedule(order, per_rank, inverse)


def check_sound(schedule: ShuffleSchedule, tokens: int, num_ranks: int) -> None:
    assert schedule.per_rank == -(-tokens // num_ranks)
    assert len(schedule.order) == num_ranks * schedule.per_rank
    assert sorted(schedule.order[schedule.order != PADDING]) == list(range(tokens))
    np.testing.assert_array_equal(schedule.order[schedule.inverse], np.arange(tokens))
    for rank in range(num_ranks):
        own = schedule.tokens_of(rank)
        assert (np.diff(own) > 0).all(), "tokens keep their order inside a block"
        assert (schedule.inverse[own] // schedule.per_rank == rank).all()


@given(batches())
def test_sound_and_equal_to_the_reference(batch: tuple[np.ndarray, int, np.ndarray]) -> None:
    ranks, num_ranks, sure = batch
    schedule, reference = (make(ranks, num_ranks, sure) for make in (shuffle_schedule, reference_schedule))
    check_sound(schedule, len(ranks), num_ranks)
    np.testing.assert_array_equal(schedule.order, reference.order)
    np.testing.assert_array_equal(schedule.inverse, reference.inverse)


@given(batches())
def test_as_little_confidence_is_lost_as_can_be(batch: tuple[np.ndarray, int, np.ndarray]) -> None:
    """A rank keeps per_rank tokens at most, so what it must give up is its least sure ones, and no others."""
    ranks, num_ranks, sure = batch
    schedule = shuffle_schedule(ranks, num_ranks, sure)
    for rank in range(num_ranks):
        wanted = np.flatnonzero(ranks == rank)
        kept = wanted[schedule.inverse[wanted] // schedule.per_rank == rank]
        assert len(kept) == min(len(wanted), schedule.per_rank)
        assert sure[kept].sum() == pytest.approx(np.sort(sure[wanted])[::-1][: schedule.per_rank].sum())


def test_a_small_case_by_hand() -> None:
    schedule = shuffle_schedule([1, 1, 0, 1, 1], 2, [0.9, 0.1, 0.5, 0.8, 0.7])
    assert schedule.order.tolist() == [1, 2, PADDING, 0, 3, 4]
    assert schedule.inverse.tolist() == [3, 0, 1, 4, 5]


@pytest.mark.parametrize(
    ("ranks", "confidence", "problem"),
    [
        ([0, 2], None, "ranks holds 2; it must be in 0 … 1"),
        ([-1], None, "ranks holds -1"),
        ([0.5], None, "whole numbers"),
        ([0], [0.1, 0.2], "confidence has shape"),
        ([0], [np.nan], "finite"),
    ],
)
def test_wrong_input_is_refused(ranks: list[int], confidence: list[float] | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        shuffle_schedule(ranks, 2, confidence)
