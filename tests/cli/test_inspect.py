"""``coterie inspect`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import ConfigError, TraceError
from coterie.traces import ActivationWriter, RequestTrace, TraceMeta
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "t"
    settings = SyntheticSettings(num_layers=30, lengths=LognormalLengths(prompt_mean=20, output_mean=10))
    generate_to(folder, settings, np.random.default_rng(0), requests=150)
    return folder


def run(*args: object) -> Any:
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_tables_fit_and_do_not_list_every_layer(trace: Path) -> None:
    output = run(trace).stdout
    lines = output.splitlines()
    assert max(len(line) for line in lines[:-2] if str(trace) not in line) <= 100, "the verdict wraps by itself"
    assert "How sure" in lines[-2] or "shows no drift" in lines[-2]
    assert lines[-1].startswith("Next: coterie fleet ")
    assert len(output.splitlines()) < 150
    for title in ("Load per expert", "Rank imbalance", "Distinct experts", "Drift of the load", "Arrivals"):
        assert title in output
    assert "No prefix sharing" in output


def test_json_is_one_object_and_the_seed_decides(trace: Path) -> None:
    first, again, other = (run(trace, "--json", "--seed", s).stdout for s in (1, 1, 2))
    found = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert found["kind"] == "activations"
    assert found["requests"] == 150
    assert len(found["layers"]) == 30
    assert found["missing"]["prefix_sharing"]
    assert "report" not in found
    assert first == again
    assert first != other


def test_out_writes_a_report_once_more_but_not_over_other_files(trace: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    RequestTrace(np.array([5, 9]), np.array([1, 2]), np.array([0.0, 3.0])).save(few)
    for _ in range(2):
        found = json.loads(run(few, "--out", tmp_path / "r", "--json").stdout)
    assert found["report"] == str(tmp_path / "r" / "report.html")
    assert found["figures"] == [str(tmp_path / "r" / "arrivals.png")]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        run(trace, "--out", tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_request_trace_with_odd_names(tmp_path: Path) -> None:
    RequestTrace(np.array([5, 9]), np.array([1, 2]), np.array([0.0, 3.0])).save(tmp_path / "[bold]x")
    output = run(tmp_path / "[bold]x").stdout
    assert "[bold]x" in output
    assert "Lengths" in output


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    """The exit code and the single line are the contract's: test_cli_contract.py."""
    ActivationWriter(tmp_path / "t", TraceMeta("m", 4, 1, 2)).close()
    with pytest.raises(TraceError, match="empty"):
        run(tmp_path / "t")
