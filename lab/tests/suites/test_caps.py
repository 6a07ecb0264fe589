"""The CAPS suite: its structure, one cell of it, and that it is deterministic. The full evaluation is a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.batches.drawn import DRAWN
from coterie.answers.suites import SuiteOptions
from coterie.batching import strategies
from coterie.errors import UnknownNameError
from coterie_lab.suites.caps.published import BURSTY, RATES, TOP_SIX, published
from coterie_lab.suites.caps.suite import Cell, paper_results, run, run_cell
from simulate_traces import quiet

SMALL = SuiteOptions(requests=300, seeds=(1, 2), rates=(150.0, 300.0), strategies=("greedy_variance", "latency_aware"))


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def small() -> Any:
    return run(SMALL, quiet)


def test_rows_have_what_is_promised(small: Any) -> None:
    keys = {"pattern", "rate", "strategy", "throughput_gain_pct", "imbalance_reduction_pct", "published", "worst_skips"}
    keys |= {"p99_reduction_pct", "p99_reduction_low", "p99_reduction_high", "worst_wait_ms"}
    assert len(small.rows) == 2 * 2 * 3
    assert all(keys <= row.keys() for row in small.rows)
    for row in small.rows:
        assert row["published"] is None, "300 requests were not published"
        if row["strategy"] == "fcfs":
            assert row["p99_reduction_pct"] == row["throughput_gain_pct"] == row["imbalance_reduction_pct"] == 0.0
            assert row["worst_skips"] == 0
    json.dumps(small.rows)


def test_the_same_seeds_give_the_same_numbers(small: Any) -> None:
    assert run(SMALL, quiet).rows == small.rows


def test_gains_are_of_the_means_over_seeds() -> None:
    cells = {seed: run_cell(Cell("bursty", 300.0, seed), ("fcfs", "random"), 300, DRAWN) for seed in (1, 2)}
    rows = run(SuiteOptions(requests=300, seeds=(1, 2), rates=(300.0,), strategies=("random",)), quiet).rows
    row = next(row for row in rows if row["pattern"] == "bursty" and row["strategy"] == "random")
    means = {name: np.mean([cells[seed][name].p99_ms for seed in (1, 2)]) for name in ("fcfs", "random")}
    assert row["p99_reduction_pct"] == pytest.approx(100 * (1 - means["random"] / means["fcfs"]))
    assert row["p99_reduction_low"] <= row["p99_reduction_pct"] <= row["p99_reduction_high"]


def test_files_in_the_published_structure(tmp_path: Path) -> None:
    options = SuiteOptions(requests=200, seeds=(1,), rates=(300.0,), strategies=("lpt",), out=tmp_path / "out")
    result = run(options, quiet)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["config"]["requests"] == 200
    assert found["strategies"] == ["fcfs", "lpt"]
    cell = found["bursty"]["300"]
    assert set(cell) == {"fcfs", "lpt", "_improvements"}
    assert {"p50_mean", "p90_std", "p99_mean", "throughput_mean", "imbalance_std"} <= set(cell["lpt"])
    assert set(cell["_improvements"]["lpt"]) == {"p99_reduction_pct", "throughput_gain_pct", "imbalance_reduction_pct"}
    assert "lpt" in (tmp_path / "out" / "evaluation.log").read_text()
    assert {path.suffix for path in (tmp_path / "out").glob("fig*")} == {".pdf", ".png"}
    assert paper_results(result, 200, (1,), (300.0,), ("fcfs", "lpt"))["poisson"].keys() == {"300"}


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UnknownNameError, match="greedy_variance"):
        run(SuiteOptions(strategies=("greedy_varianc",)), quiet)


def test_published_figures() -> None:
    assert set(TOP_SIX) <= set(BURSTY) <= set(strategies.names())
    first, second = published("bursty", 200.0, "power_of_d"), published("bursty", 150.0, "greedy_variance")
    assert first is not None
    assert first["p99_reduction_pct"] == 26.5
    assert second is not None
    assert second["throughput"] == 131.61
    assert published("poisson", 150.0, "best_fit") == {"p99_reduction_pct": [-19.0, -16.0]}
    assert published("poisson", 150.0, "power_of_d") is None
    assert published("bursty", 175.0, "greedy_variance") is None
    assert all(published("bursty", rate, "fcfs") is None for rate in RATES)


def test_the_published_order_of_strategies() -> None:
    """One cell of the evaluation itself: bursty, 300 requests a second."""
    names = ("fcfs", "greedy_variance", "differencing", "random", "karmarkar_karp", "lpt", "latency_aware")
    found = run_cell(Cell("bursty", 300.0, 42), names, 3000, DRAWN)
    p99 = [found[name].p99_ms for name in ("greedy_variance", "random", "karmarkar_karp", "lpt", "fcfs")]
    assert p99 == sorted(p99)
    assert found["latency_aware"].p99_ms < 1.03 * found["greedy_variance"].p99_ms
    assert found["greedy_variance"].imbalance == pytest.approx(1.593, abs=0.03)


def test_with_a_shallow_queue_latency_aware_does_not_lose() -> None:
    names = ("fcfs", "greedy_variance", "latency_aware")
    runs = [run_cell(Cell("poisson", 150.0, seed), names, 3000, DRAWN) for seed in (42, 123)]
    ours, fcfs, greedy = (np.mean([run[name].p99_ms for run in runs]) for name in ("latency_aware", *names[:2]))
    assert ours <= fcfs < greedy
