"""Six made traffics whose best decisions are known by how they are made, for `coterie advise`.

Every one is a recording of gpt-oss-20b's shape: 24 layers of 32 experts, 4 per token. Experts of a token are drawn
without order from the weights of its request, so that what can be gained is in the weights alone:

- nothing pays: all experts are equal in every request, and the batch has the size of a CUDA graph;
- only placement: the same four experts are hot in all requests, and experts in order puts them on one rank;
- only routing: requests come in eight kinds with experts of their own, which together load all experts equally
  (drawn independently: with exactly as many of each, one half of the requests would mirror the other's deviations, and
  a placement planned on one would suit the other). One draw is uneven, so placement is only never surely worth it;
- prefixes against experts: the same kinds, crossed with long shared prefixes that have nothing to do with them, of
  which a decoder's memory holds a third: with room for all, every decoder soon has them and they ask for nothing;
- a shift: halfway, other experts get hot; a placement for the first half does nothing for the second;
- padding: as the first, with one request more than a CUDA graph has room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.models import get_model
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

MODEL = get_model("gpt-oss-20b")
LAYERS, EXPERTS, TOP_K = MODEL.num_moe_layers, MODEL.num_experts, MODEL.top_k
REQUESTS, PROMPT, OUTPUT = 400, 24, 40
KINDS, OF_A_KIND = 8, 12
HOT, HOTTER = 4, 8.0
"""Experts that are hot in a layer, and how many times as often as the others they are chosen."""
PREFIXES, PREFIX_TOKENS, BLOCK = 24, 1920, 16
"""Shared prefixes, their length in tokens, and the tokens of a KV block."""

ON, NOT_NOW = "on", "not now"


class MadeTraffic(NamedTuple):
    """A recording, the fleet that it is for, and the advice that is right."""

    trace: ActivationTrace
    answers: Mapping[str, str]
    """Decision → advice; a decision whose answer does not follow from how the traffic is made is left out."""
    decoders: int = 8
    in_flight: int = 16
    ranks: int = 8
    kv_tokens: int | None = None
    """KV memory of a decoder in tokens; None for all that it has."""


def _weights_of_kinds(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return [kind, layer, expert] weights: experts of its own in every layer; kinds together use all equally."""
    first = np.arange(KINDS) * EXPERTS // KINDS

    weights = np.full((KINDS, LAYERS, EXPERTS), 0.02)
    for layer in range(LAYERS):
        order = rng.permutation(EXPERTS)
        for kind in range(KINDS):
            weights[kind, layer, order[(first[kind] + np.arange(OF_A_KIND)) % EXPERTS]] = 1.0
    return weights


def _drawn(weights: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw [token, layer, k] different experts by weights [token, layer, expert]: the k largest of keys u^(1/w)."""
    keys = rng.exponential(size=weights.shape) / weights
    return np.argpartition(keys, TOP_K, axis=-1)[..., :TOP_K].astype(np.uint8)


def _recording(
    weights: NDArray[np.float64], rng: np.random.Generator, prefixes: NDArray[np.int64] | None = None
) -> ActivationTrace:
    """Record requests of weights [request, layer, expert], which arrive one a second."""
    count, length = len(weights), PROMPT + OUTPUT
    ids = np.concatenate([_drawn(np.broadcast_to(one, (length, *one.shape)), rng) for one in weights])
    blocks = None
    prompt = np.full(count, PROMPT, np.int64)
    if prefixes is not None:
        held = PREFIX_TOKENS // BLOCK
        blocks = [one * held + np.arange(held, dtype=np.int64) for one in prefixes.tolist()]
        prompt += PREFIX_TOKENS
    requests = RequestTrace(
        prompt,
        np.full(count, OUTPUT, np.int64),
        arrival_s=np.arange(count, dtype=np.float64),
        prefix_blocks=blocks,
        block_tokens=None if blocks is None else BLOCK,
    )
    phase = np.tile(np.repeat(np.array([PREFILL, DECODE], np.uint8), (PROMPT, OUTPUT)), count)
    meta = TraceMeta(MODEL.name, EXPERTS, LAYERS, TOP_K, MODEL.moe_layer_ids)
    return ActivationTrace.from_arrays(meta, ids, np.arange(count + 1) * length, requests=requests, phase=phase)


def _even(requests: int = REQUESTS) -> NDArray[np.float64]:
    return np.ones((requests, LAYERS, EXPERTS))


def _hot(first: int) -> NDArray[np.float64]:
    weights = _even(1)
    weights[:, :, first : first + HOT] = HOTTER
    return weights


def nothing_pays(seed: int = 0) -> MadeTraffic:
    decisions = ("routing", "batching", "placement", "live_loop", "graph_sizes")
    return MadeTraffic(_recording(_even(), np.random.default_rng(seed)), dict.fromkeys(decisions, NOT_NOW))


def only_placement(seed: int = 0) -> MadeTraffic:
    made = _recording(np.repeat(_hot(0), REQUESTS, axis=0), np.random.default_rng(seed))
    return MadeTraffic(
        made, {"routing": NOT_NOW, "batching": NOT_NOW, "placement": ON, "live_loop": NOT_NOW, "graph_sizes": NOT_NOW}
    )


def only_routing(seed: int = 0) -> MadeTraffic:
    rng = np.random.default_rng(seed)
    weights = _weights_of_kinds(rng)[rng.integers(KINDS, size=REQUESTS)]
    return MadeTraffic(_recording(weights, rng), {"routing": ON, "live_loop": NOT_NOW, "graph_sizes": NOT_NOW})


def prefixes_against_experts(seed: int = 0) -> MadeTraffic:
    rng = np.random.default_rng(seed)
    weights = _weights_of_kinds(rng)[rng.integers(KINDS, size=REQUESTS)]
    prefixes = rng.permutation(np.arange(REQUESTS) % PREFIXES)
    return MadeTraffic(_recording(weights, rng, prefixes), {"routing": ON, "live_loop": NOT_NOW}, kv_tokens=16_000)


def shift(seed: int = 0) -> MadeTraffic:
    half = REQUESTS // 2
    weights = np.concatenate([np.repeat(_hot(first), half, axis=0) for first in (0, HOT)])
    return MadeTraffic(
        _recording(weights, np.random.default_rng(seed)), {"routing": NOT_NOW, "placement": NOT_NOW, "live_loop": ON}
    )


def padding(seed: int = 0) -> MadeTraffic:
    made = _recording(_even(), np.random.default_rng(seed))
    answers = {"routing": NOT_NOW, "placement": NOT_NOW, "live_loop": NOT_NOW, "graph_sizes": ON}
    return MadeTraffic(made, answers, in_flight=9)


TRAFFICS = {
    "nothing pays": nothing_pays,
    "only placement": only_placement,
    "only routing": only_routing,
    "prefixes against experts": prefixes_against_experts,
    "shift": shift,
    "padding": padding,
}
