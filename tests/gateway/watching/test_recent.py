"""Times of the last minutes: quantiles against NumPy's, and a memory that does not grow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.gateway.watching.recent import Recent, Times


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_quantiles_are_right_to_the_width_of_a_step(share: float, rng: np.random.Generator) -> None:
    values = rng.lognormal(-3, 1.5, 2000)
    times = Times()
    for value in values:
        times.add(float(value))
    exact = np.quantile(values, share, method="inverted_cdf")
    assert len(times) == 2000
    assert times.quantile(share) == pytest.approx(exact, rel=0.026)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300, math.inf, math.nan])
def test_times_that_cannot_be_are_held_within_bounds(value: float) -> None:
    times = Times()
    times.add(value)
    found = times.quantile(0.5)
    assert (found is None) == math.isnan(value)
    assert found is None or 0.9e-6 < found < 1.1e5


def test_bins_follow_the_clock() -> None:
    recent = Recent(bins=4, bin_s=5.0)
    recent.add(100.0, 200, False, 0.1, 0.01, 7)
    recent.add(104.9, 502)
    recent.add(111.0, 200, False, 0.2, None, 3)
    series = recent.series(112.0)
    assert series["ended"] == [0, 2, 0, 1]
    assert series["failed"] == [0, 1, 0, 0]
    assert series["ttft_ms"]["p50"] == [None, pytest.approx(100, rel=0.03), None, pytest.approx(200, rel=0.03)]
    assert series["tpot_ms"]["p95"] == [None, pytest.approx(10, rel=0.03), None, None]
    told = recent.over(112.0, 60.0)
    assert (told["ended"], told["failed"], told["output_tokens"]) == (3, 1, 10)
    assert told["ttft_ms"]["p95"] == pytest.approx(200, rel=0.03)
    assert recent.over(112.0, 5.0)["ended"] == 1
    assert recent.series(1000.0)["ended"] == [0] * 4, "what is long ago is not shown"
    assert recent.over(1000.0, 60.0)["ttft_ms"] == {"p50": None, "p95": None}


@pytest.mark.parametrize(
    ("status", "cut", "counted"),
    [
        (200, False, (0, 0)),
        (400, False, (0, 1)),
        (429, False, (0, 1)),
        (499, False, (0, 0)),
        (500, False, (1, 0)),
        (503, False, (1, 0)),
        (200, True, (1, 0)),
    ],
)
def test_a_refused_request_is_no_failure(status: int, cut: bool, counted: tuple[int, int]) -> None:
    recent = Recent(bins=2, bin_s=5.0)
    recent.add(1.0, status, cut)
    told, series = recent.over(1.0, 5.0), recent.series(1.0)
    assert (told["ended"], told["failed"], told["refused"]) == (1, *counted)
    assert (series["failed"][-1], series["refused"][-1]) == counted


def test_a_clock_that_goes_back_counts_into_the_newest_bin() -> None:
    recent = Recent(bins=3, bin_s=1.0)
    recent.add(50.0, 200, False, 0.1, None)
    recent.add(10.0, 200, False, 0.1, None)
    assert recent.series(50.5)["ended"] == [0, 0, 2]


def test_quantiles_that_were_told_are_told_anew_after_more_came() -> None:
    recent = Recent()
    recent.add(10.0, 200, False, 0.1, None)
    before = recent.series(10.0)["ttft_ms"]["p50"][-1]
    for _ in range(5):
        recent.add(10.0, 200, False, 1.0, None)
    assert recent.series(10.0)["ttft_ms"]["p50"][-1] > 5 * before


def test_it_keeps_as_much_after_a_day_as_after_five_minutes(rng: np.random.Generator) -> None:
    recent = Recent()
    for second in range(0, 86_400, 4):
        recent.add(float(second), 200, False, float(rng.lognormal(-2, 3)), float(rng.lognormal(-5, 3)))
    assert len(recent._ring) == recent.bins
    steps = math.log(1e11) / math.log(1.05)
    assert all(len(one.ttft._counts) <= steps for one in recent._ring)


def test_a_ring_has_bins() -> None:
    with pytest.raises(ConfigError, match="bins=1"):
        Recent(bins=1)
    with pytest.raises(ConfigError, match="bin_s=0"):
        Recent(bin_s=0.0)
