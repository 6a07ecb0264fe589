"""The benchmark's cases are the ones it names, and its comparisons with the integer program hold; not how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import benches
from coterie.cli.output import out
from coterie.cli.verbs.bench import bench_command
from coterie.placement import planners
from coterie_lab.benches import placement as bench_placement
from coterie_lab.benches import placement_steps
from coterie_lab.benches.placement import (
    BASELINES,
    BOUNDS,
    SIZES,
    TRIALS,
    Contest,
    Size,
    Trial,
    drifted,
    move_row,
    try_out,
)
from coterie_lab.benches.timing import Row

NAMED = ["planner", "split", "layers", "experts", "slots", "ranks", "median_ms", "balancedness", "moves", "duplicates"]


def test_the_stale_map_is_as_uneven_as_published() -> None:
    for size, low, high in ((SIZES[0], 0.50, 0.58), (SIZES[1], 0.76, 0.82), (SIZES[3], 0.62, 0.70)):
        problem = bench_placement.balance_first(size.target_balance).problem(*drifted(size, 0))
        assert low < problem.balance(problem.rank_s(problem.current.slot_experts)) < high, size.setting


def check_fits(rows: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal of 80 columns shows these rows with no word cut."""
    monkeypatch.setitem(benches._items, "these", lambda _report: rows)
    monkeypatch.setattr(out, "_width", 80)
    bench_command("these", json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


def test_every_planner_and_comparison_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole group, at a size that takes no time."""
    small = (Size(40, 4, 0.98), Size(32, 4, 0.98, 0.7, "linear"))
    monkeypatch.setattr(bench_placement, "EXPERTS", 32)
    monkeypatch.setattr(bench_placement, "LAYERS", 2)
    monkeypatch.setattr(placement_steps, "SIZES", ((36, 4),))
    monkeypatch.setattr(placement_steps, "REPEATS", 1)
    monkeypatch.setattr(bench_placement, "SIZES", small)
    monkeypatch.setattr(bench_placement, "SEEDS", range(2))
    monkeypatch.setattr(bench_placement, "REPEATS", 1)
    monkeypatch.setattr(bench_placement, "drifted", lambda size, seed: drifted(size, seed, 2, 32))
    monkeypatch.setattr(bench_placement, "CONTESTS", (Contest(small[0], "optimal", 1, 0.5),))
    together = {"planner": "latency_optimal", "against": "latency_optimal_ilp's bound"}
    monkeypatch.setattr(bench_placement, "_objective_rows", lambda *_: [together])
    told = []
    *all_rows, last = benches["placement"](lambda *at: told.append(at))
    assert told
    assert last == together
    check_fits(all_rows, monkeypatch, capsys)
    rows = [row for row in all_rows if "planner" in row]
    assert all(set(NAMED) <= set(row) for row in rows)
    assert all(row["duplicates"] == 0 for row in rows if row["planner"] not in BASELINES)
    found = [(row["planner"], row["split"], row["slots"]) for row in rows]
    names = ("keep", *BASELINES, "latency_optimal", "swaps")
    wanted = [(name, "equal", size.slots) for size in small for name in names]
    wanted += [("latency_optimal", "equal", 36)] * 2  # over scenarios, and for their mean
    wanted += [("keep", "optimal", 40), ("latency_optimal", "optimal", 40), ("latency_optimal_ilp", "optimal", 40)]
    assert sorted(found) == sorted(wanted)
    assert all(name in planners for name, _, _ in wanted if name != "keep")
    apart = [(row["split"], row["slots"], "attainable" in row) for row in all_rows if "planner" not in row]
    assert apart == [("equal", 40, True), ("optimal", 40, True), ("equal", 32, True), ("optimal", 40, False)]


def test_moves_at_the_same_balance_are_at_least_the_bound() -> None:
    row = move_row(Contest(SIZES[1], "optimal", 1, 2.0))
    assert row["least_moves"] <= row["moves"] <= row["heuristic_moves"]
    assert row["ratio"] >= 1.0
    assert row["balancedness"] >= SIZES[1].target_balance


def test_excess_is_over_the_bound_of_closed_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = try_out(Trial("small", 16, 20, 4, layers=2, prices={"horizon": 100.0}), seconds=2.0)
    larger = {name: value * 2 for name, value in outcome.row.items() if not isinstance(value, str)}
    other = outcome.row | larger | {"trial": "mixed speeds, two nodes"}
    check_fits(bench_placement.in_two([outcome.row, other], ("trial",), BOUNDS), monkeypatch, capsys)
    assert outcome.row["closed"] == len(outcome.excess)
    assert all(excess >= -1e-6 for excess in outcome.excess), "nothing is below a bound"


def test_trials_are_of_every_kind_and_enough_layers() -> None:
    assert sum(trial.layers for trial in TRIALS) >= 40
    assert {trial.split for trial in TRIALS} == {"equal", "optimal"}
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda t: t.slots > t.experts,
        lambda t: t.slots == t.experts,
        lambda t: t.ranks_per_node,
        lambda t: t.speeds,
        lambda t: t.sources,
        lambda t: t.prices.get("touch_s"),
        lambda t: t.prices.get("move_price"),
    )
    for kind in kinds:
        assert any(kind(trial) for trial in TRIALS)
    for trial in TRIALS:
        case = replace(trial, layers=1).case()
        assert case.current.num_slots == trial.slots
        assert case.load.tokens.sum() == pytest.approx(trial.rows)
        assert (case.load.sources is not None) == trial.sources
        assert np.isfinite(trial.objective().problem(*case).unit).all()
