"""What the token table expects of each token by rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.placement.holdings import held_by
from coterie.predictors import TokenTable
from coterie.traces import ActivationTrace
from coterie.types import Placement
from token_traces import EXPERTS, LAYERS, TOP_K, random_trace

CUT = EXPERTS * 2.0**-15
"""Most that rounding weights down can change of a share."""


def random_placement(rng: np.random.Generator, ranks: int = 3, spare: int = 0) -> Placement:
    """Experts in random slots; with `spare` slots a rank more, replicas too."""
    slots = np.stack(
        [
            np.concatenate([rng.permutation(EXPERTS), rng.integers(0, EXPERTS, ranks * spare)])[
                rng.permutation(EXPERTS + ranks * spare)
            ]
            for _ in range(LAYERS)
        ]
    )
    return Placement(slots.astype(np.int32), ranks, EXPERTS)


def counted(trace: ActivationTrace) -> tuple[dict[int, int], dict[tuple[int, int], Counter[int]]]:
    """Occurrences by token, and activations by token and layer, in plain Python."""
    times: Counter[int] = Counter()
    used: dict[tuple[int, int], Counter[int]] = {}
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    for token, ids in zip(tokens.token_ids.tolist(), tokens.expert_ids.tolist(), strict=True):
        times[token] += 1
        for layer, experts in enumerate(ids):
            used.setdefault((token, layer), Counter()).update(experts)
    return times, used


@settings(max_examples=15)
@given(seed=st.integers(0, 2**20), spare=st.sampled_from([0, 2]))
def test_local_shares_and_affinity_are_a_plain_sum(seed: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    placement = random_placement(rng, spare=spare)
    held = held_by(placement)
    table = TokenTable(experts_kept=EXPERTS, confidence_smoothing=1.0).fit(trace)
    times, used = counted(trace)
    popularity = table.rows.popularity.per_token
    shares = table.local_shares(held)
    assert shares.min() >= 0
    assert shares.max() <= 1 + 1e-6
    for row, token in enumerate(table.rows.token_ids.tolist()):
        n = times[token]
        for layer in range(LAYERS):
            for rank in range(3):
                own = sum(c for e, c in used[token, layer].items() if held[rank, layer, e]) / (n * TOP_K)
                everyone = popularity[layer][held[rank, layer]].sum() / TOP_K
                expected = n / (n + 1) * own + 1 / (n + 1) * everyone
                assert shares[row, layer, rank] == pytest.approx(expected, abs=CUT)
    if not spare:
        np.testing.assert_allclose(shares.sum(axis=2), 1, atol=1e-5)


def test_misshapen_requests_are_refused(rng: np.random.Generator) -> None:
    table = TokenTable().fit(random_trace(rng))
    held = np.ones((2, LAYERS, EXPERTS + 1), np.bool_)
    with pytest.raises(ConfigError, match=r"held has shape \(2, 3, 13\)"):
        table.local_shares(held)
