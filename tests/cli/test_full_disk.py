"""A full disk ends a verb in one line with the path, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Ran, refused
from coterie.traces import RequestTrace
from full_disk import FULL, files_of_at_most
from sglang_peer import Peer, Running

Run = Callable[..., Ran]


@pytest.mark.parametrize("nbytes", [50, 4000], ids=["no file fits", "no figure fits"])
def test_inspect_out(run: Run, tmp_path: Path, nbytes: int) -> None:
    times = np.arange(0.0, 40.0)
    RequestTrace(np.full(40, 9), np.full(40, 5), times).save(tmp_path / "trace")
    (tmp_path / "empty").mkdir()
    for report in (tmp_path / "new", tmp_path / "empty"):
        with files_of_at_most(nbytes):
            refused(run("inspect", tmp_path / "trace", "--out", report), f"{report}/", FULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "trace"]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("nbytes", [50, 700], ids=["no file fits", "no segment fits"])
def test_record(run: Run, tmp_path: Path, nbytes: int) -> None:
    words = ("record", "--engine", "sglang", "--prompts", tmp_path / "prompts.txt", "-o", tmp_path / "t", "--no-chat")
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {number}\n" for number in range(40)))
    with Running(Peer()) as peer:
        with files_of_at_most(nbytes):
            ran = run(*words, "--url", peer.url)
        refused(ran, f"{tmp_path}/t", FULL)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.txt"]
        assert json.loads(run(*words, "--url", peer.url, "--json").out)["requests"] == 40
