"""Shapes read from config.json: every family, layers, dtypes, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import TraceError
from coterie.models import active_params, model_from_config, total_params
from model_configs import CONFIGS, shape_of


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
        assert shape_of(listed) == shape_of(spec)

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
        with pytest.raises(TraceError, match="enable_moe_block: is false"):
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
        with pytest.raises(TraceError, match="num_local_experts: found "):
            model_from_config(changed(num_local_experts=value))

    def test_head_dim_that_cannot_be_derived(self) -> None:
        with pytest.raises(TraceError, match=r"head_dim: .*hidden_size=4096"):
            model_from_config(changed(num_attention_heads=30))

    def test_relation_between_fields(self) -> None:
        with pytest.raises(TraceError, match=r"mixtral: top_k=9 .*num_experts=8"):
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
