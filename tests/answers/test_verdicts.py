"""The one form of verdicts: opening, place, gain, baseline, interval or why there is none."""

from __future__ import annotations

import pytest

from coterie.answers.verdicts import (
    HARDLY,
    NOT,
    PAYS,
    UNTOLD,
    change,
    is_outweighed,
    is_recommended,
    opening_of,
    tail_said,
    verdict_of,
)
from coterie.types import Interval


@pytest.mark.parametrize(
    ("percent", "opening"),
    [
        (Interval(1.0, 0.1, 1.9), PAYS),
        (Interval(0.9, 0.1, 1.7), HARDLY),
        (Interval(9.0, 0.0, 18.0), UNTOLD),
        (Interval(-0.5, -1.5, 0.5), NOT),
        (Interval(0.04, 0.01, 0.07), NOT),
        (Interval(9.0, None, None), UNTOLD),
    ],
)
def test_the_opening_follows_the_interval(percent: Interval, opening: str) -> None:
    assert opening_of(percent) == opening


def test_without_an_interval_a_gain_must_be_more_than_noise() -> None:
    assert [opening_of(Interval(gain, None, None), 2.0) for gain in (-1.0, 2.0, 2.1)] == [NOT, UNTOLD, PAYS]
    assert opening_of(Interval(0.5, None, None), 0.0) == HARDLY


def test_a_gain_says_what_becomes_of_the_metric() -> None:
    assert [change(percent, "TPOT") for percent in (2.0, -0.01, -3.0)] == [
        "takes 2.0% off TPOT",
        "takes 0.0% off TPOT",
        "adds 3.0% to TPOT",
    ]


def test_the_interval_has_the_sign_of_what_is_said() -> None:
    worse = verdict_of("here", Interval(-3.0, -5.0, -1.0), "a adds 3.0% to TPOT", "b", "", "", "p99 no worse")
    assert worse == f"{NOT} here: a adds 3.0% to TPOT against b, 95% 1.0 to 5.0; p99 no worse."
    other = verdict_of("here", Interval(3.0, None, None), "a takes 3.0% off TPOT", "b", "one run", opening=HARDLY)
    assert other == f"{HARDLY} here: a takes 3.0% off TPOT against b, one run."


SURE = Interval(0.4, 0.2, 0.6)


@pytest.mark.parametrize(
    ("gain", "tail", "recommended", "outweighed", "said"),
    [
        (SURE, Interval(-1.7, -2.4, -1.0), False, True, "p99 1.7% longer, more than it saves"),
        (Interval(6.8, 6.0, 7.7), Interval(-1.7, -2.4, -1.0), True, False, "p99 1.7% longer"),
        (SURE, Interval(-0.7, -0.9, -0.5), True, False, "p99 no worse"),
        (SURE, Interval(-1.7, -4.4, 1.0), True, False, "p99 cannot be told (-4.4 to +1.0% saved)"),
        (SURE, Interval(2.0, 1.0, 3.0), True, False, "p99 no worse"),
        (Interval(0.4, -0.2, 1.0), Interval(2.0, 1.0, 3.0), False, False, "p99 no worse"),
        (Interval(5.0, None, None), Interval(1.0, None, None), False, False, ""),
    ],
)
def test_a_change_is_recommended_if_it_surely_saves_and_p99_does_not_outweigh_that(
    gain: Interval, tail: Interval, recommended: bool, outweighed: bool, said: str
) -> None:
    assert is_recommended(gain, tail) is recommended
    assert is_outweighed(gain, tail) is outweighed
    assert tail_said(gain, tail) == said
