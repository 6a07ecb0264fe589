"""The rule from an interval to advice, and the sentence on a decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.answers.advise.decisions import NOT_NOW, ON, TOO_LITTLE, TRY, Advice, Arm, Lever, advice_of, unknown
from coterie.answers.verdicts import NOT, is_worse
from coterie.types import Interval

PERCENTS = st.floats(-50, 50)


@pytest.mark.parametrize(
    ("gain", "tail", "advice"),
    [
        (Interval(6.8, 6.0, 7.7), None, ON),
        (Interval(6.8, 6.0, 7.7), Interval(-0.5, -3.0, 2.0), ON),
        (Interval(6.8, 6.0, 7.7), Interval(-5.0, -8.0, -2.0), TRY),
        (Interval(1.8, 1.0, 2.6), Interval(-5.0, -8.0, -2.0), NOT_NOW),
        (Interval(0.4, 0.2, 0.6), Interval(-1.7, -2.4, -1.0), NOT_NOW),
        (Interval(4.0, -1.0, 9.0), None, TRY),
        (Interval(4.0, -10.0, 18.0), None, TOO_LITTLE),
        (Interval(0.5, 0.4, 0.6), None, NOT_NOW),
        (Interval(-3.0, -5.0, -1.0), None, NOT_NOW),
        (Interval(0.5, -8.0, 9.0), None, TOO_LITTLE),
        (Interval(6.8, None, None), None, TOO_LITTLE),
    ],
)
def test_the_rule(gain: Interval, tail: Interval | None, advice: Advice) -> None:
    assert advice_of(gain, tail) == advice


@given(PERCENTS, st.floats(0, 50), st.floats(0, 20))
def test_what_is_turned_on_surely_gains_and_a_higher_gain_is_never_refused(
    mean: float, half: float, more: float
) -> None:
    advice = advice_of(Interval(mean, mean - half, mean + half))
    assert (advice == ON) <= (mean - half > 0)
    assert (advice == NOT_NOW) <= (mean < 1.0)
    better = advice_of(Interval(mean + more, mean + more - half, mean + more + half))
    assert (advice == ON) <= (better == ON)


@given(PERCENTS, st.floats(0, 50))
def test_a_tail_gets_worse_only_surely(mean: float, half: float) -> None:
    tail = Interval(mean, mean - half, mean + half)
    assert is_worse(tail) <= (mean < 0 and mean + half < 0)


def test_a_router_whose_p99_outweighs_its_gain_is_not_the_best() -> None:
    worse = Arm("worse", Interval(0.4, 0.2, 0.6), Interval(-1.7, -2.4, -1.0))
    harmless = Arm("harmless", Interval(0.2, 0.1, 0.3), Interval(0.0, -0.5, 0.5))
    assert max((worse, harmless), key=lambda arm: arm.rank) is harmless
    lever = Lever(
        "routing", "Routing: who", NOT_NOW, worse.name, "a queue", "TPOT", worse.gain, "for m", tail=worse.tail
    )
    assert lever.sentence.startswith(NOT)
    assert lever.to_json()["p99_pct"] == {"mean": -1.7, "low": -2.4, "high": -1.0}


def test_a_sentence_says_what_is_known_and_what_is_not() -> None:
    made = Lever(
        "routing", "Routing: who", ON, "a router", "a queue", "TPOT", Interval(6.8, 6.0, 7.7), "for m", ("a fact", "")
    )
    assert all(part in made.sentence for part in ("a router", "a queue", "6.8%", "6.0 to 7.7", "a fact"))
    assert made.to_json()["gain_pct"] == {"mean": 6.8, "low": 6.0, "high": 7.7}
    why = unknown("routing", "Routing", "for m", "record more")
    assert (why.advice, "record more" in why.sentence, "%" in why.sentence) == (TOO_LITTLE, True, False)
