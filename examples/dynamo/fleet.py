"""Dynamo's stock frontend on this machine: one prefill and three decode workers, requests routed by Coterie.

    python examples/dynamo/fleet.py  # Ctrl-C ends it

Processes find each other by a folder (no etcd), and talk over TCP and ZMQ (no NATS), on the loopback address.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from coterie.errors import check
from coterie.gateway.embedded import OURS, tiny_fit_path
from coterie.net.processes import START_S, ServerProcess, free_port, temporary_folder

FRONT, DECODERS = "coterie", "decoders"
"""Namespaces: the frontend watches the first, so that it does not see the decode workers in the second."""
MODES = ("round-robin", "power-of-two")
"""Dynamo's own ways to choose a decode worker, for a comparison."""


class DynamoFleet(NamedTuple):
    folder: Path
    """Folder of logs and configs."""
    url: str
    """URL of the frontend behind which Coterie routes."""
    plain: dict[str, str]
    """Dynamo's router mode → URL of a frontend that chooses decode workers itself."""
    component: ServerProcess
    """Coterie's component; its URL serves /metrics."""
    prefill: ServerProcess
    decoders: list[ServerProcess]
    """Decode workers; their URLs answer requests directly, and serve the log of decode steps."""


@contextlib.contextmanager
def run_fleet(
    router: str = OURS, decoders: int = 3, compare: bool = False, migrations: int = 3
) -> Iterator[DynamoFleet]:
    """Start the fleet; end it with the block. `migrations`: times that an answer may go on at another worker."""
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
        env = {
            **planes,
            **dict.fromkeys(hosts, "127.0.0.1"),
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_LOG": "warn",
            "DYN_SELF_HOST_METADATA": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

        def start(name: str, port: int, *argv: str, more: Mapping[str, str] | None = None) -> ServerProcess:
            url = f"http://127.0.0.1:{port}"
            server = ServerProcess([sys.executable, *argv], url, folder / f"{name}.log", {**env, **(more or {})})
            stack.callback(server.kill)
            return server.launch()

        def worker(role: str, number: int, *endpoints: str) -> ServerProcess:
            port, script = free_port(), str(Path(__file__).with_name("worker.py"))
            named = [word for endpoint in endpoints for word in ("--endpoint", endpoint)]
            return start(f"{role}-{number}", port, script, "--role", role, "--http-port", str(port), *named)

        def frontend(namespace: str, mode: str) -> ServerProcess:
            port = free_port()
            options = ["--namespace", namespace, "--http-host", "127.0.0.1", "--http-port", str(port)]
            options += ["--router-mode", mode, "--migration-limit", str(migrations)]
            return start(f"frontend-{namespace}-{mode}", port, "-m", "dynamo.frontend", *options)

        prefill = worker("prefill", 0, *(f"{namespace}.prefill.generate" for namespace in (FRONT, DECODERS)))
        decoding = [worker("decode", number, f"{DECODERS}.backend.generate") for number in range(decoders)]
        config, port = folder / "router.yaml", free_port()
        config.write_text(json.dumps({"decode": {"router": router, "fit": str(tiny_fit_path())}}))
        ours = ["-m", "coterie.stacks.dynamo", "--config", str(config), "--decoders", f"{DECODERS}.backend.generate"]
        component = start("coterie", port, *ours, more={"DYN_SYSTEM_PORT": str(port)})
        fronts = [frontend(FRONT, "round-robin")]
        fronts += [frontend(DECODERS, mode) for mode in MODES] if compare else []
        for server in (prefill, *decoding, component, *fronts):
            server.wait_ready()
        for server in fronts:
            wait_for_model(server.url)
        plain = dict(zip(MODES, [server.url for server in fronts[1:]], strict=False))
        yield DynamoFleet(folder, fronts[0].url, plain, component, prefill, decoding)


def wait_for_model(url: str, timeout_s: float = START_S) -> None:
    """Wait until a frontend lists a model: it then knows a prefill and a decode worker."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with urlopen(f"{url}/v1/models", timeout=timeout_s) as answer:
            if json.load(answer)["data"]:
                return
        time.sleep(0.1)
    check(False, f"{url}: no model within {timeout_s:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--router", default=OURS, help="router of the decode workers, such as join_shortest_queue")
    given = parser.parse_args()
    with run_fleet(given.router) as fleet:
        print(f"Serving at {fleet.url}, routed by {given.router}; metrics at {fleet.component.url}/metrics")
        print(f"Next: coterie load {fleet.url} --ignore-eos")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
