"""The statistics of an inspection, against brute force, theory and traces of known truth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coterie.answers.inspect.drift import measure_drift
from coterie.answers.inspect.inspection import inspect_trace
from coterie.answers.inspect.loads import arrival_rate, layer_loads
from coterie.answers.inspect.samples import cut_windows
from coterie.errors import TraceError
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.traces.arrivals import LognormalLengths, PoissonArrivals
from coterie.traces.readers import read_trace
from coterie.traces.synthetic import SlowDrift, SyntheticSettings, generate, presets
from coterie.types import DECODE, PREFILL

SHORT = LognormalLengths(prompt_mean=60, output_mean=30)
SMALL = SyntheticSettings(num_layers=4, num_experts=16, top_k=2, lengths=SHORT)


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def inspect(trace: Any, seed: int = 0) -> Any:
    return inspect_trace(trace, "t", seeded(seed))


def tiny(
    ids: Any, lengths: Any, phase: Any = None, experts: int = 4, model: str = "m", **columns: Any
) -> ActivationTrace:
    ids = np.asarray(ids, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    meta = TraceMeta(model, experts, ids.shape[1], ids.shape[2])
    phase = np.full(len(ids), DECODE, np.uint8) if phase is None else np.asarray(phase, np.uint8)
    output = np.add.reduceat(phase, offsets[:-1]).astype(np.int64)
    table = RequestTrace(np.diff(offsets) - output, output, **columns)
    return ActivationTrace.from_arrays(meta, ids, offsets, table, phase)


def test_load_statistics_by_hand() -> None:
    even, one, none = layer_loads(np.array([[5, 5, 5, 5], [0, 8, 0, 0], [0, 0, 0, 0]]), [3, 4, 5])
    assert (even.layer, even.max_over_mean) == (3, 1.0)
    assert one.max_over_mean == 4.0
    assert [(h.expert, h.share) for h in one.hot] == [(1, 1.0)]
    assert (none.max_over_mean, none.hot) == (None, [])


def test_one_pass_counts_what_counting_counts() -> None:
    trace = generate(SMALL, seeded(), requests=200)
    found = inspect(trace)
    load = footprint(trace.arrays()[0].expert_ids, 16)
    np.testing.assert_allclose(found.load, load / load.sum(axis=1, keepdims=True), rtol=1e-12)
    own = [footprint(trace.request(i).expert_ids, 16) for i in range(200)]
    domains = trace.requests.domains
    assert domains is not None
    by_domain = {
        d: np.sum([f for f, n in zip(own, domains, strict=True) if n == d], axis=0).ravel().astype(float)
        for d in found.domains.domains
    }
    a, b = (by_domain[d] for d in found.domains.domains[:2])
    assert found.domains.cosine[0][1] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert sum(found.domains.tokens) == found.tokens == trace.num_tokens
    assert found.decode_tokens == trace.requests.output_tokens.sum()


def test_rank_imbalance_of_a_known_load() -> None:
    load = np.ones((1, 1, 8), np.uint64)
    load[0, 0, 0] = 9  # ranks of 4 experts carry 12 and 4
    two, four, eight = inspect(LoadTable(load)).rank_imbalance
    assert (two.ranks, two.mean, two.median, two.worst) == (2, 1.5, 1.5, 1.5)
    assert two.most_gain == pytest.approx(1 / 3), "an even load leaves 8 of the busiest rank's 12"
    assert (four.worst, eight.worst) == (2.5, 4.5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_drift_of_known_half_life(seed: Any) -> None:
    # Four half-lives of trace: there 19 of 20 other seeds came within 25%, in shorter ones fewer (docs/inspect.md).
    settings = SyntheticSettings(num_layers=6, drift=SlowDrift(100.0), lengths=SHORT, arrivals=PoissonArrivals(2.5))
    drift = inspect(generate(settings, seeded(seed), requests=1000)).drift
    assert drift.unit == "s"
    assert drift.half_life == pytest.approx(100, rel=0.25), drift.reason
    assert drift.floor < 0.3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_stationary_load_does_not_drift(seed: Any) -> None:
    settings = dataclasses.replace(presets["balanced"], num_layers=6, lengths=SHORT)
    drift = inspect(generate(settings, seeded(seed), requests=800)).drift
    assert drift.half_life is None
    assert "noise" in drift.reason
    assert np.mean(drift.skew_left) == pytest.approx(1, abs=0.15)


def test_wandering_load_table_drifts_in_windows() -> None:
    rng, keep = seeded(1), 2 ** (-1 / 12)
    x = [rng.normal(size=(8, 64))]
    for _ in range(95):
        x.append(keep * x[-1] + np.sqrt(1 - keep**2) * rng.normal(size=(8, 64)))
    counts = rng.poisson(300 * np.exp(0.4 * np.array(x))).astype(np.uint64)
    drift = inspect(LoadTable(counts)).drift
    assert drift.unit == "windows"
    assert drift.half_life == pytest.approx(12, rel=0.25)
    assert drift.lag[0] == 1, "the noise within a window is unknown, so lag 0 is not used"
    shuffled = inspect(LoadTable(rng.permutation(counts))).drift
    assert shuffled.half_life is None
    labelled = inspect(LoadTable(counts, labels=[f"d{i % 3}" for i in range(96)]))
    assert "labelled" in labelled.drift.reason
    assert sorted(labelled.domains.domains) == ["d0", "d1", "d2"]


def test_drift_needs_windows_and_shape() -> None:
    few = measure_drift(np.ones((3, 2, 1, 4), np.int64), 1.0, "s", seeded())
    assert few.reason is not None
    assert "3 windows" in few.reason
    even = measure_drift(np.ones((16, 2, 1, 4), np.int64), 1.0, "s", seeded())
    assert even.reason is not None
    assert "even" in even.reason


def test_halves_of_windows_are_balanced() -> None:
    trace = generate(SMALL, seeded(), requests=320)
    windows = cut_windows(trace, seeded())
    assert windows.total == 20
    assert windows.half.sum() == 160
    assert windows.width_s is not None
    assert windows.width_s * 20 == pytest.approx(trace.requests.duration_s)
    assert (np.diff(windows.window) >= 0).all()


def test_distinct_experts_against_theory() -> None:
    # Even routing without preference: the closed form for random experts is exact up to the draws' noise.
    flat = dataclasses.replace(SMALL, zipf_exponent=0.0, specialisation=0.0, concentration=np.inf, domains=("one",))
    for step in inspect(generate(flat, seeded(), requests=300)).distinct_experts:
        expected = 16 * (1 - (1 - 2 / 16) ** step.batch)
        assert step.uniform == pytest.approx(expected)
        assert step.mixed == pytest.approx(expected, rel=0.03)
        assert step.mixed == pytest.approx(np.mean(step.mixed_per_layer))


def test_padding_rows_cost_nothing_if_all_tokens_choose_alike_and_more_the_more_they_differ() -> None:
    spec = get_model("gpt-oss-20b")
    rng, shape = seeded(), (80, spec.num_moe_layers, spec.num_experts)
    costs = []
    for kinds in (1, 80):
        ids = np.tile(rng.random((kinds, *shape[1:])).argsort(axis=2)[:, :, : spec.top_k], (80 // kinds, 1, 1))
        costs.append(inspect(tiny(ids, [1] * 80, experts=spec.num_experts, model=spec.name)).padding)
    alike, random = costs
    assert [(cost.batch, cost.padded) for cost in alike] == [(cost.batch, cost.padded) for cost in random]
    assert all(cost.further == cost.share == 0.0 for cost in alike)
    for cost in random:  # each padding row leaves an idle expert alone with chance 1 - k / experts
        idle = 0.875**cost.batch
        expected = spec.num_experts * idle * (1 - 0.875 ** (cost.padded - cost.batch))
        assert cost.further == pytest.approx(expected, rel=0.1, abs=0.05)
        assert cost.share >= 0.0
    assert random[0].share > 0.1


def test_padding_is_priced_only_where_vllm_was_measured() -> None:
    ids = seeded().random((80, 16, 64)).argsort(axis=2)[:, :, :8]
    assert inspect(tiny(ids, [1] * 80, experts=64)).missing["padding"] == "no known model has these layers"
    unmeasured = inspect(tiny(ids, [1] * 80, experts=64, model="olmoe-1b-7b"))
    assert "was not measured in vllm" in unmeasured.missing["padding"]


def test_distinct_experts_of_domains_that_share_none() -> None:
    # Two domains with two experts each: a batch of one domain touches 2, a mixed one nearly always 4.
    ids = np.repeat([[[0, 1]], [[2, 3]]], [40, 40], axis=0)
    found = inspect(tiny(ids, [1] * 80, domains=["a"] * 40 + ["b"] * 40)).distinct_experts
    by_batch = {step.batch: step for step in found}
    assert by_batch[32].same_domain == 2.0
    assert by_batch[32].mixed == pytest.approx(4.0, abs=0.01)
    assert by_batch[64].same_domain is None
    assert by_batch[128].mixed is None
    assert by_batch[2].mixed == pytest.approx(3, abs=0.2)


def test_phase_correlation() -> None:
    same = [[[0, 1]], [[0, 2]], [[0, 1]], [[0, 2]]]
    opposite = [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
    phase = [PREFILL, PREFILL, DECODE, DECODE]
    assert inspect(tiny(same, [4], phase)).phase_correlation.pearson == pytest.approx(1)
    found = inspect(tiny(opposite, [4], phase)).phase_correlation
    assert (found.pearson, found.requests) == (pytest.approx(-1), 1)
    every = inspect(tiny([[[0, 1, 2, 3]]] * 2, [2], [PREFILL, DECODE])).phase_correlation
    assert every.pearson is None, "constant counts have no correlation"


def test_generated_phase_correlation_follows_the_setting() -> None:
    high, low = (
        inspect(generate(dataclasses.replace(SMALL, phase_correlation=c, concentration=5.0), seeded(), requests=200))
        for c in (1.0, 0.0)
    )
    assert high.phase_correlation.pearson > low.phase_correlation.pearson + 0.2


def test_arrivals() -> None:
    times = np.repeat(np.arange(0, 100, 10.0), 10)  # ten at once, every ten seconds
    rate = arrival_rate(RequestTrace(np.ones(100, np.int64), np.ones(100, np.int64), times))
    assert rate is not None
    assert rate.mean == pytest.approx(99 / 90)
    counts = np.bincount(times[times < 90].astype(int), minlength=90)
    assert rate.dispersion[0].index == pytest.approx(counts.var() / counts.mean())
    assert sum(rate.rate) * rate.bin_s == pytest.approx(100)
    poisson = generate(SMALL, seeded(), requests=2000).requests
    steady = arrival_rate(poisson)
    assert steady is not None
    assert steady.dispersion[0].index == pytest.approx(1, abs=0.25)


def test_prefix_blocks_seen_before() -> None:
    blocks = [np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([1, 2, 3, 5])]
    table = RequestTrace(np.full(3, 9), np.full(3, 1), prefix_blocks=blocks, block_tokens=4)
    assert inspect(table).prefix_sharing.seen_before == pytest.approx(5 / 10)


TRACES: dict[str, Callable[[], ActivationTrace | LoadTable | RequestTrace]] = {
    "one token": lambda: tiny([[[0, 1]]], [1]),
    "one request, no decode": lambda: tiny([[[0, 1]], [[1, 2]]], [2], [0, 0]),
    "one expert": lambda: tiny([[[0]], [[0]]], [1, 1], experts=1),
    "requests without tokens": lambda: tiny([[[0, 1]]] * 3, [3]),
    "same arrival, one domain": lambda: tiny([[[0, 1]]] * 4, [2, 2], arrival_s=np.zeros(2), domains=["a", "a"]),
    "odd experts": lambda: tiny([[[0, 6]]] * 4, [2, 2], experts=7, domains=["a", "b"]),
    "one window": lambda: LoadTable(np.array([[[0, 3], [0, 0]]], np.uint64)),
    "one request row": lambda: RequestTrace(np.array([0]), np.array([0]), np.array([5.0])),
}


@pytest.mark.parametrize("name", TRACES)
def test_small_traces_have_reasons_and_no_nan(name: str) -> None:
    found = inspect(TRACES[name]())
    plain = msgspec.to_builtins(found)
    json.dumps(plain, allow_nan=False)
    for field, why in found.missing.items():
        assert plain[field] is None
        assert why
    for field, value in plain.items():
        if value is None and field not in {
            "model",
            "experts",
            "top_k",
            "requests",
            "tokens",
            "decode_tokens",
            "windows",
        }:
            assert field in found.missing, field
    if found.drift is not None:
        assert found.drift.half_life is None
        assert found.drift.reason


@pytest.mark.parametrize(
    "trace",
    [
        ActivationTrace.from_arrays(TraceMeta("m", 4, 1, 2), np.zeros((0, 1, 2), int), np.array([0])),
        ActivationTrace.from_arrays(TraceMeta("m", 4, 1, 2), np.zeros((0, 1, 2), int), np.array([0, 0])),
        LoadTable(np.zeros((2, 1, 4), np.uint64)),
        RequestTrace(np.empty(0, np.int64), np.empty(0, np.int64)),
    ],
)
def test_empty_traces_are_bad_input(trace: Any) -> None:
    with pytest.raises(TraceError, match=r"^t: .*the trace is empty"):
        inspect(trace)


def test_bad_ids_name_file_and_field(tmp_path: Path) -> None:
    generate(dataclasses.replace(SMALL, num_experts=12), seeded(), requests=20).save(tmp_path / "t")
    file = tmp_path / "t" / "activations.safetensors"
    clean = file.read_bytes()
    header = 8 + int.from_bytes(clean[:8], "little")
    spec = json.loads(clean[8:header])
    for field, value in (("expert_ids", 12), ("phase", 2)):
        raw = bytearray(clean)
        raw[header + spec[field]["data_offsets"][1] - 1] = value
        file.write_bytes(raw)
        with pytest.raises(TraceError) as caught:
            inspect_trace(ActivationTrace.open(tmp_path / "t"), str(file), seeded())
        assert caught.value.field == field
        assert caught.value.path == file
        assert str(value) in caught.value.problem


def test_same_seed_same_numbers_and_progress_ends_at_all() -> None:
    trace = generate(SMALL, seeded(), requests=60)
    calls = []
    first = inspect_trace(trace, "t", seeded(3), lambda done, total: calls.append((done, total)))
    assert first == inspect(trace, 3)
    assert calls[-1] == (trace.num_tokens, trace.num_tokens)


def test_interruption_stops_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.answers.inspect.samples.CHUNK_BYTES", 1 << 12)
    seen = []

    def stop(done: Any, total: Any) -> None:
        seen.append(done)
        if done > total / 2:
            raise KeyboardInterrupt

    trace = generate(SMALL, seeded(), requests=60)
    with pytest.raises(KeyboardInterrupt):
        inspect_trace(trace, "t", seeded(), stop)
    assert len(seen) > 2
    assert seen[-1] < trace.num_tokens


def test_chunks_do_not_change_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = generate(SMALL, seeded(), requests=60)
    whole = inspect(trace)
    monkeypatch.setattr("coterie.answers.inspect.samples.CHUNK_BYTES", 1 << 12)
    parts = inspect(trace)
    assert (parts.load, parts.domains, parts.decode_tokens) == (whole.load, whole.domains, whole.decode_tokens)
    assert parts.phase_correlation == whole.phase_correlation


def test_real_activations(data_dir: Path) -> None:
    found = inspect(read_trace(data_dir / "activations" / "gpt-oss-20b"))
    steps = {step.batch: step for step in found.distinct_experts}
    assert steps[1].mixed == 4.0
    assert steps[32].mixed < 0.9 * steps[32].uniform, "real routing is far from uniform"
    assert steps[4].same_domain < steps[4].mixed
    assert found.missing["phase_correlation"].startswith("no request has both")
    deepseek = inspect(read_trace(data_dir / "activations" / "deepseek-v2-lite"))
    assert deepseek.missing["distinct_experts"] == "the trace has no decode tokens"
    glm = inspect(read_trace(data_dir / "activations" / "glm-5.2"))
    assert len(glm.layers) == 75
    assert glm.layers[0].layer == 3
    assert len(glm.domains.domains) == 12


def test_real_requests(data_dir: Path) -> None:
    found = inspect(read_trace(data_dir / "requests" / "mooncake" / "conversation_trace.jsonl"))
    assert found.requests == 12_031
    assert found.prefix_sharing.block_tokens == 512
    assert 0.3 < found.prefix_sharing.seen_before < 0.45
    assert found.arrivals.gap_cv > 1
