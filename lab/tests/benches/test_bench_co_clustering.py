"""The benchmark of co-clustering, at a size that takes no time: its rows, and nothing below the optimum."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.answers.suites import benches
from coterie_lab.benches import co_clustering as bench


def test_rows_are_of_both_planners_and_of_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ITEMS": 60, "LAYERS": 2, "EXPERTS": 16, "TOP_K": 2, "RANKS": 4, "THEMES": 4}.items():
        monkeypatch.setattr(bench, name, value)
    for name, value in {"SMALL_EXPERTS": 4, "SMALL_ITEMS": 6, "SMALL_CASES": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "SMALL_RANKS", (2,))
    rows = benches["co-clustering"](lambda *_: None)
    assert [row["name"] for row in rows] == ["sem_moe plan", "co_cluster plan", "alternating against the optimum"]
    assert rows[0]["median_ms"] > 0
    assert rows[2]["closed"] == 2
    assert rows[2]["mean_excess_pct"] >= 0


def test_items_are_of_a_model() -> None:
    items = bench.themed_items(np.random.default_rng(0), 50, 3, 8, 2, 4)
    assert items.weights.max() <= 1.0
    assert items.weights.sum(axis=2).max() <= 2 + 1e-9
    assert (np.sort(items.experts, axis=2)[:, :, 1:] != np.sort(items.experts, axis=2)[:, :, :-1]).all()
    assert (np.diff(items.frequency) <= 0).all()
