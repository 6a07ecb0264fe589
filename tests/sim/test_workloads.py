"""Synthetic requests: the experts of their domains, and when they arrive."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from coterie.errors import ConfigError
from coterie.sim.workloads import SemanticLoads
from coterie.traces.arrivals import BurstyArrivals, PoissonArrivals


@given(st.integers(1, 70), st.integers(1, 30), st.data())
def test_profiles_are_shares_with_an_arc_of_the_ring_each(experts: int, domains: int, data: st.DataObject) -> None:
    hot = data.draw(st.integers(1, experts))
    strength = data.draw(st.floats(0, 1))
    loads = SemanticLoads(num_experts=experts, top_k=1, domains=domains, hot=hot, strength=strength)
    profiles = loads.profiles()
    assert profiles.shape == (domains, experts)
    np.testing.assert_allclose(profiles.sum(axis=1), 1.0)
    np.testing.assert_allclose(loads.mix, np.full(domains, 1 / domains))
    cold = (1 - strength) / experts
    for domain, profile in enumerate(profiles):
        start = round(domain * experts / domains)
        expected = [cold + strength / hot * ((e - start) % experts < hot) for e in range(experts)]
        np.testing.assert_allclose(profile, expected, atol=1e-15)


def test_domains_lie_evenly_on_the_ring() -> None:
    """Arcs as long as their distance cover each expert once; twice as long, twice."""
    for hot, covered in ((3, 1), (6, 2)):
        profiles = SemanticLoads(num_experts=60, domains=20, hot=hot).profiles()
        assert ((profiles > 0.2 / 60 + 1e-9).sum(axis=0) == covered).all()
        np.testing.assert_allclose(profiles.mean(axis=0), 1 / 60)


def test_draws_have_the_shares_tokens_and_likeness_asked_for(rng: np.random.Generator) -> None:
    loads = SemanticLoads(num_experts=12, top_k=2, domains=3, hot=4, strength=0.6, likeness=30.0, tokens=50.0)
    domain = np.repeat(np.arange(3), 8000)
    drawn = loads.draw(domain, rng)
    assert drawn.shape == (24_000, 1, 12)
    assert (drawn == np.rint(drawn)).all()
    activations = drawn.sum(axis=(1, 2))
    assert (activations % 2 == 0).all(), "top-k for every token"
    assert activations.mean() / 2 == pytest.approx(50.0, rel=0.005)
    assert np.log(activations / 2).std() == pytest.approx(0.1, rel=0.03)
    shares = drawn[:, 0] / activations[:, None]
    for one, profile in enumerate(loads.profiles()):
        np.testing.assert_allclose(shares[domain == one].mean(axis=0), profile, rtol=0.03)
        # Dirichlet-multinomial: the variance of a share that n draws around a Dirichlet of concentration c have.
        tokens = activations[domain == one]
        expected = profile * (1 - profile) * (1 / tokens + (1 - 1 / tokens) / 31.0).mean()
        np.testing.assert_allclose(shares[domain == one].var(axis=0), expected, rtol=0.1)


def test_a_domain_without_strangers_uses_its_own_experts_alone(rng: np.random.Generator) -> None:
    drawn = SemanticLoads(num_experts=10, top_k=1, domains=2, hot=5, strength=1.0).draw(np.array([0, 1]), rng)[:, 0]
    assert drawn[0, 5:].sum() == 0
    assert drawn[1, :5].sum() == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"top_k": 0}, "top_k=0 must be in 1 … num_experts=60"),
        ({"top_k": 61}, "top_k=61 must be in 1 … num_experts=60"),
        ({"hot": 0}, "hot=0 must be in 1 … num_experts=60"),
        ({"hot": 61}, "hot=61 must be in 1 … num_experts=60"),
        ({"domains": 0}, "domains=0 must be at least 1"),
        ({"strength": -0.1}, "strength=-0.1 must be in 0 … 1"),
        ({"strength": math.nan}, "strength=nan must be in 0 … 1"),
        ({"likeness": 0.5}, "likeness=0.5 must be a finite number of at least 1"),
        ({"likeness": math.inf}, "likeness=inf must be a finite number of at least 1"),
        ({"tokens": 0.0}, "tokens=0.0 must be a finite number above 0"),
        ({"tokens": math.nan}, "tokens=nan must be a finite number above 0"),
        ({"tokens_sigma": -1.0}, "tokens_sigma=-1.0 must be in 0 … 10"),
        ({"tokens_sigma": math.nan}, "tokens_sigma=nan must be in 0 … 10"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        SemanticLoads(**setting)


@pytest.mark.parametrize("domain", [-1, 20])
def test_a_domain_that_does_not_exist_is_refused(domain: int, rng: np.random.Generator) -> None:
    with pytest.raises(ConfigError, match=r"domain holds .* it must be in 0 … 19"):
        SemanticLoads().draw(np.array([3, domain]), rng)


@pytest.mark.parametrize("arrivals", [PoissonArrivals(100.0), BurstyArrivals(100.0, burst_rate=1000.0)])
def test_a_workload_is_the_same_for_the_same_seed(arrivals: PoissonArrivals | BurstyArrivals) -> None:
    settings, drawn = SemanticLoads(), []
    for seed in (1, 1, 2):
        rng = np.random.default_rng(seed)
        arrived = arrivals.draw(500, settings.mix, rng)
        drawn.append((*arrived, settings.draw(arrived.domain, rng)))
    assert [array.tobytes() for array in drawn[0]] == [array.tobytes() for array in drawn[1]]
    arrival_s, domain, loads = drawn[0]
    assert not np.array_equal(loads, drawn[2][2])
    assert len(arrival_s) == len(domain) == len(loads) == 500
    assert (np.diff(arrival_s) >= 0).all()
    # Each request's experts are those of its own domain.
    assert np.mean((loads[:, 0].argmax(axis=1) - 3 * domain) % 60 < 4) > 0.95


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_even_rate_keeps_who_follows_whom_and_evens_out_the_times(share: float) -> None:
    mix = np.full(20, 1 / 20)
    bursty = BurstyArrivals(rate=50.0, burst_size=32, burst_rate=1000.0, share=share)
    even = BurstyArrivals(rate=50.0, burst_size=32, burst_rate=1000.0, share=share, even_rate=True)
    one, two = (process.draw(20_000, mix, np.random.default_rng(3)) for process in (bursty, even))
    np.testing.assert_array_equal(one.domain, two.domain)
    gaps = np.diff(two.arrival_s, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 50.0, rel=0.02)
    assert kstest(gaps, "expon", args=(0, 1 / 50.0)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03, "one gap says nothing about the next"
    if share:
        assert kstest(np.diff(one.arrival_s), "expon", args=(0, 1 / 50.0)).pvalue < 1e-9, "bursts of rate do show"
        assert np.mean(two.domain[1:] == two.domain[:-1]) > 0.15, "and bursts of meaning stay"
