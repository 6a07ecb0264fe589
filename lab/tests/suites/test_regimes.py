"""The regimes suite: what is replayed is what was recorded, predictions come from other tokens, rows are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.batching import LatencyAware, strategies
from coterie.errors import UnavailableError, UnknownNameError
from coterie.footprints import footprint
from coterie.traces import ActivationTrace
from coterie.traces.readers import read_trace
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.eldr.synthetic import load_arrivals
from coterie_lab.suites.regimes import suite as regimes
from coterie_lab.suites.regimes.suite import (
    ARRIVALS,
    AS_PUBLISHED,
    BURST,
    REGIMES,
    Bench,
    Cell,
    draw,
    draw_order,
    run,
    verdict,
)
from sim_checks import checked

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def recording(data_dir: Path) -> Any:
    return regimes.load_recording(data_dir / "activations" / TRACES["deepseek-v2-lite"])


def test_second_halves_are_replayed_and_no_calibration_request_among_them(data_dir: Path, recording: Any) -> None:
    trace = read_trace(data_dir / "activations" / TRACES["deepseek-v2-lite"])
    assert isinstance(trace, ActivationTrace)
    whole = [np.asarray(trace.request(number).expert_ids) for number in range(trace.num_requests)]
    halves = {tokens[len(tokens) // 2 :].tobytes() for tokens in whole}
    for number in range(len(recording.tokens)):
        first, tokens = recording.first[number], recording.tokens[number]
        ids = recording.expert_ids[first : first + tokens]
        assert ids.tobytes() in halves
        assert (footprint(ids, 64) == recording.counts[number]).all()
    assert len(recording.tokens) + len(recording.calibration.truth) <= trace.num_requests
    truths = {(recording.counts[n] / recording.tokens[n]).round(9).tobytes() for n in range(len(recording.tokens))}
    shared = sum(truth.round(9).tobytes() in truths for truth in recording.calibration.truth)
    assert shared <= 2, "apart from requests that are recorded twice"
    assert np.allclose(recording.predicted.sum(axis=2), 6.0), "a token activates top-k experts"


def test_bursts_are_of_one_kind(recording: Any, rng: np.random.Generator) -> None:
    rows = draw_order(recording.kind, "bursts", 5 * BURST - 3, rng)
    assert len(rows) == 5 * BURST - 3
    for start in range(0, len(rows), BURST):
        assert len(set(recording.kind[rows[start : start + BURST]])) == 1
    assert len(set(recording.kind[draw_order(recording.kind, "mixed", BURST, rng)])) > 1


@pytest.mark.parametrize("regime", [*REGIMES, *AS_PUBLISHED])
def test_every_regime_keeps_the_invariants(
    regime: str, data_dir: Path, recording: Any, rng: np.random.Generator
) -> None:
    arrivals = load_arrivals(data_dir / "requests" / ARRIVALS["azure"])
    drawn = draw(recording, arrivals, "bursts", 60, rng)
    assert drawn.arrival_s[0] == 0.0
    assert drawn.arrival_s[-1] == pytest.approx(59.0), "one request a second on average"
    assert drawn.prompt_tokens.max() <= regimes.LONGEST_PROMPT
    bench = Bench((REGIMES | AS_PUBLISHED)[regime], "deepseek-v2-lite", recording, drawn, "bursts", drawn.prompt_tokens)
    own = bench.predicted.sum(axis=(1, 2))
    assert np.allclose(own, own[0]) == (regime in AS_PUBLISHED or bench.regime.phase == "decode")
    ours = bench.strategy("latency_aware")
    assert isinstance(ours, LatencyAware)
    for strategy in (strategies.make("fcfs"), strategies.make("greedy_variance"), ours):
        found = checked(bench.run)(strategy, 50.0, rng)
        assert np.isfinite(found.finish_s).all()


def test_a_prompt_repeats_the_recorded_tokens(data_dir: Path, recording: Any, rng: np.random.Generator) -> None:
    arrivals = load_arrivals(data_dir / "requests" / ARRIVALS["mooncake"])
    drawn = draw(recording, arrivals, "mixed", 12, rng)
    bench = Bench(REGIMES["prefill"], "deepseek-v2-lite", recording, drawn, "mixed", drawn.prompt_tokens)
    for row, number in enumerate(drawn.recorded):
        first, tokens = recording.first[number], recording.tokens[number]
        at = first + np.arange(drawn.prompt_tokens[row]) % tokens
        assert (bench.loads[row] == footprint(recording.expert_ids[at], 64)).all()


def test_a_cell_is_the_same_twice(data_dir: Path) -> None:
    cell = Cell("ep8-prefill", "deepseek-v2-lite", "azure", "bursts", 1.3, 0)
    names = ("fcfs", "random", "latency_aware")
    assert regimes.run_cell(cell, names, 40, data_dir) == regimes.run_cell(cell, names, 40, data_dir)


def test_rows_and_notes(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ARRIVALS, "mooncake")  # test_a_prompt_repeats_the_recorded_tokens draws from it
    options = SuiteOptions(
        data=data_dir, requests=12, seeds=(0,), rates=(1.3,), strategies=("latency_aware",), out=tmp_path / "out"
    )
    result = run(options, lambda *_: None)
    overall = [row for row in result.rows if row["model"] == "all"]
    shown = REGIMES | AS_PUBLISHED  # CAPS's settings too: 1.3 is an overload
    assert len(overall) == len(shown) * 2 * 2
    assert len(result.rows) == len(overall) + len(shown) * len(TRACES) * len(ARRIVALS) * 2 * 2
    kind = ("decode", "bursts", "latency_aware")
    mine = [row for row in result.rows if (row["regime"], row["order"], row["strategy"]) == kind]
    mean = np.mean([row["p99_reduction_pct"] for row in mine if row["model"] != "all"])
    row = next(row for row in mine if row["model"] == "all")
    assert row["p99_reduction_pct"] == pytest.approx(mean)
    for row in result.rows:
        assert row["model"] == "all" or row["behind_best_pct"] >= 0.0
        if row["strategy"] == "fcfs":
            assert row["p99_reduction_pct"] == 0.0
            assert verdict(row) == "one seed"
    assert any("latency_aware is best or within noise" in note for note in result.notes)
    assert list((tmp_path / "out").glob("fig*.png"))
    json.dumps(result.rows)


def test_verdicts_follow_the_interval() -> None:
    def row(low: float | None, high: float | None) -> dict[str, float | None]:
        return {"p99_reduction_low": low, "p99_reduction_high": high}

    assert verdict(row(0.1, 5.0)) == "helps"
    assert verdict(row(-9.0, -0.1)) == "hurts"
    assert verdict(row(-0.9, 0.9)) == verdict(row(0.5, 0.9)) == "nothing"
    assert verdict(row(-9.0, 9.0)) == "unclear"
    assert verdict(row(None, None)) == "one seed"


def test_without_data_and_with_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="COTERIE_DATA"):
        run(SuiteOptions(), lambda *_: None)
    with pytest.raises(UnknownNameError, match="Did you mean 'lpt'"):
        run(SuiteOptions(data=tmp_path, strategies=("ltp",)), lambda *_: None)
