"""Prediction rows and look-back: theory, a small trace end to end, the real data's counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.plan.learning import fit_rank_tables
from coterie.answers.suites import SuiteOptions
from coterie.dispatch.tables import Contexts, RankTables
from coterie.errors import TraceError
from coterie.models import get_model
from coterie.placement.holdings import held_by
from coterie.predictors import RankTransitions, TokenTable
from coterie.traces import ActivationTrace, TraceMeta
from coterie.traces.writers import write_trace
from coterie.types import Placement
from coterie_lab.suites.sem_moe.look_back import look_back, table_shares
from coterie_lab.suites.sem_moe.prediction import (
    BYTES_MODELS,
    bytes_rows,
    counts_by_domain,
    expected_experts,
    prediction_rows,
    spread,
    table_bytes,
)
from coterie_lab.suites.sem_moe.prediction_notes import prediction_notes
from simulate_traces import quiet

LAYERS, EXPERTS, TOP_K, VOCABULARY = 8, 8, 2, 30


def token_trace(rng: np.random.Generator, requests: int = 24, length: int = 40, follow: float = 0.8) -> ActivationTrace:
    """Experts follow the token with a probability, else they are drawn."""
    function = np.argsort(rng.random((VOCABULARY, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    ids = rng.integers(0, VOCABULARY, requests * length).astype(np.int32)
    drawn = np.argsort(rng.random((len(ids), LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    experts = np.where(rng.random((len(ids), LAYERS, 1)) < follow, function[ids], drawn)
    meta = TraceMeta("small", EXPERTS, LAYERS, TOP_K, tuple(range(LAYERS)))
    return ActivationTrace.from_arrays(meta, experts, np.arange(0, len(ids) + 1, length), token_ids=ids)


def test_where_each_layer_follows_the_last_looking_back_is_exact(rng: np.random.Generator) -> None:
    """Theory: the experts of a layer are a function of those of the layer before."""
    pairs = np.arange(EXPERTS).reshape(4, 2)
    start = rng.integers(0, 4, 600)
    ids = np.stack([pairs[(start + layer) % 4] for layer in range(LAYERS)], axis=1)
    held = held_by(Placement.linear(LAYERS, EXPERTS, 4))
    found = look_back(ids[:300], ids[300:], held)
    assert [one.layers_back for one in found] == list(range(6))
    assert found[0].accuracy < 0.5
    for one in found[1:]:
        assert one.accuracy == one.local == one.expert_recall == one.fitted_confidence == 1
        assert 0.8 < one.confidence < 1


def test_on_noise_only_the_fitted_share_rises(rng: np.random.Generator) -> None:
    """Looking back at random ranks tells nothing, and yet the share among the fitted tokens grows with every layer."""
    ids = np.argsort(rng.random((1200, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    found = look_back(ids[:600], ids[600:], held_by(Placement.linear(LAYERS, EXPERTS, 4)))
    assert all(abs(one.accuracy - 0.25) < 0.08 for one in found)
    fitted = [one.fitted_confidence for one in found]
    assert fitted == sorted(fitted)
    assert fitted[-1] > 0.6
    assert found[-1].confidence < 0.5, "smoothing keeps the claim near the truth"


def test_the_surer_table_is_between_popular_and_best(rng: np.random.Generator) -> None:
    trace = token_trace(rng)
    placement = Placement.linear(LAYERS, EXPERTS, 4)
    tables = fit_rank_tables(trace, placement, np.arange(12))
    tokens, offsets = trace.arrays()
    assert tokens.token_ids is not None
    at = np.arange(offsets[12], offsets[-1])
    found = table_shares(tables, tokens.expert_ids[at], tokens.token_ids[at], held_by(placement))
    assert found.popular < found.contexts < found.tokens <= found.best
    assert found.surer >= found.tokens - 0.02


def test_rows_of_a_trace_with_token_ids(rng: np.random.Generator, tmp_path: Path) -> None:
    path = write_trace(token_trace(rng), tmp_path / "small").path
    options = SuiteOptions(trace=path, seeds=(0, 1))
    rows = prediction_rows(options, quiet)
    assert rows == prediction_rows(options, quiet), "the same seeds give the same rows"
    json.dumps(rows, allow_nan=False)
    parts = {row["part"] for row in rows}
    assert parts == {"look_back", "kurtosis", "sets", "confidence", "rank_tables", "table_bytes"}
    assert all("published" in row and "trace" in row for row in rows)
    sets = {(row["definition"], row["predictor"]): row for row in rows if row["part"] == "sets"}
    occurrence = sets["occurrence", "token_table"]
    assert occurrence["precision"] == occurrence["recall"]
    assert occurrence["f1"] > 1.5 * sets["occurrence", "popularity"]["f1"]
    assert occurrence["f1_low"] < occurrence["f1"] < occurrence["f1_high"]
    assert len(occurrence["f1_by_layer"]) == LAYERS
    confidence = [row for row in rows if row["part"] == "confidence"]
    assert all(0 <= row["confidence"] <= 1 and 0 <= row["hits"] <= 1 for row in confidence)
    notes = prediction_notes(rows)
    assert any("Nearest to the published pair" in note for note in notes)
    assert any("looking back at 2 layers" in note for note in notes)


def test_without_data_the_notes_say_so() -> None:
    rows = prediction_rows(SuiteOptions(), quiet)
    assert {row["part"] for row in rows} == {"table_bytes"}
    assert "COTERIE_DATA" in prediction_notes(rows)[0]


def test_bytes_of_a_whole_vocabulary_are_as_counted(rng: np.random.Generator) -> None:
    ranks, experts = 3, 6
    spec = get_model("gpt-oss-20b")
    spec = replace(spec, num_layers=LAYERS, first_moe_layer=0, num_experts=experts, top_k=2, vocab_size=300)
    rows = RankTransitions(2).fit(rng.integers(0, ranks, (20_000, LAYERS)), ranks).rows  # every context is seen
    tables = RankTables.of(
        Placement.linear(LAYERS, experts, ranks),
        np.arange(300),
        np.zeros((LAYERS, 300), np.int64),
        np.zeros((LAYERS, 300)),
        Contexts(2, rows.offsets, rows.keys, rows.ranks, rows.confidence),
        model="any",
        top_k=2,
    )
    found = table_bytes(spec, ranks)
    arrays = {name: array.nbytes for name, array in tables._arrays().items() if name != "slot_experts"}
    assert found.tokens + found.contexts == sum(arrays.values())
    assert found.published == 300 * LAYERS * 2


def test_bytes_are_printed_for_every_model() -> None:
    rows = {row["trace"]: row for row in bytes_rows()}
    assert len(rows) == len(BYTES_MODELS)
    assert rows["deepseek-v2"]["published"]["token_bytes"] == 102_400 * 59 * 2
    for row in rows.values():
        assert row["published"]["token_bytes"] < row["token_bytes"] < 1.5 * row["published"]["token_bytes"]


def test_spreads_of_what_is_missing_are_none() -> None:
    assert spread("x", [0.5, np.nan]) == {"x": None, "x_low": None, "x_high": None}
    assert spread("x", [0.5]) == {"x": 0.5, "x_low": None, "x_high": None}


def test_counts_by_domain(tmp_path: Path) -> None:
    table = np.array([[0, 1, 70, 3], [0, 2, 70, 3], [1, 0, 70, 3], [1, 5, 70, 3]], np.int32)
    other = np.array([[0, 1, 9, 1], [0, 7, 9, 1], [1, 0, 9, 1], [1, 1, 9, 1]], np.int32)
    file = tmp_path / "counts.npz"
    tables: dict[str, Any] = {"mixtral-8x7b|a": table, "mixtral-8x7b|b": other, "olmoe|a": table}
    np.savez(file, **tables)
    found = counts_by_domain(file, "mixtral-8x7b", 8)
    assert list(found) == ["a", "b"]
    assert found["a"].occurrences.tolist() == [0, 3]
    assert found["b"].occurrences.tolist() == [1, 0]
    assert found["a"].activations[1].tolist() == [[0, 3, 3, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 3, 0, 0]]
    with pytest.raises(TraceError, match="experts must be in 0 … 3"):
        counts_by_domain(file, "mixtral-8x7b", 4)


def test_real_counts_have_every_activation(data_dir: Path) -> None:
    file = data_dir / "activations" / "olmoe-mixtral" / "eid2token_coo.npz"
    found = counts_by_domain(file, "mixtral-8x7b", 8)
    assert {int(counts.occurrences.sum()) for counts in found.values()} == {208_896}
    for counts in found.values():
        np.testing.assert_array_equal(counts.activations.sum(axis=(0, 2)), 2 * 208_896)
        assert (counts.activations.sum(axis=2) == 2 * counts.occurrences[:, None]).all()


@pytest.mark.parametrize("smoothing", [0.0, 2.0])
def test_expected_experts_are_those_of_a_plain_count(rng: np.random.Generator, smoothing: float) -> None:
    trace = token_trace(rng, requests=4, length=25)
    table = TokenTable(experts_kept=EXPERTS, confidence_smoothing=smoothing).fit(trace)
    popularity, tokens = table.rows.popularity.per_token, trace.arrays()[0]
    assert tokens.token_ids is not None
    asked = np.arange(VOCABULARY + 3)  # the last three were never seen
    expected = expected_experts(table, asked)
    for token in asked.tolist():
        seen = tokens.expert_ids[tokens.token_ids == token]
        for layer in range(LAYERS):
            counts = np.bincount(seen[:, layer].ravel(), minlength=EXPERTS)
            popular = np.argsort(-popularity[layer], kind="stable").tolist()
            own = np.lexsort((np.arange(EXPERTS), -counts))[: np.count_nonzero(counts)].tolist()
            right = [*own, *(expert for expert in popular if expert not in own)][:TOP_K]
            assert expected.experts[token, layer].tolist() == right
            trust = len(seen) / max(len(seen) + smoothing, 1e-300)
            share = counts[right].sum() / (max(len(seen), 1) * TOP_K)
            value = trust * share + (1 - trust) * popularity[layer, right].sum() / TOP_K
            assert expected.confidence[token, layer] == pytest.approx(min(1.0, value), abs=EXPERTS * 2.0**-15)
