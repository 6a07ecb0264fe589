"""The placement suite: what is planned on is never scored, rows compare by seed, and a small run of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions, options_read
from coterie.errors import UnavailableError
from coterie_lab.suites.placement import cells, traffic
from coterie_lab.suites.placement import suite as placement
from coterie_lab.suites.placement.cells import CONTENDERS, EPLB, LINEAR, MEAN, ROWS, STEPS, Cell
from coterie_lab.suites.placement.figures import strips_of
from coterie_lab.suites.placement.mixtures import (
    FOR_DOMAINS,
    FOR_MEAN,
    FOR_MIX,
    MOVING,
    STEADY,
    Mixture,
    Traded,
    serve_mixture,
)
from coterie_lab.suites.placement.notes import TABLES, notes_of
from coterie_lab.suites.placement.rows import mixture_rows, plan_rows, shift_rows
from coterie_lab.suites.placement.shifts import FEW, HORIZONS, Replanned, Shift, samples_of, serve_shift
from coterie_lab.suites.placement.traffic import GLM, LEFT_OUT, TINY, read_recorded, spec_of

COLUMNS = (
    "trace planner split ranks slots requests_a_step balancedness_fit balancedness_unseen layer_time_vs_eplb_pct moves "
    "median_ms bytes phase balancedness_unseen_low balancedness_unseen_high seeds"
)


def made(planner: str, seed: int) -> cells.Planned:
    unseen = {LINEAR: 0.6, EPLB: 0.7, STEPS: 0.8}.get(planner, 0.75) + 0.01 * seed
    return cells.Planned(planner, "equal", 12, 32, ROWS, unseen + 0.1, unseen, 1e-6 / unseen, 100.0, 0.01)


def made_rows() -> list[dict[str, Any]]:
    plans = {Cell("gpt-oss-20b", 16, 8, seed): [made(name, seed) for name in CONTENDERS] for seed in range(3)}
    plans |= {
        Cell(GLM, LEFT_OUT, 8, seed): [made(name, 0)._replace(slots=256) for name in CONTENDERS] for seed in (0, 1)
    }
    moves = {EPLB: 800, STEPS: 160}
    shifts = {
        Shift(GLM, 256, "all", seed): [
            Replanned(name, 300.0, 15, 0.7, 0.8, 1e-6, moves[name], 0.1, 0.02) for name in moves
        ]
        for seed in range(2)
    }
    trade = {
        Mixture(8, 256, seed): [
            Traded(name, 0.9, 0.8, 0.7, {STEADY: a, MOVING: 1 - a}, {STEADY: a, MOVING: 1 - a})
            for name, a in ((FOR_MEAN, 0.95), (FOR_MIX, 0.9), (FOR_DOMAINS, 0.8))
        ]
        for seed in range(2)
    }
    return [*plan_rows(plans), *shift_rows(shifts), *mixture_rows(trade)]


def test_rows_compare_by_seed() -> None:
    rows = made_rows()
    row = next(row for row in rows if row.get("planner") == STEPS and row["trace"] == "gpt-oss-20b")
    assert set(COLUMNS.split()) <= set(row)
    assert row["balancedness_unseen"] == pytest.approx(0.81)
    assert row["balancedness_unseen_low"] < 0.81 < row["balancedness_unseen_high"]
    assert row["vs_eplb_points"] == pytest.approx(10.0)
    assert row["vs_eplb_low"] == pytest.approx(10.0), "paired: the spread of the seeds is not in it"
    assert -12.6 < row["layer_time_vs_eplb_pct"] < -12.2
    moved = next(row for row in rows if row["part"] == "shifts" and row["planner"] == STEPS)
    assert moved["moves_of_eplb_pct"] == 20.0
    picks = {row["traffic"]: row["picked_for_domains"] for row in rows if "picked_for_domains" in row}
    assert picks == {STEADY: 0, MOVING: 2}


def test_notes_and_tables_say_what_the_rows_hold() -> None:
    rows = made_rows()
    notes = "\n".join(notes_of(rows))
    assert "more than 0.5 points on unseen steps: holds" in notes
    assert "20% of EPLB's (at most a quarter)" in notes
    assert "Verdict: " in notes
    for table in TABLES:
        shown = [row for row in rows if table.shows(row)]
        assert shown or "layer time" in table.title
        assert all(str(column.value(row)) for row in shown for column in table.columns)


def test_without_data_there_is_nothing_to_plan() -> None:
    assert options_read("placement") == ("seeds",)
    with pytest.raises(UnavailableError, match="COTERIE_DATA"):
        placement.run(SuiteOptions(), lambda *_args, **_values: None)


def test_slots_divide_by_ranks() -> None:
    for trace in (GLM, "gpt-oss-20b", "deepseek-v2-lite", TINY):
        for cell in cells.cells_of(trace, (0,)):
            experts = spec_of(trace).num_experts
            slots = cells.slots_of(experts, cell.ranks)
            assert slots[0] == experts
            assert not any(count % cell.ranks for count in slots)


def test_requests_that_are_planned_on_are_not_scored() -> None:
    recorded = read_recorded(TINY, None)
    fit, unseen = recorded.halves(3)
    assert not set(fit) & set(unseen)
    assert len(fit) + len(unseen) == len(recorded.footprints)
    sample = recorded.sample(4, ROWS, 3)
    assert sample.fit.num_scenarios == sample.unseen.num_scenarios == 150
    decode = recorded.sample(4, "decode", 3).unseen
    assert decode.scenarios is not None
    assert (decode.scenarios.sum(axis=2) == 4 * 4).all(), "a token of four requests, four experts each"
    law, _ = recorded.of_areas(["legal"], 2, 5, 3)
    assert law.shape == (5, 4, 32)


def test_a_cell_of_the_shipped_model() -> None:
    found = cells.serve_cell(Cell(TINY, 4, 8, 0), Path())
    assert {one.phase for one in found} == set(cells.PHASES)
    assert {one.slots for one in found} == {32, 40, 48}
    by_name = {one.planner: one for one in found if (one.phase, one.slots) == (ROWS, 32)}
    assert by_name[STEPS].unseen > by_name[EPLB].unseen
    assert by_name[STEPS].unseen >= by_name[MEAN].unseen
    assert by_name[EPLB].unseen > by_name[LINEAR].unseen
    assert by_name[STEPS].layer_s < by_name[EPLB].layer_s
    assert by_name[LINEAR].moves == 0


def test_other_traffic_takes_fewer_moves_than_eplb(data_dir: Path) -> None:
    found = serve_shift(Shift(GLM, 288, "3/4 to 1/4", 0), data_dir)
    for horizon in HORIZONS:
        by_name = {one.planner: one for one in found if one.horizon == horizon}
        eplb, ours, few = (by_name[name] for name in (EPLB, STEPS, FEW))
        assert ours.moves <= eplb.moves / 4
        assert ours.layer_s < eplb.layer_s
        assert ours.total_s < eplb.total_s
        assert few.moves <= eplb.moves / 4
        assert few.layer_s <= eplb.layer_s
    before, after = samples_of(Shift(GLM, 288, "all", 0), data_dir)
    assert before.fit.num_scenarios == after.fit.num_scenarios == 16, "steps that do not come are not planned on"


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v2-lite"])
def test_recorded_requests_have_steps_of_both_phases(data_dir: Path, name: str) -> None:
    recorded = read_recorded(name, data_dir)
    decode = recorded.sample(16, "decode", 0).fit
    assert decode.tokens.shape == recorded.footprints.shape[1:]
    assert np.allclose(decode.tokens.sum(axis=1), 16 * spec_of(name).top_k)
    assert recorded.sample(16, ROWS, 0).fit.tokens.sum() > 10 * decode.tokens.sum()


@pytest.mark.parametrize("kind", [traffic.ONE_DOMAIN, traffic.MIX, LEFT_OUT])
def test_chunks_that_are_planned_on_are_not_scored(data_dir: Path, kind: str) -> None:
    chunks = traffic.read_chunks(data_dir)
    for seed in (0, 1):
        fit, unseen = chunks.halves(seed)
        assert not {part.tobytes() for half in fit for part in half} & {
            part.tobytes() for half in unseen for part in half
        }
    samples = traffic.glm_samples(chunks, kind, ROWS, 0)
    assert len(samples) == (4 if kind == LEFT_OUT else 1)
    rows = 16_384 * 8
    assert np.allclose(samples[0].fit.tokens.sum(axis=1), rows)
    assert np.allclose(samples[0].unseen.tokens.sum(axis=1), rows)


@pytest.mark.long
def test_the_figure_and_the_trade_on_real_loads(data_dir: Path) -> None:
    strips = strips_of(data_dir)
    assert strips.loads[STEPS].shape == (16, 40)
    assert np.allclose(strips.loads[STEPS].mean(axis=0), 1.0)
    assert strips.loads[STEPS].max(axis=0).mean() < strips.loads[EPLB].max(axis=0).mean()
    found = {one.plan: one for one in serve_mixture(Mixture(8, 256, 0), data_dir)}
    assert found[FOR_DOMAINS].worst_domain > found[FOR_MIX].worst_domain
    assert found[FOR_MIX].mix > found[FOR_DOMAINS].mix - 0.005, "either may be ahead by chance, and not far"
