"""The decode step that contention is measured with: every kernel runs, at its size. Timing it needs a GPU."""

from __future__ import annotations

import pytest

from coterie.engines.calibration.contention import ContentionSettings, DecodeStep, measure_contention
from coterie.errors import ConfigError, UnavailableError
from coterie.models import get_model
from coterie.types import ModelSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SPEC = ModelSpec(
    "tiny-grouped",
    num_layers=3,
    num_experts=8,
    top_k=2,
    hidden_size=32,
    expert_intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    first_moe_layer=1,
    shared_intermediate_size=20,
    dense_intermediate_size=48,
)
SETTINGS = ContentionSettings(batch=4, context=16, steps=2, rounds=2)


def test_a_step_runs_every_layer() -> None:
    step = DecodeStep(SPEC, torch.device("cpu"), SETTINGS)
    assert step.run().shape == (4, 100)
    assert len(step.attention) == 3
    assert [len(layers) for layers in step.projections] == [3, 2, 1], "attention's, shared and dense MLPs"
    assert len(step.experts) == len(step.ids) == 2
    assert [tuple(weight.shape) for weight in step.experts[0]] == [(8, 32, 32), (8, 16, 32)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnavailableError, match="not on cpu"):
        measure_contention(SPEC, torch.device("cpu"), SETTINGS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_are_timed_beside_copies() -> None:
    found = measure_contention(SPEC, torch.device("cuda"), SETTINGS)
    assert {one.path for one in found} == {"device", "host-to-device"}
    assert all(one.alone_us > 0 and one.copy_us > 0 and one.nbytes > 0 for one in found)


def test_latent_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="latent attention"):
        DecodeStep(get_model("deepseek-v3"), torch.device("cpu"), SETTINGS)


def test_settings_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares"):
        ContentionSettings(shares=(0.0,))
    with pytest.raises(ConfigError, match="rounds"):
        ContentionSettings(rounds=0)
