"""Load tools of the field, each in an environment of its own, with a small run: every request must succeed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from clients.checks import FAILED, PASSED, Asked, Check
from environments import OUT, installed

LIMIT_S = 600
REQUESTS, CONCURRENCY = 24, 4
TORCH = "torch==2.13.0"
GUIDELLM = "guidellm==0.8.1"
WAYS = {
    "chat, streamed": "request_format=/v1/chat/completions",
    "completions, streamed": "request_format=/v1/completions",
    "chat, whole": "request_format=/v1/chat/completions,stream=false",
}
"""Name of a trial → options of guidellm's backend."""


def try_guidellm(asked: Asked, tokenizer: Path) -> tuple[str, list[Check]]:
    """Version, and what came of each of WAYS."""
    command = installed(OUT / "clients" / "guidellm", "guidellm", [TORCH], [GUIDELLM])
    found = [_guidellm(command, asked, tokenizer, what) for what in WAYS]
    return GUIDELLM.partition("==")[2], found


def _guidellm(command: Path, asked: Asked, tokenizer: Path, what: str) -> Check:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={asked.url},model={asked.model},{WAYS[what]}"
        argv: list[str | Path] = [command, "run", "--backend", backend]
        argv += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
        argv += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        argv += ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
        argv += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"]
        argv += ["--output", f"kind=json,path={report}"]
        env = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env, cwd=folder)
        if ran.returncode or not report.exists():
            return Check("guidellm", what, FAILED, (ran.stdout + ran.stderr)[-500:])
        told = json.loads(report.read_text())["benchmarks"][0]
    totals: dict[str, Any] = told["metrics"]["request_totals"]
    good = totals["successful"] == REQUESTS and not totals["errored"] and not totals["incomplete"]
    detail = ", ".join(f"{name} {totals[name]}" for name in ("successful", "errored", "incomplete"))
    return Check("guidellm", what, PASSED if good else FAILED, f"{CONCURRENCY} at once: {detail}")
