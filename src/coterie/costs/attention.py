"""Attention of one step: the bytes and flops of its kernels, and their time by the fitted roofline laws.

Compiled loops and NumPy share these functions: a context may be a number or an array, and the result has its shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.costs.roofline import roofline_us
from coterie.types import ModelSpec

Array = NDArray[np.float64]

ATTENTION_TILE = 128
"""Queries of one head that one thread block of a flash-attention kernel computes."""
ATTENTION_BLOCKS = 132
"""Thread blocks that fill a device: the multiprocessors of an H200. An RTX PRO 6000 has 188."""

LAYERS, CACHED_BYTES, QUERY_BYTES, CACHED_FLOPS, HEADS, KV_HEADS, WIDTH = range(7)
"""Indices into :func:`attention_shape`. Bytes and flops are those of decode: CACHED_… per cached token, QUERY_… per
query."""


@lru_cache(maxsize=64)
def attention_shape(spec: ModelSpec) -> Array:
    """Return [7] a model's attention numbers as a read-only array, in the order of the indices above.

    Latent attention (MLA) decodes in its absorbed form and prefills with its heads expanded.
    """
    heads, width = spec.num_heads, spec.head_dim + spec.rope_head_dim
    kv_heads = heads if spec.kv_lora_rank else spec.num_kv_heads
    decode = [4.0 * kv_heads * width, 4.0 * heads * width, 4.0 * heads * width]
    if spec.kv_lora_rank:
        latent = spec.kv_lora_rank + spec.rope_head_dim
        both = heads * (latent + spec.kv_lora_rank)
        decode = [2.0 * latent, 2.0 * both, 2.0 * both]
    shape = np.array([spec.num_layers, *decode, heads, kv_heads, width])
    shape.flags.writeable = False
    return shape


@helper()
def layer_work(shape: Array, batch: int, query: int, context: Any) -> Any:
    """Return bytes and flops of one layer: `batch` requests with `query` new tokens each.

    `context` is the number of tokens attended to, summed over the requests.
    """
    if query == 1:
        return shape[CACHED_BYTES] * context + shape[QUERY_BYTES] * batch, shape[CACHED_FLOPS] * context
    # A thread block computes one tile of queries of one head over the whole context. A short chunk leaves most of the
    # device idle and takes as long as one that fills the device.
    tiles = (query + ATTENTION_TILE - 1) // ATTENTION_TILE
    blocks = max(float(ATTENTION_BLOCKS), batch * shape[HEADS] * tiles)
    nbytes = 4.0 * (context * shape[KV_HEADS] + batch * query * shape[HEADS]) * shape[WIDTH]
    return nbytes, 4.0 * context / batch * blocks * ATTENTION_TILE * shape[WIDTH]


@helper()
def attention_us(
    shape: Array,
    decode_law: Array,
    prefill_law: Array,
    decoding: int,
    decode_context: Any,
    prefill: int,
    prefill_context: Any,
    prompts: int,
) -> Any:
    """Return the attention time of a step over all layers, in microseconds.

    `decoding` requests have `decode_context` cached tokens in all. The `prefill` new tokens belong to `prompts`
    prompts, with `prefill_context` tokens cached before them in all.
    """
    total = 0.0 * decode_context
    if decoding > 0:
        nbytes, flops = layer_work(shape, decoding, 1, 1.0 * (decode_context + decoding))
        total += roofline_us(decode_law, nbytes, flops) + decode_law[4] * decoding
    if prefill > 0:
        query = (prefill + prompts - 1) // prompts
        context = prefill_context + prefill / 2  # on average, half of the new tokens precede a token
        nbytes, flops = layer_work(shape, prompts, query, context)
        total += roofline_us(prefill_law if query > 1 else decode_law, nbytes, flops)
    return total * shape[LAYERS]
