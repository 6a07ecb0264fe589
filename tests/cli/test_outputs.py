"""Outputs: nothing that Coterie did not write is replaced, and it is said before the work begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import ConfigError
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "t"
    lengths = LognormalLengths(prompt_mean=20, output_mean=20)
    settings = SyntheticSettings(num_layers=2, num_experts=8, top_k=2, lengths=lengths)
    generate_to(folder, settings, np.random.default_rng(0), requests=24)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def a_text(path: Path) -> None:
    path.write_text("years of notes")


def a_link(path: Path) -> None:
    path.with_name("elsewhere").write_text("linked")
    path.symlink_to(path.with_name("elsewhere"))


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (a_text, "exists and is not a fitted router"),
        (a_link, "is a link"),
        (a_dangling_link, "is a link"),
        (os.mkfifo, "is a device or a pipe"),
        (Path.mkdir, "must be a file in a folder that exists"),
    ],
)
def test_fit_refuses_what_is_not_a_router(
    trace: Path, tmp_path: Path, before: Callable[[Path], None], words: str
) -> None:
    target = tmp_path / "router.safetensors"
    before(target)
    found = contents(tmp_path) if not target.is_fifo() else {}
    with pytest.raises(ConfigError, match=words):
        run("fit", trace, "--workers", 2, "-o", target)
    assert target.is_fifo() or contents(tmp_path) == found


def test_fit_refuses_its_own_input(trace: Path) -> None:
    found = contents(trace)
    for target in (trace / "meta.json", trace / "new.safetensors", trace / ".." / trace.name / "meta.json"):
        with pytest.raises(ConfigError, match="is an input or lies in one"):
            run("fit", trace, "--workers", 2, "-o", target)
    assert contents(trace) == found


def test_fit_replaces_an_older_router(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "router.safetensors"
    run("fit", trace, "--workers", 2, "-o", target)
    older = target.read_bytes()
    run("fit", trace, "--workers", 3, "-o", target)
    assert target.read_bytes() != older
