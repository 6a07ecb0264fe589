"""A pool: the workers of one role, and which of them may get requests.

A worker is closed while its health checks fail or its circuit breaker is open. If all are closed, the keeper sends
requests anyway: health checks may be wrong, and refusing everything is worse.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec
from numpy.random import Generator, default_rng

from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.meter import Meter
from coterie.gateway.fleet.health import Attempt, Breaker, Health, HealthSettings
from coterie.gateway.fleet.keeper import Choice, FleetKeeper, Mask
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.signals.worker_metrics import ReportError, WorkerReport, read_report
from coterie.net.http1 import Headers, Upstream, UpstreamError, UpstreamLimits
from coterie.routing.base import Request
from coterie.types import Placement
from coterie.wire.handoff import DP_RANK_HEADER

MOST_BYTES = 1 << 20
"""Most bytes of a worker's answer to :meth:`Member.ask`, such as a list of models, unless it says otherwise."""
RESTS = HealthSettings(failures=1)
"""An endpoint that fails once is not asked for 5 s, doubled up to a minute while it goes on failing."""
MOST_METRICS_BYTES = 2 << 20
"""Most bytes of a worker's metrics: about 50 KiB for each data-parallel rank of vLLM."""
STALE_REPORTS = 3
"""Intervals after which a worker's last report is no longer used."""
MOST_ERROR = 300
"""Most characters of an error that are shown: it quotes what the worker sent."""
PREFILL, DECODE = "prefill", "decode"
"""Names of the pools."""


class WholeAnswer(NamedTuple):
    status: int
    body: bytes


async def ask_whole(
    upstream: Upstream,
    method: str,
    path: str,
    headers: Headers,
    timeout_s: float,
    body: bytes = b"",
    most_bytes: int = MOST_BYTES,
) -> WholeAnswer:
    """Send a request and read its answer. Raises UpstreamError, also if the answer is late."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await upstream.send(method, path, headers, body)
            return WholeAnswer(answer.status, await answer.read(most_bytes))
    except TimeoutError:
        raise UpstreamError("timeout", f"{path}: no answer within {timeout_s:g} s") from None


class Member:
    """A worker of a pool, with the connections to it."""

    def __init__(
        self,
        entry: WorkerEntry,
        config: GatewayConfig,
        worker_key: str | None,
        rng: Generator,
        now: float,
        healthy: bool = False,
    ) -> None:
        """`healthy`: whether the worker counts as healthy before its first health check."""
        self.entry = entry
        self.unreachable = False
        """Whether the worker's last failure was a failed connection."""
        self.upstream = Upstream(entry.url)
        self.health_error = ""
        """Why the last health check failed; empty if it did not."""
        self.silent: Counter[str] = Counter()
        """Event stream, by its field of the entry → looks in a row at which it had no connection."""
        self.breaker = Breaker(rng, config.health)
        self.health = Health(rng, now, config.health, healthy)
        self.endpoints: defaultdict[str, Breaker] = defaultdict(lambda: Breaker(rng, RESTS))
        """Circuit breakers of endpoints that only the gateway asks, by path."""
        self.configure(config)
        self.report: WorkerReport | None = None
        """What the worker's metrics said last; None if nothing usable, or too long ago."""
        self.reported_s = -math.inf
        """Time of `report`."""
        self.report_error = ""
        """Reason why the last reading of the worker's metrics failed; empty if it did not."""
        self.headers: Headers = []
        if worker_key is not None:
            self.headers.append((b"authorization", b"Bearer " + worker_key.encode()))
        if entry.data_parallel_rank is not None:
            self.headers.append((DP_RANK_HEADER.lower().encode(), str(entry.data_parallel_rank).encode()))

    def configure(self, config: GatewayConfig) -> None:
        """Apply the limits and health thresholds of a config."""
        limits = config.limits
        self.upstream.limits = UpstreamLimits(
            connect_s=limits.connect_s,
            head_s=limits.first_token_s,
            idle_s=limits.idle_s,
            body_bytes=limits.answer_bytes,
        )
        self.breaker.settings = self.health.settings = config.health

    async def ask(
        self, method: str, path: str, timeout_s: float, body: bytes = b"", most_bytes: int = MOST_BYTES
    ) -> WholeAnswer:
        """Send a request that is no client's, with JSON as body. Raises UpstreamError, also if the answer is late."""
        headers = [*self.headers, (b"content-type", b"application/json")] if body else self.headers
        return await ask_whole(self.upstream, method, path, headers, timeout_s, body, most_bytes)

    async def ask_report(self, timeout_s: float) -> WorkerReport:
        """Read the worker's metrics. Raises ReportError or UpstreamError."""
        answer = await self.ask("GET", "/metrics", timeout_s, most_bytes=MOST_METRICS_BYTES)
        if answer.status != 200:
            raise ReportError("status", f"HTTP {answer.status}")
        return read_report(answer.body, self.entry.data_parallel_rank)

    async def check_health(self, timeout_s: float) -> bool:
        """Ask the worker for its health; return whether it is well."""
        try:
            status = (await self.ask("GET", "/health", timeout_s)).status
            self.health_error = "" if status == 200 else f"HTTP {status}"
        except UpstreamError as error:
            self.health_error = f"{error.kind}: {error}"[:MOST_ERROR]
        return not self.health_error

    @property
    def lost_streams(self) -> set[str]:
        """Event streams without a connection at as many looks in a row as failed checks make a worker unhealthy."""
        return {name for name, looks in self.silent.items() if looks >= self.health.settings.unhealthy_after}

    @property
    def is_unhealthy(self) -> bool:
        """Whether health checks found the worker unhealthy; False before the first check."""
        return not self.health.healthy and self.health.checks > 0


class Sent(msgspec.Struct, frozen=True):
    """A request assigned to a worker. Pass it to :meth:`Pool.ended` in every case, also after a failure."""

    key: str
    member: Member
    choice: Choice
    attempt: Attempt


class Pool:
    """Workers by id, and the keeper that chooses among them."""

    def __init__(self, name: str, keeper: FleetKeeper, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.keeper = keeper
        self.members: dict[str, Member] = {}
        self.ids: list[str | None] = []
        """Worker id of each row. The list is replaced, never changed in place: records of decisions share it."""
        self.clock = clock
        self.maps: dict[str, Placement] = {}
        """Worker id → the expert map that it reported last; the newest report is the last entry."""
        self.meter = Meter(clock)
        self.needed = True
        """Whether requests cannot do without this pool. If so, and no worker is open, they wait for a closed one."""
        self.context_tokens = 0
        """Longest context that a worker has reported, in tokens; 0 if none has."""
        self.rng = default_rng()
        self._due = math.inf
        """Time when a circuit breaker next lets a request through; infinite if none is open."""

    @property
    def spec(self) -> RouterSpec:
        """Spec of the router in use."""
        spec = self.keeper.spec
        return spec if isinstance(spec, RouterSpec) else RouterSpec("custom")

    def add(self, member: Member, held: Mask | None = None) -> None:
        entry = member.entry
        self.keeper.join(entry.id, entry.places, entry.speed, held)
        self.members[entry.id] = member
        self.ids = self.keeper.ids
        self.refresh(member)

    def remove(self, worker_id: str) -> None:
        self.keeper.leave(worker_id)
        self.ids = self.keeper.ids
        self.maps.pop(worker_id, None)
        self.members.pop(worker_id).upstream.retire()

    def reload(self, spec: RouterSpec, context: Mapping[str, Any] | None = None) -> None:
        """Swap the router, as :meth:`FleetKeeper.reload` does; a reported map takes the place of the spec's file.

        Every swap comes through here: a router made from the file would route by where experts were before they moved.
        """
        newest = next(reversed(self.maps.values()), None)
        if newest is not None and spec.placement is not None:
            context = {**(context or {}), "placement": newest}
        self.keeper.reload(spec, context)

    def follow(self, worker_id: str, reported: Placement, held: Mask) -> None:
        """Route by the expert map that a worker reports, of which it holds `held`. Raises ConfigError if it cannot."""
        before, known = self.maps, self.keeper.members[worker_id]
        self.maps = {id: map for id, map in before.items() if id != worker_id} | {worker_id: reported}
        try:
            self.keeper.join(worker_id, known.places, known.speed, held)
            if self.spec.placement is not None:
                self.reload(self.spec)
        except ConfigError:
            self.maps = before
            raise

    def row_of(self, member: Member) -> int:
        return self.keeper.members[member.entry.id].row

    async def close(self) -> None:
        for member in self.members.values():
            await member.upstream.close()

    def route(self, key: str, wanted: Request, exclude: Collection[str] = ()) -> Sent:
        """Choose a worker and admit the request to it. Raises UnavailableError if the pool is empty."""
        now = self.clock()
        if now >= self._due:
            for member in self.members.values():
                self.refresh(member)
        choice = self.keeper.route(key, wanted, exclude)
        member = self.members[choice.worker_id]
        attempt = member.breaker.sent(now)
        if attempt.probe:
            self.refresh(member)
        self.meter.sent(key)
        return Sent(key, member, choice, attempt)

    def came(self, sent: Sent, tokens: int = 0) -> None:
        """Note that tokens of a request's answer came. The first call says that its prompt is computed."""
        if self.meter.came(sent.key, tokens):
            self.keeper.computed(sent.key)

    def reported(self, member: Member, report: WorkerReport | None, error: str = "") -> None:
        """Take what a worker's metrics say; None if they cannot be read, because of `error`, or are not asked for.

        The last report then counts until it is :data:`STALE_REPORTS` intervals old. A worker that runs more requests
        at once than it is said to have places has at least as many places.
        """
        now, member.report_error = self.clock(), error
        if report is not None:
            member.reported_s = now
            if member.report is not None and report.steps >= member.report.steps:  # else the worker has restarted
                self.meter.experts += report.experts - member.report.experts
                self.meter.steps += report.steps - member.report.steps
        elif now - member.reported_s < STALE_REPORTS * member.health.settings.metrics_every_s:
            return
        member.report = report
        if self.members.get(member.entry.id) is not member:
            return
        if report is not None:
            known = self.keeper.members[member.entry.id]
            if report.running > known.places:
                self.keeper.join(member.entry.id, report.running, known.speed, known.held)
            self.keeper.fleet.observe(self.row_of(member), report.running + report.waiting, report.kv_used)
        self._assume_unknown()

    def _assume_unknown(self) -> None:
        """Take workers without a usable report to be as busy as the others: a worker of which nothing is known is not
        empty, and would draw most requests if it were taken to be.

        What this gateway and its peers have there is known all the same. Of other front ends it is taken to have as
        many requests by place as the workers that report, and of its KV blocks their mean share to be in use.
        """
        fleet = self.keeper.fleet
        unknown = [self.row_of(member) for member in self.members.values() if member.report is None]
        rows = [self.row_of(member) for member in self.members.values() if member.report is not None]
        by_place = kv_used = 0.0
        if unknown and rows:
            others = fleet.in_flight[rows] - fleet.running[rows] - fleet.heard.running[rows]
            by_place = others.sum() / fleet.places[rows].sum()
            kv_used = fleet.kv_used[rows].mean()
        for row in unknown:
            fleet.observe(row, fleet.peak.item(row) + round(by_place * fleet.places.item(row)), kv_used)

    def others(self, member: Member) -> int:
        """Return the requests of other front ends at a worker, by its metrics; assumed if they cannot be read."""
        fleet, row = self.keeper.fleet, self.row_of(member)
        return int(fleet.in_flight[row] - fleet.running[row])

    def described_report(self, member: Member) -> dict[str, float | str | None]:
        """Return what a worker's metrics said last, its age in seconds, and why the last reading failed, if it did."""
        values = {} if member.report is None else member.report._asdict()
        age_s = None if member.report is None else round(self.clock() - member.reported_s, 1)
        return {**values, "age_s": age_s, "error": member.report_error[:MOST_ERROR] or None}

    def ended(self, sent: Sent, ok: bool | None) -> None:
        """End a request at its worker. `ok`: whether the worker did its part; None if unknown (the client left)."""
        self.keeper.finish(sent.key)
        self.meter.ended(sent.key)
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
    def why_unready(self) -> str:
        """Why no worker of the pool can serve now, without names; empty if one can."""
        now, members = self.clock(), self.members.values()
        healthy = [member for member in members if member.health.healthy]
        if any(member.breaker.may_send(now) for member in healthy):
            return ""
        if not members:
            return f"there are no {self.name} workers"
        failing = len(members) - len(healthy)
        return f"no {self.name} worker can serve: {failing} pass no health check, {len(healthy)} fail requests"

    @property
    def failing(self) -> bool:
        """Whether every worker is unhealthy or has an open breaker. Workers never checked do not count as unhealthy."""
        now = self.clock()
        return not any(member.breaker.may_send(now) and not member.is_unhealthy for member in self.members.values())

    def checked(self, member: Member, ok: bool) -> bool:
        """Count a health check; return whether it changed the worker's state."""
        changed = member.health.record(ok, self.clock())
        if changed:
            self.refresh(member)
            if not ok:
                self.move_on(member)
        return changed

    def move_on(self, member: Member) -> None:
        """Take back the requests that wait for a first byte from an unhealthy worker, if others can serve them."""
        if self.keeper.open_workers or not self.needed:
            member.upstream.give_up("POST")

    def refresh(self, member: Member) -> None:
        """Tell the keeper whether the worker may be chosen.

        If it is the first open one, requests that were sent to unhealthy workers for lack of an open one are retried.
        """
        none_open = not self.keeper.open_workers
        if self.members.get(member.entry.id) is member:
            may = member.health.healthy and member.breaker.may_send(self.clock())
            self.keeper.set_open(member.entry.id, may)
            if none_open and may:
                for other in self.members.values():
                    if other.is_unhealthy:
                        self.move_on(other)
        changes = (other.breaker.changes_at for other in self.members.values())
        self._due = min((at for at in changes if at is not None), default=math.inf)
