"""The batch server: everyone once, batches when they are due, and skips that can be counted again."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching import strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.errors import ConfigError
from coterie.sim import Execution, Run, SpreadExecution, run_batches
from sim_checks import checked

OFFERED = {"cost": SpreadCost()}


@dataclass
class Recorder:
    """Keeps who ran together; the time of a batch is one of a few, so that ends and arrivals often coincide."""

    seconds: list[float]
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, requests: np.ndarray) -> Execution:
        self.batches.append(requests.tolist())
        return Execution(self.seconds[len(self.batches) % len(self.seconds)], 1.0, 1.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, SchedulerConfig, list[float], int]:
    count = draw(st.integers(1, 60))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    spread = draw(st.sampled_from([1, 20, 200]))  # quarters of a second: many ties, some, few
    offset = draw(st.sampled_from([0.0, 1.7e9]))  # a trace may count from 1970
    arrival_s = offset + np.sort(rng.integers(0, spread, count)) / 4
    layers, experts = draw(st.sampled_from([(1, 5), (3, 4)]))
    loads = rng.integers(0, draw(st.sampled_from([1, 4, 100])), (count, layers, experts)).astype(np.float64)
    size = draw(st.integers(1, 9))
    config = SchedulerConfig(
        strategy=draw(st.sampled_from(strategies.names())),
        max_batch_size=size,
        window_size=size + draw(st.integers(0, 30)),
        min_batch_trigger=draw(st.integers(1, 40)),
        scheduling_interval_ms=draw(st.sampled_from([0.0, 0.1, 250.0, 1000.0, 12345.678])),
        max_skips=draw(st.sampled_from([None, 1, 3, 64])),
    )
    seconds = draw(st.lists(st.sampled_from([0.0, 0.01, 0.25, 0.5, 3.0]), min_size=1, max_size=4))
    return arrival_s, loads, config, seconds, seed


@given(cases())
@settings(max_examples=120)
def test_any_strategy_and_setting(case: tuple[np.ndarray, np.ndarray, SchedulerConfig, list[float], int]) -> None:
    arrival_s, loads, config, seconds, seed = case
    recorder = Recorder(seconds)
    done: list[Any] = []
    rng = np.random.default_rng(seed)
    run = checked(run_batches)(arrival_s, loads, recorder, config, config.make(OFFERED), rng, progress=done.append)
    batches = recorder.batches

    assert sorted(row for batch in batches for row in batch) == list(range(len(arrival_s))), "everyone once"
    assert done == [len(batch) for batch in batches] == run.batch_size.tolist()
    assert run.batch_s.tolist() == [seconds[(1 + number) % len(seconds)] for number in range(len(batches))]
    np.testing.assert_array_equal(run.arrival_s, arrival_s)
    check_when(run, batches, config)
    np.testing.assert_array_equal(run.skipped, skips_again(batches, len(arrival_s)))


def check_when(run: Run, batches: list[list[int]], config: SchedulerConfig) -> None:
    """A batch starts when the server is free and enough wait, or the oldest has waited an interval."""
    waiting, free_s = list(range(len(run.arrival_s))), 0.0
    for number, batch in enumerate(batches):
        starts, ends = set(run.start_s[batch]), set(run.finish_s[batch])
        assert len(starts) == len(ends) == 1, "a batch starts and ends together"
        start_s = starts.pop()
        due_s = run.arrival_s[waiting[0]] + config.scheduling_interval_ms / 1000
        if len(waiting) >= config.min_batch_trigger:
            due_s = min(due_s, run.arrival_s[waiting[config.min_batch_trigger - 1]])
        assert start_s == max(due_s, free_s)
        there = run.arrival_s[waiting]
        # Of those who come at this very moment, some may come after the batch was chosen.
        least, most = (min(config.max_batch_size, int(n)) for n in ((there < start_s).sum(), (there <= start_s).sum()))
        assert max(1, least) <= len(batch) <= most
        assert waiting[0] in batch, "the oldest is always in"
        assert set(batch) <= set(waiting[: config.window_size])
        waiting = [row for row in waiting if row not in batch]
        free_s = ends.pop()
        assert free_s == start_s + run.batch_s[number]


def skips_again(batches: list[list[int]], count: int) -> np.ndarray:
    """[request] batches in which it stayed although a younger one was taken."""
    skips, waiting = np.zeros(count, np.int64), set(range(count))
    for batch in batches:
        waiting -= set(batch)
        for row in waiting:
            skips[row] += row < max(batch)
    return skips


@pytest.mark.parametrize("name", strategies.names())
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    def run() -> Run:
        rng = np.random.default_rng(5)
        arrival_s = np.cumsum(rng.exponential(0.005, 400))
        loads = rng.integers(0, 20, (400, 1, 12)).astype(np.float64)
        config = SchedulerConfig(strategy=name)
        return checked(run_batches)(
            arrival_s, loads, SpreadExecution(loads, 0.03, 0.5), config, config.make(OFFERED), rng
        )

    one, two = run(), run()
    assert [column.tobytes() for column in one] == [column.tobytes() for column in two]


def test_checking_changes_nothing() -> None:
    arrival_s, loads = np.arange(50) / 8, np.eye(50)[:, None, :]
    config = SchedulerConfig(strategy="power_of_d")
    execution = SpreadExecution(loads, 0.4, 1.0)
    one, two = (
        run(arrival_s, loads, execution, config, config.make(OFFERED), np.random.default_rng(1))
        for run in (run_batches, checked(run_batches))
    )
    assert [column.tobytes() for column in one] == [column.tobytes() for column in two]


@pytest.mark.parametrize(
    ("arrival_s", "loads", "message"),
    [
        ([], np.zeros((0, 1, 2)), "0 arrivals must be at least 1, with as many loads (0)"),
        ([1.0], np.zeros((2, 1, 2)), "1 arrivals must be at least 1, with as many loads (2)"),
        ([2.0, 1.0], np.zeros((2, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([-1.0, 1.0], np.zeros((2, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([0.0, math.nan], np.zeros((2, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([math.nan], np.zeros((1, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([0.0, math.inf], np.zeros((2, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([math.inf, math.inf], np.zeros((2, 1, 2)), "arrival_s must rise from at least 0, and be finite"),
        ([1.0], np.zeros((1, 2)), "predicted has shape (1, 2); expected [request, layer, expert]"),
        ([1.0], np.full((1, 1, 2), math.nan), "predicted holds nan; loads must be finite and at least 0"),
        ([1.0], np.full((1, 1, 2), math.inf), "predicted holds inf; loads must be finite and at least 0"),
        ([1.0], np.full((1, 1, 2), -1.0), "predicted holds -1.0; loads must be finite and at least 0"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(arrival_s: list[float], loads: np.ndarray, message: str) -> None:
    config = SchedulerConfig()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        run_batches(np.array(arrival_s), loads, Recorder([1.0]), config, config.make(OFFERED), np.random.default_rng(0))
