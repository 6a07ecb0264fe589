"""``coterie replay``: what it reports of earlier times, and what it refuses. test_imposed_vllm.py measures."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from command_line import Run, runner
from coterie.engines.replay.batches import write_batches
from coterie.engines.replay.run import Measured
from coterie.models import get_model
from replay_cases import draw_ids

MODEL = "gpt-oss-20b"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "replay")


@pytest.fixture
def timed(tmp_path: Path) -> tuple[Path, Path]:
    """Batches of a known model, and times of an earlier run of them."""
    spec, rng = get_model(MODEL), np.random.default_rng(0)
    routers = {"round_robin": 32, "clusters": 12}
    steps = {name: [draw_ids(rng, 8, spec, experts) for _ in range(6)] for name, experts in routers.items()}
    write_batches(tmp_path / "batches.npz", MODEL, {"low": steps})
    measured = Measured(
        model=MODEL,
        dtype="mxfp4",
        hardware={"device": "d"},
        software="an engine",
        context=1024,
        repeats=2,
        spread_pct=0.5,
        step_us={"low": {"round_robin": [5000.0] * 6, "clusters": [4000.0] * 6}},
    )
    (tmp_path / "times.json").write_bytes(msgspec.json.encode({"measured": measured}))
    return tmp_path / "batches.npz", tmp_path / "times.json"


def test_earlier_times_are_reported(run: Run, timed: tuple[Path, Path], tmp_path: Path) -> None:
    batches, times = timed
    out = tmp_path / "out.json"
    code, printed, _ = run(batches, "--times", times, "-o", out, "--json")
    assert code == 0
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    first, second = result["rows"]
    assert (first["router"], second["router"]) == ("round_robin", "clusters")
    assert second["saving_pct"] == 20.0
    assert second["predicted_saving_pct"] > 0
    assert len(result["notes"]) == 2, "whole steps of this model were measured: no caveat"
    code, table, _ = run(batches, "--times", out)
    assert code == 0
    assert "in mxfp4" in table


def test_it_refuses_in_one_line(run: Run, timed: tuple[Path, Path], tmp_path: Path) -> None:
    batches, times = timed
    given = (batches, "--times", times)
    for arguments, problem in (
        ((*given, "-o", times), "exists already"),
        ((*given, "-o", tmp_path / "none" / "out.json"), "is not a folder"),
        ((*given, "--preset", "h2000"), "Unknown preset 'h2000'. Did you mean 'h200'?"),
        ((batches,), "give --model"),
        ((batches, "--times", tmp_path / "none.json"), "not found"),
        ((tmp_path / "none.npz", "--times", times), "not found"),
    ):
        code, printed, message = run(*arguments)
        assert (code, printed) == (2, "")
        assert problem in " ".join(message.split())
