"""``coterie models``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli.main import app, main
from coterie.errors import ConfigError, TraceError, UnknownNameError
from coterie.models import models
from model_configs import CONFIGS

MIXTRAL = CONFIGS["mixtral-8x7b"]


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    answer: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    assert list(answer) == ["rows"]
    return answer["rows"]


def test_lists_every_shipped_model() -> None:
    assert [row["name"] for row in rows()] == list(models())


def test_one_row_by_repository_id() -> None:
    (row,) = rows("deepseek-ai/DeepSeek-V3")
    assert row["name"] == "deepseek-v3"
    assert row["num_moe_layers"] == 58
    assert row["expert_bytes"] == 3 * 7168 * 2048
    assert row["kv_bytes_per_token"] == 2 * 61 * (512 + 64)


@pytest.mark.parametrize("folder", [False, True])
def test_reads_a_config(tmp_path: Path, folder: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL))
    (row,) = rows("--config", str(tmp_path if folder else file))
    assert row["name"] == "mixtral"
    assert row["expert_bytes"] == models()["mixtral-8x7b"].expert_bytes()


def test_table_fits_80_columns() -> None:
    result = CliRunner().invoke(app, ["models"], catch_exceptions=False)
    for name in models():
        assert name in result.stdout
    assert "8 of 128" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_one_model_shows_all_fields() -> None:
    shown = CliRunner().invoke(app, ["models", "glm-5.2"], catch_exceptions=False).stdout
    assert "first_moe_layer" in shown
    assert "75,497,472" in shown, "bytes of one expert"


def test_bad_input_is_an_error() -> None:
    for arguments, error in (
        (["qwen3-30b"], UnknownNameError),
        (["--config", "nowhere.json"], TraceError),
        (["olmoe-1b-7b", "--config", "nowhere.json"], ConfigError),
    ):
        with pytest.raises(error):
            CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)


def test_exit_code_2_and_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["coterie", "models", "qwen3-30b"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: Unknown model 'qwen3-30b'. Did you mean 'qwen3-30b-a3b'?")
    assert err.count("\n") == 1
