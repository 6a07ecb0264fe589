"""One version number, in `coterie.__version__`, and the two ways to start the command."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from typer.testing import CliRunner

import coterie
from coterie.cli.main import app

ROOT = Path(__file__).parents[2]


def test_the_command_prints_the_version_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"coterie {coterie.__version__}\n")


def test_the_package_is_built_with_that_version() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/coterie/__init__.py"


def test_python_m_starts_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "coterie", "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"coterie {coterie.__version__}\n", "")
