"""Permuted checkpoints: loaded by the library they compute what the original does; damaged or odd ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers.capture import expert_layers  # noqa: E402
from coterie.engines.transformers.permute import RECORD, permute_checkpoint  # noqa: E402
from coterie.errors import ConfigError, InputError, TraceError  # noqa: E402
from coterie.placement.maps.files import PlacementMap  # noqa: E402
from coterie.placement.maps.formats import read_map  # noqa: E402
from coterie.types import Placement  # noqa: E402
from permuted_models import EXPERTS, FAMILIES, SOFTMAX, TOP_K, distance, logits, placement  # noqa: E402


def save(family: str, folder: Path) -> Path:
    models.build(family, top_k=TOP_K).save_pretrained(folder, max_shard_size="60KB")
    models.tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_loads_it_and_computes_the_same(family: str, tmp_path: Path) -> None:
    """Bit-equal where the router adds nothing over experts; within float32's rounding where it has a softmax."""
    source = save(family, tmp_path / "first")
    first, chosen = load(source), placement(load(source))
    done = permute_checkpoint(PlacementMap(chosen), source, tmp_path / "second")
    second = load(tmp_path / "second")
    for row, new, old in zip(chosen.slot_experts, expert_layers(second), expert_layers(first), strict=True):
        for name, tensor in new.experts.named_parameters():
            assert torch.equal(tensor, old.experts.get_parameter(name)[row]), name
    for dtype in (torch.float64, torch.float32):
        before, after = logits(first.to(dtype)), logits(second.to(dtype))
        assert distance(before, after) < 1e-5
        if family not in SOFTMAX:  # four experts are added in another order, where top-k does not sort
            assert distance(before, after) < (1e-12 if dtype == torch.float64 and family == "gpt_oss" else 1e-6)
    assert done.moved == sum(int((row != np.arange(EXPERTS)).sum()) for row in chosen.slot_experts)
    assert done.regrouped == 0
    assert done.left_out == ()
    names = {path.name for path in (tmp_path / "second").iterdir()}
    assert names == {path.name for path in source.iterdir()} | {RECORD}
    record = read_map(tmp_path / "second" / RECORD)
    np.testing.assert_array_equal(record.placement.slot_experts, chosen.slot_experts)
    assert record.layer_ids == done.layer_ids
    index = json.loads((tmp_path / "second/model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "second" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118  (not a mapping)
            assert opened.metadata() == {"format": "pt"}


def test_both_layouts_and_the_scales_beside_a_weight(tmp_path: Path) -> None:
    """One tensor per expert is renamed, packed tensors are reordered; bytes of any dtype move with their expert."""
    rng, row = np.random.default_rng(0), np.array([2, 0, 3, 1])
    block = "model.layers.0.mlp"
    weights = {
        f"{block}.gate.weight": torch.tensor(rng.normal(size=(4, 6)), dtype=torch.bfloat16),
        f"{block}.gate.e_score_correction_bias": torch.tensor(rng.normal(size=4), dtype=torch.float32),
        f"{block}.shared_experts.up_proj.weight": torch.ones(4, 6),
        "model.layers.0.input_layernorm.weight": torch.ones(4),
    }
    each = {
        f"{block}.experts.{expert}.up_proj.{kind}": torch.full((3, 2), float(expert)).to(dtype)
        for expert in range(4)
        for kind, dtype in (("weight", torch.float8_e4m3fn), ("weight_scale_inv", torch.float32))
    }
    packed = {
        f"{block}.experts.gate_up_proj_blocks": torch.arange(4 * 5, dtype=torch.uint8).reshape(4, 5),
        f"{block}.experts.gate_up_proj_scales": torch.arange(4, dtype=torch.uint8).reshape(4, 1),
        f"{block}.experts.input_scale": torch.ones(1),
    }
    for number, experts in enumerate((each, packed)):
        source, out = tmp_path / f"in{number}", tmp_path / f"out{number}"
        source.mkdir()
        (source / "config.json").write_text('{"num_hidden_layers": 1}')
        save_file(weights | experts, source / "model.safetensors")
        permute_checkpoint(PlacementMap(Placement(row[None].astype(np.int32), 2, 4)), source, out)
        found = tensors(out)
        assert set(found) == set(weights | experts)
        for name, tensor in (weights | experts).items():
            assert found[name].dtype == tensor.dtype
            if ".experts." in name and name in each:
                expert = row[int(name.split(".experts.")[1].split(".")[0])]
                assert (found[name].float() == expert).all()
            elif "shared" in name or "norm" in name or "input_scale" in name:
                assert torch.equal(found[name], tensor)
            else:
                assert torch.equal(found[name], tensor[row]), name


def test_equal_router_rows_are_refused_or_keep_their_order(tmp_path: Path) -> None:
    source = save("qwen3_moe", tmp_path / "first")
    for path in source.glob("*.safetensors"):
        held = load_file(path)
        name = "model.layers.2.mlp.gate.weight"
        if name in held:
            held[name][5] = held[name][1]
            save_file(held, path, {"format": "pt"})
    slots = np.tile(np.arange(EXPERTS, dtype=np.int32), (2, 1))
    slots[0] = slots[0, ::-1]
    permute_checkpoint(PlacementMap(Placement(slots, 2, EXPERTS)), source, tmp_path / "other-layer")
    slots[1, [0, 1, 2]] = [1, 2, 0]
    moved = PlacementMap(Placement(slots, 2, EXPERTS))
    with pytest.raises(ConfigError, match="layer 2: experts 1 and 5 have equal router rows and tie for every token"):
        permute_checkpoint(moved, source, tmp_path / "no")
    permute_checkpoint(moved, source, tmp_path / "in-order", ties="lowest_index")
    slots[1, [0, 5]] = [5, 1]
    with pytest.raises(ConfigError, match="their order must stay"):
        permute_checkpoint(PlacementMap(Placement(slots, 2, EXPERTS)), source, tmp_path / "no", ties="lowest_index")
    assert not (tmp_path / "no").exists()
    # Where the engine takes the lower index that is sufficient: the same experts, in the same order.
    row = read_map(tmp_path / "in-order" / RECORD).placement.slot_experts[1]
    for scores in np.random.default_rng(0).normal(size=(200, EXPERTS)):
        scores[5] = scores[1]
        ids, slots_taken = (np.argsort(-one, kind="stable")[:TOP_K] for one in (scores, scores[row]))
        np.testing.assert_array_equal(row[slots_taken], ids)


def test_groups_move_as_wholes_or_to_the_nearest_that_do(tmp_path: Path) -> None:
    source = save("deepseek_v3", tmp_path / "first")
    slots = np.tile(np.arange(EXPERTS, dtype=np.int32), (2, 1))
    slots[0, [1, 2]] = [2, 1]
    asked = PlacementMap(Placement(slots, 4, EXPERTS))
    with pytest.raises(ConfigError, match="layer 1: slots 0 to 1 hold experts of groups 0 and 1"):
        permute_checkpoint(asked, source, tmp_path / "second")
    done = permute_checkpoint(asked, source, tmp_path / "second", nearest=True)
    assert done.regrouped == 2
    np.testing.assert_array_equal(done.placement.slot_experts[1], np.arange(EXPERTS))
    assert distance(logits(load(source)), logits(load(tmp_path / "second"))) < 1e-6


def test_layers_past_the_models_own_stay(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes a layer that predicts the token after the next, with experts of its own."""
    source = tmp_path / "first"
    source.mkdir()
    (source / "config.json").write_text('{"num_hidden_layers": 1}')
    held = {}
    for layer in range(2):
        held[f"model.layers.{layer}.mlp.gate.weight"] = torch.arange(8.0).reshape(4, 2)
        held[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.arange(8.0).reshape(4, 2)
    save_file(held, source / "model.safetensors")
    permute_checkpoint(PlacementMap(Placement(np.array([[3, 2, 1, 0]], np.int32), 2, 4)), source, tmp_path / "second")
    found = tensors(tmp_path / "second")
    assert torch.equal(found["model.layers.0.mlp.gate.weight"], held["model.layers.0.mlp.gate.weight"].flip(0))
    assert torch.equal(found["model.layers.1.mlp.gate.weight"], held["model.layers.1.mlp.gate.weight"])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    (folder / "pytorch_model.bin").write_bytes(b"old")
    rows = torch.arange(8.0).reshape(4, 2)
    save_file(
        {"model.layers.0.mlp.gate.weight": rows, "model.layers.0.mlp.experts.gate_up_proj": rows.clone()},
        folder / "model.safetensors",
    )
    return folder


TURNED = PlacementMap(Placement(np.array([[3, 2, 1, 0]], np.int32), 2, 4))


def test_nothing_is_written_where_it_should_not_be(small: Path, tmp_path: Path) -> None:
    for out, message in (
        (small, "is not empty"),
        (small / "inside", "lies in it"),
        (tmp_path / "first/../first/x", "lies in it"),
        (small / "config.json", "must be a new folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            permute_checkpoint(TURNED, small, out)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        permute_checkpoint(TURNED, small, tmp_path / "link")
    done = permute_checkpoint(TURNED, small, tmp_path / "a/b")
    assert done.left_out == ("pytorch_model.bin",), "weights that are not permuted must not lie beside those that are"
    with pytest.raises(ConfigError, match="was permuted already"):
        permute_checkpoint(TURNED, tmp_path / "a/b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "first", "link"], "nothing half written stays"


def test_a_write_that_fails_leaves_nothing(small: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        permute_checkpoint(TURNED, small, tmp_path / "second", on_progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def edited(folder: Path, **changed: Any) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, tensor in changed.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.layers.0.mlp.gate.weight": None}, "has experts and no router"),
        ({"model.layers.0.mlp.moe_statics.e_score_correction_bias": torch.ones(1, 4)}, "how it is indexed by them"),
        ({"model.layers.0.mlp.expert_bias": torch.ones(4)}, "how it is indexed by them"),
        ({"model.layers.0.mlp.gate.weight": torch.ones(3, 2)}, "how it is indexed by them"),
        ({"model.layers.0.mlp.experts.bias": torch.ones(1, 4)}, "how it is indexed by them"),
        ({"model.layers.0.mlp.experts.down_proj": torch.ones(3, 2)}, r"tensors of \[3, 4\] experts"),
        ({"model.layers.0.mlp.experts.5.up_proj.weight": torch.ones(3, 2)}, "no tensor of expert 0"),
        ({"model.layers.0.mlp.experts.gate_up_proj": None}, "not a MoE checkpoint"),
        ({"mlp.experts.up_proj": torch.ones(4, 2)}, "does not say of which layer"),
        ({"other.layers.0.mlp.experts.x": torch.ones(4), "other.layers.0.mlp.gate.weight": torch.ones(4)}, "are both"),
    ],
)
def test_what_is_not_known_is_refused(small: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    edited(small, **changed)
    with pytest.raises(InputError, match=message):
        permute_checkpoint(TURNED, small, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_damaged_checkpoints_are_refused(small: Path, tmp_path: Path) -> None:
    whole = (small / "model.safetensors").read_bytes()
    for cut in (0, 4, 40, len(whole) - 3):
        (small / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(TraceError):
            permute_checkpoint(TURNED, small, tmp_path / "second")
    (small / "model.safetensors").unlink()
    with pytest.raises(TraceError, match=r"no \.safetensors file"):
        permute_checkpoint(TURNED, small, tmp_path / "second")
    (small / "config.json").write_text('{"quantization_config": {"ignore": ["model.layers.0.mlp.experts.3.up_proj"]}}')
    with pytest.raises(ConfigError, match="names single experts"):
        permute_checkpoint(TURNED, small, tmp_path / "second")
    shutil.rmtree(small)
    with pytest.raises(TraceError, match="is missing"):
        permute_checkpoint(TURNED, small, tmp_path / "second")


def test_an_index_that_names_a_file_elsewhere_is_refused(small: Path, tmp_path: Path) -> None:
    (small / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(TraceError, match="not in the folder"):
        permute_checkpoint(TURNED, small, tmp_path / "second")
