"""Shapes of the dense projections, in a module without the imports of the cost model."""

from __future__ import annotations

from coterie.types import ModelSpec


def dense_shapes(spec: ModelSpec) -> list[tuple[list[tuple[int, int]], int]]:
    """Return groups of projections that every token passes: their (n, k), and the number of layers; no output head."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    kv = spec.kv_lora_rank + spec.rope_head_dim if spec.kv_lora_rank else 2 * spec.num_kv_heads * spec.head_dim
    shapes = [([(heads, hidden), (kv, hidden), (hidden, heads)], spec.num_layers)]
    moe, dense = spec.num_moe_layers, spec.num_layers - spec.num_moe_layers
    for inner, layers in ((spec.shared_intermediate_size, moe), (spec.dense_intermediate_size, dense)):
        if inner and layers:
            shapes.append(([(2 * inner, hidden), (hidden, inner)], layers))
    return shapes
