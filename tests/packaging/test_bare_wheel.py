"""The wheel alone, in a clean environment: what a user's first commands need is a core dependency, not an extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: object, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("NUMBA")}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=900, cwd=cwd, env={**env, "COTERIE_DATA": ""}
    )
    assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def coterie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, of a wheel built here and installed without extras; needs an index of packages."""
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("coterie-*.whl")
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    call(folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel, cwd=folder)
    return folder / "venv/bin/coterie"


@pytest.mark.long
def test_the_first_commands_need_no_extra(coterie: Path, tmp_path: Path) -> None:
    demo = call(coterie, "demo", cwd=tmp_path)
    lines = demo.stdout.splitlines()
    assert lines[-2] == "Next: coterie inspect out/trace"
    assert "\x1b" not in demo.stderr, "no control characters off a terminal"
    call(coterie, "inspect", "out/trace", cwd=tmp_path)
    for words in (
        ("models",),
        ("generate", "trace", "--model", "gpt-oss-20b", "--requests", "300"),
        ("inspect", "trace"),
        ("fit", "trace", "--workers", "4", "-o", "router.safetensors"),
        ("fleet", "trace", "--decoders", "4", "--in-flight", "8", "--splits", "2"),
        ("fleet", "trace", "--decoders", "4", "--in-flight", "8", "--splits", "2", "--fitted", "router.safetensors"),
        ("plan", "trace", "--ranks", "8"),
        ("simulate", "trace"),
        ("tokens", "out/trace", "-o", "loads.safetensors"),
    ):
        call(coterie, *words, cwd=tmp_path)
    assert json.loads(call(coterie, "warm", "--json", cwd=tmp_path).stdout)["wall_s"] > 0
    assert not list(coterie.parents[1].rglob(".numba_cache")), "only a source tree has a cache of its own"
    refused = call(coterie, "plan", "nothing-here", cwd=tmp_path, expected=2)
    assert refused.stderr.startswith("error: ")
    worker = call(coterie, "worker", cwd=tmp_path, expected=2)
    assert "torch" in worker.stderr, "what needs an extra says so"
