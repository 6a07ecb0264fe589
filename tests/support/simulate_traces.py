"""Small made traces for what-if runs."""

from __future__ import annotations

import numpy as np

from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

EXPERTS, LAYERS, TOP_K = 12, 2, 3


def quiet(doing: str, done: int, total: int) -> None:
    pass


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_trace(
    requests: int = 20,
    prompt: int = 10,
    output: int = 6,
    token_ids: bool = True,
    domains: bool = True,
    times: bool = False,
    seed: int = 0,
    vocabulary: int = 30,
    meta: TraceMeta = TraceMeta("made", EXPERTS, LAYERS, TOP_K),  # noqa: B008
) -> ActivationTrace:
    """Experts by token id and domain, with some noise."""
    draw = rng(seed)
    lengths = [draw.integers(1, (n or 1) + 1, requests) * bool(n) for n in (prompt, output)]
    domain = draw.integers(3, size=requests)
    taste = draw.random((3, vocabulary, meta.num_layers, meta.num_experts))
    ids, phase, tokens = [], [], []
    for row in range(requests):
        count = int(lengths[0][row] + lengths[1][row])
        own = draw.integers(vocabulary, size=count)
        scores = taste[domain[row], own] + 0.3 * draw.random((count, meta.num_layers, meta.num_experts))
        ids.append(np.argsort(-scores, axis=-1)[..., : meta.top_k])
        phase.append(np.repeat([PREFILL, DECODE], [lengths[0][row], lengths[1][row]]))
        tokens.append(own)
    table = RequestTrace(
        lengths[0],
        lengths[1],
        np.sort(draw.random(requests))[::-1] * 10 if times else None,
        domains=[f"d{n}" for n in domain] if domains else None,
    )
    return ActivationTrace.from_arrays(
        meta,
        np.concatenate(ids),
        np.cumsum([0, *map(len, ids)]),
        table,
        np.concatenate(phase).astype(np.uint8),
        np.concatenate(tokens).astype(np.int32) if token_ids else None,
    )
