"""The suite of all decisions together: traffic, metrics of a run, pairs of decisions, and a small run on real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.control import AdviceSettings, LoopShape, PlacementAdvisor
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.placement import Objective, planners
from coterie.sim.fleet.metrics import LatencyLimits
from coterie.sim.group.serving import GroupLoads
from coterie.types import Placement, Topology
from coterie_lab.suites.together import suite
from coterie_lab.suites.together.groups import AsItPays, Periodic
from coterie_lab.suites.together.outcomes import Outcome, Served, capacity, limits_of, outcome_of
from coterie_lab.suites.together.rows import Cell, Pair, against_rows, pair_rows, recovered_s, run_rows, word_of
from coterie_lab.suites.together.suite import COMPARED
from coterie_lab.suites.together.traffic import ABRUPT, DRIFTING, MINORITY, STEADY, TRAFFICS, mix_of


@pytest.mark.parametrize("traffic", TRAFFICS)
@pytest.mark.parametrize("groups", [3, 4])
def test_every_request_is_of_some_group_and_the_minority_stays(traffic: str, groups: int) -> None:
    mix = mix_of(traffic, groups, 101)
    assert np.allclose(mix.sum(axis=1), 1.0)
    assert (mix >= 0).all()
    assert (mix[:, -1] == MINORITY).all()
    first, last = mix[0, :-1], mix[-1, :-1]
    if traffic == STEADY:
        assert np.allclose(mix, mix[0])
    elif traffic == DRIFTING:
        assert first.argmax() == 0
        assert last.argmax() == groups - 2
        assert np.abs(np.diff(mix, axis=0)).max() < 0.05
    else:
        assert not (first * last).any(), "no group is in both halves"
        assert len(np.unique(mix, axis=0)) == 2


def served(tpot_s: Any, ttft_s: float = 1.0) -> Served:
    tpot = np.asarray(tpot_s, np.float64)
    return Served(np.arange(len(tpot), dtype=np.float64), np.full(len(tpot), ttft_s), tpot)


def test_goodput_counts_what_is_within_both_limits_after_the_warm_up() -> None:
    tpot = np.where(np.arange(100) < 40, 9.0, 1.0)  # the first five are not measured
    run = outcome_of(served(tpot), np.arange(100) >= 90, LatencyLimits(1.0, 1.0), experts=4.0)
    assert run.within_pct == pytest.approx(100 * 60 / 95)
    assert run.goodput == pytest.approx(60 / 94)
    assert run.minority_tpot_p99_ms == 1000.0
    assert run.tpot_p50_ms == 1000.0
    late = outcome_of(served(tpot, 1.01), np.arange(100) >= 90, LatencyLimits(1.0, 1.0), experts=4.0)
    assert late.goodput == 0.0


def test_a_request_of_one_token_has_no_tpot_and_one_that_did_not_finish_is_outside() -> None:
    run = served(np.full(20, np.nan))
    assert outcome_of(run, np.zeros(20, bool), LatencyLimits(1.0, 1.0), 1.0).within_pct == 100.0
    lost = run._replace(ttft_s=np.full(20, np.nan))
    assert outcome_of(lost, np.zeros(20, bool), LatencyLimits(1.0, 1.0), 1.0).within_pct == 0.0


def test_limits_and_capacity() -> None:
    assert limits_of(served(np.full(50, 0.02), 0.3)) == pytest.approx((0.9, 0.025))
    assert capacity(np.arange(100) / 7.0) == pytest.approx(7.0)
    slow_ends = np.concatenate([np.arange(90) / 7.0, [90.0, 91.0]])  # the last requests run alone
    assert capacity(slow_ends) == pytest.approx(7.0)


def outcome(tpot_ms: float, goodput: float = 1.0) -> Outcome:
    ttft, tpot = (10.0, 10.0, 10.0), (tpot_ms, tpot_ms, tpot_ms)
    return Outcome(goodput, 100.0, *ttft, *tpot, tpot_ms, 4.0, 1.0, 0.0, (tpot_ms,) * 20, 2.0)


def test_time_to_recover_is_seen_beside_the_same_requests() -> None:
    waves = 100.0 + 50.0 * np.sin(np.arange(20))
    beside = [outcome(1.0)._replace(tpot_windows_ms=tuple(waves))]

    def recovered(ratio: Any) -> float | None:
        return recovered_s([outcome(1.0)._replace(tpot_windows_ms=tuple(waves * ratio))], beside)

    at = np.arange(20)
    assert recovered(np.where((at >= 10) & (at < 13), 1.2, 1.0)) == 6.0, "three windows of two seconds"
    assert recovered(np.ones(20)) == 0.0
    assert recovered(np.where(at < 10, 1.0, 1.04)) == 0.0
    assert recovered(np.where(at < 10, 1.0, 1.2)) is None
    assert recovered(np.where(at < 18, 1.0, 1.2)) == 0.0, "the run empties"


@pytest.mark.parametrize(
    ("second", "both", "word"),
    [(90, 72, "add up"), (90, 60, "help each other"), (90, 78, "overlap"), (90, 95, "fight")],
)
def test_the_word_for_a_pair_follows_from_what_both_save(second: float, both: float, word: str) -> None:
    pair = Pair("a", "b", "none", "a only", "b only", "both")
    runs = [
        {
            "none": outcome(100.0),
            "a only": outcome(80.0 + seed / 100),
            "b only": outcome(second),
            "both": outcome(both - 2.0 * (word == "add up") + seed / 100 - 0.01 * (word == "add up") * (seed - 1)),
        }
        for seed in range(3)
    ]
    (row,) = pair_rows(Cell("A", 1.0, STEADY), runs, [pair])
    assert row["tpot_p50_first_pct"] == pytest.approx(20.0, abs=0.1)
    assert word_of(row) == word


def test_the_best_published_system_is_chosen_on_other_seeds() -> None:
    compared = COMPARED["A"]
    names = [compared.whole, *compared.published.values()]
    good = {name: [1.0] * 5 for name in names}
    first, second, *_ = compared.published.values()
    good[first], good[second] = [3.0, 3.0, 1.0, 1.0, 1.0], [2.0, 2.0, 9.0, 9.0, 9.0]
    good[compared.whole] = [0.0, 0.0, 2.0, 2.0, 2.0]
    runs = [{name: outcome(1.0, values[seed]) for name, values in good.items()} for seed in range(5)]
    row = against_rows(Cell("A", 1.0, STEADY), runs, compared)[0]
    assert compared.published[row["against"]] == first
    assert row["seeds"] == 3
    assert row["goodput_gain_pct"] == pytest.approx(100.0)


def test_losses_are_against_the_baseline_of_the_same_seed() -> None:
    compared = COMPARED["A"]
    runs = [
        {compared.baseline: outcome(10.0 * (seed + 1)), compared.whole: outcome(11.0 * (seed + 1))} for seed in range(3)
    ]
    base, whole = run_rows(Cell("A", 1.0, STEADY), runs, compared)
    assert whole["p99_vs_baseline_pct"] == pytest.approx(10.0)
    assert base["p99_vs_baseline_pct"] == 0.0
    assert whole["tpot_p50_saving_pct"] == pytest.approx(-10.0)
    assert whole["recovered_s"] is None


def test_a_periodic_planner_changes_whenever_nothing_moves_and_the_advisor_only_where_it_pays() -> None:
    model, linear = step_model(get_model("gpt-oss-20b"), topology=Topology(4)), Placement.linear(24, 32, 4)
    objective = Objective.of(model, 64, horizon=1e6)
    skewed = GroupLoads(np.broadcast_to(np.where(np.arange(32) < 8, 90.0, 1.0), (4, 24, 32)), 32, [])
    always = Periodic(planners.make("eplb", {"objective": objective}), linear, model.topology, 1e7, 0.1)
    assert [always.tick(at, skewed) is not None for at in (0.1, 0.2)] == [True, False], "weights move"
    rules, shape = AdviceSettings(window_s=0.1, min_steps=1, cooldown_s=0.0), LoopShape("g", 24, 32, 4, 4)
    for loads in (skewed, skewed._replace(sources=np.full((4, 24, 32), 9.0))):
        pays = AsItPays(PlacementAdvisor(shape, model.topology, objective, linear, rules))
        assert any(pays.tick(0.1 * tick, loads) for tick in range(1, 40)) == (loads is skewed)


@pytest.mark.long
def test_a_quick_run_gives_every_row_that_is_promised_and_resumes(data_dir: Path, tmp_path: Path) -> None:
    options = SuiteOptions(data=data_dir, quick=True, out=tmp_path)
    ran: list[int] = []
    first = suite.run(options, lambda _what, done, _of: ran.append(done))
    keys = {"fleet", "load", "traffic", "config", "goodput", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"}
    rows = [row for row in first.rows if row["kind"] == "run"]
    assert {row["fleet"] for row in rows} == {"A", "B"}
    assert all((keys | {"p99_vs_baseline_pct"}) <= row.keys() and row["traffic"] == ABRUPT for row in rows)
    again: list[int] = []
    assert suite.run(options, lambda _what, done, _of: again.append(done)).rows == first.rows
    assert set(again) == {2}
    assert ran[0] == 0
