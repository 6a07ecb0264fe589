"""Benchmarks print what their contract says, at sizes that take no time; how fast they are is not a test."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.answers.suites import benches
from coterie.batching import strategies
from coterie.costs.presets import load_preset, shape_spec
from coterie_lab.benches import co_clustering as bench
from coterie_lab.benches import traces
from coterie_lab.benches.batching import SIZES, STEP_COST, prompt_loads
from coterie_lab.benches.costs import _unseen_row
from coterie_lab.benches.kvindex import kv_directory_rows


def test_trace_rows_have_names_sizes_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TRACE_BYTES", 2_000_000)
    rows = benches["traces"](lambda *_: None)
    assert [row["name"] for row in rows] == ["generate", "open", "read one request", "count load", "copy"]
    assert all(row["tokens"] > 0 and (row.get("median_us") or row.get("median_ms") or 0) > 0 for row in rows)


def test_an_unseen_shape_is_predicted_from_another_one() -> None:
    preset = load_preset("h200")
    for shape in preset.measurement.shapes:
        for table in shape.moe:
            row = _unseen_row(preset, shape_spec(shape), table)
            assert row["from"] != shape.model
            assert 0 < row["mape_pct"] < 20


def test_a_row_for_every_strategy_and_size() -> None:
    rows = benches["batching"](lambda *_: None)
    assert [list(row) for row in rows] == [["strategy", "window", "batch", "experts", "median_us"]] * len(rows)
    sizes = [(window, batch, experts) for window, batch, experts, _ in SIZES]
    found = [(row["strategy"], row["window"], row["batch"], row["experts"]) for row in rows]
    assert found == [(name, *size) for size in sizes for name in (*strategies, STEP_COST)]
    assert all(row["median_us"] > 0 for row in rows)


def test_loads_are_whole_tokens_of_every_prompt() -> None:
    loads = prompt_loads(np.random.default_rng(3), 50, 60, 4)
    assert loads.shape == (50, 1, 60)
    assert (loads == loads.round()).all()
    totals = loads.sum(axis=(1, 2))
    assert (totals % 4 == 0).all()
    assert totals.min() >= 16 * 4
    assert totals.max() <= 512 * 4


def test_rows_are_of_both_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ITEMS": 60, "LAYERS": 2, "EXPERTS": 16, "TOP_K": 2, "RANKS": 4, "THEMES": 4}.items():
        monkeypatch.setattr(bench, name, value)
    rows = benches["co-clustering"](lambda *_: None)
    assert [row["name"] for row in rows] == ["sem_moe plan", "co_cluster plan"]
    assert rows[0]["median_ms"] > 0


def test_items_are_of_a_model() -> None:
    items = bench.themed_items(np.random.default_rng(0), 50, 3, 8, 2, 4)
    assert items.weights.max() <= 1.0
    assert items.weights.sum(axis=2).max() <= 2 + 1e-9
    assert (np.sort(items.experts, axis=2)[:, :, 1:] != np.sort(items.experts, axis=2)[:, :, :-1]).all()
    assert (np.diff(items.frequency) <= 0).all()


def test_rows() -> None:
    rows = kv_directory_rows(lambda *_: None, num_blocks=3136, num_workers=4, prompts=3)
    names = [row["name"] for row in rows]
    assert names == [*(["kv_match_tokens"] * 2), "kv_apply", *(["kv_stream"] * 3)]
    assert all(row["blocks"] == 3136 for row in rows[:3])
    assert all(row["median_us"] > 0 for row in rows[:2])
    assert rows[2]["holdings"] == 2 * 16 * 256
    assert all(row["blocks_per_s"] > 0 for row in rows[2:])
