"""The circuit breaker: when it opens, when it asks again, and whose results count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.gateway.fleet import health
from coterie.gateway.fleet.health import JITTER, Breaker, BreakerState, HealthSettings, is_failure

SETTINGS = HealthSettings(failures=3, window_s=10.0, open_s=4.0)


@pytest.fixture(autouse=True)
def _without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "JITTER", 0.0)
    monkeypatch.setattr(health, "LONGEST_S", 16.0)
    monkeypatch.setattr(health, "PROBE_S", 5.0)


def breaker(settings: HealthSettings = SETTINGS, seed: int = 0) -> Breaker:
    return Breaker(np.random.default_rng(seed), settings)


def fail(one: Breaker, *times: float) -> None:
    for now in times:
        one.failed(one.sent(now), now)


def test_it_opens_by_failures_within_the_window() -> None:
    one = breaker()
    fail(one, 0.0, 9.0, 10.0)
    assert one.state(10.0) is BreakerState.CLOSED, "the first was ten seconds ago"
    fail(one, 11.0)
    assert one.state(11.0) is BreakerState.OPEN
    assert not one.may_send(14.9)
    assert one.changes_at == 15.0
    assert one.state(15.0) is BreakerState.HALF_OPEN
    assert one.may_send(15.0)


def test_4xx_never_counts() -> None:
    assert [
        status for status in (200, 302, 400, 404, 408, 422, 429, 499, 500, 502, 503, 504) if is_failure(status)
    ] == [500, 502, 503, 504]


def test_one_probe_at_a_time() -> None:
    one = breaker()
    fail(one, 0.0, 0.0, 0.0)
    assert one.may_send(4.0)
    probe = one.sent(4.0)
    assert not one.may_send(4.0)
    assert not one.may_send(8.9)
    assert one.changes_at == 9.0
    assert one.may_send(9.0), "the probe was silent too long"
    second = one.sent(9.0)
    one.failed(probe, 9.5)
    assert one.state(9.5) is BreakerState.HALF_OPEN, (
        "the first probe was given up: only the second speaks against the worker"
    )
    one.succeeded(second, 10.0)
    assert one.state(10.0) is BreakerState.CLOSED
    assert one.changes_at is None


def test_a_probe_without_a_result_makes_room_for_another() -> None:
    one = breaker()
    fail(one, 0.0, 0.0, 0.0)
    probe = one.sent(4.0)
    one.dropped(probe)
    assert one.may_send(4.0)
    again = one.sent(4.0)
    one.dropped(probe)
    assert not one.may_send(4.0), "the first was dropped already"
    one.dropped(again)
    assert one.may_send(4.0)


def test_cool_downs_double_up_to_the_longest() -> None:
    one, now, waits = breaker(), 0.0, []
    fail(one, now, now, now)
    for _ in range(5):
        assert one.changes_at is not None
        waits.append(one.changes_at - now)
        now = one.changes_at
        fail(one, now)
    assert waits == [4.0, 8.0, 16.0, 16.0, 16.0]
    assert one.changes_at is not None
    now = one.changes_at
    one.succeeded(one.sent(now), now)
    fail(one, now, now, now)
    assert one.changes_at == now + 4.0, "closed once, it starts anew"


def test_results_belong_to_when_they_were_sent() -> None:
    one = breaker()
    before = [one.sent(0.0) for _ in range(6)]
    for attempt in before[:3]:
        one.failed(attempt, 1.0)
    assert one.state(1.0) is BreakerState.OPEN
    one.succeeded(before[3], 2.0)
    assert one.state(2.0) is BreakerState.OPEN, "it was sent before"
    probe = one.sent(5.0)
    one.failed(before[4], 5.5)
    assert one.state(5.5) is BreakerState.HALF_OPEN
    one.succeeded(probe, 6.0)
    for attempt in before[4:]:
        one.failed(attempt, 7.0)
    assert one.state(7.0) is BreakerState.CLOSED


def test_all_open_a_request_sent_all_the_same_counts_for_the_worker_only() -> None:
    one = breaker()
    fail(one, 0.0, 0.0, 0.0)
    fail(one, 1.0, 2.0, 3.0)
    assert one.changes_at == 4.0, "failures during the cool-down do not lengthen it"
    one.succeeded(one.sent(3.5), 3.6)
    assert one.state(3.6) is BreakerState.CLOSED


def test_a_busy_worker_may_fail_now_and_then() -> None:
    one, now = breaker(HealthSettings(failures=5, window_s=10.0)), 0.0
    for number in range(20_000):
        now += 0.001
        attempt = one.sent(now)
        if number % 500 == 250:
            one.failed(attempt, now)
        else:
            one.succeeded(attempt, now)
    assert one.state(now) is BreakerState.CLOSED, "0.2% of its answers"
    fail(one, now, now, now, now)
    assert one.state(now) is BreakerState.CLOSED
    fail(one, now)
    assert one.state(now) is BreakerState.OPEN, "five in a row: it died"


def test_half_of_the_answers_failing_opens_it() -> None:
    one = breaker(HealthSettings(failures=5, window_s=10.0))
    for number in range(9):
        attempt = one.sent(float(number))
        (one.succeeded if number % 2 else one.failed)(attempt, float(number))
    assert one.state(8.0) is BreakerState.OPEN


def test_jitter_lengthens_by_at_most_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "JITTER", JITTER)
    settings = HealthSettings(failures=1, open_s=4.0)
    for seed in range(100):
        one, same = breaker(settings, seed), breaker(settings, seed)
        for each in (one, same):
            fail(each, 0.0)
        assert one.changes_at is not None
        assert 4.0 <= one.changes_at <= 4.0 * (1 + JITTER)
        assert one.changes_at == same.changes_at


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "ok", "fail", "drop"]), st.floats(0, 6), st.integers(0, 9)), max_size=60
    )
)
def test_it_never_sticks(steps: list[tuple[str, float, int]]) -> None:
    """Whatever came before, waiting makes it ask again, and one success closes it."""
    one, now = breaker(), 0.0
    attempts = [one.sent(now)]
    for what, passed, which in steps:
        now += passed
        attempt = attempts[which % len(attempts)]
        if what == "send":
            attempts.append(one.sent(now))
        elif what == "ok":
            one.succeeded(attempt, now)
        elif what == "fail":
            one.failed(attempt, now)
        else:
            one.dropped(attempt)
        assert one.may_send(now) or one.changes_at is not None
    later = one.changes_at if one.changes_at is not None else now
    assert one.may_send(max(now, later))
    one.succeeded(one.sent(max(now, later)), max(now, later))
    assert one.state(max(now, later)) is BreakerState.CLOSED


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"window_s": 0.0}, {"open_s": -1.0}])
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HealthSettings(**wrong)  # type: ignore[arg-type]
