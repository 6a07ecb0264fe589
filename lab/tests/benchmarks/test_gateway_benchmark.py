"""What the benchmarks of gateways start, measure and print, in a run of a moment."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from gateway.compare import Median, Round, main, median_of, summarise
from gateway.peers import HERE, start_command, start_peer


def test_peers_and_commands_are_measured_beside_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"own={shlex.quote(sys.executable)} {HERE / 'minimal.py'} {{port}} {{workers}}"
    told = tmp_path / "told.json"
    short = ["--rounds", "2", "--requests", "5", "--clients", "2", "--seconds", "0.02", "--stream"]
    main(["--peers", "minimal", "--gateway", command, *short, "--output", str(told)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| direct", "| minimal", "| own"]
    written = json.loads(told.read_text())
    assert {len(rounds) for rounds in written["rounds"].values()} == {2}
    assert written["rows"][2]["added_ratio"][0] > 0


def test_rows_are_medians_and_ratios_within_a_round() -> None:
    found = {
        "direct": [Round(1.0, 1.0, 900.0), Round(2.0, 2.0, 450.0)],
        "reference": [Round(2.0, 2.0, 90.0), Round(4.0, 4.0, 45.0)],
        "other": [Round(4.0, 4.0, 180.0), Round(8.0, 8.0, 90.0)],
    }
    rows = {row["name"]: row for row in summarise(found, "reference")}
    assert rows["direct"]["added_p50_ms"] is None
    assert rows["other"]["added_ratio"] == Median(3.0, 3.0, 3.0), "a slow round is slow for both"
    assert rows["other"]["rate_ratio"] == Median(2.0, 2.0, 2.0)
    assert rows["other"]["added_p50_ms"].value == 4.5


def test_interval_holds_the_median() -> None:
    one = median_of([3.0, 1.0, 2.0, 10.0, 2.5])
    assert one.value == 2.5
    assert 1.0 <= one.low <= one.value <= one.high <= 10.0
    assert str(Median(1234.5, 1000.0, 2000.0)) == "1,234 [1,000, 2,000]"


def test_targets_are_named(tmp_path: Path) -> None:
    assert start_command("http://127.0.0.1:9/", [], tmp_path)[:2] == ("gateway", "http://127.0.0.1:9")
    assert start_command("mine=http://127.0.0.1:9", [], tmp_path).name == "mine"
    with pytest.raises(ConfigError, match="must be one of vllm-router"):
        start_peer("envoy", [], tmp_path)
