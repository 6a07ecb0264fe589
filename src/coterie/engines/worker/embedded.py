"""The reference worker on NumPy: coterie-tiny in a process of its own, where torch is not installed.

    python -m coterie.engines.worker.embedded --role decode --port 8102 --expert-events tcp://127.0.0.1:5602

Server, protocol, engine, blocks, counters and events are the reference worker's; the forward pass is
:mod:`coterie.engines.worker.numpy_model`, and KV travels as plain arrays. Such workers hand KV to each other only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.config import Role, WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.events import EventStream
from coterie.engines.worker.launch import bind
from coterie.engines.worker.model import PackedModel
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.engines.worker.server import Server
from coterie.engines.worker.transfer import VERSION, Prefilled
from coterie.errors import InputError
from coterie.net.processes import ServerProcess, free_port
from coterie.wire.expert_events import TOPIC


class EmbeddedEngine(Engine):
    step_clock = staticmethod(time.thread_time)  # several on few cores wait for each other: the clock would count that

    @staticmethod
    def to_bytes(prefilled: Prefilled) -> bytes:
        return to_bytes(prefilled)

    @staticmethod
    def from_bytes(data: bytes) -> Prefilled:
        return from_bytes(data)


def to_bytes(prefilled: Prefilled) -> bytes:
    extra = {"token_ids": prefilled.token_ids, "expert_ids": prefilled.expert_ids}
    arrays = {name: np.ascontiguousarray(array) for name, array in {**prefilled.tensors, **extra}.items()}
    return bytes(save(arrays, {"version": VERSION, "identity": prefilled.identity}))


def from_bytes(data: bytes) -> Prefilled:
    """Raises InputError in one line, whatever the bytes are."""
    try:
        arrays = load(data)
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        token_ids, expert_ids = arrays.pop("token_ids"), arrays.pop("expert_ids")
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"is no prefilled request: {error}") from None
    if about.get("version") != VERSION:
        raise InputError(f"is a prefilled request of version {about.get('version')!r}, expected {VERSION!r}")
    if token_ids.ndim != 1 or expert_ids.ndim != 3 or len(expert_ids) != len(token_ids):
        raise InputError(f"has token_ids {token_ids.shape} and expert_ids {expert_ids.shape}")
    return Prefilled(about.get("identity", ""), token_ids, expert_ids, arrays)


def embedded_worker(role: Role, folder: Path, name: str) -> tuple[ServerProcess, str]:
    """A worker on free ports, not started yet, and the endpoint of its expert events."""
    port, events = free_port(), f"tcp://127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", __name__, "--role", role, "--port", str(port), "--expert-events", events]
    # One thread each: several workers share the machine, and this model's matrices are small.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return ServerProcess(argv, f"http://127.0.0.1:{port}", folder / f"{name}.log", env), events


def serve(config: WorkerConfig) -> None:
    """Until SIGTERM or SIGINT."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        stream = None
        if config.expert_events is not None:
            stream = EventStream(config.expert_events, TOPIC, config.event_queue)
            stack.callback(stream.close)
        model: Any = NumpyModel(config.model, config.kv_blocks, config.block_size)
        engine = EmbeddedEngine(cast(PackedModel, model), config, expert_stream=stream)
        asyncio.run(Server(engine, config).run(listener, lambda _: None))


def main() -> None:
    parser = argparse.ArgumentParser(description="The reference worker on NumPy.")
    parser.add_argument("--role", default="both")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--expert-events")
    asked = parser.parse_args()
    serve(
        WorkerConfig(
            model=tiny_model_path(),
            role=asked.role,
            port=asked.port,
            expert_events=asked.expert_events,
            served_model_name=TINY,
        )
    )


if __name__ == "__main__":
    main()
