"""Batches of a small model to replay."""

from __future__ import annotations

import numpy as np

from coterie.types import ModelSpec

SPEC = ModelSpec(
    "tiny",
    num_layers=4,
    num_experts=8,
    top_k=2,
    hidden_size=32,
    expert_intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    first_moe_layer=1,
)


def draw_ids(rng: np.random.Generator, tokens: int, spec: ModelSpec = SPEC, experts: int | None = None) -> np.ndarray:
    """[token, layer, k] different experts, the first `experts` of them only."""
    order = rng.permuted(np.tile(np.arange(experts or spec.num_experts), (tokens, spec.num_moe_layers, 1)), axis=2)
    return order[:, :, : spec.top_k].astype(np.uint8)


def small(steps: int = 6, tokens: int = 4) -> dict[str, dict[str, list[np.ndarray]]]:
    rng = np.random.default_rng(5)
    return {
        name: {
            "round_robin": [draw_ids(rng, tokens) for _ in range(steps)],
            "clusters": [draw_ids(rng, tokens, experts=3) for _ in range(steps)],
        }
        for name in ("low", "high")
    }
