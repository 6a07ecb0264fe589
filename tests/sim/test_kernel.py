"""The event kernel: one order of events, and no way back."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.sim import Simulation

TIMES = st.lists(st.integers(0, 5).map(float) | st.floats(0, 5), max_size=40)


@given(TIMES)
def test_events_run_in_the_order_of_a_stable_sort(times: list[float]) -> None:
    sim = Simulation()
    seen: list[Any] = []
    for number, time_s in enumerate(times):
        sim.at(time_s, partial(lambda number: seen.append((sim.now_s, number)), number))
    sim.run()
    order = np.argsort(times, kind="stable")
    assert seen == [(times[number], number) for number in order]
    assert sim.events == len(times)
    assert sim.now_s == max(times, default=0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=3)), max_size=20))
def test_events_asked_for_by_events_take_their_turn(plan: list[tuple[int, list[int]]]) -> None:
    """The reference keeps a plain list, and always runs the first of the earliest."""
    sim = Simulation()
    seen: list[Any] = []
    waiting: list[tuple[float, int, list[int]]] = []
    asked = 0

    def ask(time_s: float, more: list[int]) -> None:
        nonlocal asked
        asked += 1
        number = asked
        waiting.append((time_s, number, more))
        sim.at(time_s, lambda: act(number, more))

    def act(number: int, more: list[int]) -> None:
        earliest = min(waiting, key=lambda one: one[:2])
        waiting.remove(earliest)
        assert (sim.now_s, number) == earliest[:2]
        seen.append(number)
        for delay in more:
            ask(sim.now_s + delay, more[1:])

    for time_s, more in plan:
        ask(float(time_s), more)
    sim.run()
    assert not waiting
    assert len(seen) == asked == sim.events


@given(TIMES, st.floats(0, 6))
def test_run_until_stops_after_the_events_of_that_time_and_goes_on(times: list[float], until_s: float) -> None:
    sim = Simulation()
    seen: list[Any] = []
    for time_s in times:
        sim.at(time_s, partial(seen.append, time_s))
    sim.run(until_s)
    early = sorted(time_s for time_s in times if time_s <= until_s)
    assert seen == early
    assert sim.now_s == max(early, default=0.0), "the clock stands at the last event"
    sim.run()
    assert seen == sorted(times)


def test_an_event_at_this_very_moment_runs_after_those_asked_for_before() -> None:
    sim = Simulation()
    seen: list[Any] = []

    def first() -> None:
        seen.append("first")
        sim.after(0.0, lambda: seen.append("third"))

    sim.at(1.0, first)
    sim.at(1.0, lambda: seen.append("second"))
    sim.run(1.0)
    assert seen == ["first", "second", "third"]


def test_the_example_of_the_module() -> None:
    sim = Simulation()
    seen: list[Any] = []
    sim.at(2.0, lambda: seen.append("b"))
    sim.at(1.0, lambda: sim.after(1.0, lambda: seen.append("c")))
    sim.run()
    assert (seen, sim.now_s) == (["b", "c"], 2.0)


@pytest.mark.parametrize("time_s", [-1.0, 0.999, -math.inf, math.inf, math.nan])
def test_a_time_that_is_past_or_no_time_is_refused(time_s: float) -> None:
    sim = Simulation()
    sim.at(1.0, lambda: None)
    sim.run()
    with pytest.raises(ConfigError, match=rf"time_s={time_s} must be a finite number not before now_s=1\.0"):
        sim.at(time_s, lambda: None)
    with pytest.raises(ConfigError, match="delay_s="):
        sim.after(time_s - 1.0, lambda: None)
    sim.run()
    assert (sim.now_s, sim.events) == (1.0, 1), "what was refused never runs"


def test_a_negative_delay_is_refused_where_the_clock_would_round_it_away() -> None:
    sim = Simulation()
    sim.at(1e9, lambda: None)
    sim.run()
    assert sim.now_s - 1e-9 == sim.now_s
    with pytest.raises(ConfigError, match="delay_s=-1e-09 must be a finite number of at least 0"):
        sim.after(-1e-9, lambda: None)


@pytest.mark.parametrize("until_s", [0.5, math.nan, -math.inf])
def test_running_until_a_time_that_is_past_is_refused(until_s: float) -> None:
    sim = Simulation()
    sim.at(1.0, lambda: None)
    sim.run(1.0)
    with pytest.raises(ConfigError, match=rf"until_s={until_s} must be a number not before now_s=1\.0"):
        sim.run(until_s)
