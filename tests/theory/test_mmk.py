"""Many servers and one queue: the event kernel against Erlang C, and continuous batching against its Markov chain."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from scipy.stats import binom, poisson

from coterie.batching import Fcfs
from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import DecodeRequests, Execution, Simulation, run_decode


def erlang_wait(servers: int, load: float) -> float:
    """Mean wait of M/M/k in units of the mean service time."""
    offered = servers * load
    queued = offered**servers / math.factorial(servers) / (1 - load)
    waits = queued / (sum(offered**n / math.factorial(n) for n in range(servers)) + queued)
    return waits / (servers * (1 - load))


# The kernel ---------------------------------------------------------------------------------------------------------


class Queue(NamedTuple):
    waits: np.ndarray
    """[request]"""
    seen: np.ndarray
    """[request] in the system when it came."""


def queue_on_the_kernel(arrival_s: np.ndarray, service_s: np.ndarray, servers: int) -> Queue:
    """Two kinds of event, arrival and departure, and nothing else."""
    sim, line = Simulation(), deque()
    starts, seen = np.zeros(len(arrival_s)), np.zeros(len(arrival_s), np.int64)
    free, arrived = servers, 0

    def arrive() -> None:
        nonlocal arrived
        row, arrived = arrived, arrived + 1
        seen[row] = servers - free + len(line)
        line.append(row)
        if arrived < len(arrival_s):
            sim.at(arrival_s[arrived], arrive)
        serve()

    def serve() -> None:
        nonlocal free
        if free and line:
            free -= 1
            row = line.popleft()
            starts[row] = sim.now_s
            sim.after(service_s[row], leave)

    def leave() -> None:
        nonlocal free
        free += 1
        serve()

    sim.at(arrival_s[0], arrive)
    sim.run()
    assert sim.events == 2 * len(arrival_s)
    assert (free, len(line)) == (servers, 0)
    return Queue(starts - arrival_s, seen)


def kiefer_wolfowitz(arrival_s: np.ndarray, service_s: np.ndarray, servers: int) -> np.ndarray:
    """The waits by their recursion: each goes to whichever server is free first."""
    free_s = [0.0] * servers
    waits = np.zeros(len(arrival_s))
    for row, (arrival, service) in enumerate(zip(arrival_s.tolist(), service_s.tolist(), strict=True)):
        start = max(arrival, free_s[0])
        heapq.heapreplace(free_s, start + service)
        waits[row] = start - arrival
    return waits


@pytest.mark.parametrize(("servers", "load"), [(1, 0.8), (2, 0.5), (4, 0.8), (8, 0.8)])
def test_the_kernel_gives_the_waits_of_mmk(servers: int, load: float):
    """Service of mean 1. What chance did to the queue is taken out by a control whose mean is 0.

    In balance the mean drift of n squared, n the number in the system, is 0; past k servers it falls in a straight line
    as the wait rises in one, so that much of a long queue's scatter cancels.
    """
    rng, count, rate = np.random.default_rng(2026), 100_000, servers * load
    arrival_s, service_s = np.cumsum(rng.exponential(1 / rate, count)), rng.exponential(1.0, count)
    waits, seen = queue_on_the_kernel(arrival_s, service_s, servers)
    np.testing.assert_allclose(waits, kiefer_wolfowitz(arrival_s, service_s, servers), rtol=0, atol=1e-9)

    drift = rate * (2 * seen + 1) + np.minimum(seen, servers) * (1 - 2 * seen)
    controlled = waits + drift / (2 * servers * (servers - rate))
    theory = erlang_wait(servers, load)
    error = controlled.reshape(100, -1).mean(axis=1).std(ddof=1) / 10
    assert error < 0.008 * theory, "too few requests to tell 2 % from chance"
    assert controlled.mean() == pytest.approx(theory, rel=0.02)


def test_erlang_c_has_its_known_values():
    assert erlang_wait(1, 0.8) == pytest.approx(4.0)
    assert erlang_wait(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_wait(2, 0.75) == pytest.approx(0.75**2 / (1 - 0.75**2))


# Continuous batching ------------------------------------------------------------------------------------------------


def decode_wait(places: int, load: float, mean_tokens: float, largest: int = 120) -> float:
    """Mean wait for a place, in units of the mean service time: steps of equal time, geometric numbers of tokens.

    Whoever is there when a step ends is a Markov chain: each of those running ends with chance 1 / mean_tokens, others
    have come meanwhile. A request is there for its wait and for a step a token, so Little's law gives the wait. With
    many short steps this is M/M/k.
    """
    ends, step_s = 1 / mean_tokens, 1 / mean_tokens
    rate = places * load
    there = np.arange(largest)
    running = np.clip(there, 1, places)  # an idle decoder waits for one request
    come = poisson.pmf(there, rate * step_s)
    chain = np.zeros((largest, largest))
    for now in there:
        for done in range(running[now] + 1):
            left = max(now, 1) - done
            chain[now, left:] += binom.pmf(done, running[now], ends) * come[: largest - left]
    chain[:, -1] += 1 - chain.sum(axis=1)
    equations = np.vstack([chain.T - np.eye(largest), np.ones(largest)])
    share = np.linalg.lstsq(equations, np.append(np.zeros(largest), 1.0), rcond=None)[0]
    assert abs(share[-largest // 4 :]).sum() < 1e-6
    cycle_s = step_s + share[0] / rate
    there_s = share @ np.maximum(there, 1) * step_s + rate * step_s**2 / 2
    return float(there_s / cycle_s / rate - 1.0)


@pytest.mark.parametrize(("places", "load"), [(1, 0.6), (4, 0.8), (8, 0.7)])
def test_short_steps_turn_the_chain_of_decode_into_mmk(places: int, load: float):
    exact = erlang_wait(places, load)
    apart = [decode_wait(places, load, tokens) / exact - 1 for tokens in (20, 200, 2000)]
    assert abs(apart[2]) < 0.02
    np.testing.assert_allclose(apart[2] / apart[1], 0.1, rtol=0.05, err_msg="the difference is one of the step")
    print(apart)


@pytest.mark.parametrize(("places", "load", "mean_tokens"), [(1, 0.6, 3.0), (4, 0.75, 4.0), (8, 0.7, 6.0)])
def test_decode_waits_as_its_chain_says(places: int, load: float, mean_tokens: float):
    out = []
    for seed in range(6):
        out.append(one(places, load, mean_tokens, seed))
    out=np.array(out); print(places, load, out.mean(0), out.std(0))

def one(places,load,mean_tokens,seed):
    rng, count = np.random.default_rng(seed), 20_000
    tokens = rng.geometric(1 / mean_tokens, count)
    requests = DecodeRequests(
        arrival_s=np.cumsum(rng.exponential(1 / (places * load), count)), context=np.zeros(count, np.int64),
        first=np.zeros(count, np.int64), tokens=tokens, expert_ids=np.zeros((tokens.max(), 1, 1), np.uint8),
    )  # fmt: skip
    step = Execution(1 / mean_tokens, 1.0, 1.0)
    config = SchedulerConfig(max_batch_size=1, window_size=1)
    import time; t=time.time()
    run = run_decode(requests, np.zeros((count, 1, 1)), lambda *_: step, places, config, Fcfs(), rng)
    waits=run.start_s-run.arrival_s
    th=decode_wait(places,load,mean_tokens)
    return waits.mean()/th, th, waits.reshape(50,-1).mean(1).std()/7/th, time.time()-t
