"""``coterie generate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.cli.verbs.generate import parse_size
from coterie.errors import ConfigError, UnavailableError, UnknownNameError
from coterie.traces import ActivationTrace
from coterie.traces.arrivals import BurstyArrivals, PoissonArrivals, at_rate


def run(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["generate", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_json_is_one_object_that_describes_the_trace(tmp_path: Path) -> None:
    result = run(tmp_path / "t", "--preset", "bursty", "--requests", "20", "--seed", "3", "--json")
    summary = json.loads(result.stdout)
    trace = ActivationTrace.open(tmp_path / "t")
    assert summary["requests"] == trace.num_requests == 20
    assert summary["tokens"] == trace.num_tokens
    assert summary["bytes"] == sum(file.stat().st_size for file in (tmp_path / "t").iterdir())
    assert trace.meta.source["seed"] == 3
    assert trace.requests.domains is not None
    assert set(trace.requests.domains) <= set(summary["domains"])


def test_table_and_seed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert "2,000" in run(tmp_path / name, "--tokens", "2000").stdout
    first, second = ((tmp_path / n / "activations.safetensors").read_bytes() for n in ("one", "two"))
    assert first == second


def test_size_and_rate(tmp_path: Path) -> None:
    args = ("--size", "1MB", "--rate", "50", "--json")
    summary = json.loads(run(tmp_path / "t", *args).stdout)
    assert summary["bytes"] == pytest.approx(1e6, rel=0.05)
    slow = json.loads(run(tmp_path / "slow", "--size", "1MB", "--rate", "5", "--json").stdout)
    assert slow["duration_s"] == pytest.approx(10 * summary["duration_s"])


def test_model_gives_the_shape_and_like_the_routing(tmp_path: Path) -> None:
    shaped = json.loads(run(tmp_path / "t", "--model", "gpt-oss-20b", "--requests", "30", "--json").stdout)
    assert (shaped["layers"], shaped["experts"], shaped["top_k"]) == (24, 32, 4)
    like = json.loads(run(tmp_path / "u", "--like", tmp_path / "t", "--requests", "5", "--json").stdout)
    assert like["model"] == shaped["model"]
    assert like["domains"] == sorted(shaped["domains"])


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    for args, error, message in (
        (("--preset", "burst"), UnknownNameError, "Did you mean 'bursty'"),
        (("--tokens", "5", "--requests", "5"), ConfigError, "exclude each other"),
        (("--like", tmp_path, "--model", "gpt-oss-20b"), ConfigError, "a shape of its own"),
        (("--size", "ten"), ConfigError, "--size='ten' must be"),
        (("--rate", "0"), ConfigError, "rate=0.0 must be"),
        (("--size", "90000TB"), UnavailableError, "the disk has"),
    ):
        with pytest.raises(error, match=message):
            run(tmp_path / "t", *args)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("text", "expected"), [("10GB", 10**10), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("4096", 4096), ("7b", 7)]
)
def test_parse_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1MB", "3 parsecs", "9" * 400])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0 and a unit"):
        parse_size(text)


def test_rate_keeps_the_shape_of_bursts() -> None:
    assert at_rate(BurstyArrivals(rate=10, burst_rate=100, burst_size=8), 20) == BurstyArrivals(20, 8, 200.0)
    assert at_rate(PoissonArrivals(1.0), 3.0) == PoissonArrivals(3.0)
