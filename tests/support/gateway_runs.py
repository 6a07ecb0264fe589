"""A gateway in front of workers, for tests: in this process, on real sockets."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from books import check_keeper
from canned_workers import Canned
from coterie.gateway.access import new_key
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.serve import MakeFront, RunningGateway
from coterie.gateway.watching.logs import Log
from coterie.net.access import FleetAccess
from coterie.net.http1.upstream import Upstream

FAST = HealthSettings(backoff_s=0.0, every_s=3600.0, timeout_s=60.0)
"""Retries without a wait, one health check."""


PATIENCE_S = 300.0
"""No verdict depends on it: it ends a test that hangs."""


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
    running: RunningGateway
    client: Client
    said: io.StringIO
    """What the log's thread has written so far."""

    @property
    def port(self) -> int:
        return int(self.running.url.rpartition(":")[2])

    def open(self, pool: str) -> set[str]:
        """Workers that may be chosen."""
        found = self.running.parts.pools[pool]
        return {name for name in found.members if found.keeper.members[name].open}

    def logged(self) -> str:
        """Return all that was logged: a thread writes it. Nothing is logged from then on."""
        self.running.parts.log.close(PATIENCE_S)
        return self.said.getvalue()

    @property
    def metrics(self) -> dict[str, float]:
        """Name and labels → value, as Prometheus reads them."""
        lines = self.running.parts.metrics.render().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def run(test: Callable[[], Coroutine[Any, Any, None]], patience_s: float = PATIENCE_S) -> None:
    """In an event loop of its own, with an end. What a callback raises unhandled, and a task left behind, fail it."""
    raised: list[str] = []

    async def ended() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(f"{context.get('exception')!r}: {context}"))
        async with asyncio.timeout(patience_s):
            await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(ended())
    assert not raised, raised


def idle(found: Run) -> None:
    """Nothing is left of any request."""
    parts = found.running.parts
    for pool in parts.pools.values():
        check_keeper(pool.keeper)
        assert not pool.keeper.requests
        assert pool.keeper.fleet.running.sum() == 0
        assert pool.keeper.fleet.context_tokens.sum() == 0
    assert parts.line.in_use == parts.line.waiting == 0
    assert not found.running.gateway.in_flight


async def settled(found: Run) -> None:
    """Wait until nothing is left of any request; the test's own end is the limit."""
    parts, names = found.running.parts, found.running.gateway.in_flight
    while (
        names or parts.line.in_use or parts.line.waiting or any(pool.keeper.requests for pool in parts.pools.values())
    ):
        await asyncio.sleep(0.001)
    idle(found)


def write_keys(path: Path, *names: str, rate: float | None = None) -> dict[str, str]:
    """Keys by name; the name `admin` may do everything."""
    made = {name: new_key(name, admin=name == "admin", rate=rate) for name in names}
    path.write_text("".join(one.entry.as_yaml() for one in made.values()))
    path.chmod(0o600)
    return {name: one.key for name, one in made.items()}


def config_of(workers: Sequence[Canned], roles: Sequence[str] | None = None, **more: Any) -> GatewayConfig:
    entries = [
        WorkerEntry(id=worker.name, url=worker.url, role="both" if roles is None else roles[number])  # type: ignore[arg-type]
        for number, worker in enumerate(workers)
    ]
    settings = {"listen": "127.0.0.1:0", "health": FAST, **more}
    return GatewayConfig(workers=entries, **settings)


@asynccontextmanager
async def gateway(
    config: GatewayConfig,
    path: Path | None = None,
    access: FleetAccess | None = None,
    port: int = 0,
    front: MakeFront | None = None,
) -> AsyncIterator[Run]:
    said = io.StringIO()
    running = RunningGateway(config, path, Log(said, requests=config.log_requests), access, front)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port may be that of a gateway that ended
    listener.bind(("127.0.0.1", port))
    client = None
    try:
        await running.start(listener)
        client = Client(running.url)
        yield Run(running, client, said)
    finally:
        if client is not None:
            await client.upstream.close()
        await running.close(0)
