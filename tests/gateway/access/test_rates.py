"""Token buckets: no caller gets more than burst + rate x T, whatever the others do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.gateway.access import Caller, Rates


def test_a_burst_passes_then_the_rate_holds() -> None:
    rates, caller = Rates(), Caller("a", rate=2.0, burst=3.0)
    assert [rates.take(caller, now=10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take(caller, now=10.25) == 0.25
    assert rates.take(caller, now=10.5) == 0.0
    assert rates.take(caller, now=10.5) == 0.5
    assert rates.take(caller, now=1e9) == 0.0
    assert rates.take(caller, now=0.0) == 0.0, "a clock that steps back adds nothing, and takes nothing away"


def test_limits_of_ones_own_or_of_all() -> None:
    assert Rates().take(Caller("a"), now=0.0) == 0.0
    shared = Rates(rate=0.5)
    assert [shared.take(Caller("a"), now=0.0), shared.take(Caller("a"), now=0.0)] == [0.0, 2.0]
    assert shared.take(Caller("b", rate=10.0), now=0.0) == 0.0
    assert len(shared) == 2


def test_a_cost_above_the_burst_leaves_a_debt() -> None:
    rates, caller = Rates(), Caller("a", rate=1.0, burst=2.0)
    assert rates.take(caller, 10.0, now=0.0) == 0.0
    assert rates.take(caller, now=0.0) == 9.0
    assert rates.take(caller, now=9.0) == 0.0


def test_a_reload_keeps_what_was_used() -> None:
    rates = Rates()
    for _ in range(3):
        rates.take(Caller("a", rate=1.0, burst=3.0), now=0.0)
    assert rates.take(Caller("a", rate=2.0, burst=100.0), now=0.0) == 0.5
    assert rates.take(Caller("a", rate=2.0, burst=1.0), now=100.0) == 0.0
    assert rates.take(Caller("a", rate=2.0, burst=1.0), now=100.0) == 0.5


def test_callers_are_bounded_and_none_starts_over() -> None:
    rates = Rates(rate=1.0, burst=1.0, most_callers=3)
    assert [rates.take(Caller(name), now=0.0) for name in "abc"] == [0.0, 0.0, 0.0]
    assert [rates.take(Caller(name), now=0.0) for name in "defg"] == [0.0, 1.0, 1.0, 1.0], "they share one"
    assert rates.take(Caller("a"), now=0.0) == 1.0, "not forgotten"
    assert len(rates) == 3
    assert rates.take(Caller("h"), now=1.0) == 0.0, "b's has filled up, so h takes its place"
    assert len(rates) == 3


@given(
    asked=st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 2), st.floats(0.1, 5)), max_size=80),
    most=st.integers(1, 4),
)
def test_nobody_gets_more_than_burst_and_rate(asked: list[tuple[str, float, float]], most: int) -> None:
    rates, now = Rates(rate=1.5, burst=5.0, most_callers=most), 0.0
    passed: dict[str, float] = {}
    for name, wait, cost in asked:
        now += wait
        needed = rates.take(Caller(name), cost, now=now)
        assert needed >= 0.0
        if needed == 0.0:
            passed[name] = passed.get(name, 0.0) + cost
        else:
            assert rates.take(Caller(name), cost, now=now) > 0.0, "a refusal takes nothing and changes nothing"
        assert all(total <= 5.0 + 1.5 * now + 1e-6 for total in passed.values())
        assert len(rates) <= most


@given(level=st.floats(1e-3, 1e3), rate=st.floats(1e-3, 1e6), now=st.floats(0, 1e9))
def test_after_the_wait_it_passes(level: float, rate: float, now: float) -> None:
    rates, caller = Rates(), Caller("a", rate=rate, burst=max(1.0, level))
    while (wait := rates.take(caller, level, now=now)) == 0.0:
        pass
    # The clock itself has limited resolution at 1e9 s: 1e-6 s cover it.
    assert rates.take(caller, level, now=now + wait * (1 + 1e-9) + 1e-6) == 0.0


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="rate=0 must be"):
        Rates(rate=0)
    with pytest.raises(ConfigError, match=r"burst=0\.5 must be at least 1"):
        Rates(rate=1, burst=0.5)
    with pytest.raises(ConfigError, match="most_callers=0 must be at least 1"):
        Rates(most_callers=0)
