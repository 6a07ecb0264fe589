"""Ranks of tokens and the numbering of contexts, against plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.footprints.ranks import context_keys, find_contexts, key_starts, token_ranks


@settings(max_examples=30)
@given(seed=st.integers(0, 2**20), ranks=st.integers(1, 5))
def test_a_tokens_rank_holds_most_of_its_experts(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, layers, experts, k = 12, 3, 8, 4
    ids = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :k].astype(np.uint8)
    held = rng.random((ranks, layers, experts)) < 0.4
    found = token_ranks(ids, held)
    for token, layer in itertools.product(range(tokens), range(layers)):
        keys = []
        for rank in range(ranks):
            places = [j for j in range(k) if held[rank, layer, ids[token, layer, j]]]
            assert found.local[token, layer, rank] == len(places)
            keys.append((-len(places), min(places, default=k), rank))
        assert found.ranks[token, layer] == min(keys)[2]


def test_of_ranks_with_equally_many_the_first_listed_wins() -> None:
    held = np.zeros((3, 1, 6), np.bool_)
    held[np.arange(6) // 2, 0, np.arange(6)] = True
    ids = np.array([[[4, 0, 1, 5]], [[0, 4, 5, 1]], [[2, 4, 0, 1]]])
    assert token_ranks(ids, held).ranks[:, 0].tolist() == [2, 0, 0]


def test_misshapen_arrays_are_refused() -> None:
    held, ids = np.ones((2, 3, 4), np.bool_), np.zeros((5, 3, 2), np.int64)
    for one, other in ((ids[:, :2], held), (ids[0], held), (ids, held[0]), (ids[:, :, :0], held)):
        with pytest.raises(ConfigError, match="expected \\[token, layer, k\\]"):
            token_ranks(one, other)
    ids[3, 1, 0] = 4
    with pytest.raises(ConfigError, match="token 3 activates an expert outside 0 … 3"):
        token_ranks(ids, held)


@pytest.mark.parametrize(("ranks", "order"), [(1, 3), (2, 3), (3, 2), (4, 3)])
def test_every_context_has_its_own_key_and_shorter_ones_are_found(ranks: int, order: int) -> None:
    starts = key_starts(ranks, order)
    contexts = [c for m in range(order + 1) for c in itertools.product(range(ranks), repeat=m)]
    keys = {c: int(context_keys(np.array([c], np.int64).reshape(1, -1), ranks, order)[0]) for c in contexts}
    assert sorted(keys.values()) == list(range(int(starts[-1])))
    for some in ({()}, set(contexts), set(contexts[::2])):
        known = {c for c in some | {()} if all(c[i:] in some | {()} for i in range(len(c)))}
        table = np.sort(np.array([keys[c] for c in known], np.int64))
        found = find_contexts(table, np.array([keys[c] for c in contexts]), ranks, order)
        for context, at in zip(contexts, found.tolist(), strict=True):
            longest = next(context[i:] for i in range(len(context) + 1) if context[i:] in known)
            assert table[at] == keys[longest]


def test_an_unknown_rank_ends_the_context() -> None:
    previous = np.array([[1, 2, 0], [1, -1, 0], [1, 2, -1], [-1, 2, 0]])
    alone = [int(context_keys(np.array([c], np.int64).reshape(1, -1), 3, 3)[0]) for c in ((1, 2, 0), (0,), (), (2, 0))]
    assert context_keys(previous, 3, 3).tolist() == alone
    assert context_keys(previous[:, :0], 3, 3).tolist() == [0] * 4
    np.testing.assert_array_equal(context_keys(previous, 3, 2)[:1], context_keys(previous[:1, 1:], 3, 2))


def test_wrong_contexts_are_refused() -> None:
    with pytest.raises(ConfigError, match="order=6 must be in 0 … 5"):
        key_starts(2, 6)
    with pytest.raises(ConfigError, match="num_ranks=1000000 with order=5"):
        key_starts(10**6, 5)
    with pytest.raises(ConfigError, match="previous has shape"):
        context_keys(np.zeros(3, np.int64), 2, 1)
    with pytest.raises(ConfigError, match="previous holds rank 2"):
        context_keys(np.array([[2]]), 2, 1)
