"""A gateway in front of workers, for tests: in this process, on real sockets."""

from __future__ import annotations

import io
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from canned_workers import Canned
from coterie.gateway.config import GatewayConfig, HealthSettings, WorkerEntry
from coterie.gateway.serve import Running
from coterie.gateway.watching.logs import Log
from coterie.net.access import FleetAccess
from coterie.net.http1.upstream import Upstream

FAST = HealthSettings(backoff_s=0.0, every_s=3600.0)
"""Retries without a wait, one health check."""


class Got(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Client:
    """Asks a gateway."""

    def __init__(self, url: str) -> None:
        self.upstream = Upstream(url)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        key: str | None = None,
    ) -> Got:
        raw = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        sent = [*headers, *([(b"content-type", b"application/json")] if body is not None else [])]
        if key is not None:
            sent.append((b"authorization", b"Bearer " + key.encode()))
        answer = await self.upstream.send(method, path, sent, raw)
        data = await answer.read()
        return Got(answer.status, dict(answer.headers), data)

    async def complete(self, **body: Any) -> Got:
        return await self.ask("POST", "/v1/completions", {"model": "canned", "prompt": "Hello", **body})


class Run(NamedTuple):
    running: Running
    client: Client

    @property
    def metrics(self) -> dict[str, float]:
        """Name and labels → value, as Prometheus reads them."""
        lines = self.running.parts.metrics.render().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def config_of(workers: Sequence[Canned], roles: Sequence[str] | None = None, **more: Any) -> GatewayConfig:
    entries = [
        WorkerEntry(id=worker.name, url=worker.url, role="both" if roles is None else roles[number])  # type: ignore[arg-type]
        for number, worker in enumerate(workers)
    ]
    settings = {"listen": "127.0.0.1:0", "health": FAST, **more}
    return GatewayConfig(workers=entries, **settings)


@asynccontextmanager
async def gateway(
    config: GatewayConfig, path: Path | None = None, access: FleetAccess | None = None
) -> AsyncIterator[Run]:
    log = Log(io.StringIO())
    running = Running(config, path, log, access)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    client = None
    try:
        await running.start(listener)
        client = Client(running.url)
        yield Run(running, client)
    finally:
        if client is not None:
            await client.upstream.close()
        await running.close(0)
