"""Peers: other gateways in front of the same workers, as behind one address. Each asks the others, every tenth of a
second, for the requests that they have at the workers; routers then weigh all of them, experts included.

A peer that does not answer for :data:`ABSENT_S` counts as absent, and so does one whose requests the workers'
own reports contradict for as long as a report may be used. Workers are matched by id. Profiles are used if the peer's
router tracks as many experts: the workers run one model, so that an expert index is the same expert, whatever requests
a router was fitted to.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from coterie.gateway.config import PeerSettings
from coterie.gateway.exchange.pool import MOST_ERROR, STALE_REPORTS, Pool, ask_whole
from coterie.net.access import read_key
from coterie.net.http1 import Headers, Upstream, UpstreamError
from coterie.routing.fleet import MOST_CONTEXT, WorkerLoads

PATH = "/peers"
KEY_VARIABLE = "COTERIE_PEER_KEY"
ABSENT_S = 3.0
"""Seconds, or ten intervals if they are longer, without a usable answer after which a peer's requests no longer count:
a busy machine may halt a process for a second."""
MOST_BYTES = 8 << 20
"""Most bytes of a peer's answer: 64 workers of a model with 58 layers of 256 experts take 1.9 MB."""
MOST_PROFILED = 1 << 12
"""Most requests with a profile that a peer counts at a worker: 32 bits hold the sums of nine peers' logarithms."""

UNANSWERED = "has not answered yet"

Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_CONTEXT)]


class WorkerPart(msgspec.Struct, frozen=True, array_like=True):
    """A gateway's requests at one worker."""

    running: Count
    context_tokens: Tokens
    prefill_tokens: Tokens
    profiled: Annotated[int, Meta(ge=0, le=MOST_PROFILED)]
    """Number of requests with a profile."""
    logs: bytes
    """16 bits by expert index: -log(1 - p), mean over these requests, in multiples of `fleet.UNIT`. All bit patterns
    are valid."""


class PoolPart(msgspec.Struct, frozen=True):
    experts: int
    """Number of expert indices that the pool's router tracks."""
    routed: Annotated[int, Meta(ge=0, le=1 << 60)]
    workers: dict[str, WorkerPart]


class GatewayPart(msgspec.Struct, frozen=True):
    """The answer of ``GET /peers``."""

    id: str
    """Random name of the gateway's process, so that one that asks itself notices."""
    pools: dict[str, PoolPart]


def own_part(pool: Pool) -> PoolPart:
    own = pool.keeper.fleet.own()
    profiled = np.minimum(own.profiled, MOST_PROFILED)
    scale = np.float32(-1) / np.maximum(1, own.profiled)[:, None].astype(np.float32)
    means = (np.multiply(own.logs, scale, dtype=np.float32) + np.float32(0.5)).astype("<u2")  # at most 56,588
    workers = {
        id: WorkerPart(
            running=int(own.running[at]),
            context_tokens=int(own.context_tokens[at]),
            prefill_tokens=int(own.prefill_tokens[at]),
            profiled=int(profiled[at]),
            logs=means[at].tobytes() if profiled[at] else b"",
        )
        for id, (at, *_) in pool.keeper.members.items()
        if own.running[at]
    }
    return PoolPart(own.logs.shape[1], own.routed, workers)


def loads_of(pool: Pool, parts: Collection[PoolPart]) -> WorkerLoads:
    """Return the sum of what peers have at this pool's workers."""
    fleet = pool.keeper.fleet
    size = fleet.missed.shape[1]
    total = WorkerLoads.none(len(fleet), size)
    for part in parts:
        for id, there in part.workers.items():
            member = pool.keeper.members.get(id)
            if member is None:
                continue
            total.running[member.row] += there.running
            total.context_tokens[member.row] += there.context_tokens
            total.prefill_tokens[member.row] += there.prefill_tokens
            if part.experts == size and len(there.logs) == 2 * size:
                total.profiled[member.row] += there.profiled
                total.logs[member.row] -= np.frombuffer(there.logs, "<u2").astype(np.int32) * there.profiled
    return total._replace(routed=sum(part.routed for part in parts))


class Peer:
    def __init__(self, url: str) -> None:
        self.url, self.upstream = url, Upstream(url)
        self.part: GatewayPart | None = None
        """What the peer said last."""
        self.heard_s = -math.inf
        """Time of `part`."""
        self.contradicted_s = math.inf
        """Time since when the workers' reports contradict the peer; infinite if they do not."""
        self.error = UNANSWERED
        """Why the peer is absent, or the last answer could not be used; empty otherwise."""
        self.present = False
        self.logged: bool | None = None
        """Value of `present` that was logged last."""


class Peers:
    """The gateways that this one asks, and the loads that it takes over from them."""

    def __init__(
        self,
        settings: PeerSettings,
        pools: Mapping[str, Pool],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.pools, self._warn, self._clock = settings, pools, warn, clock
        self.id = secrets.token_hex(8)
        self.peers = [Peer(url) for url in settings.urls]
        self._patience_s = max(ABSENT_S, 10 * settings.every_s)
        self._tasks: list[asyncio.Task[None]] = []
        key = read_key(KEY_VARIABLE) if settings.urls else None
        self._headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow(peer), name=f"peer {peer.url}") for peer in self.peers]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            await peer.upstream.close()

    @property
    def present(self) -> bool:
        return any(peer.present for peer in self.peers)

    def own(self) -> bytes:
        """Return this gateway's requests, for its peers."""
        part = GatewayPart(self.id, {name: own_part(pool) for name, pool in self.pools.items()})
        return msgspec.msgpack.encode(part)

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "url": peer.url,
                "present": peer.present,
                "age_s": None if peer.part is None else round(self._clock() - peer.heard_s, 1),
                "error": peer.error or None,
            }
            for peer in self.peers
        ]

    async def _follow(self, peer: Peer) -> None:
        while True:
            try:
                answer = await ask_whole(
                    peer.upstream, "GET", PATH, self._headers, self._patience_s, most_bytes=MOST_BYTES
                )
                self.heard(peer, answer.status, answer.body)
            except UpstreamError as error:
                peer.error = f"{error.kind}: {error}"[:MOST_ERROR]
            if peer.part is not None and peer.part.id == self.id:
                self.peers.remove(peer)
                await peer.upstream.close()
                return
            self.count()
            await asyncio.sleep(self.settings.every_s)

    def heard(self, peer: Peer, status: int, body: bytes) -> None:
        """Take a peer's answer; one that cannot be read leaves the last good one."""
        if status != 200:
            hint = f": it needs a key of `only: peers`, in {KEY_VARIABLE}" if status in (401, 403) else ""
            peer.error = f"HTTP {status}{hint}"
            return
        try:
            peer.part = msgspec.msgpack.decode(body, type=GatewayPart)
        except (ValueError, RecursionError) as error:
            peer.error = f"not a gateway's answer: {error}"[:MOST_ERROR]
            return
        peer.heard_s, peer.error = self._clock(), ""

    def count(self) -> None:
        """Count the requests of the peers that are present, each peer once, in the fleets that routers see."""
        parts: dict[str, GatewayPart] = {}
        for peer in list(self.peers):
            present = peer.present = self._is_present(peer)
            if present != peer.logged and peer.error != UNANSWERED:
                peer.logged = present
                self._warn(f"peer {peer.url} is {'present' if present else f'absent: {peer.error}'}")
            if present and peer.part is not None:
                parts[peer.part.id] = peer.part
        for name, pool in self.pools.items():
            pool.keeper.fleet.hear(loads_of(pool, [part.pools[name] for part in parts.values() if name in part.pools]))

    def _is_present(self, peer: Peer) -> bool:
        now = self._clock()
        if peer.part is None or now - peer.heard_s > self._patience_s:
            peer.contradicted_s = math.inf
            return False
        contradicted = next(self._contradicted(peer.part), None)
        peer.contradicted_s = math.inf if contradicted is None else min(peer.contradicted_s, now)
        if contradicted is None:
            return True
        id, patience_s = contradicted
        if now - peer.contradicted_s <= patience_s:
            return True
        peer.error = f"worker {id!r} reports fewer requests than the peer says it has there"
        return False

    def _contradicted(self, part: GatewayPart) -> Iterator[tuple[str, float]]:
        """Yield workers that report fewer requests than the peer has there by more than their places, and for how long
        that may be: reports are older than the peer's answer."""
        for name, there in part.pools.items():
            for id, claimed in there.workers.items():
                member = self.pools[name].members.get(id) if name in self.pools else None
                if member is None or member.report is None:
                    continue
                if claimed.running > member.report.running + member.report.waiting + member.entry.places:
                    yield id, STALE_REPORTS * member.health.settings.metrics_every_s
