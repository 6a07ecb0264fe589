"""``coterie record`` against the reference worker: a PUB socket, which does not tell who has subscribed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zmq

from command_line import Run, refused, runner
from coterie.engines.worker.embedded import EmbeddedWorker, embedded_worker
from coterie.net.processes import free_port
from coterie.traces import ActivationTrace
from coterie.wire.event_security import secure_subscriber
from coterie.wire.framing import REPLAY_END, from_frames
from coterie.wire.kv_events import BlockStored, KVEvent, decode_kv_events


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "record", "--engine", "vllm")


def stored_of(worker: EmbeddedWorker) -> list[KVEvent]:
    """All KV events of a worker, from its replay endpoint."""
    assert worker.access.secret is not None
    events: list[KVEvent] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secure_subscriber(dealer, worker.access.secret)
        dealer.setsockopt(zmq.RCVTIMEO, 120_000)
        dealer.connect(worker.kv_replay)
        dealer.send_multipart([b"", bytes(8)])
        while (frame := from_frames(dealer.recv_multipart()[1:])).seq != REPLAY_END:
            events += decode_kv_events(frame.payload).events
    return events


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
        assert any(isinstance(event, BlockStored) for event in stored_of(made)), "KV events are kept for a replay"
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
