"""Environments of other people's tools: made from PyPI on first use, in a folder that is not part of the package."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "out"


def installed(folder: Path, command: str, *steps: Sequence[str]) -> Path:
    """A command of the environment in `folder`; pip first installs each step's requirements in turn, once."""
    done = folder / f".{command}-installed"
    if not done.exists():
        print(f"installing {', '.join(steps[-1])} under {folder}", file=sys.stderr)
        if not (folder / "bin" / "pip").exists():
            venv.create(folder, with_pip=True)
        for step in steps:
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", *step], check=True, stdout=sys.stderr)
        done.touch()
    return folder / "bin" / command
