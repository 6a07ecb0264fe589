"""Benchmarks print what their contract says; how fast they are is not a test."""

from __future__ import annotations

import pytest

from coterie.answers.suites import benches
from coterie.costs.presets import load_preset, shape_spec
from coterie_lab.benches import traces
from coterie_lab.benches.costs import _unseen_row


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
