"""Real workers in processes of their own, and how to ask them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from hypothesis import strategies as st

import transformers_models as models
from coterie.net.processes import ServerProcess, free_port
from coterie.wire.handoff import prefill_body

FAMILY = "qwen3_moe"
LIMIT = 256
TTL_S = {"prefill": 600.0, "both": 3.0, "decode": 600.0}
"""Long where a test fetches KV, however slow the machine is."""
COMMAND = [sys.executable, "-c", "from coterie.cli.main import main; main()", "worker"]


class Answered(NamedTuple):
    status: int
    body: Any


class Worker(NamedTuple):
    process: ServerProcess
    port: int
    kv_port: int
    expert_port: int

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            kind = response.headers.get_content_type()
            return Answered(response.status, json.loads(data) if kind == "application/json" else data)
        finally:
            connection.close()

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> Answered:
        return self.send("POST", path, json.dumps(body).encode(), headers)

    def complete(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        status, answer = self.post(body, path)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        status, data = self.post({**body, "stream": True}, path)
        assert status == 200, data
        lines = [line for line in data.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def series(self, name: str, **labels: str) -> float:
        """One series of /metrics."""
        text = self.send("GET", "/metrics").body.decode()
        want = "".join(f'(?=.*{key}="{value}")' for key, value in labels.items())
        found = re.findall(rf"^coterie_worker_{name}{{{want}[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert len(found) == 1, (name, labels, found)
        return float(found[0])


def until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[dict[str, Worker]]:
    """One worker of each role, by role; none may have failed by the end."""
    model = models.save(FAMILY, folder / "model")
    env = {"OMP_NUM_THREADS": "1"}
    running: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        for name, role in (("prefill", "prefill"), ("both", "both"), ("decode", "decode")):
            port, kv_port, expert_port = (free_port() for _ in range(3))
            options: list[str | Path] = [
                "--model",
                model,
                "--role",
                role,
                "--port",
                str(port),
                "--served-model-name",
                "tiny",
                "--block-size",
                "8",
                "--kv-ttl",
                str(TTL_S[name]),
                "--kv-events",
                f"tcp://127.0.0.1:{kv_port}",
                "--expert-events",
                f"tcp://127.0.0.1:{expert_port}",
            ]
            process = ServerProcess([*COMMAND, *options], f"http://127.0.0.1:{port}", folder / f"{name}.log", env)
            stack.callback(process.launch().stop)
            running[name] = Worker(process, port, kv_port, expert_port)
        for worker in running.values():
            worker.process.wait_ready(120)
        yield running
        for name, worker in running.items():
            assert "Traceback" not in worker.process.log_text(), name


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, models.VOCAB, rng.integers(1, 60)).tolist() for _ in range(count)]


def asking(prompt: Any, count: int = 12, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def prefill(workers: dict[str, Worker], body: dict[str, Any]) -> dict[str, Any]:
    params = workers["prefill"].complete(prefill_body(body))["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([1 << 70, -1, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt",
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "stream",
    "stream_options",
    "return_token_ids",
    "kv_transfer_params",
    "logprobs",
)

BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no prompt": ({"prompt": None}, 400, "prompt must be a text or a list of token ids"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "one a request"),
    "empty": ({"prompt": []}, 400, "at least one"),
    "a token past the vocabulary": ({"prompt": [models.VOCAB]}, 400, f"0 … {models.VOCAB - 1}"),
    "too long": ({"prompt": [5] * LIMIT}, 400, f"fit {LIMIT}"),
    "far too long": ({"prompt": "x" * 200_000}, 400, "fits this model's context"),
    "no room": ({"prompt": [5] * 200, "max_tokens": 57}, 400, "max_tokens=57 must be at most 56"),
    "another model": ({"model": "big"}, 404, "'tiny'"),
    "n": ({"n": 2}, 400, "give 1"),
    "temperature": ({"temperature": -1}, 400, "0 … 100"),
    "nan": ({"temperature": float("nan")}, 400, "must be a number"),
    "top_p": ({"top_p": 0}, 400, "greater than 0"),
    "max_tokens": ({"max_tokens": 0}, 400, "1 … "),
    "max_tokens of a text": ({"max_tokens": "many"}, 400, "whole number"),
    "stop": ({"stop": [""]}, 400, "none empty"),
    "stream_options": ({"stream_options": {"include_usage": True}}, 400, "needs stream=true"),
    "logprobs": ({"logprobs": 5}, 400, "leave it out"),
    "surrogate": ({"prompt": "\ud800"}, 400, "surrogate"),
    "both ways": ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, 400, "not both"),
    "no host": ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "remote_host"),
}
"""What a body changes, the status it gets, and words of the reason."""


def subscribe(context: Any, port: int, topic: bytes) -> Any:
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.LINGER, 0)
    subscriber.setsockopt(zmq.RCVTIMEO, 120_000)
    subscriber.setsockopt(zmq.SUBSCRIBE, topic)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    return subscriber
