"""Every verb that takes a trace takes a shipped sample by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Ran, refused

Run = Callable[..., Ran]


@pytest.mark.parametrize(
    "words",
    [
        ("advise", "@"),
        ("convert", "@", "out"),
        ("evaluate", "all-to-all", "--trace", "@"),
        ("fit", "@", "--workers", "2", "-o", "router.safetensors"),
        ("fleet", "@"),
        ("fleet", "sample:gpt-oss-20b", "--arrivals", "@"),
        ("generate", "out", "--like", "@"),
        ("inspect", "@"),
        ("plan", "@"),
        ("simulate", "@"),
        ("simulate", "--arrivals", "@"),
        ("tokens", "@", "-o", "table.safetensors"),
    ],
    ids=" ".join,
)
def test_a_name_that_is_no_sample_is_suggested(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*(word.replace("@", "sample:gpt-oss-20") for word in words))
    refused(ran, "Unknown sample 'sample:gpt-oss-20'. Did you mean 'sample:gpt-oss-20b'?")
    assert list(tmp_path.iterdir()) == []


def test_a_sample_is_read(run: Run, tmp_path: Path) -> None:
    ran = run("convert", "sample:gpt-oss-20b", tmp_path / "copy", "--json")
    assert json.loads(ran.out)["requests"] == 100
    ran = run("inspect", tmp_path / "copy", "--json")
    assert json.loads(ran.out)["model"] == "gpt-oss-20b"
