"""The wheel alone, in a clean environment: what a user's first commands need is a core dependency, not an extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built here; needs an index of packages."""
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("coterie-*.whl")
    return built


@pytest.fixture(scope="module")
def coterie(wheel: Path) -> Path:
    """The command, of the wheel installed without extras."""
    folder = wheel.parent
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    call(folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel, cwd=folder)
    return folder / "venv/bin/coterie"


@pytest.mark.long
def test_the_wheel_has_the_sample_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
        licences = {name: archive.read(name) for name in names if "/licenses/" in name}
        sample = archive.read("coterie/data/samples/gpt-oss-20b.npz")
    shipped = [ROOT / "LICENSE", ROOT / "NOTICE", ROOT / "LICENSES/Apache-2.0.txt"]
    assert {Path(name).name: data for name, data in licences.items()} == {
        path.name: path.read_bytes() for path in shipped
    }
    assert metadata["License-Expression"] == "MIT AND Apache-2.0"
    # What tests/traces/test_samples.py says of this file holds for the wheel's.
    assert sample == (ROOT / "src/coterie/data/samples/gpt-oss-20b.npz").read_bytes()
    assert [name for name in names if name.startswith("coterie/data/samples/")] == [
        "coterie/data/samples/gpt-oss-20b.npz"
    ]


@pytest.mark.long
def test_the_first_commands_need_no_extra(coterie: Path, tmp_path: Path) -> None:
    demo = call(coterie, "demo", cwd=tmp_path)
    lines = demo.stdout.splitlines()
    assert lines[-2] == "Next: coterie inspect out/trace"
    assert "\x1b" not in demo.stderr, "no control characters off a terminal"
    call(coterie, "inspect", "out/trace", cwd=tmp_path)
    advice = call(coterie, "advise", "sample:gpt-oss-20b", cwd=tmp_path).stdout
    assert re.search(r"It pays for gpt-oss-20b .* 95% \d", advice), "a verdict with an interval, without any data"
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
