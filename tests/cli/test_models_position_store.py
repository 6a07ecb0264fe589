"""``coterie models --position-store``: the table fits a terminal, and the JSON holds every dtype and block size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import UnknownNameError
from coterie.footprints.sizing import store_size
from coterie.models import get_model, models
from model_configs import CONFIGS


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", "--position-store", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def rows(*arguments: str) -> list[dict[str, Any]]:
    answer: dict[str, list[dict[str, Any]]] = json.loads(run(*arguments, "--json"))
    assert list(answer) == ["rows"]
    return answer["rows"]


def test_json_has_a_row_for_every_shape_dtype_and_block_size() -> None:
    found = {(row["model"], row["kv_dtype"], row["block_size"]): row for row in rows()}
    assert set(found) == {(name, dtype, block) for name in models() for dtype in ("bf16", "fp8") for block in (16, 128)}
    for (name, dtype, block), row in found.items():
        size = store_size(get_model(name), dtype, block)
        assert row["share_of_kv"] == size.share_of_kv
        assert row["within_bar"] == (row["slot_bytes"] < row["kv_bytes"] / 100)
        assert row["counts_exact"] == (block == 16)
        assert row["device_bytes"] == 141e9


def test_the_table_fits_80_columns_and_marks_what_is_over_the_bar() -> None:
    shown = run()
    assert max(map(len, shown.splitlines())) <= 80
    marked = [line for line in shown.splitlines() if "!" in line and "│" in line]
    assert [line.split()[1] for line in marked] == [
        "coterie-tiny",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "glm-5.2",
    ]
    assert all(name in shown for name in models())
    assert "1.33 !" in shown


def test_one_model_and_a_config(tmp_path: Path) -> None:
    assert {row["model"] for row in rows("Qwen/Qwen3-30B-A3B")} == {"qwen3-30b-a3b"}
    config = CONFIGS["mixtral-8x7b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rows("--config", str(tmp_path))[0]["slot_bytes"] == 32 * 2 + 2
    with pytest.raises(UnknownNameError):
        run("qwen3-30b")
