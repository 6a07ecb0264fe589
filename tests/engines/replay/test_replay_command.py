"""``coterie replay``: what it measures, writes, reports and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Run, runner
from coterie.engines.replay.batches import write_batches
from replay_cases import small

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "replay")


CONFIG = {
    "model_type": "olmoe",
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture
def small_model(tmp_path: Path) -> tuple[Path, Path]:
    """Batches, and the config.json of the shape they belong to."""
    folder = tmp_path / "small-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_batches(tmp_path / "batches.npz", "small-model", small())
    return tmp_path / "batches.npz", folder / "config.json"


def test_command_measures_writes_and_reports_again(run: Run, small_model: tuple[Path, Path], tmp_path: Path) -> None:
    (path, config), out = small_model, tmp_path / "out.json"
    code, printed, _ = run(path, "--config", config, "--device", "cpu", "--repeats", 2, "-o", out, "--json")
    assert code == 0
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert [(row["group"], row["router"]) for row in result["rows"]] == [
        (group, router) for group in ("low", "high") for router in ("round_robin", "clusters")
    ]
    assert any("rates of the nearest shape" in note for note in result["notes"])
    again = json.loads(run(path, "--config", config, "--times", out, "--json")[1])
    assert again["rows"] == result["rows"]
    code, table, _ = run(path, "--config", config, "--times", out)
    assert code == 0
    assert "in fp32" in table


def test_command_refuses_in_one_line(run: Run, small_model: tuple[Path, Path], tmp_path: Path) -> None:
    (path, config), out = small_model, tmp_path / "out.json"
    shape = (path, "--config", config)
    assert run(*shape, "--device", "cpu", "--repeats", 1, "-o", out)[0] == 0
    for arguments, problem in (
        ((*shape, "-o", out), "exists already"),
        ((*shape, "-o", tmp_path / "none" / "out.json"), "is not a folder"),
        ((*shape, "--times", out, "--dtype", "bf16"), "in fp32; asked for"),
        ((*shape, "--preset", "h2000"), "Unknown preset 'h2000'. Did you mean 'h200'?"),
        ((*shape, "--dtype", "int3"), "weight_dtype='int3' must be one of"),
        ((*shape, "--model", "gpt-oss-20b"), "only one of them"),
        ((path,), "Unknown model 'small-model'"),
        ((path, "--model", "gpt-oss-20b", "--device", "cpu"), "gpt-oss-20b has (24, 4)"),
        ((tmp_path / "none.npz",), "not found"),
    ):
        code, printed, message = run(*arguments)
        assert (code, printed) == (2, "")
        assert problem in " ".join(message.split())
