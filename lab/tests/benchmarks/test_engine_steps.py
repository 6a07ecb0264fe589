"""The scripts around whole steps of vLLM, without a GPU: jobs, and fits of steps whose law is known."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.engines.replay.batches import step_load
from coterie.models import get_model
from gpu import fit_steps, step_jobs

SPEC = get_model("gpt-oss-20b")


@pytest.mark.parametrize(("rows", "distinct"), [(1, 4), (3, 8), (16, 20), (64, 32)])
def test_even_batches_touch_as_many_experts_in_every_layer(rows: int, distinct: int) -> None:
    ids = step_jobs.even(SPEC, rows, distinct, np.random.default_rng(0))
    load = step_load(ids.astype(np.uint8), SPEC.num_experts)
    assert (load.sum(axis=1) == rows * SPEC.top_k).all()
    assert ((load > 0).sum(axis=1) == distinct).all()
    assert (load.max(axis=1) - np.where(load > 0, load, rows).min(axis=1) <= 1).all()
    assert all(len(set(token)) == SPEC.top_k for layer in ids.transpose(1, 0, 2) for token in layer.tolist())


@pytest.mark.parametrize("split", fit_steps.SPLITS)
def test_a_law_is_found_again_in_its_own_steps(split: tuple[int, ...]) -> None:
    """Steps priced by known numbers: the fit has no error, and no other kernel fits better."""
    rng = np.random.default_rng(1)
    count = len(fit_steps.expert_columns(_cell(4, rng), SPEC, split))
    prices = rng.uniform(0.5, 4.0, count) if split else np.array([18.0])
    cells = []
    for number in range(160):
        cell = _cell((1, 2, 8, 24, 48, 64)[number % 6], rng)
        us = 900 + 7 * cell.rows + 6e-3 * cell.cached + float(prices @ fit_steps.expert_columns(cell, SPEC, split))
        cells.append(cell._replace(forward_us=us))
    found, quality, _ = fit_steps.fit_decode(cells, SPEC, split)
    assert quality.worst_pct < 0.1
    assert found[-count:] == pytest.approx(prices, rel=1e-3)
    others = [fit_steps.fit_decode(cells, SPEC, other)[1].mape_pct for other in fit_steps.SPLITS if other != split]
    assert min(others) >= quality.mape_pct


def _cell(rows: int, rng: np.random.Generator) -> fit_steps.Cell:
    distinct = min(int(rng.choice([4, 5, 6, 8, 12, 20, 32])), 4 * rows)
    ids = step_jobs.even(SPEC, rows, distinct, rng)
    cached = float(rows * rng.choice([128, 2048]))
    return fit_steps.Cell(rows, cached, step_load(ids.astype(np.uint8), SPEC.num_experts), "even", 1.0, 300.0)
