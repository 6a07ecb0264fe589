"""Workers of one role, and which of them may get requests.

A worker is closed while its health checks fail, or while its circuit breaker is open. All closed: the keeper sends
requests anyway, since a guess is better than refusing everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

import msgspec
from numpy.random import Generator, default_rng

from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.health import Attempt, Breaker, BreakerSettings, Health
from coterie.gateway.fleet.keeper import Choice, FleetKeeper
from coterie.gateway.fleet.rows import HeldExperts
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http1.messages import Headers
from coterie.net.http1.upstream import Upstream, UpstreamLimits
from coterie.routing.base import Request
from coterie.wire.handoff import DP_RANK_HEADER

PREFILL, DECODE = "prefill", "decode"
"""Names of pools."""


class Member:
    """A worker of a pool, with the connections to it."""

    __slots__ = ("breaker", "entry", "headers", "health", "unreachable", "upstream")

    def __init__(
        self,
        entry: WorkerEntry,
        config: GatewayConfig,
        worker_key: str | None,
        rng: Generator,
        now: float,
        healthy: bool = False,
    ) -> None:
        """`healthy` trusts the worker before its first health check."""
        self.entry = entry
        self.unreachable = False
        """Whether its last failure was that of a connection to it."""
        self.upstream = Upstream(entry.url)
        self.breaker = Breaker(rng)
        self.health = Health(rng, now, healthy=healthy)
        self.configure(config)
        self.headers: Headers = []
        if worker_key is not None:
            self.headers.append((b"authorization", b"Bearer " + worker_key.encode()))
        if entry.data_parallel_rank is not None:
            self.headers.append((DP_RANK_HEADER.lower().encode(), str(entry.data_parallel_rank).encode()))

    def configure(self, config: GatewayConfig) -> None:
        """Take over limits and thresholds."""
        health, limits = config.health, config.limits
        self.upstream.limits = UpstreamLimits(
            connect_s=limits.connect_s,
            head_s=limits.first_token_s,
            idle_s=limits.idle_s,
            body_bytes=limits.answer_bytes,
        )
        longest_s = max(60.0, health.open_s)
        self.breaker.settings = BreakerSettings(
            health.failures, health.window_s, cool_down_s=health.open_s, longest_s=longest_s
        )
        self.health.settings = health

    def may_be_well(self, now: float) -> bool:
        """Whether neither its health checks nor its requests speak against it."""
        return self.breaker.may_send(now) and not self.is_unhealthy

    @property
    def is_unhealthy(self) -> bool:
        """Whether its health checks failed; one that was never asked may be well."""
        return not self.health.healthy and self.health.checks > 0


class Sent(msgspec.Struct, frozen=True):
    """A request that was given to a worker. Tell :meth:`Pool.ended` what became of it, whatever that is."""

    key: str
    member: Member
    choice: Choice
    attempt: Attempt


class Pool:
    """Members by id, and the keeper that chooses among them."""

    def __init__(self, name: str, keeper: FleetKeeper, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.keeper = keeper
        self.members: dict[str, Member] = {}
        self.ids: list[str | None] = []
        """[row] worker id. Replaced, never changed in place: records of decisions keep it."""
        self.clock = clock
        self.needed = True
        """Whether a request needs a worker of this pool: if none is open, it waits for one that is not."""
        self.context_tokens = 0
        """Longest context that a worker has told of; 0 if none has."""
        self.rng = default_rng()
        self._due = math.inf
        """Time when a breaker next lets a request through."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def spec(self) -> RouterSpec:
        """The router in use."""
        spec = self.keeper.spec
        return spec if isinstance(spec, RouterSpec) else RouterSpec("custom")

    def add(self, member: Member, held: HeldExperts | None = None) -> None:
        entry = member.entry
        self.keeper.join(entry.id, entry.places, entry.speed, held)
        self.members[entry.id] = member
        self.ids = self.keeper.ids
        self.refresh(member)

    def remove(self, worker_id: str) -> Member:
        self.keeper.leave(worker_id)
        self.ids = self.keeper.ids
        member = self.members.pop(worker_id)
        member.upstream.retire()
        return member

    async def close(self) -> None:
        for member in self.members.values():
            await member.upstream.close()

    def route(self, key: str, wanted: Request, exclude: Collection[str] = ()) -> Sent:
        """Choose a worker and admit the request to it. Raises UnavailableError if there is none."""
        now = self.clock()
        if now >= self._due:
            for member in self.members.values():
                self.refresh(member)
        choice = self.keeper.route(key, wanted, exclude)
        member = self.members[choice.worker_id]
        attempt = member.breaker.sent(now)
        if attempt.probe:
            self.refresh(member)
        return Sent(key, member, choice, attempt)

    def ended(self, sent: Sent, ok: bool | None) -> None:
        """The worker did its part, or failed; None: neither is known, as when the client left."""
        self.keeper.finish(sent.key)
        breaker, now = sent.member.breaker, self.clock()
        closed = breaker.changes_at is None
        if ok is None:
            breaker.dropped(sent.attempt)
        elif ok:
            breaker.succeeded(sent.attempt, now)
        else:
            breaker.failed(sent.attempt, now)
        if not closed or not ok:
            self.refresh(sent.member)
            if closed and sent.member.unreachable and breaker.changes_at is not None:
                self.move_on(sent.member)

    @property
    def failing(self) -> bool:
        """Whether no worker is worth asking: each was seen to fail. One that was never asked may be well."""
        now = self.clock()
        return not any(member.may_be_well(now) for member in self.members.values())

    def checked(self, member: Member, ok: bool) -> bool:
        """Count a health check; whether it changed the worker's state."""
        changed = member.health.record(ok, self.clock())
        if changed:
            self.refresh(member)
            if not ok:
                self.move_on(member)
        return changed

    def move_on(self, member: Member) -> None:
        """Take back the requests that wait for the first byte of a worker that is not well, if others can serve."""
        if self.keeper.open_workers or not self.needed:
            member.upstream.give_up("POST")

    def refresh(self, member: Member) -> None:
        """Tell the keeper whether the worker may be chosen. Requests that unhealthy ones got for want of it move on."""
        none_open = not self.keeper.open_workers
        if self.members.get(member.entry.id) is member:
            may = member.health.healthy and member.breaker.may_send(self.clock())
            self.keeper.set_open(member.entry.id, may)
            if none_open and may:
                for other in self.members.values():
                    if other.is_unhealthy:
                        self.move_on(other)
        changes = [other.breaker.changes_at for other in self.members.values()]
        self._due = min((at for at in changes if at is not None), default=math.inf)
