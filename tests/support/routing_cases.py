"""A fitted routing and its requests, small."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.lines import DecodeStepPrices
from coterie.routing.calibration import Calibration
from coterie.routing.fitted import RouterFit

COST = DecodeStepPrices(
    fixed_us=900.0,
    expert_us=1.8,
    request_us=2.0,
    context_us=0.001,
    transfer_us=1.0,
    prefill_us=20.0,
    output_tokens=256.0,
)
"""About gpt-oss-20b's on an H200."""
LAYERS, EXPERTS, TOP_K, WORKERS, GROUPS = 3, 8, 2, 6, 4


class Requests(NamedTuple):
    prefill: NDArray[np.int64]
    """[request, layer, expert]"""
    decode: NDArray[np.int64]
    group: NDArray[np.int64]


def draw(requests: int, seed: int, tokens: int = 120) -> Requests:
    """Requests of a few groups, each of which prefers two neighbouring experts."""
    rng = np.random.default_rng(seed)
    group = rng.integers(GROUPS, size=requests)
    liking = np.full((GROUPS, EXPERTS), 0.05)
    for one in range(GROUPS):
        liking[one, [2 * one, 2 * one + 1]] = 1.0
    liking /= liking.sum(axis=1, keepdims=True)
    counts = np.empty((2, requests, LAYERS, EXPERTS), np.int64)
    for row in range(requests):
        counts[:, row] = rng.multinomial(tokens * TOP_K, liking[group[row]], size=(2, LAYERS))
    return Requests(counts[0], counts[1], group)


@lru_cache(maxsize=1)
def fitted() -> RouterFit:
    known = draw(120, 0)
    calibration = Calibration(
        prefill=known.prefill.astype(np.uint32),
        decode=known.decode.astype(np.uint32),
        gates=None,
        requests=np.arange(120),
        halved=False,
        model="test",
        top_k=TOP_K,
    )
    return RouterFit(WORKERS, batch=4).fit(calibration, np.random.default_rng(0))
