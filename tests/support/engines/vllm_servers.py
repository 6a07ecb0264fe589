"""Real vLLM servers for the tests: started when first asked for, together where they are used together."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coterie.engines.tiny import tiny_model_path
from coterie.net.processes import ServerProcess, free_port

START_S = 420.0
"""Three servers that start together on two busy cores."""
MODEL = "tiny"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@dataclass
class Server:
    name: str
    process: ServerProcess
    events: str
    log: Path
    store: str
    kv_events: str
    """Endpoint of KV events, if they were asked for; `kv_replay` sends lost ones again."""
    kv_replay: str

    @property
    def url(self) -> str:
        return self.process.url

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def complete(self, prompt: str | list[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        return self.post("/v1/completions", {**body, **more})

    def complete_all(self, prompts: Iterable[str], concurrency: int, **more: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(
                pool.map(lambda item: self.complete(item[1], request_id=f"r{item[0]}r", **more), enumerate(prompts))
            )

    def metrics(self) -> dict[str, float]:
        """Sum of each counter or gauge over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=120) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def counter(self, name: str) -> float:
        return self.metrics()[f"coterie_{name}_total"]


@dataclass
class Fleet:
    """Every server of a test session, by name."""

    folder: Path
    servers: dict[str, Server] = field(default_factory=dict)
    start_s: float = START_S

    def start(self, wanted: dict[str, dict[str, Any]]) -> list[Server]:
        """Those not yet running are started at the same time."""
        new = [self._make(name, **how) for name, how in wanted.items() if name not in self.servers]
        with ThreadPoolExecutor(max(1, len(new))) as pool:
            try:
                list(pool.map(lambda server: server.process.start(self.start_s), new))
            except BaseException:
                for server in new:
                    server.process.kill()
                raise
        self.servers.update({server.name: server for server in new})
        return [self.servers[name] for name in wanted]

    def stop(self, *names: str) -> None:
        for name in names:
            if name in self.servers:
                self.servers.pop(name).process.stop()

    def close(self) -> None:
        self.stop(*list(self.servers))

    def _make(
        self,
        name: str,
        *arguments: str,
        settings: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
        model: Path | None = None,
        env: dict[str, str] | None = None,
        extra: tuple[str, ...] = (),
        kv_events: bool = False,
    ) -> Server:
        """`settings` turns the plugin on; `beside` is a KV connector to run it beside."""
        port, events_port = free_port(), free_port()
        argv = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model or tiny_model_path()),
            "--served-model-name",
            MODEL,
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "512",
            "--block-size",
            str(BLOCK_SIZE),
            "--kv-cache-memory-bytes",
            KV_CACHE_BYTES,
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            *arguments,
            *extra,
        ]
        if settings is not None:
            own = {
                "kv_connector": "CoterieConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"events": f"tcp://127.0.0.1:{events_port}", "store": name, **settings},
            }
            if beside is not None:
                both = {"connectors": [beside, own]}
                own = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
            argv += ["--kv-transfer-config", json.dumps(own)]
        kv, replay = (f"ipc://{self.folder}/{name}.{kind}" for kind in ("kv", "replay"))  # no port that others may take
        if kv_events:
            published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kv, "replay_endpoint": replay}
            argv += ["--kv-events-config", json.dumps(published)]
        log = self.folder / f"{name}.log"
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **(env or {}),
        }
        process = ServerProcess(argv, f"http://127.0.0.1:{port}", log, environment)
        return Server(name, process, f"tcp://127.0.0.1:{events_port}", log, name, kv, replay)


def hand_over(folder: Path) -> dict[str, Any]:
    """vLLM's connector that hands KV over through a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def start_trio(fleet: Fleet) -> list[Server]:
    """One prefill and two decode servers that hand KV over through a folder, and tell which experts and blocks.

    The last runs Coterie's scheduler, with nothing to go by but the footprints that it is given.
    """
    fleet.stop("plugin", "tight")
    how: dict[str, Any] = {
        "settings": {"load_interval_s": 0.2},
        "beside": hand_over(fleet.folder / "kv"),
        "kv_events": True,
        "extra": ("--enable-prompt-tokens-details",),
    }
    ordering = {"coterie": {"scheduler": {"strategy": "greedy_variance", "decisions": str(decisions_of(fleet))}}}
    scheduler = "coterie.engines.vllm.scheduler.ExpertAwareScheduler"
    ours = (*how["extra"], "--scheduler-cls", scheduler, "--additional-config", json.dumps(ordering))
    return fleet.start({**dict.fromkeys(TRIO, how), TRIO[-1]: {**how, "extra": ours}})


def decisions_of(fleet: Fleet) -> Path:
    """File of the selections that the scheduler of the last of the three made."""
    return fleet.folder / "decisions"


TRIO = ("prefill", "decode-0", "decode-1")
BLOCK_SIZE = 32
"""Tokens per KV block; vLLM's attention on a CPU takes multiples of 32."""
KV_CACHE_BYTES = "256M"
"""For 65,536 tokens of coterie-tiny, at 4 KiB each."""
PLUGIN = {"settings": {"footprint": "always", "load_interval_s": 0.2, "events_queue": 32}}
