"""What is simulated is what runs: the simulator's servers and an engine that asks its waiting list take the same order.

The engine here is a loop of its own: it pushes who arrives, refreshes the list before a step and pops while a place is
free. Loads are whole tokens, so that their sums are exact in whatever order they are added.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching import strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.batching.waiting import WaitingList
from coterie.sim import DecodeRequests, Execution, run_batches, run_decode
from sim_checks import checked
from waiting_engine import EXPERTS, LAYERS, Engine, Request, load, make

BATCH_S = 0.1234567
"""Takes no multiple of a gap between arrivals: nobody arrives just when a batch ends."""


class Case(NamedTuple):
    strategy: str
    gaps: list[int]
    places: int
    window: int
    max_skips: int | None
    seed: int

    @property
    def config(self) -> SchedulerConfig:
        """A batch starts with whoever waits, as in an engine."""
        return SchedulerConfig(
            strategy=self.strategy,
            max_batch_size=self.places,
            window_size=self.window,
            max_skips=self.max_skips,
            min_batch_trigger=1,
            scheduling_interval_ms=0.0,
        )

    def engine(self) -> tuple[Engine, WaitingList[Request]]:
        engine = Engine(places=self.places)
        _, waiting = make(
            engine, self.strategy, self.seed, self.max_skips, window_size=self.window, batch_size=self.places
        )
        return engine, waiting


@st.composite
def cases(draw: st.DrawFn) -> Case:
    places = draw(st.integers(1, 8))
    return Case(
        draw(st.sampled_from(strategies.names())),
        draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 60]), min_size=1, max_size=80)),
        places,
        draw(st.integers(places, 32)),
        draw(st.sampled_from([None, 1, 2, 5, 64])),
        draw(st.integers(0, 3)),
    )


def loads_of(count: int) -> np.ndarray:
    return np.array([load(number) for number in range(count)])


@given(cases())
@settings(max_examples=150)
def test_batch_after_batch(case: Case) -> None:
    """Requests arrive whenever they like; the order, and how often each was passed over, are the same."""
    arrival_s = np.cumsum(case.gaps) / 64
    simulated: list[list[int]] = []

    def execution(requests: np.ndarray) -> Execution:
        simulated.append(requests.tolist())
        return Execution(BATCH_S, 1.0, 1.0)

    config, count = case.config, len(case.gaps)
    rng = np.random.default_rng(case.seed)
    run = checked(run_batches)(arrival_s, loads_of(count), execution, config, config.make({"cost": SpreadCost()}), rng)

    engine, waiting = case.engine()
    served: list[list[int]] = []
    skipped = np.zeros(count, np.int64)
    now_s, arrived = 0.0, 0
    while arrived < count or waiting:
        if not waiting:
            now_s = max(now_s, float(arrival_s[arrived]))
        first = arrived if now_s == arrival_s[min(arrived, count - 1)] and not waiting else None
        while arrived < count and arrival_s[arrived] <= now_s and (first is None or arrived == first):
            waiting.push(Request(arrived))  # of those that come at once to an idle server, the first starts alone
            arrived += 1
        waiting.refresh()
        while waiting and engine.free_places():
            skips = {request: waiting.skips(request) for request in waiting}
            engine.runs.append(waiting.pop())
            skipped[engine.runs[-1].number] = skips[engine.runs[-1]]
        served.append([request.number for request in engine.runs])
        engine.runs.clear()
        now_s += BATCH_S
    assert simulated == served
    np.testing.assert_array_equal(run.skipped, skipped)


@given(cases(), st.integers(0, 9))
@settings(max_examples=150)
def test_decode_where_places_become_free_one_by_one(case: Case, seed: int) -> None:
    """All arrive while the first decodes. If one arrives later, an engine selects anew and the simulator does not."""
    config, count = case.config, len(case.gaps)
    tokens = np.random.default_rng(seed).integers(1, 5, count)
    requests = DecodeRequests(
        np.zeros(count), tokens, np.zeros(count, np.int64), tokens, np.zeros((5, LAYERS, 2), np.uint8)
    )
    rng = np.random.default_rng(case.seed)
    run = checked(run_decode)(
        requests,
        loads_of(count),
        lambda *_: Execution(1.0, 1.0, 1.0),
        case.places,
        config,
        config.make({"cost": SpreadCost()}),
        rng,
    )

    engine, waiting = case.engine()
    start, step = np.full(count, -1), 0
    left = tokens.copy()
    waiting.push(Request(0))
    while waiting or engine.runs:
        waiting.refresh()
        while waiting and engine.free_places():
            engine.runs.append(waiting.pop())
            start[engine.runs[-1].number] = step
        for request in engine.runs:
            left[request.number] -= 1
        engine.runs = [request for request in engine.runs if left[request.number]]
        step += 1
        if step == 1:
            for number in range(1, count):
                waiting.push(Request(number))
    assert (left == 0).all()
    np.testing.assert_array_equal(run.start_s, start)


def test_the_order_is_not_that_of_arrival() -> None:
    """The properties above compare something."""
    case = Case("greedy_variance", [0] * 60, 8, 32, 64, 0)
    _, waiting = case.engine()
    for number in range(60):
        waiting.push(Request(number))
    assert [waiting.pop().number for _ in range(60)] != list(range(60))
    assert loads_of(60).shape == (60, LAYERS, EXPERTS)
