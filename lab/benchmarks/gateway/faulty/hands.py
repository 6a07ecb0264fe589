"""Faults of a fleet under load: two hands draw them from one shuffled deck.

At least one decode worker is well at any time, and was for some seconds; one hand at a time is at the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
from numpy.random import Generator

from coterie.net.http1.messages import HttpError
from coterie.net.http1.upstream import UpstreamError
from coterie.net.processes import ServerProcess
from gateway.faulty.client import Clients
from gateway.faulty.site import DRAIN_S, Site, until

BAD_CONFIG = "listen: nowhere\nworkers: 3\n"
LONG_ANSWER = 400
"""Tokens of the answer that is cut in the middle."""
SEEN_S = 30.0
"""Time in which the gateway must have read a config."""
GATEWAY = "gateway"
SETTLED_S = 5.0
"""Time after its repair in which a worker is not counted on: it has a backlog, or its breaker is open."""


@dataclass(slots=True)
class Fault:
    """Times are of the monotonic clock."""

    kind: str
    target: str
    began_s: float
    repaired_s: float = 0.0
    """Time when what failed was there again: a process that answers, a worker that was added, the truth."""
    note: str = ""


class Hands:
    def __init__(self, site: Site, clients: Clients, rng: Generator, until_s: float, gateway_until_s: float) -> None:
        """Faults begin until `until_s`, those of the gateway's process until `gateway_until_s`."""
        self.faults: list[Fault] = []
        self.defects: list[str] = []
        """Defects in the gateway's answers to an operator."""
        self._site, self._clients, self._rng = site, clients, rng
        self._until_s, self._gateway_until_s = until_s, gateway_until_s
        self._sound = list(site.decoders)
        self._deck: list[str] = []
        self._gateway, self._prefill = asyncio.Lock(), asyncio.Lock()
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "kill a decode worker": self._kill,
            "cut a stream": self._cut,
            "stall a decode worker": self._stall,
            "flap a decode worker": self._flap,
            "lie in footprints": self._lie,
            "kill the prefill worker": self._kill_prefill,
            "stall the prefill worker": self._stall_prefill,
            "clients leave": self._leave,
            "remove and add a worker": self._remove,
            "reload, good and bad": self._reload,
            "SIGTERM the gateway": self._drain,
            "kill -9 the gateway": self._crash,
        }

    async def work(self) -> None:
        """Both hands, until the time is up and all is repaired."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(self._hand())

    async def _hand(self) -> None:
        while time.monotonic() < self._until_s:
            if not self._deck:
                self._deck = [str(kind) for kind in self._rng.permutation(list(self._kinds))]
            kind = self._deck.pop()
            if kind.endswith("the gateway") and time.monotonic() > self._gateway_until_s:
                continue
            await self._kinds[kind]()
            await asyncio.sleep(self._between(0.2, 1.5))

    def _between(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))

    @contextlib.asynccontextmanager
    async def _doing(self, kind: str, target: str) -> AsyncIterator[Fault]:
        fault = Fault(kind, target, time.monotonic())
        self.faults.append(fault)
        yield fault
        fault.repaired_s = time.monotonic()

    @contextlib.asynccontextmanager
    async def _taken(self, worker_id: str | None = None) -> AsyncIterator[str]:
        """A decode worker that the other hand leaves alone, and a while longer. One at least stays untouched."""
        if worker_id is None:
            while len(self._sound) < 2:
                await asyncio.sleep(0.1)
        found = self._sound[self._rng.integers(len(self._sound))] if worker_id is None else worker_id
        self._sound.remove(found)
        try:
            yield found
        finally:
            asyncio.get_running_loop().call_later(SETTLED_S, self._sound.append, found)

    def _process(self, worker_id: str) -> ServerProcess:
        return self._site.decoders[worker_id].process

    async def _kill(self) -> None:
        async with self._taken() as name, self._doing("kill a decode worker", name):
            await self._replace(self._process(name), self._between(0.2, 3.0))

    async def _replace(self, process: ServerProcess, wait_s: float) -> None:
        """Kill a process; start another on its port a while later."""
        await asyncio.to_thread(process.kill)
        await asyncio.sleep(wait_s)
        await asyncio.to_thread(process.start)

    async def _cut(self) -> None:
        """Kill the worker of a stream that has begun."""
        async with self._gateway:
            one = self._clients.drawn(LONG_ANSWER)
            task = self._clients.send(one)
            await until(lambda: one.first_s is not None or task.done(), SEEN_S, 0.01)
            name = await self._worker_of(one.name)
            if name not in self._sound or len(self._sound) < 2:
                return  # the other hand has it, or it is the last one
            async with self._taken(name), self._doing("cut a stream", name) as fault:
                await asyncio.to_thread(self._process(name).kill)
                await asyncio.wait([task])
                fault.note = f"the stream ended {one.state}"
                await asyncio.to_thread(self._process(name).start)

    async def _worker_of(self, request: str) -> str:
        with contextlib.suppress(UpstreamError, HttpError):
            for decision in (await self._site.ask("GET", "/decisions?last=200&pool=decode"))["decisions"]:
                if decision["id"] == request:
                    return str(decision["worker"])
        return ""

    async def _stall(self) -> None:
        async with self._taken() as name, self._doing("stall a decode worker", name) as fault:
            fault.note = await self._stop(self._process(name))

    async def _stop(self, process: ServerProcess) -> str:
        seconds = self._between(2.0, 18.0)
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.signal(signal.SIGCONT)
        return f"for {seconds:.1f} s"

    async def _flap(self) -> None:
        async with self._taken() as name, self._doing("flap a decode worker", name) as fault:
            times = int(self._rng.integers(2, 5))
            for number in range(times):
                if number % 2:  # asked to end, it finishes what it runs
                    await asyncio.to_thread(self._process(name).stop, 2 * DRAIN_S)
                await self._replace(self._process(name), self._between(0.0, 0.5))
                await asyncio.sleep(self._between(0.0, 1.0))
            fault.note = f"{times} times"

    async def _kill_prefill(self) -> None:
        async with self._prefill, self._doing("kill the prefill worker", "prefill-0"):
            await self._replace(self._site.fleet.workers[0].process, self._between(0.2, 3.0))

    async def _stall_prefill(self) -> None:
        async with self._prefill, self._doing("stall the prefill worker", "prefill-0") as fault:
            fault.note = await self._stop(self._site.fleet.workers[0].process)

    async def _lie(self) -> None:
        liar = self._site.liar
        async with self._gateway, self._prefill, self._doing("lie in footprints", "prefill-0") as fault:
            told, refused = liar.told.total(), await self._refused()
            liar.share = 0.7
            await asyncio.sleep(self._between(3.0, 6.0))
            liar.share = 0.0
            told, refused = liar.told.total() - told, await self._refused() - refused
            fault.note = f"{told} lies, {refused:g} refused"
            if told > 3 and not refused:  # some of the last are still on their way, or their clients have left
                self.defects.append("lies were told in footprints, and none was refused")

    async def _refused(self) -> float:
        return (await self._site.metrics())['coterie_gateway_footprints_total{source="damaged"}']

    async def _leave(self) -> None:
        async with self._doing("clients leave", GATEWAY) as fault:
            asked = [self._clients.drawn(64) for _ in range(8)]
            for one in asked:
                task = self._clients.send(one)
                await asyncio.sleep(self._between(0.0, 0.4))
                task.cancel()
            await asyncio.sleep(0)
            fault.note = f"{sum(one.state == 'left' for one in asked)} left"

    async def _drain(self) -> None:
        gateway = self._site.gateway
        async with self._gateway:
            async with self._doing("SIGTERM the gateway", GATEWAY) as fault:
                code = await asyncio.to_thread(gateway.stop, 2 * DRAIN_S)
                fault.note = f"drained in {time.monotonic() - fault.began_s:.1f} s"
                if code:
                    self.defects.append(f"the gateway ended with code {code} after SIGTERM")
                await asyncio.to_thread(gateway.start)
            await self._serves(fault)

    async def _crash(self) -> None:
        async with self._gateway:
            async with self._doing("kill -9 the gateway", GATEWAY) as fault:
                await self._replace(self._site.gateway, 0.0)
            await self._serves(fault)

    async def _serves(self, fault: Fault) -> None:
        """Wait for a whole answer, so that each restart's recovery is its own."""
        asked = self._clients.asked
        await until(lambda: any(one.state == "whole" and one.began_s > fault.began_s for one in asked), SEEN_S)

    async def _reload(self) -> None:
        site = self._site
        async with self._gateway, self._doing("reload, good and bad", GATEWAY):
            before = await self._reloads()
            limits = msgspec.structs.replace(site.config.limits, waiting=site.config.limits.waiting + 1)
            site.config = msgspec.structs.replace(site.config, limits=limits)
            site.write(site.config)
            site.gateway.signal(signal.SIGHUP)
            await self._expect((before[0] + 1, before[1]), "a good config was not taken over")
            site.config_path.write_text(BAD_CONFIG)
            site.gateway.signal(signal.SIGHUP)
            await self._expect((before[0] + 1, before[1] + 1), "a bad config was not refused")
            site.write(site.config)

    async def _reloads(self) -> tuple[float, float]:
        found = await self._site.metrics()
        ok, rejected = (found[f'coterie_gateway_reloads_total{{outcome="{one}"}}'] for one in ("ok", "rejected"))
        return ok, rejected

    async def _expect(self, reloads: tuple[float, float], otherwise: str) -> None:
        async def seen() -> bool:
            return await self._reloads() == reloads

        if not await until(seen, SEEN_S):
            self.defects.append(otherwise)

    async def _remove(self) -> None:
        async with self._taken() as name, self._gateway, self._doing("remove and add a worker", name):
            await self._site.ask("DELETE", f"/workers/{name}")
            await asyncio.sleep(self._between(0.5, 3.0))
            await self._site.ask("POST", "/workers", self._site.entry(name))
