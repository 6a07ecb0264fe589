"""The reference worker on NumPy: serves coterie-tiny in a separate process, without torch.

    python -m coterie.engines.worker.embedded --role decode --port 8102 --expert-events tcp://127.0.0.1:5602

Server, protocol, engine, blocks, counters and events are those of the reference worker. The forward pass is
:mod:`coterie.engines.worker.numpy_model`, and KV is sent as NumPy arrays: these workers hand KV to each other only.
Secrets are read from the environment; :func:`embedded_fleet` gives a fleet fresh ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.config import STREAMS, Role, WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.model import PackedModel
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.engines.worker.server import serve_engine
from coterie.engines.worker.transfer import numpy_codec
from coterie.net.access import FleetAccess
from coterie.net.processes import ServerProcess, free_port


class EmbeddedEngine(Engine):
    step_clock = staticmethod(time.thread_time)  # CPU time: wall time would count waiting for other workers' cores
    codec = staticmethod(numpy_codec)

    @classmethod
    def load_model(cls, config: WorkerConfig) -> PackedModel:
        return cast(PackedModel, NumpyModel(config.model, config.kv_blocks, config.block_size))


class EmbeddedWorker(NamedTuple):
    """A worker process on free ports of this machine, and the endpoints of its streams."""

    process: ServerProcess
    """The process, not started yet."""
    role: Role
    expert_events: str
    kv_events: str
    kv_replay: str
    access: FleetAccess

    @property
    def url(self) -> str:
        return self.process.url


def embedded_worker(
    role: Role,
    folder: Path,
    name: str,
    access: FleetAccess | None = None,
    peers: Sequence[str] = (),
    port: int | None = None,
) -> EmbeddedWorker:
    """Create a worker without starting it; its log goes to `folder`.

    Workers of one fleet share `access`; without it, this worker gets fresh secrets. It may fetch KV from the addresses
    in `peers`. See :func:`embedded_fleet`.
    """
    access = access or FleetAccess.fresh()
    port = port or free_port()
    experts, kv, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    argv = [sys.executable, "-m", __name__, "--role", role, "--port", str(port)]
    argv += ["--expert-events", experts, "--kv-events", kv, "--kv-replay", replay]
    argv += [word for peer in peers for word in ("--peer", peer)]
    # One BLAS thread each: several workers share the machine, and this model's matrices are small.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **access.environment}
    process = ServerProcess(argv, f"http://127.0.0.1:{port}", folder / f"{name}.log", env)
    return EmbeddedWorker(process, role, experts, kv, replay, access)


def embedded_fleet(roles: Sequence[Role], folder: Path) -> list[EmbeddedWorker]:
    """Create workers with fresh shared secrets that may fetch KV from the prefilling ones; none is started."""
    access = FleetAccess.fresh()
    ports = [free_port() for _ in roles]
    peers = [f"127.0.0.1:{port}" for port, role in zip(ports, roles, strict=True) if role != "decode"]
    return [
        embedded_worker(role, folder, f"worker-{number}", access, peers, port)
        for number, (port, role) in enumerate(zip(ports, roles, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The reference worker on NumPy.")
    parser.add_argument("--role", default="both")
    parser.add_argument("--port", type=int, default=8100)
    for stream in STREAMS:
        parser.add_argument(f"--{stream.replace('_', '-')}")
    parser.add_argument("--peer", action="append", default=[])
    asked = parser.parse_args()
    access = FleetAccess.read()
    config = WorkerConfig(
        model=tiny_model_path(),
        role=asked.role,
        port=asked.port,
        fleet_secret=access.secret,
        worker_key=access.key,
        peers=tuple(asked.peer),
        kv_events=asked.kv_events,
        kv_replay=asked.kv_replay,
        expert_events=asked.expert_events,
        served_model_name=TINY,
    )
    serve_engine(EmbeddedEngine, config, lambda _: None)


if __name__ == "__main__":
    main()
