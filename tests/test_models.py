"""Shipped shapes against published parameter counts and configs; configs of many families, and bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.errors import UnknownNameError
from coterie.models import active_params, get_model, model_from_config, models, total_params
from model_configs import CONFIGS, shape_of

TOTALS = {
    "arctic-480b": 480e9,
    "deepseek-v2": 236e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
    "gemma-4-26b-a4b": 25.2e9,
    "glm-5.2": 744e9,
    "gpt-oss-120b": 116.8e9,
    "gpt-oss-20b": 20.9e9,
    "mixtral-8x22b": 141e9,
    "mixtral-8x7b": 46.7e9,
    "olmoe-1b-7b": 6.9e9,
    "qwen1.5-moe-a2.7b": 14.3e9,
    "qwen3-235b-a22b": 235e9,
    "qwen3-30b-a3b": 30.5e9,
}

ACTIVE = {
    "deepseek-v2-lite": 2.66e9,
    "mixtral-8x22b": 39e9,
    "mixtral-8x7b": 12.9e9,
    "olmoe-1b-7b": 1.3e9,
    "qwen1.5-moe-a2.7b": 2.7e9,
    "qwen3-235b-a22b": 22e9,
    "qwen3-30b-a3b": 3.3e9,
    "arctic-480b": 17e9,
}


class TestShipped:
    def test_published_totals_are_met_within_3_percent(self) -> None:
        assert set(TOTALS) | {TINY} == set(models()), "every shipped model but Coterie's own has a published total"
        off = {name: total_params(get_model(name)) / total - 1 for name, total in TOTALS.items()}
        assert {name: round(error, 4) for name, error in off.items() if abs(error) > 0.03} == {}

    def test_coterie_tiny_is_the_shape_of_its_checkpoint(self) -> None:
        spec = get_model(TINY)
        assert shape_of(spec) == shape_of(model_from_config(tiny_model_path()))
        # The README of the checkpoint counts every weight; its embeddings are tied, and norms are left out here.
        once = total_params(spec) - spec.vocab_size * spec.hidden_size
        assert once == pytest.approx(11_062_976, rel=0.001)

    @pytest.mark.parametrize("name", ACTIVE)
    def test_published_active_counts(self, name: str) -> None:
        assert active_params(get_model(name)) == pytest.approx(ACTIVE[name], rel=0.03)

    @pytest.mark.parametrize(("name", "published"), [("gpt-oss-20b", 3.61e9), ("gpt-oss-120b", 5.13e9)])
    def test_gpt_oss_leaves_the_input_embedding_out(self, name: str, published: float) -> None:
        spec = get_model(name)
        assert active_params(spec) - spec.vocab_size * spec.hidden_size == pytest.approx(published, rel=0.01)

    def test_low_rank_queries_explain_the_rest(self) -> None:
        # DeepSeek-V3: q_lora_rank 1536 replaces one 7168 x 24576 matrix by two thin ones.
        spec, rank, queries = get_model("deepseek-v3"), 1536, 128 * (128 + 64)
        extra = spec.num_layers * (7168 * queries - rank * (7168 + queries))
        assert total_params(spec) - extra == pytest.approx(671e9, rel=0.001)
        assert active_params(spec) - extra == pytest.approx(37e9, rel=0.02)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_shapes_are_those_of_the_configs(self, name: str) -> None:
        assert shape_of(model_from_config(CONFIGS[name])) == shape_of(get_model(name))

    def test_every_shape_names_its_repository(self) -> None:
        for spec in models().values():
            owner, _, repository = spec.source.split(";")[0].split()[0].partition("/")
            assert owner, spec
            assert repository, spec
            assert get_model(f"{owner}/{repository}") is get_model(repository) is spec

    def test_glm_5_2_is_the_shape_of_the_recorded_counts(self, data_dir: Path) -> None:
        spec = get_model("glm-5.2")
        with np.load(data_dir / "activations/glm-5.2/expert_counts.npz") as data:
            assert data["counts"].shape[1:] == (spec.num_moe_layers, spec.num_experts)
        assert (spec.moe_layer_ids[0], spec.moe_layer_ids[-1]) == (3, 77)

    def test_expert_bytes_as_published(self) -> None:
        assert get_model("deepseek-v3").expert_bytes() == 3 * 7168 * 2048
        assert get_model("gpt-oss-20b").expert_bytes() == 3 * 2880 * 2880 * 4.25 / 8
        assert get_model("qwen3-30b-a3b").expert_bytes() == 3 * 2048 * 768 * 2

    def test_is_read_only(self) -> None:
        with pytest.raises(TypeError):
            models()["mine"] = get_model("glm-5.2")  # type: ignore[index]


class TestGetModel:
    @pytest.mark.parametrize("name", ["qwen3-30b-a3b", "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "QWEN/qwen3-30b-a3b"])
    def test_name_case_and_repository(self, name: str) -> None:
        assert get_model(name).name == "qwen3-30b-a3b"

    def test_unknown(self) -> None:
        with pytest.raises(UnknownNameError, match=r"'Qwen3-30B'.*'qwen3-30b-a3b'"):
            get_model("Qwen3-30B")


def test_a_models_folder_holds_no_other_tensors() -> None:
    """vLLM loads every such file of the folder as weights."""
    assert [file.name for file in tiny_model_path().glob("*.safetensors")] == ["model.safetensors"]
