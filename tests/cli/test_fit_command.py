"""``coterie fit`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import ConfigError, TraceError
from coterie.traces import RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "t"
    settings = SyntheticSettings(
        num_layers=4,
        num_experts=16,
        top_k=2,
        specialisation=0.9,
        zipf_exponent=1.2,
        lengths=LognormalLengths(prompt_mean=40, output_mean=40),
    )
    generate_to(folder, settings, np.random.default_rng(0), requests=120)
    return folder


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["fit", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_writes_a_router_and_scores_it_on_other_requests(trace: Path, tmp_path: Path) -> None:
    from coterie.routing.fitted import RouterFit

    path = tmp_path / "router.safetensors"
    found = json.loads(run(trace, "--workers", 4, "--batch", 8, "-o", path, "--json").stdout)
    assert found["calibration_requests"] + found["test_requests"] == 120
    assert found["file"] == str(path)
    assert found["bytes"] == path.stat().st_size
    rho = {(row["weighting"], row["mask"]): row["rho"] for row in found["rho"]}
    assert rho["gate", True] is None, "the trace has no gate weights"
    assert rho["count", False] > 0.3
    saving = {row["clusters"]: row["saving_pct"] for row in found["distinct"]}
    assert saving["one cluster"] == 0
    assert saving["union clusters"] > saving["round robin"]
    assert saving["cosine clusters"] > saving["round robin"]
    loaded = RouterFit.load(path, model="synthetic", workers=4)
    assert loaded.learned.signature.layers.tolist() == found["layers_kept"]


def test_prints_tables_and_the_seed_decides(trace: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        output = run(trace, "--workers", 3, "--requests", 60, "--seed", 4, "-o", tmp_path / name).stdout
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for words in ("rho on held-out requests", "distinct experts", "union clusters", "Layers kept", "Router:"):
        assert words in output


def test_speeds_and_weighting(trace: Path, tmp_path: Path) -> None:
    run(trace, "--workers", 2, "--speeds", "1,3", "--weighting", "count", "-o", tmp_path / "r", "--json")
    with pytest.raises(ConfigError, match="2 finite numbers above 0"):
        run(trace, "--workers", 2, "--speeds", "1", "-o", tmp_path / "r")
    with pytest.raises(ConfigError, match="commas"):
        run(trace, "--workers", 2, "--speeds", "1;2", "-o", tmp_path / "r")
    with pytest.raises(ConfigError, match="count_idf, count, binary"):
        run(trace, "--workers", 2, "--weighting", "gate", "-o", tmp_path / "r")


def test_too_few_to_test_are_said_to_be(trace: Path, tmp_path: Path) -> None:
    output = run(trace, "--workers", 6, "--requests", 12, "-o", tmp_path / "r").stdout
    assert "too few" in output


def test_bad_input_leaves_no_file(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    RequestTrace(np.array([5, 9]), np.array([1, 2]), np.array([0.0, 3.0])).save(tmp_path / "requests")
    with pytest.raises(ConfigError, match="must be an activation trace"):
        run(tmp_path / "requests", "--workers", 2, "-o", path)
    with pytest.raises(TraceError, match="does not exist"):
        run(tmp_path / "absent", "--workers", 2, "-o", path)
    with pytest.raises(ConfigError, match="200 workers need 200"):
        run(trace, "--workers", 200, "-o", path)
    with pytest.raises(ConfigError, match="folder that exists"):
        run(trace, "--workers", 2, "-o", tmp_path / "no" / "r.safetensors")
    assert not path.exists()
