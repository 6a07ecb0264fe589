"""Calibration on the CPU: a real run over two tiny shapes, and the experts against a dense layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.cells import Measurement, expert_tokens
from coterie.engines.calibration import timing
from coterie.engines.calibration.calibrate import active_levels, attention_grid, calibrate, gemm_shapes, moe_grid
from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import CalibrationSettings, Timer
from coterie.errors import ConfigError, UnavailableError
from coterie.types import ModelSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

GROUPED = ModelSpec(
    "tiny-grouped",
    num_layers=2,
    num_experts=8,
    top_k=2,
    hidden_size=32,
    expert_intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
)
LATENT = ModelSpec(
    "tiny-latent",
    num_layers=3,
    num_experts=6,
    top_k=3,
    hidden_size=24,
    expert_intermediate_size=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=100,
    first_moe_layer=1,
    shared_intermediate_size=20,
    dense_intermediate_size=48,
    kv_lora_rank=16,
    rope_head_dim=4,
)
QUICK = CalibrationSettings(dtypes=("fp32",), tokens=(1, 4, 16, 64), contexts=(16, 32), cell_ms=1, passes=1)

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture(scope="module")
def measured() -> Iterator[Measurement]:
    with pytest.MonkeyPatch.context() as patch:
        # No number of copies of these shapes fills a cache, and some CPUs take 600 us for any product of 16 rows.
        patch.setattr("coterie.engines.calibration.timing.MAX_COPIES", 3)
        yield calibrate([GROUPED, LATENT], QUICK, "cpu")


def test_every_time_is_positive_and_finite(measured: Measurement) -> None:
    cells: list[Any] = list(measured.copies)
    for shape in measured.shapes:
        cells += [*shape.routing, *shape.gemm, *shape.attention, *(cell for table in shape.moe for cell in table.cells)]
    assert len(cells) > 80
    assert all(math.isfinite(cell.us) and cell.us > 0 for cell in cells)


def test_measures_what_the_grid_says(measured: Measurement) -> None:
    assert measured.note == ""
    for spec, shape in zip((GROUPED, LATENT), measured.shapes, strict=True):
        assert shape.model == spec.name
        (table,) = shape.moe
        assert (table.dtype, table.kernel) == ("fp32", "torch.mm per expert")
        assert [msgspec.structs.replace(cell, us=0.0) for cell in table.cells] == list(moe_grid(spec, QUICK))
        assert [cell.tokens for cell in shape.routing] == list(QUICK.tokens)
        assert {(cell.n, cell.k) for cell in shape.gemm} == set(gemm_shapes(spec))
        assert [(cell.batch, cell.query, cell.context) for cell in shape.attention] == attention_grid(QUICK)
        assert {cell.context for cell in shape.attention if cell.query == 1} == set(QUICK.contexts)


def test_copies_take_longer_for_more_bytes(measured: Measurement) -> None:
    assert {cell.path for cell in measured.copies} == {"device"}
    by_size = sorted((cell.nbytes, cell.us) for cell in measured.copies)
    assert by_size[-1][1] > 10 * by_size[0][1], "4,096 times the bytes"


def test_survives_json(measured: Measurement) -> None:
    assert msgspec.json.decode(msgspec.json.encode(measured), type=Measurement) == measured
    assert str(measured.hardware["device"]).startswith("CPU")
    assert measured.software["torch"] == torch.__version__


def test_shared_and_dense_projections_are_measured() -> None:
    assert {(2 * 20, 24), (24, 20), (2 * 48, 24), (24, 48)} <= set(gemm_shapes(LATENT))
    assert (16 + 4, 24) in gemm_shapes(LATENT), "the latent and its rotary part"
    assert (2 * 2 * 8, 32) in gemm_shapes(GROUPED), "keys and values of the grouped heads"


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=lambda spec: spec.name)
def test_grid_is_feasible_and_has_no_cell_twice(spec: ModelSpec) -> None:
    grid = list(moe_grid(spec, QUICK))
    assert len({(cell.tokens, cell.active, cell.zipf, cell.warm) for cell in grid}) == len(grid)
    for cell in grid:
        assert spec.top_k <= cell.active <= min(spec.num_experts, cell.tokens * spec.top_k)
    assert {cell.active for cell in grid if cell.tokens == 64} == set(active_levels(spec))
    assert {cell.zipf for cell in grid} == {0.0, *QUICK.skews}
    assert any(cell.warm for cell in grid)


@given(st.data(), st.sampled_from([GROUPED, LATENT]))
@settings(max_examples=30)
def test_experts_equal_a_dense_layer(data: st.DataObject, spec: ModelSpec) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=spec.num_experts, max_size=spec.num_experts))
    copies = data.draw(st.integers(1, 2))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    experts = Experts(spec, "fp32", torch.device("cpu"), copies)
    x = torch.randn(sum(counts), spec.hidden_size)
    found = experts.forward(copies - 1, x, torch.tensor(np.cumsum(counts)), counts)
    assert found.shape == x.shape
    up, down = (weight.double() for weight in experts.layers[copies - 1])
    # Dense: every row through every expert, then each row keeps its own.
    inner = torch.einsum("rh,ehi->eri", x.double(), up)
    gate, value = inner[..., : spec.expert_intermediate_size], inner[..., spec.expert_intermediate_size :]
    every = torch.einsum("eri,eih->erh", gate / (1 + torch.exp(-gate)) * value, down)
    own = torch.repeat_interleave(torch.arange(spec.num_experts), torch.tensor(counts))
    torch.testing.assert_close(found.double(), every[own, torch.arange(len(own))], rtol=1e-4, atol=1e-7)


def test_copies_of_a_layer_differ() -> None:
    first, second = Experts(GROUPED, "fp32", torch.device("cpu"), 2).layers
    assert not torch.equal(first[0], second[0])
    assert first[0].shape == (8, 32, 2 * 16)
    assert first[1].shape == (8, 16, 32)


@st.composite
def cells(draw: st.DrawFn) -> tuple[Any, Any, Any, Any]:
    tokens, top_k = draw(st.integers(1, 200)), draw(st.integers(1, 8))
    active = draw(st.integers(top_k, min(64, tokens * top_k)))
    return tokens, top_k, active, draw(st.floats(0.0, 3.0))


@given(cells())
def test_expert_tokens(cell: tuple[Any, Any, Any, Any]) -> None:
    tokens, top_k, active, zipf = cell
    counts = expert_tokens(tokens, top_k, active, zipf)
    assert counts.shape == (active,)
    assert counts.sum() == tokens * top_k
    assert counts.min() >= 1
    assert counts.max() <= tokens, "no token takes an expert twice"
    assert (np.diff(counts) <= 0).all(), "the popular come first"
    np.testing.assert_array_equal(counts, expert_tokens(tokens, top_k, active, zipf))
    if zipf == 0.0:
        assert counts.max() - counts.min() <= 1, "no skew spreads evenly"


@pytest.mark.parametrize("active", [1, 9])
def test_expert_tokens_rejects_what_cannot_be(active: int) -> None:
    with pytest.raises(ConfigError, match=f"active={active} must be between top_k=2 and tokens x top_k=8"):
        expert_tokens(4, 2, active)


def test_timer_takes_turns_and_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    clock_s = 0.0

    def call(name: int) -> None:
        nonlocal clock_s
        order.append(name)
        clock_s += (1e-3, 1e-3, 20e-3)[name]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock_s))
    us = Timer(torch.device("cpu"), QUICK).us([partial(call, name) for name in range(3)])
    assert order == [0, 1, 2] * (len(order) // 3), "each finds the cache as the others left it"
    assert len(order) - 3 >= QUICK.min_repeats, "once round to warm up, then timed"
    assert us == pytest.approx(1e3), "the median of single calls: the slow one does not count"


@pytest.mark.parametrize("tokens", [(), (4, 0), (-1,)])
def test_bad_settings(tokens: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"tokens=.* must be at least"):
        CalibrationSettings(tokens=tokens)


@pytest.mark.parametrize("dtype", ["fp8", "fp16", "mxfp4"])
def test_dtype_the_cpu_cannot_measure(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype '{dtype}' cannot be measured on cpu; it must be fp32 or bf16"):
        calibrate([GROUPED], CalibrationSettings(dtypes=("fp32", cast(Any, dtype))), "cpu")


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none(device: str) -> None:
    with pytest.raises(UnavailableError, match=f"device '{device}' was asked for, but torch sees no CUDA device"):
        calibrate([GROUPED], QUICK, device)


@without_cuda
def test_auto_takes_the_cpu_and_reports() -> None:
    seen: list[tuple[int, int]] = []
    few = CalibrationSettings(dtypes=("fp32",), tokens=(2,), contexts=(16,), cell_ms=0, passes=2, min_repeats=1)
    found = calibrate([GROUPED], few, report=lambda what, done, total: seen.append((done, total)))  # noqa: ARG005
    assert str(found.hardware["device"]).startswith("CPU")
    grid = len(list(moe_grid(GROUPED, few)))
    assert seen[: 2 * grid] == [(done, 2 * grid) for done in range(2 * grid)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_measures_on_cuda(dtype: str) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 grouped GEMM needs compute capability 9.0")
    spec = ModelSpec(
        "small",
        num_layers=2,
        num_experts=8,
        top_k=2,
        hidden_size=256,
        expert_intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=100,
    )
    quick = CalibrationSettings(dtypes=(cast(Any, dtype),), tokens=(1, 4, 64), contexts=(128,), cell_ms=1, passes=1)
    found = calibrate([spec], quick, "cuda")
    assert found.note == ""
    assert all(cell.us > 0 for cell in found.shapes[0].moe[0].cells)
