"""Workers of one role, and which of them may get requests.

A worker is closed while its health checks fail, while its circuit breaker is open, or while it drains. All closed: the
keeper sends requests anyway, since a guess is better than refusing everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.breaker import Breaker
from coterie.gateway.fleet.health import Health
from coterie.gateway.fleet.keeper import Choice, FleetKeeper
from coterie.gateway.fleet.pool import Held
from coterie.net.http1.messages import Headers
from coterie.net.http1.upstream import Upstream, UpstreamLimits
from coterie.routing.base import Request
from coterie.wire.handoff import DP_RANK_HEADER


class Member:
    """A worker of a pool, with the connections to it."""

    __slots__ = ("breaker", "draining", "entry", "headers", "health", "upstream")

    def __init__(self, entry: WorkerEntry, config: GatewayConfig, worker_key: str | None) -> None:
        health, limits = config.health, config.limits
        self.entry = entry
        self.upstream = Upstream(
            entry.url,
            UpstreamLimits(
                connect_s=limits.connect_s,
                head_s=limits.first_token_s,
                idle_s=limits.idle_s,
                body_bytes=limits.answer_bytes,
            ),
        )
        self.breaker = Breaker(failures=health.failures, window_s=health.window_s, open_s=health.open_s)
        self.health = Health(unhealthy_after=health.unhealthy_after, healthy_after=health.healthy_after)
        self.draining = False
        self.headers: Headers = []
        if worker_key is not None:
            self.headers.append((b"authorization", b"Bearer " + worker_key.encode()))
        if entry.data_parallel_rank is not None:
            self.headers.append((DP_RANK_HEADER.lower().encode(), str(entry.data_parallel_rank).encode()))


class Pool:
    """Members by id, and the keeper that chooses among them."""

    def __init__(self, name: str, keeper: FleetKeeper, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.keeper = keeper
        self.members: dict[str, Member] = {}
        self.ids: list[str | None] = []
        """[row] worker id. Replaced, never changed in place: records of decisions keep it."""
        self._clock = clock

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: Member, held: Held | None = None) -> None:
        entry = member.entry
        self.keeper.join(entry.id, entry.places, entry.speed, held)
        self.members[entry.id] = member
        self.ids = self.keeper.ids

    def remove(self, worker_id: str) -> Member:
        self.keeper.leave(worker_id)
        self.ids = self.keeper.ids
        return self.members.pop(worker_id)

    def route(self, key: str, wanted: Request, exclude: Collection[str] = ()) -> tuple[Member, Choice]:
        """Choose a worker and admit the request to it. Raises UnavailableError if there is none."""
        choice = self.keeper.route(key, wanted, exclude)
        member = self.members[choice.worker_id]
        if not member.breaker.is_closed:
            member.breaker.sent(self._clock())  # a probe: the next waits for its result
            self.refresh(member)
        return member, choice

    def finish(self, key: str) -> None:
        self.keeper.finish(key)

    def report(self, member: Member, ok: bool) -> None:
        """Count a request's result: whether the worker did its part. What a client did wrong is no failure."""
        before = member.breaker.is_closed
        if ok:
            member.breaker.succeeded(self._clock())
        else:
            member.breaker.failed(self._clock())
        if not ok or not before:
            self.refresh(member)

    def checked(self, member: Member, ok: bool) -> bool:
        """Count a health check; whether it changed the worker's state."""
        before = member.health.healthy
        member.health.checked(ok)
        self.refresh(member)
        return member.health.healthy != before

    def refresh(self, member: Member) -> None:
        """Tell the keeper whether the worker may be chosen."""
        if self.members.get(member.entry.id) is member:
            may = member.health.healthy and not member.draining and member.breaker.allows(self._clock())
            self.keeper.set_open(member.entry.id, may)
