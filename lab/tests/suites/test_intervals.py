"""Words on intervals."""

from __future__ import annotations

from coterie.answers.runs import interval
from coterie_lab.suites.intervals import interval_of, told_apart


def test_words_follow_the_interval() -> None:
    assert told_apart(interval([1.0, 2.0, 3.0, 4.0])) == "surely"
    assert told_apart(interval([-1.0, 2.0])) == "not told apart"
    assert told_apart(interval([-1.0, -2.0, -1.5])) == "surely not"
    assert told_apart(interval([7.0])) == "one run: no interval"
    assert interval_of({"x_pct": 1.0, "x_low": 0.5, "x_high": 1.5}, "x") == (1.0, 0.5, 1.5)
