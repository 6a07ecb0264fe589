"""The processes: an embedded fleet, a liar in front of its prefill worker, and a gateway that can be restarted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from sys import executable
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator

from coterie.engines.worker.embedded import EmbeddedWorker
from coterie.gateway.config import GatewayConfig, LimitSettings, WorkerEntry
from coterie.gateway.embedded import EmbeddedFleet
from coterie.net.http1.messages import HttpError, HttpRequest, Limits, passed_on
from coterie.net.http1.responder import Responder
from coterie.net.http1.server import HttpServer
from coterie.net.http1.upstream import Upstream, UpstreamError
from coterie.net.processes import ServerProcess, bind, free_port
from coterie.wire.footprints import KEY, WireFootprint, decode_footprint, encode_footprint

LIMITS = LimitSettings(prefill_s=6.0, first_token_s=60.0, idle_s=6.0)
"""A stall of some seconds must show, in health checks and in silence after the first token. Time for a first token is
long: the one worker that is well may have a queue, on a busy machine one of more than 15 s. The rest is default."""
DRAIN_S = 30.0
Lie = Callable[[str], Any]


def _array(change: Callable[[WireFootprint], WireFootprint]) -> Lie:
    return lambda text: encode_footprint(change(decode_footprint(text)))


LIES: dict[str, Lie] = {
    "transposed": _array(lambda one: one._replace(counts=one.counts.T, layer_ids=tuple(range(one.counts.shape[1])))),
    "one layer": _array(lambda one: one._replace(counts=one.counts[:1], layer_ids=one.layer_ids[:1])),
    "huge counts": _array(lambda one: one._replace(counts=one.counts + np.uint64(1 << 62))),
    "huge tokens": _array(lambda one: one._replace(tokens=1 << 62)),
    "no counts": _array(lambda one: one._replace(counts=one.counts * 0)),
    "cut off": lambda text: text[: len(text) // 2],
    "other bytes": lambda text: base64.b64encode(b"\xff" * len(text)).decode(),
    "a number": lambda _: 1e308,
    "a list": lambda _: [None, {}],
}
"""Ways to change the footprint in an answer."""


class Liar:
    """A proxy in front of the prefill worker that changes the footprints of some of its answers."""

    def __init__(self, worker_url: str, rng: Generator) -> None:
        self.share = 0.0
        """Share of the answers that lie."""
        self.told: Counter[str] = Counter()
        self.url = ""
        self._rng = rng
        self._worker = Upstream(worker_url)
        self._server = HttpServer(self._handle, Limits(body_s=600.0, head_s=600.0))

    async def start(self) -> None:
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self._server.start(listener)

    async def close(self) -> None:
        await self._server.close(0.0)
        await self._worker.close()

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        try:
            headers = passed_on(request.headers)
            answer = await self._worker.send(request.method, request.path, headers, request.body)
            data = await answer.read()
        except UpstreamError:  # as if the worker itself were gone
            responder.abort()
            return
        if answer.status == 200 and request.path.startswith("/v1/") and self._rng.random() < self.share:
            data = self._lie(data)
        kind = next((value for name, value in answer.headers if name == b"content-type"), b"application/json")
        responder.send(answer.status, data, kind)

    def _lie(self, data: bytes) -> bytes:
        answer = msgspec.json.decode(data)
        params = answer.get("kv_transfer_params") or {}
        if KEY in params:
            name = list(LIES)[self._rng.integers(len(LIES))]
            params[KEY] = LIES[name](params[KEY])
            self.told[name] += 1
        return msgspec.json.encode(answer)


class Site:
    """The processes, and what can be asked of them."""

    def __init__(self, fleet: EmbeddedFleet, rng: Generator) -> None:
        self.fleet = fleet
        self.liar = Liar(fleet.workers[0].url, rng)
        self.config_path = fleet.folder / "gateway.yaml"
        port = free_port()
        self.config = fleet.config(f"127.0.0.1:{port}", limits=LIMITS)
        argv = [executable, "-m", "coterie", "serve", "--config", str(self.config_path)]
        self.log = fleet.folder / "gateway.log"
        url = f"http://127.0.0.1:{port}"
        self.gateway = ServerProcess(argv, url, self.log, fleet.access.environment)
        self._admin = Upstream(url)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the liar and the gateway; the workers run already."""
        await self.liar.start()
        first, *others = self.config.workers
        self.config = msgspec.structs.replace(
            self.config,
            workers=[msgspec.structs.replace(first, url=self.liar.url), *others],
            state=str(self.fleet.folder / "state.json"),
            drain_s=DRAIN_S,
            log_requests=True,
        )
        self.write(self.config)
        try:
            await asyncio.to_thread(self.gateway.start)
            yield
        finally:
            await self._admin.close()
            await self.liar.close()
            await asyncio.to_thread(self.gateway.stop, 2 * DRAIN_S)

    def write(self, config: GatewayConfig) -> None:
        self.config_path.write_bytes(msgspec.yaml.encode(config))

    @property
    def decoders(self) -> dict[str, EmbeddedWorker]:
        """Decode workers by their ids in the gateway."""
        return {entry.id: worker for entry, worker in zip(self.config.workers[1:], self.fleet.workers[1:], strict=True)}

    def entry(self, worker_id: str) -> WorkerEntry:
        return next(one for one in self.config.workers if one.id == worker_id)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the gateway's own endpoints; raises UpstreamError or HttpError."""
        data = b"" if body is None else msgspec.json.encode(body)
        answer = await self._admin.send(method, path, [(b"content-type", b"application/json")], data)
        found = await answer.read()
        if answer.status != 200:
            raise HttpError(answer.status, found.decode(errors="replace"))
        return found.decode() if path == "/metrics" else msgspec.json.decode(found)

    async def metrics(self) -> dict[str, float]:
        """Return the metrics of the gateway: name and labels → value."""
        return parse_metrics(await self.ask("GET", "/metrics"))

    async def worker_metrics(self, worker: EmbeddedWorker) -> dict[str, float]:
        upstream = Upstream(worker.url)
        try:
            key = f"Bearer {worker.access.key}".encode()
            answer = await upstream.send("GET", "/metrics", [(b"authorization", key)])
            return parse_metrics((await answer.read()).decode())
        finally:
            await upstream.close()

    def logged(self) -> dict[str, dict[str, Any]]:
        """Request id → what the gateway said of its end, from the log of all its processes."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.log.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                event = msgspec.json.decode(line)
                if isinstance(event, dict) and event.get("event") == "request":
                    found[event["id"]] = event
        return found

    def resources(self) -> dict[str, float]:
        """Sockets, threads and memory of the gateway's process."""
        return resources_of(self.gateway.pid)


def resources_of(pid: int) -> dict[str, float]:
    folder = Path(f"/proc/{pid}")
    sockets = 0
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            sockets += str(link.readlink()).startswith("socket:")
    resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "sockets": sockets,
        "threads": len(list((folder / "task").iterdir())),
        "resident_mib": round(int(resident.split()[1]) / 1024, 1),
    }


def parse_metrics(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def until(true: Callable[[], Any], timeout_s: float, every_s: float = 0.25) -> bool:
    """Wait for a condition, sync or async; whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = true()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every_s)
