"""Continuous batching: who joins when, and that every token is replayed once, in order, with its own experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching import Selection, Window, strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.sim import DecodeRequests, Execution, Run, StepTimer, run_decode
from sim_checks import checked

OFFERED = {"cost": SpreadCost()}

ONE_BY_ONE = SchedulerConfig(strategy="fcfs", max_batch_size=1, window_size=1)


def fresh() -> np.random.Generator:
    return np.random.default_rng(0)


def test_two_places_and_three_requests_by_hand() -> None:
    """A step takes a second for each token in it.

    0.0  A comes (3 tokens) and runs alone
    0.5  B comes (1 token), waits for the step to end
    1.0  A and B: 2 s
    1.2  C comes (2 tokens)
    3.0  B is done, A goes on with C: 2 s
    5.0  A is done, C goes on alone: 1 s
    6.0  C is done; nobody is left until D
    9.0  D comes (1 token): 1 s
    """
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[5, 0]], [[4, 5]], [[3, 4]], [[0, 5]]], np.uint8)
    requests = DecodeRequests(
        arrival_s=np.array([0.0, 0.5, 1.2, 9.0]),
        context=np.array([10, 20, 30, 40]),
        first=np.array([0, 3, 4, 6]),
        tokens=np.array([3, 1, 2, 1]),
        expert_ids=ids,
    )
    steps = []

    def timer(load: np.ndarray, batch: Batch) -> Execution:
        steps.append((np.flatnonzero(load[0]).tolist(), load.sum(), batch))
        return Execution(float(batch.decode_requests), 1.5, float((load > 0).sum()))

    done: list[int] = []
    run = checked(run_decode)(
        requests, np.zeros((4, 1, 6)), timer, 2, ONE_BY_ONE, ONE_BY_ONE.make(OFFERED), fresh(), progress=done.append
    )
    assert run.start_s.tolist() == [0.0, 1.0, 3.0, 9.0]
    assert run.finish_s.tolist() == [5.0, 3.0, 6.0, 10.0]
    assert run.batch_s.tolist() == [1.0, 2.0, 2.0, 1.0, 1.0]
    assert run.batch_size.tolist() == [1, 2, 2, 1, 1]
    assert run.distinct.tolist() == [2.0, 4.0, 4.0, 2.0, 2.0]
    assert run.imbalance.tolist() == [1.5] * 5
    assert run.skipped.tolist() == [0, 0, 0, 0]
    assert done == [1, 1, 1, 1]
    assert steps == [
        ([0, 1], 2, Batch(decode_requests=1, decode_context=10)),
        ([0, 1, 2, 5], 4, Batch(decode_requests=2, decode_context=11 + 20)),
        ([2, 3, 4, 5], 4, Batch(decode_requests=2, decode_context=12 + 30)),
        ([3, 4], 2, Batch(decode_requests=1, decode_context=31)),
        ([0, 5], 2, Batch(decode_requests=1, decode_context=40)),
    ]


def test_ranks_share_the_requests_of_a_step() -> None:
    requests = DecodeRequests(
        np.zeros(5), np.full(5, 100), np.arange(5), np.ones(5, np.int64), np.zeros((5, 1, 1), np.uint8)
    )
    seen = []

    def timer(_load: np.ndarray, batch: Batch) -> Execution:
        seen.append(batch)
        return Execution(1.0, 1.0, 1.0)

    run_decode(requests, np.zeros((5, 1, 1)), timer, 4, ONE_BY_ONE, ONE_BY_ONE.make(OFFERED), fresh(), ranks=2)
    assert seen == [Batch(1, 50), Batch(2, 200)], "the first comes alone; of 4, each rank has 2"


@dataclass
class Shown:
    """First come, first served; keeps the load it was told is running."""

    max_skips: int | None = None
    running: list[np.ndarray] = field(default_factory=list)

    def select(self, window: Window, running: np.ndarray, size: int, _rng: np.random.Generator) -> Selection:
        self.running.append(running.copy())
        return Selection(np.arange(min(size, len(window.loads))), "the oldest")


@pytest.mark.parametrize("size", [1, 3])
def test_a_strategy_is_shown_the_load_that_runs(size: int, rng: np.random.Generator) -> None:
    """Named `size` at once while a queue lasts, so each choice is shown those of earlier ones who still run."""
    count = 40
    tokens, predicted = rng.integers(1, 6, count), rng.random((count, 2, 5))
    requests = DecodeRequests(
        np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64), tokens, np.zeros((6, 2, 1), np.uint8)
    )
    strategy, step = Shown(), Execution(0.5, 1.0, 1.0)
    config = SchedulerConfig(max_batch_size=size, window_size=size)
    run = checked(run_decode)(requests, predicted, lambda *_: step, 4, config, strategy, rng)
    first = [0, *range(1, count, size)]  # the first request comes alone
    assert len(strategy.running) == len(first)
    for row, running in zip(first, strategy.running, strict=True):
        still = np.flatnonzero(run.finish_s[:row] > run.start_s[row])
        np.testing.assert_allclose(running, predicted[still].sum(axis=0), atol=1e-12)
    assert not strategy.running[0].any()
    assert strategy.running[-1].any()


@st.composite
def cases(draw: st.DrawFn) -> tuple[DecodeRequests, np.ndarray, SchedulerConfig, int, int]:
    count, seed = draw(st.integers(1, 30)), draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 7, count)
    order = rng.permutation(count)  # the recording holds them in another order
    first = np.zeros(count, np.int64)
    first[order] = np.concatenate([[0], np.cumsum(tokens[order])[:-1]])
    requests = DecodeRequests(
        arrival_s=np.sort(rng.integers(0, draw(st.sampled_from([1, 30, 300])), count)) / 8,
        context=rng.integers(0, 50, count),
        first=first,
        tokens=tokens,
        expert_ids=rng.integers(0, 6, (int(tokens.sum()), 2, 2)).astype(draw(st.sampled_from([np.uint8, np.int32]))),
    )
    size = draw(st.integers(1, 6))
    config = SchedulerConfig(
        strategy=draw(st.sampled_from(strategies.names())),
        max_batch_size=size,
        window_size=size + draw(st.integers(0, 9)),
        max_skips=draw(st.sampled_from([None, 2])),
    )
    return requests, rng.random((count, 2, 6)), config, draw(st.integers(1, 9)), seed


@given(cases())
@settings(max_examples=50)
def test_every_token_is_replayed_once_in_order(
    case: tuple[DecodeRequests, np.ndarray, SchedulerConfig, int, int],
) -> None:
    requests, predicted, config, places, seed = case
    loads, batches = [], []

    def timer(load: np.ndarray, batch: Batch) -> Execution:
        loads.append(load.copy())
        batches.append(batch)
        return Execution(0.125 * (1 + len(loads) % 3), 1.0, 1.0)

    run = checked(run_decode)(
        requests, predicted, timer, places, config, config.make(OFFERED), np.random.default_rng(seed)
    )
    assert sum(run.batch_size) == sum(requests.tokens)
    # From the starts alone: who runs in each step, and with which token.
    ends = np.zeros(len(run.batch_s))
    now_s, token = 0.0, np.zeros(len(requests.tokens), np.int64)
    for step in range(len(run.batch_s)):
        running = np.flatnonzero((run.start_s <= now_s) & (token < requests.tokens))
        if not len(running):  # idle until somebody comes
            now_s = run.start_s[run.start_s > now_s].min()
            running = np.flatnonzero((run.start_s <= now_s) & (token < requests.tokens))
        assert len(running) == run.batch_size[step] <= places
        expected = np.zeros((2, 6), np.int64)
        for row in running:
            for layer in range(2):
                for expert in requests.expert_ids[requests.first[row] + token[row], layer]:
                    expected[layer, expert] += 1
        np.testing.assert_array_equal(loads[step], expected)
        context = sum(int(requests.context[row] + token[row]) for row in running)
        assert batches[step] == Batch(decode_requests=len(running), decode_context=context)
        token[running] += 1
        now_s += run.batch_s[step]
        ends[step] = now_s
        ended = running[token[running] == requests.tokens[running]]
        assert (run.finish_s[ended] == now_s).all()
        # A place that is free is not left so while someone waits.
        if run.batch_size[step] < places:
            began_s = now_s - run.batch_s[step]
            assert not ((requests.arrival_s < began_s) & (run.start_s > began_s)).any()
    np.testing.assert_array_equal(token, requests.tokens)
    assert np.isin(run.start_s, np.concatenate([ends, requests.arrival_s])).all()


@pytest.fixture(scope="module")
def timer() -> StepTimer:
    return StepTimer(step_model(get_model("gpt-oss-20b")))


@pytest.mark.parametrize("name", ["fcfs", "random", "greedy_variance", "latency_aware", "karmarkar_karp"])
def test_calibrated_steps_and_the_same_seed_give_the_same_bytes(name: str, timer: StepTimer) -> None:
    spec = timer.model.spec

    def run() -> Run:
        rng = np.random.default_rng(9)
        tokens = rng.integers(1, 12, 60)
        first = np.concatenate([[0], np.cumsum(tokens)[:-1]])
        ids = rng.integers(0, spec.num_experts, (int(tokens.sum()), spec.num_moe_layers, spec.top_k)).astype(np.uint8)
        requests = DecodeRequests(np.cumsum(rng.exponential(0.002, 60)), rng.integers(1, 500, 60), first, tokens, ids)
        predicted = rng.random((60, spec.num_moe_layers, spec.num_experts))
        config = SchedulerConfig(strategy=name)
        return checked(run_decode)(requests, predicted, timer, 8, config, config.make(OFFERED), rng)

    one, two = run(), run()
    assert [column.tobytes() for column in one] == [column.tobytes() for column in two]
    assert (one.batch_size <= 8).all()
    assert (one.batch_s > 0).all()


GOOD = DecodeRequests(
    np.zeros(2), np.zeros(2, np.int64), np.array([0, 2]), np.array([2, 1]), np.zeros((3, 2, 2), np.uint8)
)
Change = Callable[[DecodeRequests], DecodeRequests]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r._replace(arrival_s=np.array([1.0, 0.5])), "arrival_s must rise from at least 0, and be finite"),
        (lambda r: r._replace(arrival_s=np.zeros(3)), "3 arrivals must be at least 1, with as many loads (2)"),
        (lambda r: r._replace(tokens=np.array([2, 0])), "tokens=0 must be at least 1 for every request"),
        (lambda r: r._replace(tokens=np.array([2])), "tokens has 1 requests; arrival_s has 2"),
        (lambda r: r._replace(context=np.array([2, -1])), "context=-1 must be at least 0 for every request"),
        (lambda r: r._replace(first=np.array([-1, 0])), "first=-1 must be at least 0 for every request"),
        (lambda r: r._replace(first=np.array([2, 0])), "expert_ids has 3 tokens; requests need 4"),
        (
            lambda r: r._replace(expert_ids=np.zeros((3, 1, 2), np.uint8)),
            "expert_ids has shape (3, 1, 2); expected [token, 2, k]",
        ),
        (lambda r: r._replace(expert_ids=np.full((3, 2, 2), 4)), "expert_ids holds 4; ids must be in 0 … 3"),
        (lambda r: r._replace(expert_ids=np.full((3, 2, 2), -1)), "expert_ids holds -1; ids must be in 0 … 3"),
    ],
)
def test_requests_that_cannot_be_replayed_are_refused(change: Change, message: str) -> None:
    step = Execution(1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        run_decode(change(GOOD), np.zeros((2, 2, 4)), lambda *_: step, 2, ONE_BY_ONE, ONE_BY_ONE.make(OFFERED), fresh())


@pytest.mark.parametrize("setting", ["places", "ranks"])
def test_no_places_and_no_ranks_are_refused(setting: str) -> None:
    step = Execution(1.0, 1.0, 1.0)
    given_: dict[str, Any] = {"places": 1, "ranks": 1, setting: 0}
    with pytest.raises(ConfigError, match=f"^{setting}=0 must be at least 1$"):
        run_decode(
            GOOD,
            np.zeros((2, 2, 4)),
            lambda *_: step,
            config=ONE_BY_ONE,
            strategy=ONE_BY_ONE.make(OFFERED),
            rng=fresh(),
            **given_,
        )
