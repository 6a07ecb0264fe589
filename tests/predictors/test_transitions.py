"""Rank transitions against a count in plain Python, theory, and their limits."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, NotFittedError
from coterie.predictors import RankTransitions


def reference(ranks: Any, local: Any, top_k: int, layer: int, context: tuple[int, ...], model: RankTransitions) -> Any:
    """Smoothed shares of a context, back to the shorter one where it is too rare."""
    by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for token in range(len(ranks)):
        for m in range(min(model.order, layer) + 1):
            by_context[tuple(ranks[token, layer - m : layer].tolist())].append(token)

    def shares(key: tuple[int, ...]) -> Any:
        tokens = by_context[key]
        counts = local[tokens, layer].sum(axis=0).astype(float)
        if not key:
            return counts / (len(tokens) * top_k)
        if len(tokens) < model.min_tokens:
            return shares(key[1:])
        pull = model.smoothing * top_k
        return (counts + pull * shares(key[1:])) / (len(tokens) * top_k + pull)

    return shares(context)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    order=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    min_tokens=st.integers(1, 3),
    with_local=st.booleans(),
)
def test_it_is_the_plain_count(seed: int, order: int, num_ranks: int, min_tokens: int, with_local: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens, layers, top_k = 40, 6, 3
    ranks = rng.integers(0, num_ranks, (tokens, layers))
    local = rng.multinomial(top_k, np.full(num_ranks, 1 / num_ranks), (tokens, layers)).astype(np.uint16)
    model = RankTransitions(order, smoothing=1.5, min_tokens=min_tokens)
    if with_local:
        model.fit(ranks, num_ranks, local, top_k)
    else:
        local, top_k = (np.arange(num_ranks) == ranks[..., None]).astype(np.uint16), 1
        model.fit(ranks, num_ranks)
    rows = model.rows
    assert rows.shares.min() >= 0
    assert rows.shares.max() <= 1 + 1e-6
    np.testing.assert_allclose(rows.shares.sum(axis=1), 1, atol=1e-5)
    for layer in range(layers):
        part = rows.tokens[rows.offsets[layer] : rows.offsets[layer + 1]]
        assert part[0] == tokens, "the context of no layers is every token's"
        previous = rng.integers(0, num_ranks, (10, layer))
        found = rows.shares[model.find(layer, previous)]
        for i, before in enumerate(previous.tolist()):
            context = tuple(before[-order:])
            np.testing.assert_allclose(found[i], reference(ranks, local, top_k, layer, context, model), atol=1e-6)
        at = model.find(layer, previous)
        np.testing.assert_array_equal(rows.ranks[at], found.argmax(axis=1))
        np.testing.assert_array_equal(rows.confidence[at], found.max(axis=1))


def test_counts_of_an_order_sum_to_the_tokens(rng: np.random.Generator) -> None:
    ranks = rng.integers(0, 3, (200, 5))
    rows = RankTransitions(2, min_tokens=1).fit(ranks, 3).rows
    for layer in range(5):
        part = slice(rows.offsets[layer], rows.offsets[layer + 1])
        keys, tokens = rows.keys[part], rows.tokens[part]
        for first, end in ((0, 1), (1, 4), (4, 13))[: layer + 1]:
            assert tokens[(keys >= first) & (keys < end)].sum() == 200


def test_where_the_last_layers_decide_it_is_exact(rng: np.random.Generator) -> None:
    """Theory: the rank is a function of the last two; order 2 finds it, order 1 and no order cannot."""
    ranks = rng.integers(0, 4, (4000, 2)).tolist()
    function = np.array([[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]])  # a Latin square
    array = np.array([[a, b, function[a, b]] for a, b in ranks])
    hits = {}
    for order in (1, 2, 3):
        model = RankTransitions(order).fit(array[:2000], 4)
        rows = model.find(2, array[2000:, :2])
        hits[order] = (model.rows.ranks[rows] == array[2000:, 2]).mean()
    assert hits[2] == hits[3] == 1.0
    assert hits[1] < 0.4


def test_a_context_seen_once_is_not_sure() -> None:
    ranks = np.array([[0, 0]] * 50 + [[0, 1]] * 50 + [[1, 1]])
    once = RankTransitions(1, min_tokens=1).fit(ranks, 2)
    assert once.rows.shares[once.find(1, np.array([[1]]))][0, 1] < 0.6
    left_out = RankTransitions(1, min_tokens=2).fit(ranks, 2)
    assert left_out.find(1, np.array([[1]])).tolist() == left_out.find(1, np.empty((1, 0), np.int64)).tolist()


def test_many_contexts_take_few_rows(rng: np.random.Generator) -> None:
    """16 ranks and 5 layers have a million contexts a layer; only those seen are kept."""
    ranks = rng.integers(0, 16, (3000, 8))
    rows = RankTransitions(5, min_tokens=1).fit(ranks, 16).rows
    assert len(rows.keys) <= 8 * (1 + 16 + 256 + 3 * 3000)


def test_bad_input_is_refused() -> None:
    ranks = np.zeros((4, 3), np.int64)
    for order in (0, 6):
        with pytest.raises(ConfigError, match=f"order={order} must be in 1 … 5"):
            RankTransitions(order)
    with pytest.raises(ConfigError, match="smoothing=-1 must"):
        RankTransitions(smoothing=-1)
    with pytest.raises(ConfigError, match="min_tokens=0 must"):
        RankTransitions(min_tokens=0)
    with pytest.raises(NotFittedError):
        RankTransitions().find(0, ranks)
    with pytest.raises(ConfigError, match="expected \\[token, layer\\], none 0"):
        RankTransitions().fit(ranks[:0], 2)
    with pytest.raises(ConfigError, match="ranks holds 5; it must be in 0 … 1"):
        RankTransitions().fit(ranks + 5, 2)
    with pytest.raises(ConfigError, match="local has shape"):
        RankTransitions().fit(ranks, 2, np.zeros((4, 3, 3), np.int64), 2)
    with pytest.raises(ConfigError, match="local must be in 0 … top_k=2"):
        RankTransitions().fit(ranks, 2, np.full((4, 3, 2), 3), 2)
    with pytest.raises(ConfigError, match="layer=3 must be in 0 … 2"):
        RankTransitions().fit(ranks, 2).find(3, ranks)
