"""The drift suite: requests to fit on are never served, rows and verdicts, and a small cell of each trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from control_traffic import NEW, OLD, band, fitted, made_requests
from coterie.answers.suites import SuiteOptions
from coterie.errors import ConfigError, UnavailableError
from coterie.routing import LocalityBand, Request, RouterFit
from coterie_lab.suites.drift import suite as drift
from coterie_lab.suites.drift.advice import advice_row
from coterie_lab.suites.drift.cells import CHANCE, FRESH, LOOP, WITHOUT, CellResult, DriftCell, Outcome, serve_cell
from coterie_lab.suites.drift.controlled import FitsAtChanges, OneElsewhere
from coterie_lab.suites.drift.notes import TABLES, advice_notes, notes_of
from coterie_lab.suites.drift.traffic import GLM, GPT_OSS, read_turns
from coterie_lab.suites.latency_optimal.domains import DomainSetting


def found(loop_ms: float) -> CellResult:
    outcomes = {
        WITHOUT: Outcome(10.0, 20.0, 10.0, 20.0),
        LOOP: Outcome(loop_ms, 19.0, 9.0, 18.0),
        FRESH: Outcome(9.0, 18.0, 9.0, 18.0),
        CHANCE: Outcome(10.02, 20.0, 10.0, 20.0),
    }
    return CellResult(outcomes, {"refit_started": 2, "refit_taken": 1}, 150.0, 3)


def test_rows_compare_by_seed_and_say_whether_the_bar_holds() -> None:
    cells = {DriftCell(GPT_OSS, "locality_band", seed): found(9.4 + 0.1 * seed) for seed in range(3)}
    cells |= {DriftCell(GLM, "latency_aware", seed): found(10.1) for seed in range(3)}
    rows = drift.rows_of(cells)
    assert [row["variant"] for row in rows] == [WITHOUT, LOOP, FRESH, CHANCE] * 2
    good, bad = (row for row in rows if row["variant"] == LOOP)
    assert good["tpot_ms_saving_pct"] == pytest.approx(5.0)
    assert good["tpot_ms_saving_low"] < 5.0 < good["tpot_ms_saving_high"]
    assert good["within_bar"]
    assert bad["worst_seed_pct"] == pytest.approx(-1.0)
    assert not bad["within_bar"]
    notes = "\n".join(notes_of(rows))
    assert "the loop helps: it saves +5.00%" in notes
    assert "more than 0.5%: does NOT hold (-1.00%" in notes
    assert "changes TPOT by 0.20%" in notes
    for table in TABLES:
        shown = [row for row in rows if table.shows(row)]
        assert len(shown) == 4
        assert all(str(column.value(row)) is not None for row in shown for column in table.columns)


def test_advice_is_scored_on_windows_that_it_was_not_made_from() -> None:
    rng = np.random.default_rng(0)
    steady = np.repeat(rng.dirichlet(np.full(256, 0.5), (1, 2)), 8, axis=0)  # the same load in all windows
    setting = DomainSetting(windows=8, steps=500, slots=256)
    row = advice_row("prefill", 16_384, steady, setting)
    assert 1 <= row["plans"] <= 3, "little is left to gain once a plan is carried out"
    assert row["gain_next_pct"] == pytest.approx(row["gain_planned_pct"], rel=0.01), "source ranks have come in since"
    assert row["moves"] > 0
    assert "plans in 8 windows" in advice_notes([row])[0]


def test_without_data_there_is_nothing_to_serve() -> None:
    with pytest.raises(UnavailableError, match="COTERIE_DATA"):
        drift.run(SuiteOptions(), lambda *_args, **_values: None)


def test_fits_at_changes_are_in_force_from_the_first_request_on() -> None:
    fits: list[RouterFit] = [
        fitted(made_requests(np.random.default_rng(seed), groups, 32)) for seed, groups in enumerate((OLD, NEW))
    ]
    controller = FitsAtChanges([2, 5], fits, band, 8)
    swaps = [controller.tick(float(at), []) for at in range(8)]
    assert [at for at, swap in enumerate(swaps) if swap is not None] == [2, 5]
    assert swaps[5] is not None
    assert isinstance(swaps[5].router, LocalityBand)
    assert swaps[5].router.fitted is fits[1]


def test_one_request_goes_elsewhere_and_no_other() -> None:
    fit = fitted(made_requests(np.random.default_rng(0), OLD, 32))
    router, fleet = band(fit), fit.fleet(8)
    seen = made_requests(np.random.default_rng(1), OLD, 5)
    controller, using = OneElsewhere(2, router), router
    for at, one in enumerate(seen):
        swap = controller.tick(one.at_s, [])
        assert (swap is not None) == (at in (2, 3))
        using = using if swap is None else swap.router
        asked = Request(one.request_id, 20, one.prefill)
        chosen, own = (int(each.route(asked, fleet).worker) for each in (using, router))
        assert (chosen != own) == (at == 2)
        fleet.admit(one.request_id, chosen)


@pytest.mark.parametrize("trace", [GPT_OSS, pytest.param(GLM, marks=pytest.mark.long)])
def test_what_is_fitted_on_is_never_served(data_dir: Path, trace: str) -> None:
    turns = read_turns(trace, data_dir, 0, 60)
    kept = turns.requests.recordings
    assert (np.diff(turns.turn) >= 0).all()
    assert len(np.unique(turns.requests.recorded)) == len(turns.requests), "none is served twice"
    assert kept.footprint is not None
    served = {counts.astype(np.uint32).tobytes() for counts in kept.footprint}
    for known in turns.fits:
        assert not served & {counts.tobytes() for counts in known.prefill}
    with pytest.raises(ConfigError, match="four times"):
        serve_cell(DriftCell(trace, "latency_aware", 0), data_dir, 60)


@pytest.mark.long
@pytest.mark.parametrize("trace", [GPT_OSS, GLM])
@pytest.mark.parametrize("router", ["latency_aware", "locality_band"])
def test_the_loop_costs_nothing_to_speak_of(data_dir: Path, trace: str, router: str) -> None:
    cell = serve_cell(DriftCell(trace, router, 1), data_dir, 400)
    assert cell.outcomes[LOOP].tpot_ms < 1.005 * cell.outcomes[WITHOUT].tpot_ms
    if (trace, router) == (GPT_OSS, "locality_band"):
        assert cell.outcomes[LOOP].tpot_ms < 0.95 * cell.outcomes[WITHOUT].tpot_ms
        assert cell.events["refit_taken"] >= 1
