"""Small models of every family with random weights, and a tokenizer trained on the spot: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from coterie.engines.transformers.capture import ExpertCapture

EXPERTS, TOP_K, VOCAB = 8, 2, 320
END = 1

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": END,
    "bos_token_id": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "intermediate_size": 32,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS},
    "deepseek_v2": {
        **_ROUTED,
        **_LATENT,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 4, "topk_group": 2},
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {
        "num_local_experts": EXPERTS,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe": {**_ROUTED, "n_group": 2, "topk_group": 1},
}

ALIKE: dict[str, dict[str, Any]] = {
    "dots1": {**_ROUTED, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_intermediate_size": 16},
    "granitemoe": {"num_local_experts": EXPERTS, "embedding_multiplier": 3.0},
    "flex_olmo": {"num_experts": EXPERTS},
    "minimax_m2": {"num_local_experts": EXPERTS},
    "phimoe": {"num_local_experts": EXPERTS},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": TOP_K, "moe_intermediate_size": 16},
}
"""More of the library that share the mechanism, without being named."""


@cache
def build(family: str, width: int = 32, top_k: int = TOP_K) -> Any:
    """A model in float32 with weights wide enough that routing differs from token to token."""
    kind = {**FAMILIES, **ALIKE}[family]
    if width != 32:
        kind = {**kind, "hidden_size": width, "moe_intermediate_size": width, "head_dim": width // 4}
    config = transformers.AutoConfig.for_model(family, **{**_BASE, "num_experts_per_tok": top_k, **kind})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scramble(model)
    return model


def scramble(model: Any) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
            elif tensor.ndim > 1 and "inv_freq" not in name:
                tensor.normal_(std=0.25)
            elif name.endswith("layernorm.weight"):
                tensor.uniform_(0.5, 1.5)


def save(family: str, folder: Path, chat: bool = True, width: int = 32) -> Path:
    """A checkpoint as it is published: config, weights, tokenizer."""
    build(family, width).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if chat:
        template = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<model>"
        (folder / "chat_template.jinja").write_text(template)
    return folder


def same_routes(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of rows and layers that chose the same experts, in any order."""
    assert found.shape == expected.shape
    return float((np.sort(found) == np.sort(expected)).all(axis=2).mean())


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<end>", "<begin>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["a small text about experts and routers, and the tokens they share"] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def generated(family: str, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """The tokens that ``generate`` gives."""
    model = build(family)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=eos,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def captured(family: str, tokens: list[int]) -> np.ndarray:
    """The experts of one forward pass over all tokens, [token, layer, k]."""
    model = build(family)
    with torch.inference_mode(), ExpertCapture(model) as capture:
        model(torch.tensor([tokens]), use_cache=False)
        return capture.take().expert_ids
