"""Health by thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.gateway.fleet.health import JITTER, Health, HealthSettings


def health(healthy: bool = True, every_s: float = 2.0) -> Health:
    chosen = HealthSettings(unhealthy_after=3, healthy_after=2, every_s=every_s)
    return Health(np.random.default_rng(0), 100.0, chosen, healthy)


def test_a_new_worker_is_healthy_with_its_first_answer() -> None:
    one = health(healthy=False)
    assert one.next_check_s == 100.0
    assert [one.record(False, 100.0 + second) for second in range(9)] == [False] * 9
    assert one.record(True, 110.0)
    assert one.healthy


def test_thresholds() -> None:
    one = health()
    results = [False, False, True, False, False, False, True, False, True, True]
    changed = [one.record(ok, float(at)) for at, ok in enumerate(results)]
    assert changed == [False, False, False, False, False, True, False, False, False, True]
    assert one.healthy
    assert one.checks == 10


@given(st.lists(st.booleans(), max_size=40), st.booleans())
def test_it_follows_runs_of_results(results: list[bool], healthy: bool) -> None:
    one, expected, seen = health(healthy), healthy, healthy
    for at, ok in enumerate(results):
        one.record(ok, float(at))
        needed = 3 if expected else 2 if seen else 1
        last = results[max(0, at + 1 - needed) : at + 1]
        if len(last) == needed and set(last) == {not expected}:
            expected, seen = not expected, True
        assert one.healthy == expected


def test_checks_are_spread() -> None:
    one = health(every_s=5.0)
    times = []
    for _ in range(50):
        one.record(True, 200.0)
        times.append(one.next_check_s)
    assert 205.0 <= min(times) < max(times) <= 200.0 + 5.0 * (1 + JITTER)


def test_wrong_settings() -> None:
    for wrong in ({"unhealthy_after": 0}, {"healthy_after": 0}, {"every_s": 0.0}, {"timeout_s": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            HealthSettings(**wrong)
