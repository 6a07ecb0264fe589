"""Batches of up to b requests in a constant time: the batch server must be the bulk-service queue M/D(a,b)/1.

A free server waits until `a` requests are there and takes the oldest `b`. What is left behind when a batch ends is a
Markov chain, so the mean wait is known to any accuracy: Little's law turns queue lengths into waits. CAPS's own setting
is one of these, with a trigger of 16 above its batches of 8.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import poisson

from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import Execution, Run, run_batches

SERVICE_S = 0.1
LARGEST = 300
"""Queue lengths past this are cut off; hardly any probability lies there in the cases here."""
NEVER_MS = 1e12
"""A scheduling interval that never starts a batch: only the trigger does."""


def mean_wait_s(rate: float, trigger: int, size: int) -> float:
    """Return the mean wait of a request from its arrival to the start of its batch."""
    left = np.arange(LARGEST)  # when a batch ends
    stay = np.maximum(np.maximum(left, trigger) - size, 0)  # when the next one starts
    arrivals = poisson.pmf(left, rate * SERVICE_S)
    chain = np.zeros((LARGEST, LARGEST))
    for now in left:
        chain[now, stay[now] :] = arrivals[: LARGEST - stay[now]]
    chain[:, -1] += 1 - chain.sum(axis=1)
    equations = np.vstack([chain.T - np.eye(LARGEST), np.ones(LARGEST)])
    share = np.linalg.lstsq(equations, np.append(np.zeros(LARGEST), 1.0), rcond=None)[0]
    assert abs(share[-LARGEST // 4 :]).sum() < 1e-8
    # A cycle: where too few are left, the server waits for the missing ones; then a batch, while others gather.
    cycle_s = share @ np.maximum(trigger - left, 0) / rate + SERVICE_S
    before_s = share @ np.array([sum(range(now, trigger)) for now in left]) / rate
    during_s = share @ stay * SERVICE_S + rate * SERVICE_S**2 / 2
    return float((before_s + during_s) / cycle_s / rate)


def simulate(arrival_s: np.ndarray, trigger: int, size: int, strategy: str) -> Run:
    config = SchedulerConfig(
        strategy=strategy,
        max_batch_size=size,
        window_size=4 * size,
        min_batch_trigger=trigger,
        scheduling_interval_ms=NEVER_MS,
    )
    rng = np.random.default_rng(7)
    loads = rng.integers(0, 9, (len(arrival_s), 1, 4)).astype(np.float64)
    timed = Execution(SERVICE_S, 1.0, 1.0)
    return run_batches(arrival_s, loads, lambda _: timed, config, config.make(), rng)


def test_the_formula_is_md1_for_batches_of_one() -> None:
    for load in (0.3, 0.5, 0.8):
        assert mean_wait_s(load / SERVICE_S, 1, 1) == pytest.approx(load / (2 * (1 - load)) * SERVICE_S, rel=1e-6)


@pytest.mark.parametrize(
    ("trigger", "size", "load", "strategy"),
    [
        (1, 8, 0.65, "fcfs"),
        (4, 8, 0.3, "fcfs"),
        (8, 8, 0.6, "fcfs"),
        (16, 8, 0.5, "fcfs"),
        # Who is taken does not matter to the mean where every batch takes as long.
        (1, 8, 0.65, "greedy_variance"),
        (16, 8, 0.5, "random"),
    ],
)
def test_waits_are_those_of_bulk_service(trigger: int, size: int, load: float, strategy: str) -> None:
    rate = load * size / SERVICE_S
    run = simulate(np.cumsum(np.random.default_rng(11).exponential(1 / rate, 40_000)), trigger, size, strategy)
    waits = (run.start_s - run.arrival_s)[: -4 * trigger]  # the last ones wait for others who never come
    means = waits[: len(waits) // 50 * 50].reshape(50, -1).mean(axis=1)
    theory = mean_wait_s(rate, trigger, size)
    assert means.std(ddof=1) / np.sqrt(50) < 0.008 * theory, "too few requests to tell 2 % from chance"
    assert waits.mean() == pytest.approx(theory, rel=0.02)
