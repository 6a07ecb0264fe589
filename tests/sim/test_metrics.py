"""A run in numbers, against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.sim import Run, summarise_run


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000))
def test_summaries_are_the_plain_formulas(requests: int, batches: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.uniform(5, 9, requests))
    start = arrival + rng.exponential(1.0, requests)
    finish = start + rng.exponential(0.1, requests)
    skipped = rng.integers(0, 5, requests)
    per_batch = [rng.uniform(0.1, 2, batches) for _ in range(3)]
    run = Run(arrival, start, finish, skipped, per_batch[0], rng.integers(1, 9, batches), per_batch[1], per_batch[2])
    found = summarise_run(run)

    latency = [(f - a) * 1000 for f, a in zip(finish, arrival, strict=True)]
    assert found.requests == requests
    for name, percent in (("p50_ms", 50), ("p90_ms", 90), ("p99_ms", 99), ("p999_ms", 99.9)):
        assert getattr(found, name) == pytest.approx(percentile(latency, percent), rel=1e-9)
    assert found.p50_ms <= found.p90_ms <= found.p99_ms <= found.p999_ms <= max(latency) * (1 + 1e-12)
    assert found.mean_ms == pytest.approx(sum(latency) / requests)
    assert found.throughput == pytest.approx(requests / (max(finish) - min(arrival)))
    assert found.batch_ms == pytest.approx(1000 * sum(per_batch[0]) / batches)
    assert found.imbalance == pytest.approx(sum(per_batch[1]) / batches)
    assert found.distinct == pytest.approx(sum(per_batch[2]) / batches)
    assert found.worst_skips == max(skipped)
    assert found.worst_wait_ms == pytest.approx(1000 * max(start - arrival))
    assert all(type(value) in (int, float) for value in found), "plain numbers, for JSON"


def test_a_run_that_took_no_time() -> None:
    one, zero = np.ones(1), np.zeros(1, np.int64)
    assert summarise_run(Run(one, one, one, zero, np.zeros(1), zero + 1, one, one)).throughput == math.inf
