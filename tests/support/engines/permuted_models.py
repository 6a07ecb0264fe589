"""Random placements that a model admits, and its outputs before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from coterie.engines.transformers.capture import expert_layers
from coterie.engines.transformers.permute import routing_groups
from coterie.types import Placement

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe")
SOFTMAX = ("qwen3_moe", "mixtral", "deepseek_v2", "olmoe", "qwen2_moe")
"""Families whose routers sum over all experts, in the order of their indices; in float32 whatever the model's dtype."""
EXPERTS, TOP_K = 8, 4


def placement(model: Any, seed: int = 0, ranks: int = 2) -> Placement:
    groups, rng = routing_groups(model.config.to_dict()), np.random.default_rng(seed)
    size = EXPERTS // groups
    rows = [
        np.concatenate([group * size + rng.permutation(size) for group in rng.permutation(groups)])
        for _ in expert_layers(model)
    ]
    return Placement(np.array(rows, np.int32), ranks, EXPERTS)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (3, 17), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, implementation: str = "batched_mm") -> torch.Tensor:
    model.set_experts_implementation(implementation)
    with torch.inference_mode():
        found: torch.Tensor = model(tokens(), use_cache=False).logits
    return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one.double() - other.double()).abs().max() / one.double().abs().max())
