"""Many servers and one queue: the event kernel against Erlang C, and continuous batching against its Markov chain."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np
import pytest
from scipy.stats import binom, poisson

from control_variates import controlled_mean
from coterie.batching import Fcfs
from coterie.batching.scheduler import SchedulerConfig
from coterie.sim import DecodeRequests, Execution, Simulation, run_decode
from sim_checks import checked


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
    sim = Simulation()
    line: deque[int] = deque()
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
def test_the_kernel_gives_the_waits_of_mmk(servers: int, load: float) -> None:
    """Service of mean 1. Whatever function of the number in the system one takes, its mean drift is 0 in balance."""
    rng, count, rate = np.random.default_rng(2026), 100_000, servers * load
    arrival_s, service_s = np.cumsum(rng.exponential(1 / rate, count)), rng.exponential(1.0, count)
    waits, seen = queue_on_the_kernel(arrival_s, service_s, servers)
    np.testing.assert_allclose(waits, kiefer_wolfowitz(arrival_s, service_s, servers), rtol=0, atol=1e-9)

    def drift(of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        up, down = of(seen + 1) - of(seen), of(seen - 1) - of(seen)
        found: np.ndarray = rate * up + np.minimum(seen, servers) * down
        return found

    def waiting(power: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda n: np.maximum(n - servers, 0.0) ** power

    queued = [drift(waiting(power)) for power in (1, 2, 3)]
    found = controlled_mean(waits, [drift(lambda n: n), drift(lambda n: n**2), *queued])
    theory = erlang_wait(servers, load)
    assert found.error < 0.008 * theory, "too few requests to tell 2 % from chance"
    assert found.mean == pytest.approx(theory, rel=0.02)


def test_erlang_c_has_its_known_values() -> None:
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
            left = max(int(now), 1) - done
            chain[now, left:] += binom.pmf(done, running[now], ends) * come[: largest - left]
    chain[:, -1] += 1 - chain.sum(axis=1)
    equations = np.vstack([chain.T - np.eye(largest), np.ones(largest)])
    share = np.linalg.lstsq(equations, np.append(np.zeros(largest), 1.0), rcond=None)[0]
    assert abs(share[-largest // 4 :]).sum() < 1e-6
    cycle_s = step_s + share[0] / rate
    there_s = share @ np.maximum(there, 1) * step_s + rate * step_s**2 / 2
    return float(there_s / cycle_s / rate - 1.0)


@pytest.mark.parametrize(("places", "load"), [(1, 0.6), (4, 0.8), (8, 0.7)])
def test_short_steps_turn_the_chain_of_decode_into_mmk(places: int, load: float) -> None:
    exact = erlang_wait(places, load)
    apart = [decode_wait(places, load, tokens) / exact - 1 for tokens in (20, 200)]
    assert abs(apart[1]) < 0.02
    assert apart[1] / apart[0] == pytest.approx(0.1, rel=0.05), "what is left is in proportion to the step"


@numba.njit  # type: ignore[untyped-decorator]
def steps_by_hand(arrival_s: np.ndarray, tokens: np.ndarray, places: int, step_s: float) -> np.ndarray:
    """[request] when each joined, from the rule alone: joined at the end of a step, in order, where a place is free."""
    starts, left = np.zeros(len(tokens)), tokens.copy()
    running = np.zeros(places, np.int64)
    count, following, now_s = 0, 0, 0.0
    while following < len(tokens) or count:
        if count == 0:
            now_s = max(now_s, arrival_s[following])
        while count < places and following < len(tokens) and arrival_s[following] <= now_s:
            running[count] = following
            starts[following] = now_s
            count, following = count + 1, following + 1
        now_s += step_s
        still = 0
        for place in range(count):
            left[running[place]] -= 1
            if left[running[place]]:
                running[still] = running[place]
                still += 1
        count = still
    return starts


CASES = [(1, 0.6, 3.0), (4, 0.75, 4.0), (8, 0.7, 6.0)]


def draw(places: int, load: float, mean_tokens: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2026)
    return np.cumsum(rng.exponential(1 / (places * load), count)), rng.geometric(1 / mean_tokens, count)


@pytest.mark.parametrize(("places", "load", "mean_tokens"), CASES)
def test_decode_runs_by_the_rule_of_its_chain(places: int, load: float, mean_tokens: float) -> None:
    """Every start of the decoder is that of the rule, and a long run of the rule waits as the chain says."""
    arrival_s, tokens = draw(places, load, mean_tokens, 4000)
    requests = DecodeRequests(
        arrival_s=arrival_s,
        context=np.zeros(4000, np.int64),
        first=np.zeros(4000, np.int64),
        tokens=tokens,
        expert_ids=np.zeros((tokens.max(), 1, 1), np.uint8),
    )
    step = Execution(1 / mean_tokens, 1.0, 1.0)
    config = SchedulerConfig(max_batch_size=1, window_size=1)
    rng = np.random.default_rng(0)
    run = checked(run_decode)(requests, np.zeros((4000, 1, 1)), lambda *_: step, places, config, Fcfs(), rng)
    by_hand = steps_by_hand(arrival_s, tokens, places, 1 / mean_tokens)
    np.testing.assert_allclose(run.start_s, by_hand, rtol=0, atol=1e-9)

    arrival_s, tokens = draw(places, load, mean_tokens, 4_000_000)
    waits = steps_by_hand(arrival_s, tokens, places, 1 / mean_tokens) - arrival_s
    theory = decode_wait(places, load, mean_tokens)
    error = waits.reshape(100, -1).mean(axis=1).std(ddof=1) / 10
    assert error < 0.006 * theory, "too few requests to tell 2 % from chance"
    assert waits.mean() == pytest.approx(theory, rel=0.02)
