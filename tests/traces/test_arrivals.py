"""Arrival processes and lengths against their theory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.errors import ConfigError
from coterie.traces import RequestTrace
from coterie.traces.arrivals import (
    BurstyArrivals,
    LognormalLengths,
    PoissonArrivals,
    RecordedLengths,
    ReplayedArrivals,
    draw_arrivals,
)

MIX = np.array([0.2, 0.3, 0.5])


def test_poisson_gaps_are_exponential_and_domains_follow_the_mix(rng: np.random.Generator) -> None:
    arrivals = PoissonArrivals(rate=4.0).draw(5000, MIX, rng)
    gaps = np.diff(arrivals.arrival_s, prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    assert stats.chisquare(np.bincount(arrivals.domain), 5000 * MIX).pvalue > 0.01


def test_bursts_keep_the_rate_and_come_in_runs_of_one_domain(rng: np.random.Generator) -> None:
    arrivals = BurstyArrivals(rate=10.0, burst_size=20, burst_rate=1000.0, share=0.5).draw(20_000, MIX, rng)
    assert 20_000 / arrivals.arrival_s[-1] == pytest.approx(10.0, rel=0.1)
    gaps = np.diff(arrivals.arrival_s)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue < 1e-6, "bursts are not Poisson"
    close = gaps < 0.005
    same = arrivals.domain[1:] == arrivals.domain[:-1]
    assert close.mean() == pytest.approx(0.5, abs=0.05), "half of the requests follow one of their burst"
    assert same[close].mean() > 0.9
    assert same[~close].mean() == pytest.approx((MIX**2).sum(), abs=0.05)


@given(count=st.integers(1, 300), size=st.integers(1, 50), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_bursts_give_the_count_in_order(count: int, size: int, share: float) -> None:
    arrivals = BurstyArrivals(rate=5.0, burst_size=size, burst_rate=6.0, share=share).draw(
        count, MIX, np.random.default_rng(0)
    )
    assert len(arrivals.arrival_s) == len(arrivals.domain) == count
    assert (np.diff(arrivals.arrival_s) >= 0).all()


def test_overlapping_bursts_keep_the_rate_to_the_end(rng: np.random.Generator) -> None:
    """Bursts that start before the last request but after the last drawn would be missing from the end."""
    arrivals = BurstyArrivals(rate=10.0, burst_size=500, burst_rate=11.0, share=1.0).draw(40_000, MIX, rng)
    half = arrivals.arrival_s[-1] / 2
    assert (arrivals.arrival_s > half).mean() == pytest.approx(0.5, abs=0.1)


def test_replay_scales_time_and_laps(rng: np.random.Generator) -> None:
    trace = RequestTrace(np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([15.0, 10.0, 12.0]))
    arrivals = ReplayedArrivals(trace, time_scale=2.0).draw(5, np.array([0.5, 0.5]), rng)
    assert arrivals.arrival_s.tolist() == [0.0, 4.0, 10.0, 15.0, 19.0]
    lengths = RecordedLengths(trace.prompt_tokens, trace.output_tokens).draw(arrivals.domain, rng)
    assert lengths.prompt_tokens.tolist() == [1, 2, 3, 1, 2]
    assert lengths.output_tokens.tolist() == [4, 5, 6, 4, 5]


def test_lognormal_lengths_have_the_stated_means(rng: np.random.Generator) -> None:
    model = LognormalLengths(prompt_mean=400.0, prompt_sigma=0.7, output_mean=100.0, output_sigma=0.0)
    lengths = model.draw(np.zeros(50_000, np.int64), rng)
    assert lengths.prompt_tokens.mean() == pytest.approx(400.0, rel=0.02)
    assert np.log(lengths.prompt_tokens).std() == pytest.approx(0.7, rel=0.02)
    assert (lengths.output_tokens == 100).all()
    longest = LognormalLengths(prompt_sigma=3.0, longest=1000).draw(np.zeros(5000, np.int64), rng).prompt_tokens
    assert longest.min() == 1
    assert longest.max() == 1000


def test_recorded_lengths_stay_with_their_domain(rng: np.random.Generator) -> None:
    model = RecordedLengths(np.array([1, 2, 30]), np.array([5, 6, 7]), np.array([0, 0, 1]))
    lengths = model.draw(np.array([0] * 50 + [1] * 50), rng)
    assert set(lengths.prompt_tokens[:50].tolist()) == {1, 2}
    assert set(lengths.prompt_tokens[50:].tolist()) == {30}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonArrivals(0.0), "rate=0.0 must be a finite number above 0"),
        (lambda: BurstyArrivals(share=1.5), "share=1.5 must be in 0 … 1"),
        (lambda: BurstyArrivals(rate=10, burst_rate=5), "burst_rate=5 must be above rate=10"),
        (lambda: LognormalLengths(prompt_sigma=-1), "prompt_sigma=-1 must be in 0 … 10"),
        (lambda: ReplayedArrivals(RequestTrace(np.ones(1, int), np.ones(1, int))), "has no arrival times"),
        (lambda: RecordedLengths(np.empty(0, int), np.empty(0, int)), "0 prompts must be at least 1"),
    ],
)
def test_bad_settings_say_why(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@given(tokens=st.integers(1, 5000))
def test_a_number_of_tokens_is_met_exactly(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    arrived, lengths = draw_arrivals(PoissonArrivals(), LognormalLengths(5, 1, 5, 1), MIX, rng, tokens=tokens)
    assert lengths.prompt_tokens.sum() + lengths.output_tokens.sum() == tokens
    assert len({len(column) for column in (*arrived, *lengths)}) == 1
    assert (lengths.prompt_tokens >= 1).all()
    assert (lengths.output_tokens[:-1] >= 1).all()


def test_unreachable_tokens_are_refused(rng: np.random.Generator) -> None:
    nothing = RecordedLengths(np.zeros(3, np.int64), np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="tokens=5 cannot be reached"):
        draw_arrivals(PoissonArrivals(), nothing, MIX, rng, tokens=5)
