"""One server, one request at a time, constant service: the batch server must be the M/D/1 queue of the textbooks."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from control_variates import Estimate, controlled_mean
from coterie.batching import Fcfs
from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import Execution, run_batches

ONE_AT_A_TIME = SchedulerConfig(max_batch_size=1, window_size=1, min_batch_trigger=1)
SERVICE_S = 0.02


def simulate(arrival_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """[request] seconds each waited in the simulator."""

    def execution(rows: np.ndarray) -> Execution:
        return Execution(float(service_s[rows[0]]), 1.0, 1.0)

    loads = np.zeros((len(arrival_s), 1, 1))
    run = run_batches(arrival_s, loads, cast(Any, execution), ONE_AT_A_TIME, Fcfs(), np.random.default_rng(0))
    np.testing.assert_allclose(run.finish_s - run.start_s, service_s, rtol=0, atol=1e-9)
    return run.start_s - run.arrival_s


def lindley(arrival_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """The waits by their recursion: what is left of the work of whoever came before."""
    waits = np.zeros(len(arrival_s))
    for i in range(1, len(waits)):
        waits[i] = max(0.0, waits[i - 1] + service_s[i - 1] - (arrival_s[i] - arrival_s[i - 1]))
    return waits


def controlled(waits: np.ndarray, gaps: np.ndarray, mean_gap: float) -> Estimate:
    """Mean wait. A gap is independent of the waits before it, so each control here has mean 0."""
    over, before = gaps[1:] - mean_gap, waits[:-1] / mean_gap
    controls = [over, over**2 - mean_gap**2, before * over, np.minimum(before, 1.0) * over, before**2 * over]
    return controlled_mean(waits[1:], controls)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waits_are_those_of_md1(load: float) -> None:
    mean_gap = SERVICE_S / load
    gaps = np.random.default_rng(2026).exponential(mean_gap, 60_000)
    arrival_s, service_s = np.cumsum(gaps), np.full(len(gaps), SERVICE_S)
    waits = lindley(arrival_s, service_s)
    some = slice(None, 8_000)  # the simulator's waits are the recursion's, one by one: the rest need not be simulated
    np.testing.assert_allclose(simulate(arrival_s[some], service_s[some]), waits[some], rtol=0, atol=1e-9)

    theory = load / (2 * (1 - load)) * SERVICE_S
    found = controlled(waits, gaps, mean_gap)
    assert found.error < 0.008 * theory, "too few requests to tell 2 % from chance"
    assert found.mean == pytest.approx(theory, rel=0.02)


def test_a_server_that_is_3_percent_slow_is_told_apart() -> None:
    """The bar of 2 % means something: the estimate that passes above fails on a queue that is only a little wrong."""
    load, mean_gap = 0.8, SERVICE_S / 0.8
    gaps = np.random.default_rng(2026).exponential(mean_gap, 60_000)
    waits = lindley(np.cumsum(gaps), np.full(len(gaps), 1.03 * SERVICE_S))
    assert controlled(waits, gaps, mean_gap).mean > 1.05 * load / (2 * (1 - load)) * SERVICE_S


@pytest.mark.parametrize("seed", range(5))
def test_every_wait_follows_lindley_for_any_service_times(seed: int) -> None:
    """Ties, idle spells and rushes: arrivals on a grid, service times from none to long."""
    rng = np.random.default_rng(seed)
    arrival_s = np.sort(rng.integers(0, 600, 1000) / 10)
    service_s = rng.choice([0.0, 0.01, 0.05, 0.1, 0.3], 1000)
    np.testing.assert_allclose(simulate(arrival_s, service_s), lindley(arrival_s, service_s), rtol=0, atol=1e-9)
