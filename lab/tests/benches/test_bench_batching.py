"""The benchmark names every strategy at both sizes; how fast they are is not a test."""

from __future__ import annotations

import numpy as np

from coterie.answers.suites import benches
from coterie.batching import strategies
from coterie_lab.benches.batching import SIZES, STEP_COST, prompt_loads


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
