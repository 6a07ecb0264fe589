"""The synthetic generator against theory: Plackett-Luce, Dirichlet, drift with a known truth, determinism."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, UnavailableError, UnknownNameError
from coterie.footprints import footprint, footprints
from coterie.traces import ActivationTrace
from coterie.traces import synthetic as module
from coterie.traces.arrivals import LognormalLengths, PoissonArrivals
from coterie.traces.synthetic import (
    Preferences,
    SlowDrift,
    SyntheticSettings,
    draw_preferences,
    generate,
    generate_to,
    presets,
)
from coterie.types import PREFILL, ModelSpec

SMALL = SyntheticSettings(
    num_experts=8,
    num_layers=3,
    top_k=2,
    domains=("a", "b"),
    concentration=float("inf"),
    lengths=LognormalLengths(prompt_mean=20, output_mean=20),
)


def inclusion(trace: ActivationTrace) -> Any:
    """[layer, expert] share of tokens that activate the expert."""
    return footprint(trace.arrays()[0].expert_ids, trace.meta.num_experts) / trace.num_tokens


def exact_inclusion(q: Any, k: Any) -> np.ndarray:
    """Plackett-Luce by summing over all ordered draws."""
    out = np.zeros(len(q))
    for order in permutations(range(len(q)), k):
        p, left = 1.0, 1.0
        for e in order:
            p, left = p * q[e] / left, left - q[e]
        out[list(order)] += p
    return out


def cosine(a: Any, b: Any) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("k", [1, 2, 4, 7, 8])
def test_inclusion_is_plackett_luce(rng: np.random.Generator, k: int) -> None:
    settings = replace(SMALL, top_k=k, domains=("a",), zipf_exponent=1.5)
    truth = draw_preferences(settings, rng)
    seen = inclusion(generate(settings, rng, tokens=60_000, preferences=truth))
    q = truth.epochs[0, 0]  # [layer, expert]
    expected = q if k == 1 else np.stack([exact_inclusion(row, k) for row in q])
    assert np.abs(seen - expected).max() < 5 * np.sqrt(0.25 / 60_000)


def test_first_expert_follows_the_preferences_and_second_the_rest(rng: np.random.Generator) -> None:
    settings = replace(
        SMALL, domains=("a",), num_layers=1, preferences=np.array([[[0.7, 0.1, 0.1, 0.04, 0.03, 0.01, 0.01, 0.01]]])
    )
    ids = generate(settings, rng, tokens=60_000).arrays()[0].expert_ids[:, 0]
    assert np.mean(ids[:, 0] == 0) == pytest.approx(0.7, abs=0.01)
    after_first = ids[ids[:, 0] == 0, 1]
    assert np.mean(after_first == 1) == pytest.approx(0.1 / 0.3, abs=0.015)


def test_nearly_all_weight_on_one_expert_still_gives_distinct_ids(rng: np.random.Generator) -> None:
    q = np.full((1, 3, 8), 1e-7)
    q[:, :, 5] = 1.0
    trace = generate(replace(SMALL, domains=("a",), preferences=q, top_k=3), rng, tokens=3000)
    assert np.allclose(inclusion(trace)[:, 5], 1.0)
    others = np.delete(inclusion(trace), 5, axis=1)
    assert np.allclose(others, 2 / 7, atol=0.05), "the exact scan draws the others evenly"


@hypothesis_settings(max_examples=25)
@given(
    experts=st.sampled_from([1, 2, 8, 300]),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 400),
    concentration=st.sampled_from([0.01, 1.0, 50.0, float("inf")]),
    data=st.data(),
)
def test_ids_are_distinct_and_sizes_exact(
    experts: int, layers: int, tokens: int, concentration: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, min(experts, 8)))
    settings = replace(SMALL, num_experts=experts, num_layers=layers, top_k=k, concentration=concentration)
    trace = generate(settings, np.random.default_rng(tokens), tokens=tokens)
    ids = trace.arrays()[0].expert_ids
    assert trace.num_tokens == tokens
    assert ids.max() < experts
    assert (np.diff(np.sort(ids.astype(int), axis=2), axis=2) > 0).all()
    table = trace.requests
    assert np.array_equal(table.prompt_tokens + table.output_tokens, trace.lengths)
    assert [int((trace.request(i).phase == PREFILL).sum()) for i in range(len(table))] == table.prompt_tokens.tolist()


def test_large_concentration_makes_requests_alike_and_small_unlike(rng: np.random.Generator) -> None:
    settings = replace(SMALL, domains=("a",), zipf_exponent=1.0, lengths=LognormalLengths(1000, 0, 1000, 0))

    def scatter(concentration: Any) -> float:
        trace = generate(replace(settings, concentration=concentration), rng, requests=40)
        tokens, offsets = trace.arrays()
        counts = footprints(tokens.expert_ids, offsets, 8) / 2000
        return float(counts.var(axis=0).sum())

    assert scatter(float("inf")) < 0.01 < scatter(10.0)
    assert scatter(1e6) == pytest.approx(scatter(float("inf")), rel=0.5)


def test_dirichlet_has_the_stated_variance(rng: np.random.Generator) -> None:
    """With k = 1 a request's inclusion is its preference: Var = q (1 - q) / (c + 1)."""
    settings = replace(
        SMALL,
        top_k=1,
        domains=("a",),
        concentration=15.0,
        phase_correlation=1.0,
        lengths=LognormalLengths(1000, 0, 1000, 0),
    )
    truth = draw_preferences(settings, rng)
    trace = generate(settings, rng, requests=1500, preferences=truth)
    tokens, offsets = trace.arrays()
    counts = footprints(tokens.expert_ids, offsets, 8) / 2000
    q = truth.epochs[0, 0]
    assert np.allclose(counts.mean(axis=0), q, atol=0.015)
    expected = (q * (1 - q)).sum() * (1 / 16 + (15 / 16) / 2000)
    assert counts.var(axis=0).sum() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_phases_of_a_request_correlate_as_stated(rng: np.random.Generator, correlation: float) -> None:
    settings = replace(
        SMALL,
        num_experts=32,
        top_k=1,
        domains=("a",),
        concentration=64.0,
        zipf_exponent=0.0,
        phase_correlation=correlation,
        lengths=LognormalLengths(2000, 0, 2000, 0),
    )
    trace = generate(settings, rng, requests=300)
    tokens, offsets = trace.arrays()
    halves = np.sort(np.concatenate([offsets, offsets[:-1] + 2000]))
    counts = footprints(tokens.expert_ids, halves, 32) / 2000
    prefill, decode = counts[0::2].ravel(), counts[1::2].ravel()
    noise = (1 / 32) * (31 / 32) / 2000
    seen = np.cov(prefill, decode)[0, 1] / (prefill.var() - noise)
    assert seen == pytest.approx(correlation, abs=0.06)


def test_specialisation_sets_how_alike_domains_are(rng: np.random.Generator) -> None:
    def likeness(specialisation: Any) -> Any:
        settings = replace(SMALL, num_experts=64, zipf_exponent=1.0, specialisation=specialisation)
        trace = generate(settings, rng, requests=400)
        labels, tokens = np.array(trace.requests.domains), trace.arrays()
        counts = footprints(tokens[0].expert_ids, tokens[1], 64).astype(float)
        loads = [counts[labels == name].sum(axis=0) for name in ("a", "b")]
        return cosine(loads[0], loads[1])

    alike, half, unlike = (likeness(s) for s in (0.0, 0.5, 1.0))
    assert alike > 0.99
    assert unlike < half < alike
    assert unlike < 0.7


def test_half_life_is_recovered_from_loads(rng: np.random.Generator) -> None:
    settings = replace(
        SMALL,
        num_experts=32,
        top_k=1,
        domains=("a",),
        zipf_exponent=1.0,
        drift=SlowDrift(half_life_s=100.0),
        arrivals=PoissonArrivals(20.0),
        lengths=LognormalLengths(20, 0, 20, 0),
    )
    truth = draw_preferences(settings, rng)
    trace = generate(settings, rng, requests=6000, preferences=truth)
    tokens, offsets = trace.arrays()
    counts = footprints(tokens.expert_ids, offsets, 32).astype(float)
    step = truth.epochs[1, 0] - truth.epochs[0, 0]  # [layer, expert]
    centres, left = [], []
    for start in range(0, 240, 20):
        assert trace.requests.arrival_s is not None
        rows = (trace.requests.arrival_s >= start) & (trace.requests.arrival_s < start + 20)
        load = counts[rows].sum(axis=0) / (rows.sum() * 40)
        centres.append(start + 10.0)
        left.append(1 - ((load - truth.epochs[0, 0]) * step).sum() / (step * step).sum())
    slope = np.polyfit(centres, np.log2(left), 1)[0]
    assert -1 / slope == pytest.approx(100.0, rel=0.2)


def digest(folder: Path) -> dict[Any, Any]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_same_seed_same_bytes_for_any_threads_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(presets["bursty"], num_layers=6, lengths=LognormalLengths(50, 1, 50, 1))
    threads = numba.get_num_threads()
    digests: list[dict[str, Any]] = []
    try:
        for count, chunk in ((1, 64 << 20), (threads, 64 << 20), (threads, 4096)):
            numba.set_num_threads(count)
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
            folder = tmp_path / f"{len(digests)}"
            generate_to(folder, settings, np.random.default_rng(7), requests=120)
            digests.append(digest(folder))
    finally:
        numba.set_num_threads(threads)
    assert digests[0] == digests[1] == digests[2]
    generate_to(tmp_path / "other", settings, np.random.default_rng(8), requests=120)
    assert digest(tmp_path / "other")["activations.safetensors"] != digests[0]["activations.safetensors"]


def test_written_and_in_memory_traces_agree_and_meta_matches_the_writer(tmp_path: Path) -> None:
    kept = generate(SMALL, np.random.default_rng(3), requests=30)
    kept.save(tmp_path / "saved")
    done = []
    written = generate_to(
        tmp_path / "written", SMALL, np.random.default_rng(3), requests=30, progress=lambda *p: done.append(p)
    )
    assert digest(tmp_path / "saved") == digest(tmp_path / "written")
    assert done[-1] == (written.num_tokens, written.num_tokens)
    written.validate()
    assert written.meta.source["settings"]["specialisation"] == 0.5
    json.dumps(written.meta.source, allow_nan=False)


def test_nbytes_is_the_size_on_disk(tmp_path: Path) -> None:
    generate_to(tmp_path / "t", SMALL, np.random.default_rng(0), nbytes=200_000)
    size = (tmp_path / "t" / "activations.safetensors").stat().st_size
    assert size == pytest.approx(200_000, rel=0.05)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interruption_leaves_nothing(tmp_path: Path, error: type[Exception]) -> None:
    def stop(_done: Any, _total: Any) -> None:
        raise error

    with pytest.raises(error):
        generate_to(tmp_path / "t", SMALL, np.random.default_rng(0), requests=5, progress=stop)
    assert not (tmp_path / "t").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not empty"):
        generate_to(tmp_path / "mine", SMALL, np.random.default_rng(0), requests=5, progress=stop)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert [file.name for file in tmp_path.iterdir()] == ["mine"], "no temporary folder stays"


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    generate_to(tmp_path / "t", SMALL, np.random.default_rng(0), requests=5)
    before = digest(tmp_path / "t")
    with pytest.raises(ConfigError, match="holds a trace already"):
        generate_to(tmp_path / "t", SMALL, np.random.default_rng(1), requests=5)
    assert digest(tmp_path / "t") == before


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(UnavailableError, match="the disk has 10 free"):
        generate_to(tmp_path / "t", SMALL, np.random.default_rng(0), requests=5)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", ["balanced", "bursty", "drifting"])
def test_presets_generate(name: str, rng: np.random.Generator) -> None:
    trace = generate(replace(presets[name], num_layers=2), rng, requests=20)
    assert isinstance(trace, ActivationTrace)
    assert trace.num_requests == 20
    with pytest.raises(UnknownNameError, match="Did you mean 'bursty'"):
        presets["burst"]


def test_shape_comes_from_a_model_and_wide_ids_fit(rng: np.random.Generator) -> None:
    spec = ModelSpec(
        "wide",
        num_layers=4,
        num_experts=384,
        top_k=6,
        hidden_size=1,
        expert_intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        first_moe_layer=1,
    )
    trace = generate(SMALL.shaped_like(spec), rng, requests=5)
    assert trace.meta.layer_ids == (1, 2, 3)
    assert trace.arrays()[0].expert_ids.dtype == np.uint16
    assert trace.arrays()[0].expert_ids.max() > 255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"specialisation": 1.5}, "specialisation=1.5 must be in 0 … 1"),
        ({"phase_correlation": -0.1}, "phase_correlation=-0.1 must be in 0 … 1"),
        ({"concentration": 0.0}, "concentration=0.0 must be above 0"),
        ({"concentration": (1.0, 2.0)}, "must be above 0, one or 3"),
        ({"top_k": 9}, "top_k=9 must be at most num_experts=8"),
        ({"mix": (1.0,)}, "must hold a share of 0 or more for each of 2 domains"),
        ({"domains": ()}, "domains is empty"),
        ({"zipf_exponent": -1.0}, "zipf_exponent=-1.0 must be in 0 … 20"),
        ({"preferences": np.ones((1, 3, 8))}, r"expected \(2, 3, 8\)"),
    ],
)
def test_bad_settings_quote_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change)


def test_bad_amounts_and_drifts(rng: np.random.Generator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either a number of requests or a number of tokens"):
        generate(SMALL, rng)
    with pytest.raises(ConfigError, match="requests=0 must be at least 1"):
        generate(SMALL, rng, requests=0)
    with pytest.raises(ConfigError, match="one of requests, tokens and nbytes"):
        generate_to(tmp_path / "t", SMALL, rng, requests=1, nbytes=1)
    other = draw_preferences(replace(SMALL, domains=("a",)), rng)
    with pytest.raises(ConfigError, match=r"shape \(1, 3, 8\) per epoch; expected \(2, 3, 8\)"):
        generate(SMALL, rng, requests=1, preferences=other)
    with pytest.raises(ConfigError, match="needs 2 of them"):
        Preferences(other.epochs, SlowDrift(1.0))
    with pytest.raises(ConfigError, match="half_life_s=0 must be above 0"):
        SlowDrift(0)
