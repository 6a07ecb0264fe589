"""The calibrated step time as tables, so that a step of a fleet is timed from exact counts by looking up.

An expert's share of a layer depends on its rows alone once the tile is chosen, so `layer_us` over counts is a sum of
table entries: the same number, without its powers. Attention keeps its law, projections and routing are tables over
tokens. What :class:`~coterie.sim.execution.StepTimer` says is what this says, up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.costs.attention import attention_shape
from coterie.costs.dense import dense_table
from coterie.costs.exchange import arrival_links
from coterie.costs.experts import OVERHEAD, OVERLAP, SHARPNESS, SWITCH, TILE, TOKEN, expert_table
from coterie.costs.replicas import Slots
from coterie.costs.shapes import dense_shapes
from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.sim.execution import placement_for
from coterie.types import Placement

MOST_DECODING = 63
"""Tokens of a step whose experts are counted in bits: six binary digits."""
WORD = 64

BLEND_PARTS = 1 << 13
"""Straight lines that stand for ``(1 + x ** s) ** (1 / s)`` on 0 … 1: off by less than 1e-7 of a layer's time."""


class StepTables(NamedTuple):
    """A step model for steps of up to a number of tokens; times in microseconds."""

    shape: NDArray[np.int64]
    """MoE layers, experts, ranks, slots a rank."""
    layer: NDArray[np.float64]
    """Overhead and per-token time of a layer, rows an expert above which the large tile is taken, overlap of
    streaming with compute, overlap of the all-to-all, rows of a tile."""
    experts: NDArray[np.float64]
    """[3, tile, rows] one expert's time by itself, the streaming of its weights, its compute."""
    dense: NDArray[np.float64]
    """[2, tokens] projections and routing of all layers; the output head by outputs."""
    padded: NDArray[np.int64]
    """[tokens] padded size of a batch that only decodes."""
    attention: NDArray[np.float64]
    """The model's shape, then the laws of decode and of prefill, as `attention_us` takes them."""
    slots: NDArray[np.int64]
    """[3, layer, slot] expert, turn among its replicas, replicas."""
    links: NDArray[np.float64]
    """Links of the exchange, as `exchange_us` takes them."""
    blend: NDArray[np.float64]
    """[part + 1] by how much the larger of streaming and compute grows by the other, over their ratio."""
    spans: NDArray[np.uint64]
    """[layer, 4] first and last word of its experts in a row of bits, and which bits of the two are its."""
    union: NDArray[np.uint64]
    """[word] working memory."""
    having: NDArray[np.uint64]
    """[count] working memory."""


def step_tables(model: StepModel, most_tokens: int, placement: Placement | None = None) -> StepTables:
    """Tables for steps of up to `most_tokens` tokens, of all ranks together."""
    spec, options = model.spec, model.options
    if options.cache_resident:
        raise ConfigError("cache_resident=True holds for one layer that repeats; a fleet's steps pass through all")
    placed = placement_for(model, placement)
    most_tokens = max(most_tokens, options.padded(most_tokens), MOST_DECODING)
    p = model.moe.array()
    experts = np.zeros((3, 2, most_tokens + 1))
    expert_table(p, spec.expert_bytes(model.dtype), 2.0 * spec.expert_params, experts)
    laws = model.decode_attention.numbers(), model.prefill_attention.numbers()
    layers, words = spec.num_moe_layers, -(-spec.num_moe_layers * spec.num_experts // WORD)
    return StepTables(
        shape=np.array([layers, spec.num_experts, placed.num_ranks, placed.slots_per_rank], np.int64),
        layer=np.array([p[OVERHEAD], p[TOKEN], p[SWITCH], p[OVERLAP], options.overlap, min(p[TILE], p[TILE + 1])]),
        experts=experts,
        dense=_dense(model, most_tokens),
        padded=np.array([options.padded(tokens) for tokens in range(most_tokens + 1)], np.int64),
        attention=np.concatenate([attention_shape(spec), *laws]),
        slots=np.stack(Slots.of(placed)),
        links=arrival_links(spec, model.topology),
        blend=_blends(p[SHARPNESS]),
        spans=_spans(layers, spec.num_experts),
        union=np.zeros(words, np.uint64),
        having=np.zeros(MOST_DECODING + 1, np.uint64),
    )


def _dense(model: StepModel, most_tokens: int) -> NDArray[np.float64]:
    spec, law = model.spec, model.gemm.numbers()
    found = np.zeros((2, most_tokens + 1))
    rows = [(n, k, layers) for pairs, layers in dense_shapes(spec) for n, k in pairs]
    dense_table(law, np.array(rows, np.float64), found[0])
    dense_table(law, np.array([[spec.vocab_size, spec.hidden_size, 1]], np.float64), found[1])
    found[0] += spec.num_moe_layers * np.array([model.routing_us(tokens) for tokens in range(most_tokens + 1)])
    return found


def _blends(sharpness: float) -> NDArray[np.float64]:
    ratio = np.linspace(0.0, 1.0, BLEND_PARTS + 1)
    return np.asarray((1.0 + ratio**sharpness) ** (1.0 / sharpness))


def _spans(layers: int, experts: int) -> NDArray[np.uint64]:
    first = np.arange(layers) * experts
    last = first + experts - 1
    everything = np.uint64(0xFFFFFFFFFFFFFFFF)
    from_first = everything << (first % WORD).astype(np.uint64)
    to_last = everything >> (WORD - 1 - last % WORD).astype(np.uint64)
    return np.stack([(first // WORD).astype(np.uint64), (last // WORD).astype(np.uint64), from_first, to_last], axis=1)


@helper()
def blended(a: float, b: float, blend: NDArray[np.float64]) -> float:
    """`soft_max` by table, since powers would take most of a step."""
    top, low = max(a, b), min(a, b)
    at = low / top * BLEND_PARTS
    part = min(np.uint64(at), np.uint64(BLEND_PARTS - 1))
    share = at - part
    return float(top * (blend[part] + share * (blend[part + np.uint64(1)] - blend[part])))
