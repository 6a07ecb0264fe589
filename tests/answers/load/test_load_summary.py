"""Percentiles and their intervals, goodput, hit rate; contenders compared in blocks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.answers.load.client import RequestOutcome
from coterie.answers.load.report import MOST_UNBOUND
from coterie.answers.load.run import (
    Contender,
    LoadRun,
    Pace,
    StepTotals,
    blocks_of,
    changes,
    compare,
    experts_ratio,
    jackknife,
)
from coterie.answers.load.summary import Targets, block_length, draws_of, percentiles, summarise
from coterie.answers.load.workload import LoadRequest, Message
from coterie.answers.runs import interval
from coterie.errors import ConfigError
from virtual_time import run_virtually


def outcome(number: int, ttft_s: float, tpot_s: float = 0.01, tokens: int = 11, **more: object) -> RequestOutcome:
    start = float(number)
    pieces = tuple(start + ttft_s + tpot_s * (index + 1) for index in range(tokens - 1))
    end = pieces[-1] if pieces else start + ttft_s
    found = RequestOutcome(number, start, start, end, start + ttft_s, pieces, prompt_tokens=100, output_tokens=tokens)
    return found._replace(**more)  # type: ignore[arg-type]


def run_of(*outcomes: RequestOutcome, unfinished: int = 0) -> LoadRun:
    return LoadRun(outcomes=list(outcomes), in_flight=unfinished)


def test_percentiles_are_of_the_answered_and_failures_are_counted_apart(rng: np.random.Generator) -> None:
    fine = [outcome(number, 0.001 * (number + 1), cached_tokens=number % 2 * 50) for number in range(100)]
    bad = [
        outcome(100 + number, 99.0, failure=kind, problem="why") for number, kind in enumerate(("cut", "reset", "cut"))
    ]
    found = summarise([run_of(*bad, *fine[::-1], unfinished=2)], rng, Targets(ttft_s=0.05))
    assert (found.requests, found.answered, found.unfinished) == (103, 100, 2)
    assert found.failures == {"cut": 2, "reset": 1}
    assert found.problems == {"cut": "why", "reset": "why"}
    for level in (50, 90, 99):
        value = getattr(found.metrics["ttft"], f"p{level}")
        assert value.mean == pytest.approx(np.percentile(np.arange(1, 101) / 1000, level))
        assert value.low <= value.mean
    assert found.metrics["ttft"].p99.high is None, "the slowest of 100 does not bound the 99th percentile"
    assert found.metrics["ttft"].p90.high is not None
    assert found.metrics["tpot"].p50.mean == pytest.approx(0.01)
    assert found.metrics["gap"].p50.mean == pytest.approx(0.01)
    assert found.metrics["e2e"].mean.mean == pytest.approx(0.0505 + 0.1)
    assert found.within.mean == pytest.approx(50 / 103)
    assert found.hit_rate is not None
    assert found.hit_rate.mean == pytest.approx(0.25)
    assert found.to_json()["ttft_ms"]["p50"]["value"] == pytest.approx(50.5)


def test_warm_up_is_left_out(rng: np.random.Generator) -> None:
    run = run_of(*(outcome(number, 1.0 if number < 10 else 0.1) for number in range(40)))
    assert summarise([run], rng, skip=10).metrics["ttft"].p99.mean == pytest.approx(0.1)
    assert summarise([run], rng, skip=10).requests == 30


def test_nothing_measured_is_no_error(rng: np.random.Generator) -> None:
    found = summarise([run_of()], rng)
    assert (found.requests, found.metrics, found.hit_rate) == (0, {}, None)
    assert found.to_json()["requests_per_s"] == 0.0


def test_the_rule_for_bounds_is_that_of_order_statistics() -> None:
    assert 1 - 0.99**MOST_UNBOUND >= 0.975 > 1 - 0.99 ** (MOST_UNBOUND - 1)


def test_blocks_cover_the_mean_where_requests_are_correlated() -> None:
    """Requests in groups that share a delay: drawn in blocks they cover the mean nearly as often as they say."""
    rng, trials, together = np.random.default_rng(5), 80, 8
    held = {"blocks": 0, "single": 0}
    for _ in range(trials):
        values = np.repeat(rng.exponential(1.0, 50), together) + rng.exponential(0.1, 50 * together)
        for how, block in (("blocks", block_length(len(values), together)), ("single", 1)):
            low, high = np.percentile(values[draws_of(len(values), block, rng)].mean(axis=1), [2.5, 97.5])
            held[how] += low <= 1.1 <= high
    assert held["blocks"] / trials > 0.85
    assert held["single"] / trials < 0.65, "intervals from single requests would be too narrow"


def test_intervals_of_percentiles_cover_them() -> None:
    rng, held, trials = np.random.default_rng(2), 0, 40
    true = stats.expon.ppf(0.9)
    for _ in range(trials):
        found = percentiles(rng.exponential(1.0, 400), 8, rng).p90
        assert found.high is not None
        held += (found.low or 0) <= true <= found.high
    assert held / trials > 0.87


# ---------------------------------------------------------------------------------------------------------- comparing


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12))
def test_the_jackknife_of_a_mean_is_students_interval(values: list[float]) -> None:
    found = jackknife(values, lambda some: float(np.mean(some)))
    assert found is not None
    assert found == pytest.approx(interval(values), abs=1e-9)


def test_two_blocks_have_no_interval() -> None:
    assert jackknife([1.0, 2.0], lambda some: float(np.mean(some))) == (1.5, None, None)
    assert jackknife([1.0, 2.0, 3.0], lambda _: None) is None


@given(st.integers(1, 300), st.integers(1, 20))
def test_blocks_hold_every_request_once(count: int, blocks: int) -> None:
    if blocks > count:
        with pytest.raises(ConfigError, match="at most the number of requests"):
            blocks_of(count, blocks)
        return
    found = blocks_of(count, blocks)
    assert [number for start, end in found for number in range(start, end)] == list(range(count))
    assert {end - start for start, end in found} <= {count // blocks, -(-count // blocks)}


def test_contenders_take_turns_and_drift_cancels() -> None:
    """The machine slows down by half over the run; the second contender is 10% faster throughout."""
    served: list[tuple[str, int]] = []
    draw = np.random.default_rng(0)

    def contender(name: str, factor: float) -> Contender:
        async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
            clock = asyncio.get_running_loop().time
            sent = clock()
            served.append((name, request.number))
            await asyncio.sleep(factor * (1 + sent / 200) * draw.uniform(0.9, 1.1))
            end = clock()
            return RequestOutcome(request.number, planned or sent, sent, end, end, (), output_tokens=1)

        return Contender(name, send)

    both = [contender("a", 1.0), contender("b", 0.9)]
    message = (Message("user", "Hello."),)
    asked = [LoadRequest(number, number, "", message, 1) for number in range(240)]
    run_virtually(compare(both, asked, Pace(concurrency=4), 8, np.random.default_rng(1)))
    for name in ("a", "b"):
        assert sorted(number for one, number in served if one == name) == list(range(240))
    order = [
        "a" if a.outcomes[0].sent < b.outcomes[0].sent else "b" for a, b in zip(both[0].runs, both[1].runs, strict=True)
    ]
    assert sorted(order) == ["a"] * 4 + ["b"] * 4
    found = {one.statistic: one for one in changes(both[0], both[1])}
    change = found["ttft_mean"].pct
    assert found["ttft_mean"].sure
    assert change.low is not None
    assert change.high is not None
    assert change.low < -10 < change.high
    assert change.high - change.low < 10


def test_only_requests_that_both_answered_are_compared() -> None:
    """A contender that fails the slow ones does not look fast."""
    first, other = (Contender(name, None) for name in "ab")  # type: ignore[arg-type]
    for block in range(4):
        numbers = range(10 * block, 10 * block + 10)
        first.runs.append(run_of(*(outcome(number, 5.0 if number % 5 == 0 else 0.1) for number in numbers)))
        other.runs.append(
            run_of(*(outcome(number, 0.1, failure="timeout" if number % 5 == 0 else None) for number in numbers))
        )
    found = {one.statistic: one.pct for one in changes(first, other)}
    assert found["ttft_mean"] == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    assert "hit_rate" not in found, "no server said"


def test_hit_rates_are_compared_in_points() -> None:
    first, other = (Contender(name, None) for name in "ab")  # type: ignore[arg-type]
    for block in range(4):
        for contender, cached in ((first, 30), (other, 40 + block)):
            numbers = range(10 * block, 10 * block + 10)
            contender.runs.append(run_of(*(outcome(number, 0.1, cached_tokens=cached) for number in numbers)))
    (change,) = (one for one in changes(first, other) if one.statistic == "hit_rate")
    assert change.pct.mean == pytest.approx(11.5)
    assert change.sure


def test_experts_are_compared_in_steps_of_equal_size() -> None:
    log = np.array([[0.0, rows, distinct, 0.0] for rows, distinct in ((1, 4.0), (1, 4.0), (4, 10.0), (8, 16.0))])
    even = StepTotals.of([log])
    assert even.experts_per_step == pytest.approx(34 / 4)
    assert even.rows_per_step == pytest.approx(14 / 4)
    assert even.experts_by_token == pytest.approx((4 + 4 + 40 + 128) / 14)
    # Other sizes of steps, the same experts in each: nothing is saved.
    uneven = StepTotals.of([log[[0, 0, 0, 2]], log[3:]])
    assert experts_ratio(even, uneven) == pytest.approx(1.0)
    fewer = StepTotals.of([log * np.array([1, 1, 0.8, 1])])
    assert experts_ratio(even, fewer) == pytest.approx(0.8)
    assert experts_ratio(even, StepTotals.of([])) is None
    twice = even.plus(StepTotals.of([log[:1]]))
    assert (twice.steps[1], twice.distinct[1]) == (3, 12)
