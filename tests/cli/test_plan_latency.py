"""`coterie plan --latency`: what requests notice while the moves of a plan run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import Run, refused
from coterie.answers.plan import moving
from coterie.answers.plan.plans import PlanOptions, make_plan
from planning_commands import save_load


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT_TOKENS": 256, "OUTPUT_TOKENS": 8, "ROWS": 16, "REQUESTS": 12, "STARTS": 2}.items():
        monkeypatch.setattr(moving, name, value)


def test_all_ways_are_told_and_shown(run: Run, tmp_path: Path) -> None:
    load = save_load(tmp_path / "load")
    found = json.loads(run("plan", load, "--latency", "--json").out)
    rows = {row["movement"]: row for row in found["while_moving"]}
    assert [*rows] == ["none", "stops", "staged"]
    assert rows["none"]["recovered_s"] == rows["none"]["moving_s"] == 0.0
    for row in rows.values():
        assert row["requests"] == rows["none"]["requests"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert rows["stops"]["moving_s"] == pytest.approx(found["movement_s"]), "both take the rounds one after another"
    shown = run("plan", load, "--latency")
    assert (shown.code, shown.err) == (0, "")
    assert "the engine stops" in shown.out


def test_a_slow_move_is_felt_where_the_engine_stops(tmp_path: Path) -> None:
    """Over links a hundred times slower all moves take many steps: a stop is one long gap, staged moves are none."""
    links = tmp_path / "links.txt"
    np.savetxt(links, np.full((8, 8), 4.5))
    planned = make_plan(PlanOptions(save_load(tmp_path / "load"), links=links, planner="eplb"))
    none, stops, staged = moving.latency_while_moving(planned)
    assert stops.longest_gap_ms > 1e3 * stops.moving_s > 3 * none.longest_gap_ms
    assert staged.longest_gap_ms < 0.5 * stops.longest_gap_ms
    assert stops.ttft_p99_ms > staged.ttft_p99_ms
    assert stops.recovered_s is None or stops.recovered_s > stops.moving_s


def test_what_cannot_be_simulated_is_refused_before_the_plan(run: Run, tmp_path: Path) -> None:
    load = save_load(tmp_path / "load")
    for given in (("--ranks", 1), ("--speeds", "1,1,1,1,1,1,1,0.5")):
        refused(run("plan", load, "--latency", *given), "--latency simulates a change on 2 to 64 ranks")


def test_nodes_and_spare_slots_are_simulated(run: Run, tmp_path: Path) -> None:
    load = save_load(tmp_path / "load")
    for given in (("--nodes", 2), ("--slots", 40)):
        found = json.loads(run("plan", load, "--latency", *given, "--json").out)
        assert [row["movement"] for row in found["while_moving"]] == ["none", "stops", "staged"]


def test_a_plan_without_moves_is_not_simulated(run: Run, tmp_path: Path) -> None:
    load = save_load(tmp_path / "load")
    found = json.loads(run("plan", load, "--latency", "--planner", "linear", "--json").out)
    assert (found["moves"], found["while_moving"]) == (0, [])
    shown = run("plan", load, "--latency", "--planner", "linear")
    assert (shown.code, shown.err) == (0, "")
    assert "while weights move" not in shown.out
