"""Small traces with token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.traces import ActivationTrace, TraceMeta

LAYERS, EXPERTS, TOP_K = 3, 12, 2


def distinct(
    rng: np.random.Generator, tokens: Any, layers: Any = LAYERS, experts: Any = EXPERTS, k: Any = TOP_K
) -> Any:
    """Random expert ids [token, layer, k], different within a token."""
    return np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :k]


def trace_of(
    expert_ids: Any, token_ids: Any, lengths: Any, phase: Any = None, experts: Any = EXPERTS
) -> ActivationTrace:
    meta = TraceMeta("model", experts, expert_ids.shape[1], expert_ids.shape[2], tuple(range(expert_ids.shape[1])))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return ActivationTrace.from_arrays(
        meta, expert_ids, offsets, phase=phase, token_ids=np.asarray(token_ids, np.int32)
    )


def random_trace(rng: np.random.Generator, requests: int = 12, vocabulary: int = 20) -> ActivationTrace:
    lengths = rng.integers(1, 30, requests)
    total = int(lengths.sum())
    return trace_of(distinct(rng, total), rng.integers(0, vocabulary, total), lengths)
