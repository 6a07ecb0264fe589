"""``coterie convert``: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app, main
from coterie.traces import RequestTrace

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE % 0 + LINE % 1500)
    return path


def test_default_is_a_coterie_folder_and_a_table(tmp_path: Path, source: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "mooncake" in result.stdout
    assert "1,200" in result.stdout, "prompt tokens"
    trace = RequestTrace.open(tmp_path / "out")
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert source.read_text() == LINE % 0 + LINE % 1500


def test_json_is_one_object(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out.csv"
    result = CliRunner().invoke(app, ["convert", str(source), str(target), "--to", "csv", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "path": str(target),
        "from": "mooncake",
        "to": "csv",
        "kind": "requests",
        "requests": 2,
        "prompt_tokens": 1200,
        "output_tokens": 10,
        "duration_s": 1.5,
        "prefix_blocks": 4,
        "left_out": ["prefix_blocks"],
    }
    assert target.read_text().splitlines()[1] == "0.0,600,5"


def test_what_is_left_out_is_said(tmp_path: Path, source: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "o"), "--to", "csv"])
    assert "left out" in result.stdout


def test_load_and_activations(tmp_path: Path) -> None:
    counts = tmp_path / "counts.npz"
    np.savez(counts, counts=np.array([[[1, 2, 3]]]))
    result = CliRunner().invoke(app, ["convert", str(counts), str(tmp_path / "l"), "--model", "demo", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["kind"], summary["model"], summary["windows"], summary["activations"]) == ("load", "demo", 1, 6)


def test_real_activations(tmp_path: Path, data_dir: Path) -> None:
    file = data_dir / "activations/deepseek-v2-lite/routing_tokens.npz"
    result = CliRunner().invoke(app, ["convert", str(file), str(tmp_path / "a"), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["kind"], summary["requests"], summary["tokens"]) == ("activations", 213, 33_279)
    assert (summary["layers"], summary["experts"], summary["top_k"]) == (26, 64, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "out"], "missing: file: does not exist"),
        (["trace.jsonl", "out", "--to", "parquet"], "Unknown output format 'parquet'"),
        (["trace.jsonl", "out", "--from", "azur"], "Did you mean 'azure'?"),
        (["trace.jsonl", "out", "--from", "azure"], "trace.jsonl: line 1, TIMESTAMP: column is missing"),
        (["trace.jsonl", "trace.jsonl"], "exists already"),
        (["trace.jsonl", "out", "--to", "npz"], "'npz' cannot hold requests"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", "convert", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert [p.name for p in tmp_path.iterdir()] == [source.name]
