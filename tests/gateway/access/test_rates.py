"""Token buckets: no caller gets more than burst + rate x T, whatever the others do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.access import Entry, Rates


def caller_of(name: str, rate: float | None = None, burst: float | None = None) -> Entry:
    return Entry(name=name, sha256="", rate=rate, burst=burst)


def test_a_burst_passes_then_the_rate_holds() -> None:
    rates, caller = Rates(), caller_of("a", rate=2.0, burst=3.0)
    assert [rates.take(caller, now=10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take(caller, now=10.25) == 0.25
    assert rates.take(caller, now=10.5) == 0.0
    assert rates.take(caller, now=10.5) == 0.5
    assert rates.take(caller, now=1e9) == 0.0
    assert rates.take(caller, now=0.0) == 0.0, "a clock that steps back adds nothing, and takes nothing away"


def test_a_caller_without_a_rate_has_no_limit() -> None:
    assert [Rates().take(caller_of("a"), now=0.0) for _ in range(9)] == [0.0] * 9


def test_a_burst_is_a_second_s_worth_unless_given() -> None:
    rates = Rates()
    assert [rates.take(caller_of("a", rate=2.0), now=0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert [rates.take(caller_of("b", rate=0.5), now=0.0) for _ in range(2)] == [0.0, 2.0]


def test_a_reload_keeps_what_was_used() -> None:
    rates = Rates()
    for _ in range(3):
        rates.take(caller_of("a", rate=1.0, burst=3.0), now=0.0)
    assert rates.take(caller_of("a", rate=2.0, burst=100.0), now=0.0) == 0.5
    assert rates.take(caller_of("a", rate=2.0, burst=1.0), now=100.0) == 0.0
    assert rates.take(caller_of("a", rate=2.0, burst=1.0), now=100.0) == 0.5


@given(asked=st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 2)), max_size=80))
def test_nobody_gets_more_than_burst_and_rate(asked: list[tuple[str, float]]) -> None:
    rates, now = Rates(), 0.0
    passed: dict[str, int] = {}
    for name, wait in asked:
        now += wait
        caller = caller_of(name, rate=1.5, burst=5.0)
        if rates.take(caller, now=now) == 0.0:
            passed[name] = passed.get(name, 0) + 1
        else:
            assert rates.take(caller, now=now) > 0.0, "a refusal takes nothing and changes nothing"
        assert all(total <= 5.0 + 1.5 * now + 1e-6 for total in passed.values())


@given(burst=st.floats(1, 1e3), rate=st.floats(1e-3, 1e6), now=st.floats(0, 1e9))
def test_after_the_wait_it_passes(burst: float, rate: float, now: float) -> None:
    rates, caller = Rates(), caller_of("a", rate=rate, burst=burst)
    while (wait := rates.take(caller, now=now)) == 0.0:
        pass
    # The clock itself has limited resolution at 1e9 s: 1e-6 s cover it.
    assert rates.take(caller, now=now + wait * (1 + 1e-9) + 1e-6) == 0.0
