"""A router in a file of its own, written by CONTRIBUTING.md alone: `--plugin` makes its name work in the verbs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import coterie.answers.demo.run
from command_line import Run, refused, runner
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.registry import PLUGINS, load_plugin
from coterie.routing import routers
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
NAME = "most_cached"
CONFIG = """
listen: 127.0.0.1:0
workers: [{id: d0, url: "http://127.0.0.1:1"}]
decode: {router: "most_cached:most_ahead=2"}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The guide's router as it stands there, in a file; what importing it leaves in this process is removed."""
    (block,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    path = tmp_path / "my_router.py"
    path.write_text(block)
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop(path.stem, None)
    routers._items.pop(NAME, None)


def test_fleet(run: Run, plugin: Path, tmp_path: Path) -> None:
    settings = SyntheticSettings(lengths=LognormalLengths(16, 0.3, 24, 0.3, 48), model="gpt-oss-20b")
    trace = tmp_path / "trace"
    generate_to(trace, settings.shaped_like(get_model("gpt-oss-20b")), np.random.default_rng(0), requests=60)
    small = ("--decoders", 2, "--in-flight", 4, "--requests", 64, "--splits", 1, "--json")
    spelled = f"{NAME}:most_ahead=1"
    ran = run("fleet", trace, "--plugin", plugin, "--router", NAME, "--router", spelled, *small)
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["fleets"][0]["rows"]
    assert {row["router"] for row in rows} == {"join_shortest_queue", NAME, spelled}
    refused(run("fleet", trace, "--router", f"{NAME}:most=1", *small), "most_ahead")  # it is imported by now


def test_serve_checks_a_config_that_names_it(run: Run, plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    refused(run("serve", "--config", tmp_path / "fleet.yaml", "--check"), NAME)
    ran = run("--plugin", plugin, "serve", "--config", tmp_path / "fleet.yaml", "--check")
    assert ran.code == 0, ran.err
    assert f"{NAME}:most_ahead=2" in ran.out


def test_serve_routes_by_it(plugin: Path, tmp_path: Path) -> None:
    """The command in a process of its own, with its workers."""
    router = f"{NAME}:most_ahead=3"
    words = ["serve", "--embedded", "--port", "0", "--plugin", str(plugin), "--router", router, "--json"]
    with (tmp_path / "log").open("w") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "coterie", *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert gateway.stdout is not None
        line = gateway.stdout.readline()
        assert line, (tmp_path / "log").read_text()
        url = json.loads(line)["url"]
        with urllib.request.urlopen(f"{url}/routers", timeout=60) as answer:
            assert json.load(answer)["decode"]["router"] == router
        body = json.dumps({"model": "coterie-tiny", "prompt": "Once upon", "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.communicate(timeout=120)
    assert gateway.returncode == 0


def test_demo(run: Run, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coterie.answers.demo.run, "MAX_TOKENS", 4)
    ran = run("demo", "--plugin", plugin, "--router", NAME, "--requests", 24, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert [row["router"] for row in found["rows"]] == ["join_shortest_queue", "round_robin", NAME]
    assert found["same_tokens"]


def test_processes_that_are_started_know_it(plugin: Path) -> None:
    load_plugin(str(plugin))
    load_plugin(str(plugin))
    assert os.environ[PLUGINS] == str(plugin), "once"
    code = f"from coterie.routing import routers; print(routers.make('{NAME}:most_ahead=7'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "MostCached(most_ahead=7)\n"


@pytest.mark.parametrize("source", ["import unheard_of", "1 / 0", "raise KeyError('x')", "def"])
def test_a_plugin_that_cannot_be_imported(plugin: Path, source: str) -> None:
    plugin.write_text(source)
    with pytest.raises(ConfigError, match=r"my_router\.py"):
        load_plugin(str(plugin))
    assert plugin.stem not in sys.modules
    assert not os.environ[PLUGINS]


@pytest.mark.parametrize("name", ["missing.py", "coterie_missing", "json.py", ""])
def test_a_plugin_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="plugin"):
        load_plugin(name)
