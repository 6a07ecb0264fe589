"""What engines send of routed experts, for the tests of what reads it."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray

from coterie.types import narrowest_uint
from coterie.wire.routed_experts import SGLANG_DTYPES


def encode_vllm(expert_ids: NDArray[np.integer], num_experts: int) -> str:
    """[token, layer, k] → what vLLM sends: uint8 up to 256 experts, uint16 past that."""
    stream = io.BytesIO()
    np.save(stream, expert_ids.astype(narrowest_uint(num_experts - 1)), allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def encode_sglang(expert_ids: NDArray[np.integer], dtype: str = "int32") -> str:
    """[token, layer, k] → what SGLang sends."""
    return base64.b64encode(expert_ids.astype(SGLANG_DTYPES[dtype]).tobytes()).decode("ascii")


def distinct_experts(rng: np.random.Generator, tokens: int, layers: int, k: int, experts: int = 128) -> np.ndarray:
    """[token, layer, k] expert ids, different ones for a token in a layer."""
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :k]
