"""Count activations: footprints, loads and distinct experts, at memory speed.

Every function takes expert ids [token, layer, k] as stored in a trace, and checks each id as it counts, since a mapped
trace is not checked when opened. Ids of one token are assumed distinct within a layer; a repeated id counts twice in a
footprint and once among the distinct experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, check

Ids = NDArray[np.integer]
PAIRED = 1 << 14
"""Tokens whose pairs of experts are counted at a time: 8 MB at top-8."""


def footprint(expert_ids: Ids, num_experts: int) -> NDArray[np.uint32]:
    """Return [layer, expert] activation counts, summed over the tokens."""
    out = np.zeros((_layers(expert_ids), num_experts), np.uint32)
    accumulate_load(expert_ids, out)
    return out


def footprints(expert_ids: Ids, offsets: NDArray[np.int64], num_experts: int) -> NDArray[np.uint32]:
    """Return [request, layer, expert] activation counts; request r has tokens offsets[r] … offsets[r + 1] - 1."""
    check(
        len(offsets) >= 1 and offsets[0] >= 0 and offsets[-1] <= len(expert_ids) and not (np.diff(offsets) < 0).any(),
        f"offsets must rise from 0 or more to at most the {len(expert_ids)} tokens",
    )
    out = np.zeros((len(offsets) - 1, _layers(expert_ids), num_experts), np.uint32)
    for request in range(len(out)):
        accumulate_load(expert_ids[offsets[request] : offsets[request + 1]], out[request])
    return out


def accumulate_load(expert_ids: Ids, out: NDArray[Any]) -> None:
    """Add the tokens' activations to `out` [layer, expert], of any integer or float dtype, in place."""
    check(
        _layers(expert_ids) == out.shape[0], f"expert_ids has {expert_ids.shape[1]} layers; the load has {out.shape[0]}"
    )
    token, experts = _accumulate(expert_ids, out), out.shape[1]
    if token >= 0:
        bad = next(int(expert) for expert in expert_ids[token].flat if not 0 <= expert < experts)
        raise ConfigError(f"token {token} activates expert {bad}; it must be in 0 … {experts - 1}")


def distinct_experts(expert_ids: Ids, num_experts: int) -> NDArray[np.int64]:
    """Return [layer] the number of experts that at least one token activates: those a decode step must stream."""
    return np.asarray((footprint(expert_ids, num_experts) > 0).sum(axis=1), np.int64)


def transitions(expert_ids: Ids, num_experts: int) -> NDArray[np.int64]:
    """Return [layer - 1, expert, expert] the tokens that activate the one, and the other in the next layer."""
    out = np.zeros((max(_layers(expert_ids) - 1, 0), num_experts, num_experts), np.int64)
    for start in range(0, len(expert_ids), PAIRED):
        ids = expert_ids[start : start + PAIRED].astype(np.int64)
        for layer, counts in enumerate(out):
            pairs = ids[:, layer, :, None] * num_experts + ids[:, layer + 1, None, :]
            counts += np.bincount(pairs.ravel(), minlength=counts.size).reshape(counts.shape)
    return out


def next_layer_recall(counts: NDArray[np.int64], expert_ids: Ids) -> dict[str, float]:
    """Return the share of a token's experts in the next layer that are among its top-k guesses.

    A guess by the `transitions` [layer - 1, expert, expert] sums those of the token's experts in this layer.
    """
    hits: dict[str, list[float]] = {"transitions": [], "popularity": []}
    for layer, flows in enumerate(counts.astype(np.float64)):
        rows = (flows / np.maximum(flows.sum(axis=1, keepdims=True), 1.0))[expert_ids[:, layer]].sum(axis=1)
        for name, scores in (("transitions", rows), ("popularity", np.broadcast_to(flows.sum(axis=0), rows.shape))):
            guessed = np.argsort(-scores, axis=1, kind="stable")[:, : expert_ids.shape[2]]
            hits[name].append(float((guessed[:, :, None] == expert_ids[:, layer + 1, None, :]).any(axis=1).mean()))
    return {name: float(np.mean(shares)) for name, shares in hits.items()}


def _layers(expert_ids: Ids) -> int:
    check(expert_ids.ndim == 3, f"expert_ids has shape {expert_ids.shape}; expected [token, layer, k]")
    return int(expert_ids.shape[1])


@njit()
def _accumulate(expert_ids: NDArray[Any], out: NDArray[Any]) -> int:
    """Count into `out` up to the first token with an id outside 0 … experts - 1; return that token, or -1."""
    tokens, layers, k = expert_ids.shape
    experts = out.shape[1]
    for token in range(tokens):
        for layer in range(layers):
            for j in range(k):
                expert = np.int64(expert_ids[token, layer, j])
                if expert < 0 or expert >= experts:
                    return token
                out[layer, expert] += 1
    return -1
