"""Intervals over overlapping splits of one recording, against a population whose saving is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.runs import interval
from coterie.types import Interval

RECORDED, SPLITS, TRIALS = 200, 6, 2000


def splits(rng: Generator, served: int, truth: float = 5.0) -> NDArray[np.float64]:
    """Record requests and serve `served` of them, drawn anew for every split; return each split's saving in percent.

    A saving depends on the requests' own and on how they go together (the square of a latent sum): resampling requests
    one by one would miss the second part. Orders add noise to every split.
    """
    own, kind = rng.normal(truth, 10.0, RECORDED), rng.normal(0.5, 1.0, (RECORDED, 3))
    chosen = (rng.permutation(RECORDED)[:served] for _ in range(SPLITS))
    together = (0.75 + 3.0 / served, 4.0)  # expectation of the square, and the weight of that part
    return np.array(
        [
            own[half].mean() + together[1] * ((kind[half].mean(axis=0) ** 2).sum() - together[0]) + rng.normal(0.0, 0.2)
            for half in chosen
        ]
    )


def covered(found: Interval, truth: float) -> bool:
    assert found.low is not None
    assert found.high is not None
    return found.low <= truth <= found.high


@pytest.mark.parametrize("served", [100, 140])
def test_the_interval_covers_the_truth_as_often_as_it_says(served: int) -> None:
    """Halves, and seven of ten, as a fitted router serves where more must be in flight."""
    rng = np.random.default_rng(0)
    drawn = [splits(rng, served) for _ in range(TRIALS)]
    hits = np.mean([covered(interval(savings, served / (RECORDED - served)), 5.0) for savings in drawn])
    assert hits == pytest.approx(0.95, abs=0.02), "four standard errors of 2,000 trials"
    naive = np.mean([covered(interval(savings), 5.0) for savings in drawn])
    assert naive < 0.75, "Student's t as if splits were independent is far too sure"


def test_no_saving_is_rarely_called_one() -> None:
    """No verdict by luck: where nothing is saved, an interval lies above 0 for one recording in forty."""
    rng = np.random.default_rng(1)
    found = [interval(splits(rng, 100, truth=0.0), 1.0) for _ in range(TRIALS)]
    assert np.mean([one.low is not None and one.low > 0 for one in found]) < 0.025 + 0.014


def test_more_splits_do_not_make_a_recording_larger() -> None:
    values = np.array([4.0, 6.0])
    few, many = (interval(np.tile(values, times), 1.0) for times in (3, 300))
    assert few.low is not None
    assert many.low is not None
    assert many.mean - many.low == pytest.approx(1.96 * values.std(), rel=0.01), "the deviation, not ÷ √600"
    assert many.low > few.low
    assert interval(values, np.inf) == Interval(5.0, None, None), "every split served every request"
