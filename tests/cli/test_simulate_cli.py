"""``coterie simulate`` as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app, main
from coterie.cli.output import WIDTH
from coterie.predictors import PopularityPredictor, predictors
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

MAIN = [sys.executable, "-c", "from coterie.cli.main import main; main()"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "[bold]t"
    draw = np.random.default_rng(0)
    ids = draw.random((400, 24, 32)).argpartition(3, axis=2)[:, :, :4]
    table = RequestTrace(np.full(20, 100), np.full(20, 20), domains=[f"[d]{n % 3}" for n in range(20)])
    meta = TraceMeta("gpt-oss-20b", 32, 24, 4)
    ActivationTrace.from_arrays(meta, ids, np.arange(0, 401, 20), table).save(path)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "caps.json"
    scheduler = {"strategy": "best_fit", "max_batch_size": 4, "window_size": 16, "scheduling_interval_ms": 50}
    path.write_text(json.dumps({"num_experts": 16, "top_k_experts": 2, "scheduler": scheduler}))
    return path


def run(*args: object) -> Any:
    result = CliRunner().invoke(app, ["simulate", *map(str, args)])
    assert result.exception is None, result.output
    return result.stdout


def test_tables_and_notes_fit(trace: Path) -> None:
    output = run(trace, "--requests", 30, "--strategy", "lpt", "--strategy", "latency_aware")
    *lines, verdict, then = output.splitlines()
    assert max(map(len, lines)) <= WIDTH, "the verdict wraps by itself"
    assert "against fcfs, no interval: one run" in verdict
    assert then.startswith("Next: coterie ")
    assert "imbalance" not in output, "one rank is always even"
    assert "…" not in output, "nothing is cut off"
    for text in (
        "30 requests, decode of gpt-oss-20b on h200",
        "p99.9 ms",
        "Gain over fcfs",
        "latency_aware",
        "lpt",
        "a live predictor knows less",
        "keeps up",
        "KV memory is not modelled",
    ):
        assert text in " ".join(output.split())


def test_json_is_one_object_with_rows_and_settings(config: Path) -> None:
    output = run("--config", config, "--requests", 40, "--rate", 90, "--json")
    found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert list(found) == ["settings", "rows", "notes", "verdict", "next"]
    assert [row["strategy"] for row in found["rows"]] == ["fcfs", "best_fit"]
    for name in (
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "p999_ms",
        "throughput",
        "imbalance",
        "distinct",
        "worst_skips",
        "worst_wait_ms",
        "p99_reduction_pct",
        "throughput_gain_pct",
        "imbalance_reduction_pct",
    ):
        assert all(name in row for row in found["rows"])
    settings = found["settings"]
    assert (settings["experts"], settings["top_k"], settings["rate"]) == (16, 2, 90)
    assert (settings["scheduler"]["max_batch_size"], settings["scheduler"]["strategy"]) == (4, ["best_fit"])


def test_every_predictor_can_be_chosen_and_an_unknown_name_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(predictors._items, "mine", PopularityPredictor)
    draw = np.random.default_rng(0)
    ids = draw.random((400, 2, 8)).argpartition(1, axis=2)[:, :, :2]
    table = RequestTrace(np.full(20, 10), np.full(20, 10), domains=[f"d{n % 3}" for n in range(20)])
    tokens = draw.integers(0, 50, 400).astype(np.int32)
    phase = np.tile(np.repeat([PREFILL, DECODE], 10), 20).astype(np.uint8)
    meta = TraceMeta("demo", 8, 2, 2)
    ActivationTrace.from_arrays(meta, ids, np.arange(0, 401, 20), table, phase, tokens).save(tmp_path / "t")
    for name in predictors.names():
        found = json.loads(run(tmp_path / "t", "--predictor", name, "--requests", 9, "--json"))
        assert found["settings"]["predictor"] == name
        assert found["settings"]["calibration_requests"] == (0 if name == "recorded" else 14)
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "t"), "--predictor", "oracle"])
    assert [name for name in predictors.names() if name not in str(result.exception)] == []


@pytest.mark.parametrize("page", ["predictors.md", "simulate.md"])
def test_the_pages_name_every_predictor(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in predictors.names() if f"`{name}`" not in text] == []


def test_a_pipe_gets_the_object_and_stderr_nothing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["coterie", "simulate", "--requests", "20", "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    assert not stopped.value.code
    assert json.loads(out)["settings"]["requests"] == 20
    assert out.count("\n") == 1
    assert err == ""


def test_bad_input_exits_with_2_and_one_line(
    trace: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "typo.json").write_text('{"scheduler": {"max_batch": 3}}')
    (tmp_path / "cut.json").write_text('{"scheduler": ')
    (tmp_path / "name.json").write_text('{"scheduler": {"strategy": "greedy_varianse"}}')
    for arguments, said in (
        ([tmp_path / "none"], "does not exist"),
        ([trace, "--config", config], "num_experts=16 must equal 32"),
        (["--config", tmp_path / "typo.json"], "max_batch"),
        (["--config", tmp_path / "cut.json"], "cut.json: "),
        (["--config", tmp_path / "name.json"], "Did you mean 'greedy_variance'?"),
        (["--config", tmp_path / "missing.json"], "missing.json: "),
        (["--strategy", "fifo"], "Unknown strategy 'fifo'"),
        (["--rate", "fast"], "--rate"),
        (["--rate", "-1"], "rate=-1.0 must be"),
        ([trace, "--ranks", "3"], "num_slots=32 must be a multiple of num_ranks=3"),
        ([trace, "--preset", "h300"], "Did you mean 'h200'?"),
        ([trace, "--base-ms", "3"], "--base-ms is for execution spread; this run's is decode"),
        ([trace, "--predictor", "token_table"], "no token_ids"),
        ([trace, "--predictor", "similar_prefix"], "no token_ids"),
        ([trace, "--predictor", "dry_run"], "Unknown predictor 'dry_run'"),
        ([trace, "--predictor", "recent_popularty"], "Did you mean 'recent_popularity'?"),
        (["--with-model", tmp_path], "config.json"),
        (["--with-model", tmp_path / "none"], "none"),
        (["--from", "npz"], "--from=npz is the format of TRACE, which is not given"),
    ):
        monkeypatch.setattr(sys, "argv", ["coterie", "simulate", *map(str, arguments), "--requests", "9"])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert stopped.value.code == 2, arguments
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert said in printed.err, arguments


def test_interrupt_ends_with_130_and_prints_no_result() -> None:
    """Stopped while it simulates, which its progress bar on a terminal shows."""
    screen, terminal = pty.openpty()
    command = [*MAIN, "simulate", "--requests", "30000", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    try:
        seen, started = b"", time.monotonic()
        while b"Measuring" not in seen:
            assert time.monotonic() - started < 100
            seen += os.read(screen, 4096)
        os.kill(process.pid, signal.SIGINT)
        while True:
            try:
                more = os.read(screen, 4096)
            except OSError:  # Linux: the other side is closed
                break
            if not more:
                break
            seen += more
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in seen
