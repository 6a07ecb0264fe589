"""The gateways that are compared: how each is started in front of the same workers.

The Rust routers are wheels of PyPI; they get an environment of their own, made on first use under ``out/peers``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coterie.errors import ConfigError
from coterie.net.processes import ServerProcess, free_port
from environments import OUT, installed

HERE = Path(__file__).resolve().parent
ENVIRONMENT = OUT / "peers"
PACKAGES = {"vllm-router": "0.1.16", "sglang-router": "0.3.2"}
OWN = ("minimal", "bare-aiohttp")
PEERS = (*PACKAGES, *OWN)
START_S = 120.0


class Target(NamedTuple):
    """A gateway, or the workers themselves, under load."""

    name: str
    url: str
    process: ServerProcess | None = None


def start_workers(count: int, logs: Path) -> tuple[ServerProcess, list[str]]:
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    argv = [sys.executable, str(HERE / "canned.py"), *map(str, ports)]
    return ServerProcess(argv, urls[0], logs / "canned.log").start(START_S), urls


def start_peer(name: str, workers: Sequence[str], logs: Path) -> Target:
    """Start one of PEERS by its name."""
    if name not in PEERS:
        raise ConfigError(f"peer={name!r} must be one of {', '.join(PEERS)}")
    port = free_port()
    if name in OWN:
        argv = [sys.executable, str(HERE / f"{name.replace('-', '_')}.py"), str(port), *workers]
    else:
        argv = [str(_installed(name)), *_router_options(name, port, workers)]
    return _start(name, argv, port, logs)


def start_command(given: str, workers: Sequence[str], logs: Path) -> Target:
    """Use a gateway that the user names: a URL where it runs, or a command that starts it.

    ``NAME=`` may stand before it. In a command, ``{port}`` and ``{workers}`` stand for its port and the workers' URLs.
    """
    name, mark, rest = given.partition("=")
    if not mark or " " in name or "/" in name:
        name, rest = "gateway", given
    if rest.startswith(("http://", "https://")) and " " not in rest:
        return Target(name, rest.rstrip("/"))
    port = free_port()
    argv = shlex.split(rest.replace("{port}", str(port)).replace("{workers}", " ".join(workers)))
    return _start(name, argv, port, logs)


def _start(name: str, argv: Sequence[str], port: int, logs: Path) -> Target:
    url = f"http://127.0.0.1:{port}"
    return Target(name, url, ServerProcess(argv, url, logs / f"{name}.log").start(START_S))


def _router_options(name: str, port: int, workers: Sequence[str]) -> list[str]:
    shared = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    shared += ["--prometheus-port", str(free_port()), "--worker-urls", *workers]
    return shared if name == "vllm-router" else ["launch", *shared]


def _installed(name: str) -> Path:
    return installed(ENVIRONMENT, name, [f"{name}=={PACKAGES[name]}"])
