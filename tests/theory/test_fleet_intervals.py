"""Intervals of `coterie fleet` against a population whose saving is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.simulation import _Served, _sure
from coterie.answers.runs import interval
from coterie.sim import FleetSummary
from coterie.types import Interval

RECORDED, SPLITS, TRIALS = 120, 6, 300
SUMMARY = FleetSummary(*[None] * len(FleetSummary._fields))  # type: ignore[arg-type]
"""Not read by the bootstrap."""


def trial(saving: float, rng: Generator, fitted: bool) -> tuple[list[tuple[_Served, _Served]], NDArray[np.float64]]:
    """Record requests of a population, serve them in overlapping halves; return the runs and each split's saving.

    A request's own saving differs from the population's by 15 points: recording 120 of them leaves an error of 1.4.
    `fitted` serves the same half in every split.
    """
    base = rng.gamma(20.0, 1.0, RECORDED)
    other = base * (1.0 - saving + rng.normal(0.0, 0.15, RECORDED))
    first, pairs = rng.permutation(RECORDED)[: RECORDED // 2], []
    for _ in range(SPLITS):
        half = first if fitted else rng.permutation(RECORDED)[: RECORDED // 2]
        uses = np.repeat(half, 5)
        noise = rng.normal(1.0, 0.05, (2, len(uses)))  # of orders and neighbours
        runs = (
            _Served(SUMMARY, 0.0, 1.0, uses, values[uses] * by) for values, by in zip((base, other), noise, strict=True)
        )
        pairs.append((next(runs), next(runs)))
    return pairs, np.array([100 * (1 - two.tpot_s.mean() / one.tpot_s.mean()) for one, two in pairs])


def ends(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def covers(found: Interval, truth: float) -> bool:
    low, high = ends(found)
    return low <= truth <= high


@pytest.mark.parametrize("fitted", [False, True])
def test_the_interval_covers_the_truth_as_often_as_it_says(fitted: bool) -> None:
    rng, hits, naive = np.random.default_rng(0), 0, 0
    for seed in range(TRIALS):
        pairs, savings = trial(0.05, rng, fitted)
        hits += covers(_sure(float(savings.mean()), pairs, None, seed), 5.0)
        naive += covers(interval(savings), 5.0)
    # Four standard errors of a binomial of 300 below 95%; at most the conservative side above.
    assert 0.90 <= hits / TRIALS <= 0.995
    assert naive / TRIALS < 0.75, "Student's t over overlapping halves is far too sure"


@pytest.mark.parametrize("fitted", [False, True])
def test_no_saving_is_rarely_called_one(fitted: bool) -> None:
    """No verdict by luck: where nothing is saved, an interval lies above 0 in 2.5% of recordings."""
    rng, wrong = np.random.default_rng(1), 0
    for seed in range(TRIALS):
        pairs, savings = trial(0.0, rng, fitted)
        found = _sure(float(savings.mean()), pairs, None, seed)
        wrong += found.low is not None and found.low > 0
    assert wrong / TRIALS <= 0.06


def test_the_tail_and_one_split() -> None:
    pairs, savings = trial(0.05, np.random.default_rng(2), fitted=False)
    found = _sure(7.0, pairs, 0.99, 0)
    (low, high), (low_mean, high_mean) = ends(found), ends(_sure(float(savings.mean()), pairs, None, 0))
    assert low < found.mean == 7.0 < high
    assert high - low > high_mean - low_mean, "a tail is less sure than a mean"
    assert _sure(7.0, pairs[:1], 0.99, 0) == Interval(7.0, None, None)
    assert _sure(7.0, pairs, 0.99, 0) == found, "the same seed gives the same interval"
