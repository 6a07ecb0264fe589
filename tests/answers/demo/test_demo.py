"""The demo closes the loop on real workers, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.answers.demo import run
from coterie.answers.demo.run import BASELINES, run_demo
from coterie.cli.main import app
from coterie.errors import ConfigError
from coterie.gateway.embedded import OURS
from coterie.traces import ActivationTrace

COMMAND = [sys.executable, "-c", "from coterie.cli.main import main; main()", "demo"]


def workers_of(parent: int) -> list[int]:
    """Processes of the embedded worker that this process started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()
                command = folder.joinpath("cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if status[0] != "Z" and int(status[1]) == parent and b"worker.embedded" in command:
                found.append(int(folder.name))
    return found


def test_the_loop_on_a_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_TOKENS", 12)
    told: list[str] = []
    result = run_demo(requests=24, out=tmp_path / "out", report=lambda what, *_: told.append(what))
    assert [row.router for row in result.rows] == [*BASELINES, OURS]
    assert f"{OURS} takes " in result.verdict or f"{OURS} adds " in result.verdict
    assert " against join_shortest_queue, 95% " in result.verdict, "the baseline of coterie fleet"
    assert "on this CPU " in result.verdict
    assert result.cpu.step_ms > 0
    assert result.same_tokens
    assert result.calibrated + result.served <= 24
    assert result.rows[0].saving_pct == pytest.approx(0, abs=1e-9)
    for row in result.rows:
        assert sum(row.requests) == result.served
        assert len(row.requests) == 3
        assert 4 <= row.experts <= 32
        assert row.interval_pct[0] <= row.interval_pct[1]
        assert row.h200_ms > 0
    assert Path(result.figure).read_bytes().startswith(b"\x89PNG")
    assert {"Recording", "Fitting the router", "Serving under latency_aware"} <= set(told)
    assert workers_of(os.getpid()) == []
    trace = ActivationTrace.open(result.trace)
    trace.validate()
    assert trace.num_requests <= result.calibrated + result.served
    assert result.next.endswith(result.trace)
    (tmp_path / "other" / "trace").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not the trace of a demo"):
        run_demo(requests=24, out=tmp_path / "other")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while len(started := workers_of(demo.pid)) < 4:
            assert demo.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 128 + number, err.decode()
    assert out == b""
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_too_few_requests_are_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--requests", "3"])
    assert result.exit_code == 2
    assert "--requests" in result.output
