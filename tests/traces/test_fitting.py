"""Fitted settings: recovered from synthetic traces, and like real ones in skew and batch unions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.footprints import distinct_experts, footprint
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.traces.arrivals import LognormalLengths, PoissonArrivals
from coterie.traces.fitting import fit_synthetic
from coterie.traces.synthetic import SyntheticSettings, draw_preferences, generate, presets

SMALL = SyntheticSettings(
    num_experts=16,
    num_layers=4,
    top_k=3,
    domains=("a", "b"),
    mix=(0.25, 0.75),
    zipf_exponent=1.0,
    concentration=40.0,
    specialisation=0.8,
    lengths=LognormalLengths(100, 0.5, 100, 0.5),
)


def test_recovers_what_generated_the_trace(rng: np.random.Generator) -> None:
    truth = draw_preferences(SMALL, rng)
    fitted = fit_synthetic(generate(SMALL, rng, requests=600, preferences=truth), rng)
    assert fitted.domains == ("a", "b")
    assert fitted.mix == pytest.approx((0.25, 0.75), abs=0.05)
    assert np.mean(fitted.concentration) == pytest.approx(40.0, rel=0.2)
    assert fitted.preferences is not None
    assert np.abs(fitted.preferences - truth.epochs[0]).mean() < 0.004
    assert isinstance(fitted.arrivals, PoissonArrivals)
    assert fitted.arrivals.rate == pytest.approx(10.0, rel=0.15)


def test_requests_that_are_alike_fit_a_large_concentration(rng: np.random.Generator) -> None:
    alike = fit_synthetic(generate(replace(SMALL, concentration=float("inf")), rng, requests=200), rng)
    assert np.min(alike.concentration) > 400
    one = fit_synthetic(generate(replace(SMALL, domains=("a",), mix=None), rng, requests=1), rng)
    assert isinstance(one.concentration, tuple)
    assert set(one.concentration) == {float("inf")}, "one request says nothing of how far others would lie"


def test_base_gives_arrivals_and_drift_and_unlabelled_is_one_domain(rng: np.random.Generator) -> None:
    trace = generate(SMALL, rng, requests=20)
    tokens, offsets = trace.arrays()
    bare = ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets)
    fitted = fit_synthetic(bare, rng, presets["drifting"])
    assert fitted.domains == ("all",)
    assert fitted.drift == presets["drifting"].drift
    assert generate(fitted, rng, requests=5).num_requests == 5
    empty = ActivationTrace.from_arrays(trace.meta, tokens.expert_ids[:0], np.zeros(1, np.int64))
    with pytest.raises(ConfigError, match="without tokens cannot be fitted"):
        fit_synthetic(empty, rng)


def recorded(data_dir: Path, name: str) -> ActivationTrace:
    """gpt-oss requests are labelled by dataset: its 88 categories hold 5 requests each, too few for a batch."""
    folder = data_dir / "activations" / name
    if name == "gpt-oss-20b":
        arrays, text = np.load(folder / "routing.npz"), gzip.decompress((folder / "requests.jsonl.gz").read_bytes())
        label, experts = "dataset", 32
    else:
        arrays, text = np.load(folder / "routing_tokens.npz"), (folder / "requests.jsonl").read_bytes()
        label, experts = "domain", 64
    ids, offsets = arrays["expert_ids"], arrays["offsets"]
    domains = [json.loads(line)[label] for line in text.splitlines()]
    table = RequestTrace(np.zeros(len(domains), np.int64), np.diff(offsets), domains=domains)
    return ActivationTrace.from_arrays(TraceMeta(name, experts, *ids.shape[1:]), ids, offsets, table)


def gini(trace: ActivationTrace) -> Any:
    """[layer] of the load of the whole trace."""
    load = np.sort(footprint(trace.arrays()[0].expert_ids, trace.meta.num_experts).astype(float), axis=1)
    n = load.shape[1]
    return ((2 * np.arange(1, n + 1) - n - 1) * load).sum(axis=1) / (n * load.sum(axis=1))


def union(trace: ActivationTrace, batch: Any, rng: np.random.Generator, domain: Any = None, steps: int = 150) -> Any:
    """Mean distinct experts per layer of a random token each of `batch` different requests."""
    tokens, offsets = trace.arrays()
    labels = np.array(trace.requests.domains)
    pool = np.flatnonzero((trace.lengths > 0) & ((labels == domain) | (domain is None)))
    total = 0.0
    for _ in range(steps):
        chosen = rng.choice(pool, batch, replace=False)
        rows = offsets[chosen] + (rng.random(batch) * trace.lengths[chosen]).astype(np.int64)
        total += distinct_experts(tokens.expert_ids[rows], trace.meta.num_experts).mean()
    return total / steps


@pytest.mark.parametrize("name", ["gpt-oss-20b", pytest.param("deepseek-v2-lite", marks=pytest.mark.long)])
def test_like_real_traces_in_skew_and_batch_unions(data_dir: Path, name: str, rng: np.random.Generator) -> None:
    real = recorded(data_dir, name)
    synthetic = generate(fit_synthetic(real, rng), rng, requests=3 * real.num_requests)
    assert np.abs(gini(real) - gini(synthetic)).mean() <= 0.02
    labels = np.array(real.requests.domains)
    compared = 0
    for batch in (4, 8, 16, 32, 64):
        assert union(synthetic, batch, rng) == pytest.approx(union(real, batch, rng), rel=0.03)
        for domain in np.unique(labels):
            # Twice the batch: from a smaller pool without replacement, real batches nearly repeat each other.
            if (labels == domain).sum() >= 2 * batch:
                compared += 1
                seen, expected = union(synthetic, batch, rng, domain), union(real, batch, rng, domain)
                assert seen == pytest.approx(expected, rel=0.05), (batch, domain)
    assert compared >= 10
