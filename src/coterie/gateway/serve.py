"""Run a gateway: bind, start, serve, reload on SIGHUP, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import msgspec

from coterie.errors import InputError, check, check_given
from coterie.gateway.access import Keys
from coterie.gateway.config import GatewayConfig, check_filled_in, read_config
from coterie.gateway.exchange.pool import DECODE, PREFILL
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.gateway import Gateway, check_access
from coterie.gateway.parts import GatewayParts
from coterie.gateway.pods import PodWatch
from coterie.gateway.saved import SavedState, load_state, lock_state, set_aside
from coterie.gateway.watching.logs import Log
from coterie.gateway.watching.metrics import Counter, Gauge, Read
from coterie.net.access import Address, FleetAccess
from coterie.net.http1.server import HttpServer, most_connections
from coterie.net.processes import bind
from coterie.routing import RouterFit
from coterie.units import counted

FIXED = (
    "listen",
    "handshake",
    "tokenizer",
    "block_size",
    "placement",
    "predictor",
    "state",
    "decisions",
    "peers",
    "picker",
    "pods",
)
"""Settings that a reload cannot change."""
SPARE_FILES = 256
"""Open files allowed besides connections: logs, event streams, files of libraries."""
SWEEP_S = 0.5
"""Seconds between two sweeps for requests past their deadline."""


class Front(Protocol):
    """A second server of a gateway's process, which sends requests to the same workers."""

    async def start(self) -> None:
        """Serve: the workers are watched, and loops are compiled."""

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, wait at most `drain_s` for running ones and end the others.

        A second call, with 0, ends those that the first one waits for.
        """


MakeFront = Callable[["RunningGateway"], Front]
Ready = Callable[["RunningGateway", Callable[[], None]], None]
"""Callback, called once with the gateway that serves and a function that stops it and may run in any thread."""


def check_config(config: GatewayConfig) -> None:
    """Raise ConfigError for faults in keys, certificates and routers that would otherwise appear only at the start."""
    check_filled_in(config.workers)
    check_access(config)
    if config.picker is not None:
        config.picker.tls()
    for pool, spec in _specs(config).items():
        keeper = FleetKeeper(spec)
        for worker in config.workers:
            if worker.role in (pool, "both"):
                keeper.join(worker.id, worker.places, worker.speed)


def _specs(config: GatewayConfig) -> dict[str, RouterSpec]:
    """Return the routers of the pools."""
    return {DECODE: config.decode} if config.handshake == "none" else {DECODE: config.decode, PREFILL: config.prefill}


def misfits(config: GatewayConfig) -> list[str]:
    """Name the fits that were made for another number of workers than their pool has; pods are not known yet."""
    said = []
    for pool, spec in _specs(config).items():
        count = sum(worker.role in (pool, "both") for worker in config.workers)
        fitted = count if spec.fit is None or config.pods is not None else RouterFit.load(spec.fit).workers
        if fitted != count:
            said.append(
                f"{spec.fit}: the fit is for {counted(fitted, 'worker')}, the {pool} pool has {count}: it serves, and "
                f"routes better after coterie fit TRACE --workers {count}"
            )
    return said


def run_gateway(
    config: GatewayConfig,
    path: Path | None,
    ready: Ready,
    log: Log | None = None,
    access: FleetAccess | None = None,
    front: MakeFront | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `path` is the config file, which a reload reads again."""
    listener = bind(*config.address)
    _allow_files(most_connections(config.limits.connections) + config.limits.in_flight)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(config, path, listener, ready, log, access, front))


def _allow_files(connections: int) -> None:
    """Raise this process's limit on open files as far as the hard limit allows: every connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # asyncio's own loop works too, but slower
        return None
    return uvloop.new_event_loop


async def serve(
    config: GatewayConfig,
    path: Path | None,
    listener: socket.socket,
    ready: Ready,
    log: Log | None = None,
    access: FleetAccess | None = None,
    front: MakeFront | None = None,
) -> None:
    running = RunningGateway(config, path, log, access, front)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop, stop)
    loop.add_signal_handler(signal.SIGHUP, running.start_reload)
    try:
        await running.start(listener)
        gc.collect()
        gc.freeze()  # else a full collection searches all that was there at the start, and halts requests for 50 ms
        ready(running, lambda: _ask(loop, running, stop))
        await stop.wait()
    finally:
        try:
            await running.close()
        finally:  # only now: a second signal during the drain must not end the process without cleaning up
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)


def _ask(loop: asyncio.AbstractEventLoop, running: RunningGateway, stop: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(running.stop, stop)


def _saved(config: GatewayConfig) -> tuple[SavedState, str | None]:
    """Return the changes saved before a restart, and a problem with them; with a problem, the changes are empty."""
    if config.state is None:
        return SavedState(), None
    state, problem = load_state(config.state)
    if state is None:
        return SavedState(), problem
    try:
        check_config(state.over(config))
        return state, None
    except InputError as error:
        kept = set_aside(Path(config.state))
        return SavedState(), f"{config.state}: does not fit the config: {error}; it was kept as {kept}"


class RunningGateway:
    """A gateway with its HTTP server, and with a second server if it has one."""

    def __init__(
        self,
        config: GatewayConfig,
        path: Path | None = None,
        log: Log | None = None,
        access: FleetAccess | None = None,
        front: MakeFront | None = None,
    ) -> None:
        self.path = path
        keys = check_access(config)
        self._pods = None if config.pods is None else PodWatch(config.pods)
        self._lock = None if config.state is None else lock_state(config.state)
        try:
            changes, self._problem = _saved(config)
            self.parts = GatewayParts(config, log, access, changes)
        except BaseException:
            self._unlock()
            raise
        self.gateway = Gateway(self.parts, keys, self.reload)
        self.server = HttpServer(
            self.gateway.handle, self.gateway.http_limits, self.gateway.check_head, on_error=self.parts.log.failed
        )
        self.front = None if front is None else front(self)
        self._cutting: asyncio.Task[None] | None = None
        """Closes the front at once, after a second signal."""
        self._following: asyncio.Task[None] | None = None
        self.url = ""
        self._drain_s = config.drain_s
        self._sweeper: asyncio.TimerHandle | None = None
        self._reloads: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def start(self, listener: socket.socket) -> None:
        self.url = f"http://{Address(*listener.getsockname()[:2])}"
        await self.parts.start()
        if self._pods is not None:
            self._following = asyncio.create_task(self._pods.run(self.parts), name="pods")
        await asyncio.to_thread(self.parts.knowledge.warm_up)
        self._gauges()
        await self.server.start(listener)
        self.parts.peers.start()  # only now: a gateway may be among its own peers
        if self.front is not None:
            await self.front.start()
        self._sweep(asyncio.get_running_loop())
        pools = {name: pool.spec.router for name, pool in self.parts.pools.items()}
        self.parts.log.started(self.url, version("coterie"), pools, len(self.parts.entries()))
        keys = self.gateway.keys
        said = await asyncio.to_thread(misfits, self.parts.changes.over(self.parts.config))
        for problem in (self._problem, self.parts.knowledge.says, *(() if keys is None else keys.warnings), *said):
            if problem:
                self.parts.log.warning(problem)

    def stop(self, stopped: asyncio.Event) -> None:
        """Refuse new requests and start the drain. A second call ends the drain at once."""
        if self.gateway.draining:
            self._drain_s = 0.0
            self.server.end_drain()
            if self.front is not None:
                self._cutting = asyncio.create_task(self.front.close(0.0), name="end of the front")
        self.gateway.draining = True
        self.gateway.live.close()
        stopped.set()

    async def close(self, drain_s: float | None = None) -> None:
        """Wait at most `drain_s` for running requests, then close everything."""
        started = time.monotonic()
        self.gateway.draining = True
        self.gateway.live.close()
        tasks = [*self._reloads, *([] if self._following is None else [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pods is not None:
            await self._pods.upstream.close()
        drain_s = self._drain_s if drain_s is None else drain_s
        ending = () if self.front is None else (self.front.close(drain_s),)
        cut, *_ = await asyncio.gather(self.server.close(drain_s), *ending)
        if self._cutting is not None:
            await self._cutting
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.parts.close()
        self.parts.log.stopped("asked to", cut, time.monotonic() - started)
        self.parts.log.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def start_reload(self) -> None:
        """Reload in the background, and log the result."""
        task = asyncio.create_task(self.try_reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def try_reload(self) -> None:
        try:
            await self.reload()
        except InputError as error:
            self.parts.log.reloaded(problem=str(error))

    async def reload(self) -> None:
        """Read the config file again and apply it. Raises InputError and changes nothing if it cannot be used."""
        try:
            async with self._reloading:
                changed = await self._reload()
        except InputError:
            self.parts.metrics.reloads.inc("rejected")
            raise
        self.parts.metrics.reloads.inc("ok")
        self.parts.log.reloaded(changed)

    async def _reload(self) -> list[str]:
        path = check_given(self.path, "the gateway was started without a config file")
        # In a thread: reading fits and compiling may take seconds, which would block the event loop.
        before, saved = self.parts.config, self.parts.changes
        config, keys = await asyncio.to_thread(self._checked, path, before, saved)
        self.parts.reconfigure(config, self.parts.changes.after_reload(before, config))
        self.gateway.configure(config, keys)
        self.server.limits = self.gateway.http_limits
        self._drain_s = config.drain_s
        return [name for name in msgspec.structs.asdict(config) if getattr(config, name) != getattr(before, name)]

    @staticmethod
    def _checked(path: Path, before: GatewayConfig, saved: SavedState) -> tuple[GatewayConfig, Keys | None]:
        """Read a config and its keys. Raises InputError if it is invalid or changes a setting that a reload cannot."""
        config = read_config(path)
        fixed = next((name for name in FIXED if getattr(config, name) != getattr(before, name)), None)
        check(fixed is None, f"{path}: {fixed} cannot change while the gateway runs; restart it")
        check_config(saved.after_reload(before, config).over(config))
        return config, check_access(config)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweeper = loop.call_later(SWEEP_S, self._sweep, loop)
        self.gateway.sweep()

    def _gauges(self) -> None:
        metrics, counters = self.parts.metrics, self.server.counters
        reads: dict[Counter | Gauge, Read] = {
            metrics.tasks: lambda: len(asyncio.all_tasks()),
            metrics.connections: lambda: len(self.server.connections),
            metrics.connections_accepted: lambda: counters.accepted,
            metrics.connections_refused: lambda: counters.refused,
            metrics.connection_timeouts: lambda: {(kind,): count for kind, count in counters.timeouts.items()},
            metrics.errors: lambda: {("handler",): counters.errors},
            metrics.malformed: lambda: counters.malformed,
            metrics.disconnects: lambda: counters.disconnects,
        }
        for metric, read in reads.items():
            metric.read = read
