"""The exact program of co-clusters against brute force, the alternating algorithm beside it, and the rows of gaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng

from co_cluster_cases import brute_force, some_items
from coterie.answers.suites import SuiteOptions
from coterie.placement import Items
from coterie.placement.co_clustering import cost
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie.traces import ActivationTrace, TraceMeta
from coterie_lab.suites.sem_moe import optimum
from coterie_lab.suites.sem_moe.exact import solve_exactly
from coterie_lab.suites.sem_moe.optimum import ITEMS, optimum_gaps, optimum_notes, optimum_rows
from simulate_traces import quiet


@pytest.mark.parametrize("theta", [0.0, 0.4, 1.0])
def test_the_exact_program_finds_what_brute_force_finds(theta: float) -> None:
    items = some_items(default_rng(3), 5, 4)
    found = solve_exactly(items, 4, 2, theta)
    assert found.cost == pytest.approx([brute_force(items, 4, 2, theta)])
    assert found.bound == pytest.approx(found.cost, abs=1e-4)


def test_the_exact_program_keeps_the_ranks_of_requests_in_all_layers() -> None:
    items = some_items(default_rng(4), 4, 4, layers=2, one_rank=True)
    found = solve_exactly(items, 4, 2, 0.5)
    assert found.ranks.shape == (1, 4)
    assert found.cost == pytest.approx(cost(items, found.expert_ranks, found.ranks, 2, 0.5))
    apart = Items(items.frequency, items.experts, items.weights)
    assert found.cost[0] >= solve_exactly(apart, 4, 2, 0.5).cost.sum() - 1e-9, "a rank per layer is freer"


def test_the_alternating_algorithm_is_near_the_optimum_on_average() -> None:
    over = []
    for seed in range(8):
        items = some_items(default_rng(seed), 10, 6, themes=2 * (seed % 2))
        best = solve_exactly(items, 6, 2, 0.5).cost
        found = alternate(items, 6, 2, default_rng(0), AlternatingSettings(theta=0.5, starts=4))
        over.append(float(cost(items, *found, 2, 0.5)[0] / best[0]))
    assert min(over) >= 1 - 1e-6, "nothing is below the optimum"
    assert np.mean(over) < 1.05


@pytest.mark.parametrize("background", [0.0, 0.1])
def test_planted_clusters_have_no_gap(background: float) -> None:
    """Items of even and odd numbers activate even and odd experts; a background is remote wherever they are."""
    same = np.arange(ITEMS)[:, None] % 2 == np.arange(4)[None] % 2
    items = Items.of_counts(np.where(same, 1.0, background)[:, None], np.ones(ITEMS))
    for theta in optimum.THETA.values():
        gaps = optimum_gaps(items, 4, 2, theta, 0)
        assert gaps is not None
        assert gaps == pytest.approx({"sem_moe": 0.0, "co_cluster": 0.0}, abs=1e-9)


@pytest.mark.parametrize("alike", [True, False])
def test_an_instance_has_the_hottest_experts_with_their_shares(alike: bool) -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(3.0, (30, 2, 20)) * np.linspace(2.0, 0.1, 20)
    fitted = Items.of_counts(counts, np.full(30, 50.0), one_rank=True)
    found = optimum.draw_instance(fitted, 20, 4, np.random.default_rng(1), alike=alike)
    assert (len(found), found.num_layers, found.one_rank) == (ITEMS, 1, True)
    assert set(found.frequency.tolist()) == {1.0 if alike else 50.0}
    load = fitted.load(20)
    per_token = found.weights.sum() / len(found)
    hottest = np.sort(load, axis=1)[:, -optimum.EXPERTS :].sum(axis=1) / fitted.frequency.sum()
    assert min(abs(per_token / hottest - 1)) < 0.2, "the shares of items are kept, not scaled"


def test_rows_are_whole_and_no_gap_is_negative(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 30, 1200).astype(np.int32)
    prefers = rng.random((30, 2, 4))
    ids = np.argsort(-(prefers[tokens] + rng.random((1200, 2, 4))), axis=-1)[..., :2]
    trace = ActivationTrace.from_arrays(
        TraceMeta("drawn", 4, 2, 2), ids.astype(np.uint8), np.arange(0, 1201, 20), token_ids=tokens
    )
    trace.save(tmp_path / "drawn")
    rows = optimum_rows(SuiteOptions(trace=tmp_path / "drawn", seeds=(0,)), quiet, {4: 1, 2: 2})
    kinds = {(row["items"], row["ranks"], row["measure"], row["planner"]) for row in rows}
    assert len(kinds) == len(rows) == 2 * 2 * 2, "4 experts are too few for 4 ranks"
    for row in rows:
        assert row["part"] == "optimum"
        assert row["instances"] == row["proven"] == 2
        assert -1e-9 <= row["gap_pct"] <= row["worst_gap_pct"]
        assert row["gap_low"] <= row["gap_pct"] <= row["gap_high"]
        assert row["published"] is None
    notes = optimum_notes(rows)
    assert "8 of 8 were proven" in notes[0]
    assert notes[1].startswith("drawn, ")
    assert "of 2 cases at the same balance" in notes[-1]


def test_no_data_makes_no_rows(tmp_path: Path) -> None:
    assert optimum_notes(optimum_rows(SuiteOptions(data=tmp_path), quiet)) == []
