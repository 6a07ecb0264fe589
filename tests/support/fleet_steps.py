"""A small model, and its steps as the compiled fleet times them."""

from __future__ import annotations

import numpy as np

from coterie.costs.composition import StepTables
from coterie.costs.step import Batch
from coterie.sim.fleet._steps import StepCounts, bit_step_us, counted_step_us, fill_bits
from coterie.types import ModelSpec

SPEC = ModelSpec(
    "small",
    num_layers=4,
    num_experts=12,
    top_k=3,
    hidden_size=512,
    expert_intermediate_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    first_moe_layer=1,
)


def counted_us(t: StepTables, c: StepCounts, counts: np.ndarray, batch: Batch) -> tuple[float, float]:
    """The step of loads that were counted; counts [layer, expert] tokens."""
    return counted_step_us(*t, c.shape, c.slots, c.links, c.slot_rows, c.rank_tokens, c.parts, counts, *batch)


def by_bits(t: StepTables, c: StepCounts, tokens: np.ndarray, experts: int, context: int) -> tuple[float, float]:
    """The step counted 64 experts at a time; tokens [token, layer, k]."""
    ids = (tokens + np.arange(tokens.shape[1])[None, :, None] * experts).reshape(len(tokens), -1).astype(np.uint16)
    bits = np.zeros((len(tokens) + 1, len(c.union)), np.uint64)
    fill_bits(ids, bits)
    starts = np.full(len(tokens) + 8, len(tokens) * bits.shape[1], np.uint64)
    starts[: len(tokens)] = np.arange(len(tokens)) * bits.shape[1]
    memory = c.shape, c.spans, c.union, c.having
    return bit_step_us(*t, *memory, bits.ravel(), starts, tokens.shape[2], len(tokens), context)
