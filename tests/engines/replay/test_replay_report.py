"""Reports of a replay against known times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.engines.replay.report import predict_us, read_measured, replay_rows, saving_interval
from coterie.engines.replay.run import Measured
from coterie.errors import ConfigError, TraceError
from replay_cases import SPEC

CONTEXT = 100


def timed(step_us: dict[str, dict[str, list[float]]]) -> Measured:
    return Measured(
        model="tiny",
        dtype="bf16",
        hardware={"device": "d"},
        software="e",
        context=CONTEXT,
        repeats=1,
        spread_pct=0.0,
        step_us=step_us,
    )


def test_report_of_known_times(batches: Any) -> None:
    model = step_model(SPEC, dtype="bf16")
    predicted = {g: {r: predict_us(s, model, CONTEXT) for r, s in one.items()} for g, one in batches.groups.items()}
    base = predicted["low"]["round_robin"] * 1.25
    times = {
        "low": {"round_robin": base.tolist(), "clusters": (base * 0.9).tolist()},
        "high": {r: (us * np.where(np.arange(6) % 2, 0.8, 1 / 0.8)).tolist() for r, us in predicted["high"].items()},
    }
    rows = {(r.group, r.router): r for r in replay_rows(batches, timed(times), model, np.random.default_rng(0))}
    assert list(rows) == [(g, r) for g in ("low", "high") for r in ("round_robin", "clusters")]
    first, second = rows["low", "round_robin"], rows["low", "clusters"]
    assert (first.saving_pct, first.saving_low_pct, first.saving_high_pct, first.predicted_saving_pct) == (0, 0, 0, 0)
    assert (first.mape_pct, first.bias_pct) == (20.0, -20.0), "predicted is 0.8 of measured"
    assert (second.saving_pct, second.saving_low_pct, second.saving_high_pct) == (10.0, 10.0, 10.0)
    assert second.paired
    assert second.mean_us == pytest.approx(0.9 * base.mean(), abs=1e-3)
    assert second.median_us == pytest.approx(0.9 * np.median(base), abs=1e-3)
    assert second.predicted_us == pytest.approx(predicted["low"]["clusters"].mean(), abs=1e-3)
    low = predicted["low"]
    assert second.predicted_saving_pct == pytest.approx(
        100 * (1 - low["clusters"].mean() / low["round_robin"].mean()), abs=1e-3
    )
    assert second.active_experts == 3.0
    assert (second.steps, second.tokens) == (6, 4.0)
    third = rows["high", "round_robin"]
    assert third.mape_pct == pytest.approx(100 * (0.25 + 0.2) / 2)
    assert third.bias_pct == pytest.approx(100 * (0.25 - 0.2) / 2)


def test_a_prediction_is_that_of_the_whole_step(batches: Any) -> None:
    model = step_model(SPEC, dtype="bf16")
    steps = batches.groups["low"]["clusters"]
    for ids, us in zip(steps, predict_us(steps, model, CONTEXT), strict=True):
        load = np.array([[(ids[:, layer] == e).sum() for e in range(8)] for layer in range(3)])
        batch = Batch(decode_requests=len(ids), decode_context=len(ids) * CONTEXT)
        assert us == pytest.approx(1e6 * model.step(load, batch).total_s)


def test_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(3)
    hits, widths = 0, {True: 0.0, False: 0.0}
    for _ in range(100):
        shared = rng.normal(1000, 100, 120)
        base, other = shared + rng.normal(0, 10, 120), 0.9 * shared + rng.normal(0, 10, 120)
        for paired in (True, False):
            low, high = saving_interval(base, other, paired, rng, draws=300)
            widths[paired] += high - low
            hits += paired and low <= 0.1 <= high
    assert 85 <= hits <= 100
    assert widths[True] < widths[False] / 3, "steps that vary together cancel"


def test_neighbours_alike_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    slow = np.repeat(rng.normal(1000, 100, 25), 8)
    mixed = rng.permutation(slow)
    base = np.full(200, 1000.0)
    width = [np.diff(saving_interval(base, us, False, np.random.default_rng(0)))[0] for us in (slow, mixed)]
    assert width[0] > 1.5 * width[1]


def test_times_of_other_batches(batches: Any) -> None:
    model = step_model(SPEC, dtype="bf16")
    with pytest.raises(ConfigError, match="times of other batches"):
        replay_rows(batches, timed({"low": {"round_robin": [1.0]}}), model, np.random.default_rng(0))


def test_times_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    measured = timed({"g": {"r": [1.0, 2.5]}})
    path.write_bytes(msgspec.json.encode({"rows": [], "measured": measured}))
    assert read_measured(path) == measured
    for content, problem in ((b"{}", "missing required field `measured`"), (b"words", "malformed")):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=f"out.json: measured: .*{problem}"):
            read_measured(path)
    path.write_bytes(msgspec.json.encode({"measured": timed({"g": {"r": [0.0]}})}))
    with pytest.raises(TraceError, match="g, r: every step_us must be above 0"):
        read_measured(path)
