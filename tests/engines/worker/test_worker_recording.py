"""``coterie record`` against the reference worker: a PUB socket, which does not tell who has subscribed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Run, refused, runner
from coterie.engines.worker.embedded import embedded_worker
from coterie.net.processes import free_port
from coterie.traces import ActivationTrace


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "record", "--engine", "vllm")


def test_every_prompt_is_recorded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = embedded_worker("both", tmp_path, "worker")
    worker, events = made.process, made.expert_events
    for name, value in made.access.environment.items():
        monkeypatch.setenv(name, value)
    out, asked = tmp_path / "trace", ["--prompts", "bundled", "--limit", 6, "--max-tokens", 3]
    with worker.launch():
        url = worker.wait_ready().url
        ran = run("--url", url, "--events", events, "-o", out, *asked, "--json")
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert (found["requests"], found["failed"], found["lost_messages"]) == (6, 0, 0)
        assert "too few to tell what a fleet would gain" in found["verdict"]
        assert found["next"] == f"coterie inspect {out}"
        trace = ActivationTrace.open(out)
        trace.validate()
        assert trace.num_tokens == found["prompt_tokens"] + found["output_tokens"] - 6
        nobody = f"tcp://127.0.0.1:{free_port()}"
        refused(run("--url", url, "--events", nobody, "-o", tmp_path / "u", *asked), f"nothing listens at {nobody}")
    refused(run("--url", url, "--events", events, "-o", tmp_path / "u", *asked), f"nothing listens at {url}", "start")
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_nothing_listens_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ran = runner(monkeypatch, capsys, "record")("--engine", engine, "--url", url, "-o", tmp_path / "t", "--duration", 1)
    refused(ran, f"nothing listens at {url}", "start")
