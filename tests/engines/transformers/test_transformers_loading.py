"""Checkpoints from a folder in the precision asked, and one line for what is missing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers import ExpertCapture, load_model  # noqa: E402
from coterie.engines.transformers.loading import model_digest  # noqa: E402
from coterie.errors import ConfigError, TraceError, UnavailableError  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("qwen3_moe", tmp_path_factory.mktemp("models") / "small")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_loads_in_the_precision_asked(folder: Path, dtype: str) -> None:
    loaded = load_model(folder, dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert not loaded.model.training
    assert loaded.name == "small"
    for name, weight in models.build("qwen3_moe").named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weight.to(getattr(torch, dtype)))
    assert loaded.tokenizer("a router")["input_ids"] == models.tokenizer()("a router")["input_ids"]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_survives_the_round_trip_through_a_checkpoint(family: str, tmp_path: Path) -> None:
    """The library splits and joins the experts' weights on the way: the same logits come back."""
    model = models.build(family)
    loaded = load_model(models.save(family, tmp_path / family)).model
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert ExpertCapture(loaded).layer_ids == ExpertCapture(model).layer_ids


def test_no_network_is_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(folder)
    with pytest.raises(TraceError, match="does not exist; nothing is downloaded"):
        load_model("Qwen/Qwen3-30B-A3B")


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="file: model: is a file; a model is a folder"):
        load_model(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"empty/config.json: file: does not exist"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UnavailableError, match=r"transformers cannot load it: .*") as caught:
        load_model(tmp_path / "empty")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_weights_or_tokenizer_is_named(tmp_path: Path) -> None:
    models.build("qwen3_moe").config.save_pretrained(tmp_path / "bare")
    with pytest.raises(UnavailableError, match="bare: transformers cannot load it"):
        load_model(tmp_path / "bare")
    models.tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(UnavailableError, match="bare: transformers cannot load it"):
        load_model(tmp_path / "bare")


def test_wrong_settings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='int3' must be one of float32, float16, bfloat16, nf4"):
        load_model(folder, "int3")
    with pytest.raises(ConfigError, match="device='toaster' must be cpu, cuda or cuda:N"):
        load_model(folder, device="toaster")
    with pytest.raises(UnavailableError, match=f"this machine has {torch.cuda.device_count()} CUDA devices"):
        load_model(folder, device="cuda:99")


def test_nf4_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import coterie.engines.transformers.loading as loading

    monkeypatch.setattr(loading, "find_spec", lambda _: None)  # as on a machine without it
    with pytest.raises(UnavailableError, match="pip install bitsandbytes accelerate"):
        load_model(folder, "nf4")


def test_nf4_quantises_the_experts_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    folder = models.save("qwen3_moe", tmp_path / "small", width=64)
    whole, small = load_model(folder, "bfloat16").model, load_model(folder, "nf4").model
    experts = small.model.layers[0].mlp.experts
    stored = sum(p.numel() * p.element_size() for p in experts.parameters())
    before = sum(p.numel() * p.element_size() for p in whole.model.layers[0].mlp.experts.parameters())
    assert stored <= before / 3.5, "half a byte a weight in place of two, and scales"
    original = whole.model.layers[0].mlp.experts.gate_up_proj
    with torch.no_grad():
        error = (experts.gate_up_proj.float() - original.float()).abs().mean() / original.float().abs().mean()
    assert 0.08 < error < 0.1, "NF4 of a normal distribution errs by 0.092 of the mean"
    with ExpertCapture(small) as capture, torch.no_grad():
        small(torch.arange(3, 20)[None])
        assert capture.take().expert_ids.shape == (17, 2, models.TOP_K)


def test_nf4_that_does_not_give_the_weights_back_is_refused(tmp_path: Path) -> None:
    """Rows of 32 are shorter than a block of 64, which not every version of bitsandbytes gets right on every device."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    folder = models.save("qwen3_moe", tmp_path / "small", width=32)
    original = load_model(folder, "bfloat16").model.model.layers[0].mlp.experts.gate_up_proj.float()
    refusal, found = "", original
    try:
        found = load_model(folder, "nf4").model.model.layers[0].mlp.experts.gate_up_proj.float()
    except UnavailableError as error:
        refusal = str(error)
    with torch.no_grad():
        assert "% off; NF4 is 9%" in refusal or 0 < (found - original).abs().mean() < 0.1 * original.abs().mean()


def test_a_digest_tells_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    again = models.save("qwen3_moe", tmp_path / "again")
    assert model_digest(again) == model_digest(folder)
    data = bytearray((again / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (again / "model.safetensors").write_bytes(data)
    assert model_digest(again) != model_digest(folder)
