"""Shipped shapes against published parameter counts and configs; configs of many families, and bad ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import TraceError, UnknownNameError
from coterie.models import active_params, get_model, model_from_config, models, total_params
from coterie.types import ModelSpec

# Keys and numbers as config.json files give them, from the model's repository or from checkpoints made of it
# (GLM-5.2's latent widths from GLM-5); keys that say nothing of the shape are left out.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "sliding_window": 128,
        "vocab_size": 201088,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "torch_dtype": "bfloat16",
        "vocab_size": 50304,
    },
    "glm-5.2": {
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
        "text_config": {
            "model_type": "gemma4_text",
            "enable_moe_block": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "top_k_experts": 8,
            "vocab_size": 262144,
            "dtype": None,
        },
    },
    "arctic-480b": {
        "model_type": "arctic",
        "hidden_size": 7168,
        "intermediate_size": 4864,
        "moe_layer_frequency": 1,
        "num_attention_heads": 56,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 35,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "parallel_attn_mlp_res": True,
        "quantization": None,
        "torch_dtype": "bfloat16",
        "use_residual": True,
        "vocab_size": 32000,
    },
}

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
        assert set(TOTALS) == set(models()), "every shipped model has a published total"
        off = {name: total_params(spec) / TOTALS[name] - 1 for name, spec in models().items()}
        assert {name: round(error, 4) for name, error in off.items() if abs(error) > 0.03} == {}

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
        assert _shape(model_from_config(CONFIGS[name])) == _shape(get_model(name))

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
        with pytest.raises(UnknownNameError, match=r"Unknown model 'Qwen3-30B'\. Did you mean 'qwen3-30b-a3b'\? Known"):
            get_model("Qwen3-30B")


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(spec).items() if key not in ("name", "source")}


def changed(name: str = "mixtral-8x7b", drop: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (CONFIGS[name] | changes).items() if key not in drop}


class TestFamilies:
    """Configs of families that are not shipped."""

    def test_qwen3_5_nests_and_has_no_dense_width(self) -> None:
        spec = model_from_config(
            {
                "model_type": "qwen3_5_moe",
                "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
                "text_config": {
                    "model_type": "qwen3_5_moe_text",
                    "dtype": "bfloat16",
                    "head_dim": 256,
                    "hidden_size": 2048,
                    "full_attention_interval": 4,
                    "mlp_only_layers": [],
                    "moe_intermediate_size": 512,
                    "num_attention_heads": 16,
                    "num_experts": 256,
                    "num_experts_per_tok": 8,
                    "num_hidden_layers": 40,
                    "num_key_value_heads": 2,
                    "shared_expert_intermediate_size": 512,
                    "vocab_size": 248320,
                },
            }
        )
        assert (spec.num_moe_layers, spec.num_experts, spec.shared_intermediate_size) == (40, 256, 512)
        assert (spec.hidden_size, spec.head_dim, spec.dense_intermediate_size) == (2048, 256, 0)

    def test_llama_4_maverick(self) -> None:
        text = {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "head_dim": 128,
            "interleave_moe_layer_step": 2,
            "moe_layers": [],
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "vocab_size": 202048,
        }
        spec = model_from_config({"model_type": "llama4", "torch_dtype": "bfloat16", "text_config": text})
        assert spec.moe_layer_ids == tuple(range(1, 48, 2))
        assert (spec.expert_intermediate_size, spec.shared_intermediate_size) == (8192, 8192)
        assert spec.dense_intermediate_size == 16384
        assert total_params(spec) == pytest.approx(400e9, rel=0.03)
        assert active_params(spec) == pytest.approx(17e9, rel=0.03)
        listed = model_from_config({"text_config": text | {"moe_layers": list(range(1, 48, 2))}})
        assert _shape(listed) == _shape(spec)

    def test_minimax_m2(self) -> None:
        spec = model_from_config(
            {
                "model_type": "minimax_m2",
                "head_dim": 128,
                "hidden_size": 3072,
                "intermediate_size": 1536,
                "num_attention_heads": 48,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 62,
                "num_key_value_heads": 8,
                "num_local_experts": 256,
                "quantization_config": {"quant_method": "fp8"},
                "vocab_size": 200064,
            }
        )
        assert spec.weight_dtype == "fp8"
        assert total_params(spec) == pytest.approx(230e9, rel=0.03)
        assert active_params(spec) == pytest.approx(10e9, rel=0.12), "the card rounds"

    def test_minimax_m3_lists_its_moe_layers(self) -> None:
        spec = model_from_config(
            {
                "model_type": "minimax_m3_vl",
                "torch_dtype": "bfloat16",
                "text_config": {
                    "hidden_size": 6144,
                    "intermediate_size": 3072,
                    "num_hidden_layers": 60,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 4,
                    "head_dim": 128,
                    "vocab_size": 200064,
                    "dense_intermediate_size": 12288,
                    "shared_intermediate_size": 3072,
                    "num_local_experts": 128,
                    "num_experts_per_tok": 4,
                    "n_shared_experts": 1,
                    "moe_layer_freq": [0] * 3 + [1] * 57,
                },
            }
        )
        assert (spec.first_moe_layer, spec.num_moe_layers) == (3, 57)
        assert (spec.expert_intermediate_size, spec.dense_intermediate_size) == (3072, 12288)
        assert spec.shared_intermediate_size == 3072

    def test_glm_4_5(self) -> None:
        spec = model_from_config(
            {
                "model_type": "glm4_moe",
                "first_k_dense_replace": 3,
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 12288,
                "moe_intermediate_size": 1536,
                "n_routed_experts": 160,
                "n_shared_experts": 1,
                "num_attention_heads": 96,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 92,
                "num_key_value_heads": 8,
                "torch_dtype": "bfloat16",
                "vocab_size": 151552,
            }
        )
        assert (spec.first_moe_layer, spec.num_moe_layers, spec.kv_lora_rank) == (3, 89, 0)
        assert total_params(spec) == pytest.approx(355e9, rel=0.03)

    def test_phi_and_granite_use_mixtrals_keys(self) -> None:
        spec = model_from_config(changed(model_type="phimoe", intermediate_size=6400, num_local_experts=16))
        assert total_params(spec) == pytest.approx(42e9, rel=0.03)
        shared = model_from_config(changed(model_type="granitemoeshared", shared_intermediate_size=1024))
        assert shared.shared_intermediate_size == 1024

    def test_keys_of_an_unknown_family(self) -> None:
        """ERNIE's names for counts and layers, in a family nobody has heard of."""
        spec = model_from_config(
            {
                "model_type": "brand_new_moe",
                "hidden_size": 512,
                "intermediate_size": 2048,
                "moe_intermediate_size": 256,
                "moe_num_experts": 64,
                "moe_k": 6,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_interval": 1,
                "moe_layer_end_index": -1,
                "num_hidden_layers": 28,
                "num_attention_heads": 8,
                "vocab_size": 1000,
            }
        )
        assert (spec.num_experts, spec.top_k, spec.first_moe_layer, spec.num_moe_layers) == (64, 6, 1, 27)
        assert (spec.shared_intermediate_size, spec.dense_intermediate_size) == (512, 2048)
        assert (spec.num_kv_heads, spec.head_dim) == (8, 64), "what is not said follows from the rest"
        assert (spec.name, spec.weight_dtype) == ("brand_new_moe", "bf16")


class TestLayers:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"decoder_sparse_step": 2}, [1, 3, 5, 7, 9, 11]),
            ({"moe_layer_freq": 2}, [0, 2, 4, 6, 8, 10]),
            ({"first_k_dense_replace": 3, "moe_layer_freq": 3}, [3, 6, 9]),
            ({"first_k_dense_replace": 1, "moe_layer_freq": 4}, [4, 8]),
            ({"mlp_only_layers": [0, 1]}, [*range(2, 12)]),
            ({"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3, 5, 7, 9, 11]),
            ({"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 8, "first_k_dense_replace": 9}, [*range(4, 12)]),
            ({"moe_layers": [5]}, [5]),
        ],
    )
    def test_rules(self, keys: dict[str, Any], expected: list[int]) -> None:
        assert list(model_from_config(changed(num_hidden_layers=12, **keys)).moe_layer_ids) == expected

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"mlp_only_layers": [5]}, "MoE layers: 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11 of 12 follow no pattern"),
            ({"moe_layer_end_index": 10}, "MoE layers: .* follow no pattern of a first layer and a fixed step"),
            ({"hybrid_override_pattern": "MEM*EMEMEM*E"}, "MoE layers: 1, 4, 6, 8, 11 of 12 follow no pattern"),
            ({"first_k_dense_replace": 12}, "MoE layers: none of the 12 layers is one"),
            ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: found 1 of them, expected an entry for each of the 12"),
            ({"mlp_only_layers": [12]}, r"mlp_only_layers: found \[12\], expected a list of layers in 0 … 11"),
            ({"decoder_sparse_step": 0}, "decoder_sparse_step: found 0, expected a whole number of at least 1"),
        ],
    )
    def test_what_cannot_be_expressed(self, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(TraceError, match=message):
            model_from_config(changed(num_hidden_layers=12, **keys))

    @given(st.integers(1, 60), st.data())
    def test_any_regular_pattern_is_found(self, num_layers: int, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, num_layers - 1))
        wanted = range(first, num_layers, data.draw(st.integers(1, num_layers)))
        kinds = ["sparse" if i in wanted else "dense" for i in range(num_layers)]
        spec = model_from_config(changed(num_hidden_layers=num_layers, mlp_layer_types=kinds))
        assert spec.moe_layer_ids == tuple(wanted)
        assert (spec.dense_intermediate_size > 0) == (len(wanted) < num_layers)


class TestDtype:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"torch_dtype": "float16"}, "fp16"),
            ({"torch_dtype": "torch.float32"}, "fp32"),
            ({"dtype": "float32", "torch_dtype": "float16"}, "fp32"),
            ({"torch_dtype": None}, "bf16"),
            ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
            ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "fp8"),
            ({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}, "fp8"),
            ({"quantization_config": {}}, "bf16"),
        ],
    )
    def test_read(self, keys: dict[str, Any], expected: str) -> None:
        assert model_from_config(changed(**keys)).weight_dtype == expected

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"torch_dtype": "int4"}, "torch_dtype: found 'int4', expected one of float32, bfloat16, float16"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: found quant_method 'awq'"),
            ({"quantization": {"bits": 4}}, "quantization_config: found quant_method None, expected one of fp8"),
        ],
    )
    def test_refused(self, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(TraceError, match=message):
            model_from_config(changed(**keys))


class TestBadConfigs:
    def test_dense_model(self) -> None:
        with pytest.raises(TraceError) as error:
            model_from_config(changed(drop=("num_local_experts", "num_experts_per_tok")))
        assert str(error.value) == (
            "config.json: num_experts: is missing; expected one of num_experts, n_routed_experts, num_local_experts, "
            "moe_num_experts, num_routed_experts; is this a dense model?"
        )

    def test_dense_gemma(self) -> None:
        with pytest.raises(TraceError, match="enable_moe_block: is false: a dense model"):
            model_from_config({"text_config": {"enable_moe_block": False, "num_experts": None}})

    @pytest.mark.parametrize(
        ("key", "field"),
        [
            ("num_experts_per_tok", "top_k: is missing; expected one of num_experts_per_tok, "),
            ("intermediate_size", "expert_intermediate_size: is missing; expected one of moe_intermediate_size, "),
            ("num_hidden_layers", "num_layers: is missing"),
            ("num_attention_heads", "num_heads: is missing"),
            ("hidden_size", "hidden_size: is missing"),
            ("vocab_size", "vocab_size: is missing"),
        ],
    )
    def test_missing_key(self, key: str, field: str) -> None:
        with pytest.raises(TraceError, match=field):
            model_from_config(changed(drop=(key,)))

    @pytest.mark.parametrize("value", ["8", 8.0, True, [8], 0, -1])
    def test_wrong_type_or_size(self, value: object) -> None:
        with pytest.raises(TraceError, match=r"num_local_experts: found .*, expected a whole number of at least 1"):
            model_from_config(changed(num_local_experts=value))

    def test_head_dim_that_cannot_be_derived(self) -> None:
        with pytest.raises(TraceError, match=r"head_dim: is missing; .*hidden_size=4096 is no multiple of num_heads"):
            model_from_config(changed(num_attention_heads=30))

    def test_relation_between_fields(self) -> None:
        with pytest.raises(TraceError, match="shape: mixtral: top_k=9 must be at most num_experts=8"):
            model_from_config(changed(num_experts_per_tok=9))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"not json", "JSON: cannot be parsed"),
            (b"\xff\xfe", "JSON: cannot be parsed"),
            (b"[1]", "JSON: must be an object, found list"),
            (b"{}", "num_experts: is missing"),
        ],
    )
    def test_file(self, tmp_path: Path, content: bytes, message: str) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(content)
        with pytest.raises(TraceError, match=message) as error:
            model_from_config(file)
        assert error.value.path == file

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="file: does not exist"):
            model_from_config(tmp_path / "config.json")


def test_name_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed(_name_or_path="mistralai/Mixtral-8x7B-v0.1/")))
    assert model_from_config(file).name == "mixtral-8x7b-v0.1"
    assert model_from_config(str(tmp_path), name="Mine").name == "mine"
    assert model_from_config(changed()).name == "mixtral"
    assert model_from_config(changed(drop=("model_type",))).name == "unnamed"
