"""OpenAI's Python client, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.checks import FAILED, PASSED, Asked, Check
from environments import OUT, installed

LIMIT_S = 600
REQUIREMENT = "openai==3.49.0"


def try_openai(asked: Asked) -> tuple[str, list[Check]]:
    """Version, and what came of each check; bodies are compared byte by byte with what a worker that keeps them got."""
    python = installed(OUT / "clients" / "openai", "python", [REQUIREMENT])
    script = Path(__file__).with_name("openai_script.py")
    argv: list[str | Path] = [python, script, asked.url, asked.model, *([] if asked.key is None else [asked.key])]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ran.returncode:
        return REQUIREMENT.partition("==")[2], [Check("openai", "all", FAILED, ran.stderr[-500:])]
    told = json.loads(ran.stdout)
    found = [Check("openai", one["what"], one["outcome"], one["detail"]) for one in told["checks"]]
    if asked.got is not None:
        found.append(_compared(told["sent"], asked.got))
    return told["version"], found


def _compared(sent: list[tuple[str, str]], got: Sequence[Any]) -> Check:
    """Whether the worker got every body that the client sent under an id of its own."""
    what = "workers get bodies byte for byte"
    kept = {(one.headers.get(b"x-request-id", b"").decode(), one.raw) for one in got}
    lost = [name for name, body in sent if (name, body.encode()) not in kept]
    if lost or not sent:
        return Check("openai", what, FAILED, f"changed: {', '.join(lost)}")
    return Check("openai", what, PASSED, f"{len(sent)} bodies, tools and logprobs among them")
