"""An engine that asks in every step holds requests back as long as the simulated batch server does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.batching import strategies
from coterie.batching.scheduler import Scheduler, SchedulerConfig
from coterie.batching.waiting import BatchTrigger

STEP_S = 0.01


@given(
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    trigger=st.integers(1, 6),
    steps=st.integers(0, 20),
    size=st.integers(1, 4),
)
def test_requests_start_when_the_batch_server_would_start_them(
    arrivals: list[int], trigger: int, steps: int, size: int
) -> None:
    config = SchedulerConfig(
        strategy="fcfs",
        max_batch_size=size,
        window_size=size,
        min_batch_trigger=trigger,
        scheduling_interval_ms=1000 * STEP_S * steps,
    )
    loads = np.ones((len(arrivals), 1, 2))
    server = Scheduler(config, strategies.make("fcfs", max_skips=None), loads, np.random.default_rng(0))
    held: BatchTrigger[int] = BatchTrigger(trigger, STEP_S * (steps - 0.5))  # half a step: no verdict of rounding
    waiting: list[int] = []
    for step in range(90):
        now_s = STEP_S * step
        for request, at in enumerate(arrivals):
            if at == step:
                server.push(request, now_s)
                waiting.append(request)
        due = server.due_s() <= now_s + STEP_S / 2
        assert held.holds(waiting, now_s) == (bool(waiting) and not due)
        if due:
            for request in server.next_batch(np.zeros((1, 2))).items:
                waiting.remove(request)
    assert not waiting, "none waits for ever"
