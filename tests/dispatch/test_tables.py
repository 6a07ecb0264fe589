"""Rank tables: lookups against plain Python, round trips, and files that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from coterie.answers.plan.learning import fit_rank_tables
from coterie.dispatch.tables import AFFINITY_ONE, ONE, Contexts, RankTables
from coterie.errors import ConfigError, TraceError
from coterie.footprints.ranks import token_ranks
from coterie.placement.holdings import held_by
from coterie.predictors import RankTransitions
from coterie.types import Placement
from described_files import rewritten
from token_traces import random_trace

LAYERS, EXPERTS, RANKS = 4, 6, 3


def random_tables(rng: np.random.Generator, order: int = 2, tokens: int = 9, **changed: Any) -> RankTables:
    slots = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]).astype(np.int32)
    transitions = RankTransitions(order, min_tokens=1).fit(rng.integers(0, RANKS, (30, LAYERS)), RANKS)
    rows = transitions.rows
    given = {
        "placement": Placement(slots, RANKS, EXPERTS),
        "token_ids": np.sort(rng.choice(40, tokens, replace=False)),
        "ranks": rng.integers(0, RANKS, (LAYERS, tokens)),
        "confidence": rng.random((LAYERS, tokens)),
        "contexts": Contexts(order, rows.offsets, rows.keys, rows.ranks, rows.confidence),
        "model": "any",
        "top_k": 2,
        "layer_ids": (1, 2, 3, 4),
    }
    return RankTables.of(**{**given, **changed})


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), order=st.integers(1, 5), tokens=st.integers(0, 20))
def test_the_surer_table_decides(seed: int, order: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.integers(0, RANKS, (30, LAYERS))
    transitions = RankTransitions(order, min_tokens=1).fit(ranks, RANKS)
    rows = transitions.rows
    contexts = Contexts(order, rows.offsets, rows.keys, rows.ranks, rows.confidence)
    own, sure = rng.integers(0, RANKS, (LAYERS, tokens)), rng.random((LAYERS, tokens))
    tables = random_tables(rng, order, tokens, contexts=contexts, ranks=own, confidence=sure)
    known = {token: i for i, token in enumerate(tables.token_ids.tolist())}
    asked = rng.integers(0, 45, 25)
    for layer in range(LAYERS):
        previous = rng.integers(-1, RANKS, (25, layer))
        predicted = tables.ranks_of(asked, layer, previous)
        assert ((predicted.confidence >= 0) & (predicted.confidence <= 1)).all()
        shares = transitions.rows.shares[transitions.find(layer, previous)]
        for i, token in enumerate(asked.tolist()):
            by_context = int(np.rint(shares[i].max() * ONE))
            by_token = -1 if token not in known else int(np.rint(sure[layer, known[token]] * ONE))
            right = own[layer, known[token]] if by_token >= by_context else shares[i].argmax()
            assert predicted.ranks[i] == right
            assert predicted.confidence[i] == pytest.approx(max(by_token, by_context) / ONE)
        at = tables.ranks_at(tables.rows_of(asked), layer, previous)
        np.testing.assert_array_equal(at.ranks, predicted.ranks)


def test_without_previous_ranks_an_unseen_token_takes_the_popular_rank(rng: np.random.Generator) -> None:
    ranks = rng.choice(RANKS, (200, LAYERS), p=[0.2, 0.7, 0.1])
    rows = RankTransitions().fit(ranks, RANKS).rows
    tables = random_tables(rng, contexts=Contexts(2, rows.offsets, rows.keys, rows.ranks, rows.confidence))
    predicted = tables.ranks_of(np.array([1000]), 3)
    assert predicted.ranks.tolist() == [1]
    assert predicted.confidence[0] == pytest.approx((ranks[:, 3] == 1).mean(), abs=0.5 / ONE + 1e-6)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), given_affinity=st.booleans())
def test_request_scores_are_means_over_tokens(seed: int, given_affinity: bool) -> None:
    rng = np.random.default_rng(seed)
    own, sure = rng.integers(0, RANKS, (LAYERS, 9)), rng.random((LAYERS, 9))
    affinity = rng.dirichlet(np.ones(RANKS), 9) if given_affinity else None
    tables = random_tables(rng, ranks=own, confidence=sure, affinity=affinity)
    if affinity is None:
        affinity = np.zeros((9, RANKS))
        for layer in range(LAYERS):
            for token in range(9):
                affinity[token, own[layer, token]] += sure[layer, token] / LAYERS
    asked = rng.integers(0, 45, 30)
    rows = [tables.token_ids.tolist().index(t) for t in asked.tolist() if t in tables.token_ids]
    right = affinity[rows].mean(axis=0) if rows else np.full(RANKS, 1 / RANKS)
    np.testing.assert_allclose(tables.request_scores(asked), right, atol=1 / AFFINITY_ONE)
    np.testing.assert_array_equal(tables.request_scores(np.array([99])), 1 / RANKS)
    np.testing.assert_array_equal(tables.request_scores(np.empty(0, np.int64)), 1 / RANKS)


def test_ranks_of_all_layers_are_taken_for_each(rng: np.random.Generator) -> None:
    one = random_tables(rng, ranks=np.arange(9)[None] % RANKS, confidence=np.full((1, 9), 1.0))
    for layer in range(LAYERS):
        assert one.ranks_of(one.token_ids, layer).ranks.tolist() == [0, 1, 2] * 3


def test_fitted_tables_know_the_fitted_tokens(rng: np.random.Generator) -> None:
    """The best rank of each token is at least as local as any one rank would be, on what was fitted."""
    trace = random_trace(rng)
    placement = Placement.linear(3, 12, 4)
    tables = fit_rank_tables(trace, placement)
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    of = token_ranks(tokens.expert_ids, held_by(placement))
    local, baseline = 0.0, 0.0
    for layer in range(3):
        predicted = tables.ranks_of(tokens.token_ids, layer, of.ranks[:, :layer])
        local += np.take_along_axis(of.local[:, layer], predicted.ranks[:, None], 1).mean()
        baseline += of.local[:, layer].mean(axis=0).max()
    assert local > baseline
    np.testing.assert_allclose(tables.affinity.sum(axis=1) / AFFINITY_ONE, 1, atol=4 / AFFINITY_ONE)
    with pytest.raises(ConfigError, match="the placement has"):
        fit_rank_tables(trace, Placement.linear(2, 12, 4))


# Files ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(seed=st.integers(0, 2**20), order=st.integers(1, 5), tokens=st.integers(0, 20))
def test_a_round_trip_is_exact(tmp_path_factory: Any, seed: int, order: int, tokens: int) -> None:
    folder = tmp_path_factory.mktemp("tables")
    tables = random_tables(np.random.default_rng(seed), order, tokens)
    tables.save(folder / "one")
    again = RankTables.load(folder / "one")
    again.save(folder / "two")
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    assert (again.model, again.top_k, again.order, again.layer_ids) == ("any", 2, order, (1, 2, 3, 4))
    asked = np.arange(45)
    np.testing.assert_array_equal(again.request_scores(asked), tables.request_scores(asked))
    for layer in range(LAYERS):
        np.testing.assert_array_equal(again.ranks_of(asked, layer).ranks, tables.ranks_of(asked, layer).ranks)


@pytest.fixture
def saved(rng: np.random.Generator, tmp_path: Path) -> Path:
    random_tables(rng).save(tmp_path / "tables.safetensors")
    return tmp_path / "tables.safetensors"


def test_nothing_is_replaced(saved: Path, rng: np.random.Generator) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        random_tables(rng).save(saved)


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"format": "other"}, "found 'other' version 1"),
        ({"version": 2}, "metadata format"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
        ({"num_ranks": 4}, "must be a multiple of num_ranks=4"),
        ({"num_ranks": 2}, r"affinity is uint16 \(9, 3\)"),
        ({"num_experts": 7}, "num_experts=7 must be in 1 … num_slots=6"),
        ({"num_experts": 10**15}, "must be in 1 … num_slots=6"),
        ({"num_experts": 5}, "slot_experts holds 5"),
        ({"top_k": 0}, "top_k=0 must be in 1 … num_experts=6"),
        ({"top_k": None}, "contents: "),
        ({"order": 0}, "order=0 must be in 1 … 5"),
        ({"order": 1}, "keys of layer 2 holds"),
        ({"order": 10**9}, "order=1000000000 must"),
        ({"layer_ids": [1]}, "layer_ids has 1 entries"),
        ({"layer_ids": 3}, "contents: "),
    ],
)
def test_wrong_metadata_is_refused(saved: Path, about: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        RankTables.load(rewritten(saved, about))


@pytest.mark.parametrize("name", ["num_ranks", "num_experts", "top_k", "order", "layer_ids", "model"])
def test_missing_metadata_is_named(saved: Path, name: str) -> None:
    with pytest.raises(TraceError, match=f"metadata {name}: is missing"):
        RankTables.load(rewritten(saved, drop=(name,)))


ARRAYS = (
    "slot_experts",
    "token_ids",
    "token_ranks",
    "token_confidence",
    "affinity",
    "offsets",
    "keys",
    "context_ranks",
    "context_confidence",
)


@pytest.mark.parametrize("name", ARRAYS)
def test_missing_or_misshapen_arrays_are_refused(saved: Path, name: str) -> None:
    whole = saved.read_bytes()
    array = load_safetensors(whole)[name]
    for other in (array[:-1], array[..., None], array.astype(np.float32), array[:0]):
        saved.write_bytes(whole)
        with pytest.raises(TraceError):
            RankTables.load(rewritten(saved, arrays={name: np.ascontiguousarray(other)}))
    saved.write_bytes(whole)
    with pytest.raises(TraceError, match=f"{name}: is missing"):
        RankTables.load(rewritten(saved, drop=(name,)))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("slot_experts", lambda a: a * 0, "has no slot for expert 1"),
        ("slot_experts", lambda a: a - 1, "slot_experts holds -1"),
        ("token_ids", lambda a: a[::-1], "token_ids must rise"),
        ("token_ids", lambda a: a - 41, "token_ids must rise"),
        ("token_ranks", lambda a: a + 3, "token_ranks holds"),
        ("context_ranks", lambda a: a + 3, "context_ranks holds"),
        ("offsets", lambda a: a[::-1], "offsets must rise"),
        ("offsets", lambda a: a + 1, "offsets must rise"),
        ("offsets", lambda a: a * 0, "offsets must rise"),
        ("keys", lambda a: a[::-1], "keys of layer 0"),
        ("keys", lambda a: a + 1, "keys of layer 0"),
        ("keys", lambda a: a * 9, "keys of layer 1 holds"),
        ("keys", lambda a: a * 0, "keys of layer 1 must rise"),
    ],
)
def test_damaged_values_are_refused(saved: Path, name: str, change: Callable[..., Any], problem: str) -> None:
    array = np.ascontiguousarray(change(load_safetensors(saved.read_bytes())[name]))
    with pytest.raises(TraceError, match=problem):
        RankTables.load(rewritten(saved, arrays={name: array}))


def test_a_cut_file_is_refused_wherever_it_is_cut(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for length in [0, 4, 8, 100, *range(200, len(data), 97), len(data) - 1]:
        (tmp_path / "part").write_bytes(data[:length])
        with pytest.raises(TraceError):
            RankTables.load(tmp_path / "part")


def test_wrong_arrays_are_refused(rng: np.random.Generator) -> None:
    for changed, problem in (
        ({"ranks": np.zeros((2, 9), np.int64)}, r"ranks has shape \(2, 9\)"),
        ({"confidence": np.zeros((LAYERS, 8))}, "confidence has shape"),
        ({"ranks": np.full((LAYERS, 9), 3)}, "ranks holds 3; it must be in 0 … 2"),
        ({"ranks": np.full((LAYERS, 9), -1)}, "ranks holds -1"),
        ({"confidence": np.full((LAYERS, 9), 1.1)}, "confidence must be in 0 … 1"),
        ({"confidence": np.full((LAYERS, 9), np.nan)}, "confidence must be in 0 … 1"),
        ({"affinity": np.full((9, RANKS), -0.1)}, "affinity must be in 0 … 1"),
        ({"affinity": np.zeros((9, RANKS + 1))}, "affinity is uint16"),
        ({"token_ids": np.arange(9)[::-1]}, "token_ids must rise"),
        ({"top_k": 7}, "top_k=7 must be"),
    ):
        with pytest.raises(ConfigError, match=problem):
            random_tables(rng, **changed)
    tables = random_tables(rng)
    with pytest.raises(ConfigError, match="layer=4 must be in 0 … 3"):
        tables.ranks_of(np.array([1]), 4)
    with pytest.raises(ConfigError, match="previous has 2"):
        tables.ranks_of(np.array([1]), 1, np.zeros((2, 1), np.int64))
