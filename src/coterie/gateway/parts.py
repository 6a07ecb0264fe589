"""The parts of a gateway, built from its config: pools of workers, signals for routing, observers, control loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import msgspec

from coterie.control.before_after import BeforeAfter
from coterie.control.switchback import BASELINE, Comparison, Switchback
from coterie.errors import ConfigError, CoterieError, check_known
from coterie.gateway.config import GatewayConfig, WorkerEntry, check_role
from coterie.gateway.control.live import LiveControl, is_wanted
from coterie.gateway.exchange.asking import WorkerIds
from coterie.gateway.exchange.flow import Flow, PlainFlow
from coterie.gateway.exchange.knowledge import Knowledge
from coterie.gateway.exchange.observing import Watcher
from coterie.gateway.exchange.peers import Peers
from coterie.gateway.exchange.pool import DECODE, PREFILL, Member, Pool
from coterie.gateway.exchange.sglang_pair import SglangPairFlow
from coterie.gateway.exchange.vllm_pair import VllmPairFlow
from coterie.gateway.fleet.health import JITTER
from coterie.gateway.fleet.keeper import FleetKeeper, Mask
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.fleet.waiting import WaitingLine
from coterie.gateway.saved import SavedState, save_state
from coterie.gateway.signals.worker_metrics import ReportError
from coterie.gateway.watching.decisions import Decisions
from coterie.gateway.watching.logs import Log
from coterie.gateway.watching.metrics import BREAKER_STATES, Counter, Gauge, Metrics, Read
from coterie.gateway.watching.spans import Spans
from coterie.net.access import FleetAccess
from coterie.net.http1.upstream import UpstreamError
from coterie.wire.expert_events import ExpertMap

MODELS_S = 10.0
"""Seconds that a worker has to send its list of models."""
TURN_S = 1.0
"""Seconds between two looks at whose turn it is."""
ASKED_SHARE = 0.9
"""Share of `tokenise_s` in which a worker must make token ids: a silent one is named before the request goes on."""


class GatewayParts:
    """Everything in a gateway but its HTTP server. Construct it in a running event loop; then `start`, `close`."""

    def __init__(
        self,
        config: GatewayConfig,
        log: Log | None = None,
        access: FleetAccess | None = None,
        changes: SavedState = SavedState(),  # noqa: B008 (frozen)
    ) -> None:
        """`access` holds the fleet's secrets; None to read them from the environment.

        `changes` are the changes made at run time before a restart.
        """
        self.config = config
        """Config as in the file, without the changes made at run time."""
        self.changes = changes
        config = changes.over(config)
        self.access = FleetAccess.read() if access is None else access
        self.metrics = Metrics(version("coterie"))
        self.decisions = Decisions(config.decisions)
        self.log = Log(requests=config.log_requests) if log is None else log
        self.spans = Spans.from_environment()
        self.watcher = Watcher(self.metrics, self.decisions, self.log)
        self.line = WaitingLine(config.limits.in_flight, config.limits.waiting)
        self.pools = {DECODE: Pool(DECODE, FleetKeeper(config.decode))}
        if config.handshake != "none":
            self.pools[PREFILL] = Pool(PREFILL, FleetKeeper(config.prefill))
        self.pods: dict[str, WorkerEntry] = {}
        """Workers that are pods, by id; a reload leaves them as they are."""
        self.peers = Peers(config.peers, self.pools, self.log.warning)
        self.knowledge = Knowledge(config, list(self.pools), self.access.secret)
        # Prefill workers first: their event loops stream no answers.
        asker = WorkerIds(list(reversed(self.pools.values())), ASKED_SHARE * config.limits.tokenise_s)
        self.knowledge.tokens.ask = asker.ids
        self.watcher.beliefs = lambda pool: self.knowledge.claims[pool].beliefs
        self.plain = PlainFlow(self.pools[DECODE], config, self.knowledge, self.watcher)
        self.flow: Flow = self.plain
        if config.handshake != "none":
            pair = VllmPairFlow if config.handshake == "vllm" else SglangPairFlow
            self.flow = pair(self.pools[PREFILL], self.pools[DECODE], config, self.knowledge, self.watcher)
        self.control: LiveControl | None = None
        """The loop that re-fits the decode router; None if it is off."""
        self.switchback: Switchback | None = None
        """Turns between the decode router and the shortest queue; None if none are taken."""
        self.around_plan = BeforeAfter()
        self.alone = False
        """Whether somebody compares routers now, so that no turns are taken."""
        self.comparison: Comparison | None = None
        """The last comparison of routers that this process made itself; None if it made none, or turns began since."""
        self._turned: tuple[object, ...] = ()
        """Router, settings and fit that the turns are for."""
        self._turning: asyncio.Task[None] | None = None
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._started = False
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that close control loops which were switched off."""
        self._gauges()

    async def start(self) -> None:
        for entry in self.changes.over(self.config).workers:
            self.add_worker(entry)
        self._started = True
        self._refresh_control()
        self._turning = asyncio.create_task(self._take_turns(), name="switchback")

    async def close(self) -> None:
        self._started = False
        if self._turning is not None:
            self._turning.cancel()
            await asyncio.gather(self._turning, return_exceptions=True)
        await asyncio.gather(*self._ending)
        if self.control is not None:
            await self.control.close()
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        await self.peers.close()
        await self.flow.close()
        await self.knowledge.close()
        for pool in self.pools.values():
            await pool.close()
        await asyncio.to_thread(self.spans.close)

    # -------------------------------------------------------------------------------------------------------- workers

    def entries(self) -> list[WorkerEntry]:
        """Return the entries of all workers, each once."""
        return list({id: member.entry for pool in self.pools.values() for id, member in pool.members.items()}.values())

    def pools_of(self, entry: WorkerEntry) -> list[Pool]:
        """Return the pools that a worker belongs to: with two pools, a worker of role `both` is in both."""
        return [pool for name, pool in self.pools.items() if entry.role in (name, "both")]

    def add_worker(self, entry: WorkerEntry) -> None:
        """Add a worker, or replace the one with its id. Raises ConfigError and changes nothing if it cannot join."""
        check_role(self.config.handshake, entry)
        held = self.knowledge.held(entry)
        before = next((other for other in self.entries() if other.id == entry.id), None)
        if before == entry:
            return
        reported = self.knowledge.maps.get(entry.id)
        if before is not None:
            self.remove_worker(entry.id)
        try:
            self._join(entry, held)
        except ConfigError:
            if any(entry.id in pool.members for pool in self.pools.values()):
                self.remove_worker(entry.id)
            if before is not None:
                self._join(before, self.knowledge.held(before))
            raise
        if reported is not None and before is not None and entry.expert_events == before.expert_events:
            self.follow_map(entry.id, reported)  # its stream goes on, and says its map again only when it changes

    def _join(self, entry: WorkerEntry, held: Mask | None) -> None:
        for pool in self.pools_of(entry):
            member = Member(entry, self.config, self.access.key, pool.rng, pool.clock())
            pool.add(member, held)
            self.knowledge.join(pool.name, pool.row_of(member), entry)
            self._checks[pool.name, entry.id] = asyncio.create_task(
                self._watch(pool, member), name=f"health of {entry.id}"
            )
            self.log.worker(entry.id, pool.name, "joined")
        self._refresh_control()

    def remove_worker(self, worker_id: str) -> None:
        """Remove a worker. Its running requests continue; new ones go to others. Raises UnknownNameError."""
        check_known("worker", worker_id, [entry.id for entry in self.entries()])
        for pool in [pool for pool in self.pools.values() if worker_id in pool.members]:
            self.knowledge.leave(pool.name, pool.keeper.members[worker_id].row, worker_id)
            pool.remove(worker_id)
            check = self._checks.pop((pool.name, worker_id), None)
            if check is not None:
                check.cancel()
            self.log.worker(worker_id, pool.name, "left")
        self._refresh_control()
        self.watcher.catch_up()  # buffered events would create the worker's series again
        self.metrics.forget_worker(worker_id)

    def follow_map(self, worker_id: str, reported: ExpertMap) -> None:
        """Route by the map that a worker reports; one that does not fit is logged and ignored."""
        entry = next((one for one in self.entries() if one.id == worker_id), None)
        if entry is None or entry.placement_rank is None:
            return
        try:
            held = self.knowledge.follow(worker_id, entry.placement_rank, reported)
            for pool in self.pools_of(entry):
                pool.follow(entry.id, reported.placement(), held)
            self.log.worker(worker_id, entry.role, "routed by its map", f"version {reported.version}")
        except CoterieError as error:
            self.log.warning(f"map {reported.version} of worker {worker_id!r} is ignored: {error}")

    @property
    def context_tokens(self) -> int:
        """Longest context that a worker has reported, in tokens; 0 if none has."""
        return max(pool.context_tokens for pool in self.pools.values())

    def first_open(self) -> Iterator[Member]:
        """Yield the decode workers, open ones first, for a question that any worker can answer."""
        pool = self.pools[DECODE]
        yield from sorted(pool.members.values(), key=lambda member: not pool.keeper.members[member.entry.id].open)

    def set_router(self, pool: str, spec: RouterSpec) -> None:
        """Swap a pool's router. Raises ConfigError and keeps the old router if the new one cannot be made."""
        self.pools[pool].reload(spec)
        self._refresh_control()

    def as_configured(self, spec: RouterSpec) -> RouterSpec:
        """Return the spec with the configured fit in place of a fit that the control loop has put in force."""
        return spec if self.control is None else self.control.as_configured(spec)

    def _refresh_control(self) -> None:
        """Start the control loop, update it with the present workers and router, or end it."""
        if not self._started:
            return
        section, pool = self.config.control, self.pools[DECODE]
        if is_wanted(section, pool.spec, self.entries()) or (self.control is not None and section.enabled is None):
            if self.control is None:
                self.control = LiveControl(
                    section, pool, self.entries, self.access, self.metrics, self.log, self.follow_map
                )
                self.control.start()
                self.watcher.sent = self.control.sent
            else:
                self.control.refresh(section)
        elif self.control is not None:
            before, self.control, self.watcher.sent = self.control, None, None
            if before.as_configured(pool.spec) != pool.spec:  # the loop's own fits are removed with it
                pool.reload(before.as_configured(pool.spec))
            ending = asyncio.create_task(before.close(), name="end of the control loop")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _take_turns(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.turn()

    def turn(self) -> None:
        """Let the decode pool's router or the shortest queue choose, whoever's turn it is; a change starts anew."""
        pool, settings = self.pools[DECODE], self.config.switchback
        now_s, totals = pool.clock(), pool.meter.totals()
        if self.control is not None:
            counts = self.control.counts
            self.around_plan.tick(now_s, totals, counts["plan_confirmed"], counts["drift"])
        if self.no_turns() is not None:
            self.switchback, pool.keeper.baseline, self._turned = None, False, ()
            return
        wanted = (msgspec.structs.replace(pool.spec, fit=None), settings, pool.spec.fit)
        if self.switchback is None or self._turned[:2] != wanted[:2]:
            self.switchback = Switchback(settings, pool.rng, now_s)
        elif self._turned != wanted:
            self.switchback.restart(now_s)
        self._turned = wanted
        self.comparison = None
        said = self.switchback.tick(now_s, totals)
        pool.keeper.baseline = self.switchback.baseline
        if said is not None:
            self.log.control("switchback", f"{pool.spec.router}: {said}", {})

    def no_turns(self) -> str | None:
        """Return why the decode pool takes no turns, in words; None if it takes them."""
        pool = self.pools[DECODE]
        if not self.config.switchback.enabled:
            return "switchback.enabled is false"
        if self.alone:
            return "routers are compared by somebody else's requests (set with ?alone=1)"
        if self.peers.present:  # half of the fleet's requests would be the peers', by their own routers
            return "a peer routes to the same workers"
        if pool.spec.router.partition(":")[0] == BASELINE:
            return "the router is the shortest queue itself"
        if len(pool.members) < 2:
            return f"they need two workers, and the pool has {len(pool.members)}"
        return None

    def described_switchback(self) -> dict[str, Any] | None:
        """Return what the turns have measured, as plain values; None if none are taken."""
        turns = self.switchback
        if turns is None:
            return None
        return {
            "router": self.pools[DECODE].spec.router,
            "state": turns.state,
            "pairs": turns.pairs,
            "of": turns.settings.pairs,
            "verdict": turns.verdict(),
            "before": turns.before,
            "changes": {name: change._asdict() for name, change in turns.changes.items()},
        }

    def described_comparison(self) -> dict[str, Any] | None:
        """Return the last comparison as plain values; None if there is none."""
        made = self.comparison
        if made is None:
            return None
        return {**made._asdict(), "changes": {name: change._asdict() for name, change in made.changes.items()}}

    def plan_measured(self) -> dict[str, Any] | None:
        """Return what changed with the last placement plan, as plain values; None if nothing can be said."""
        found = self.around_plan.measured()
        return None if found is None else {"sentence": found.sentence, **found._asdict()}

    def change(self, changes: SavedState) -> None:
        """Store changes made at run time, in the state file if there is one. Raises ConfigError if writing fails."""
        self.changes = changes
        if self.config.state is not None:
            save_state(self.config.state, changes)

    def reconfigure(self, file: GatewayConfig, changes: SavedState) -> None:
        """Apply a config's workers, routers and limits. Raises ConfigError and changes nothing if a router fails."""
        config = changes.over(file)
        specs = {DECODE: config.decode, PREFILL: config.prefill}
        for entry in config.workers:
            check_role(config.handshake, entry)
            self.knowledge.held(entry)
        before = {name: pool.spec for name, pool in self.pools.items()}
        try:
            for name, spec in before.items():
                if specs[name] != self.as_configured(spec):
                    self.set_router(name, specs[name])
        except ConfigError:
            for name, spec in before.items():
                if self.pools[name].spec != spec:
                    self.set_router(name, spec)
            raise
        self.config = file
        self.log.requests = config.log_requests
        self.line.set_limits(config.limits.in_flight, config.limits.waiting)
        for flow in (self.plain, self.flow):
            flow.configure(config)
        for pool in self.pools.values():
            for member in pool.members.values():
                member.configure(config)
        wanted = {*self.pods, *(entry.id for entry in config.workers)}
        for entry in self.entries():
            if entry.id not in wanted:
                self.remove_worker(entry.id)
        for entry in config.workers:
            self.add_worker(entry)
        self._refresh_control()
        if changes != self.changes:
            self.change(changes)

    # --------------------------------------------------------------------------------------------------------- health

    async def _watch(self, pool: Pool, member: Member) -> None:
        """Check a worker's health and read its metrics. These do not wait for each other: either may hang."""
        await asyncio.gather(self._watch_health(pool, member), self._watch_metrics(pool, member))

    async def _watch_metrics(self, pool: Pool, member: Member) -> None:
        """Read a worker's metrics repeatedly, for as long as it is in the pool and the setting says so."""
        while True:
            health = self.config.health
            if health.metrics_every_s:
                outcome = "ok"
                try:
                    pool.reported(member, await member.ask_report(health.timeout_s))
                except (ReportError, UpstreamError) as error:
                    outcome = error.kind
                    pool.reported(member, None, f"{outcome}: {error}")
                self.metrics.worker_reports.inc(member.entry.id, outcome)
            else:
                pool.reported(member, None)
            await asyncio.sleep((health.metrics_every_s or health.every_s) * (1.0 + JITTER * float(pool.rng.random())))

    async def _watch_health(self, pool: Pool, member: Member) -> None:
        """Check a worker's health repeatedly, for as long as it is in the pool."""
        context_known = False
        while True:
            unreached, well = member.health.unreached, await member.check_health(self.config.health.timeout_s)
            if pool.checked(member, well):
                state = "healthy" if member.health.healthy else "unhealthy"
                self.log.worker(member.entry.id, pool.name, state, member.health_error or None)
                if state == "unhealthy":
                    self.knowledge.restarted(pool.name, pool.row_of(member), member.entry.id)
            elif member.health.unreached and not unreached:
                self.log.worker(member.entry.id, pool.name, "unreached", member.health_error)
            if member.health.healthy:
                self._watch_streams(pool, member)
            if well and not context_known:
                context_known = await self._learn_context(pool, member)
            await asyncio.sleep(member.health.next_check_s - pool.clock())

    def streams_of(self, pool: Pool, member: Member) -> dict[str, bool]:
        """Return whether each event stream of a worker has a connection, by its field of the entry."""
        entry, connected = member.entry, None if self.control is None else self.control.connected
        streams = {}
        if entry.kv_events is not None:
            streams["kv_events"] = self.knowledge.streams[pool.name].connected(entry.id)
        if entry.expert_events is not None and connected is not None:  # else nothing reads it
            streams["expert_events"] = entry.id in connected
        return streams

    def _watch_streams(self, pool: Pool, member: Member) -> None:
        """Log the event streams of a healthy worker that have no connection, and their return, each once."""
        before = member.lost_streams
        for name, connected in self.streams_of(pool, member).items():
            member.silent[name] = 0 if connected else member.silent[name] + 1
        for name in sorted(before ^ member.lost_streams):
            state = "back" if name in before else "lost"
            self.log.worker(member.entry.id, pool.name, f"{name} {state}", str(getattr(member.entry, name)))

    @property
    def why_unready(self) -> str:
        """Why no request can be served now, without names; empty if one can."""
        return "; ".join(why for pool in self.pools.values() if pool.needed and (why := pool.why_unready))

    async def _learn_context(self, pool: Pool, member: Member) -> bool:
        """Ask a worker for its context length, which bounds request bodies; return whether it answered."""
        try:
            models = msgspec.json.decode((await member.ask("GET", "/v1/models", MODELS_S)).body, type=_Models)
        except (UpstreamError, msgspec.DecodeError, RecursionError, ValueError):
            return False
        for card in models.data:
            if card.max_model_len is not None and 0 < card.max_model_len < 1 << 31:
                pool.context_tokens = max(pool.context_tokens, card.max_model_len)
                self.knowledge.streams[pool.name].context_tokens = pool.context_tokens
        return True

    # --------------------------------------------------------------------------------------------------------- gauges

    def _gauges(self) -> None:
        """Register the gauges: functions that read current values when metrics are collected."""
        metrics, knowledge = self.metrics, self.knowledge
        reads: dict[Counter | Gauge, Read] = {
            metrics.in_flight: lambda: self.line.in_use,
            metrics.queue_length: lambda: self.line.waiting,
            metrics.tokenised: lambda: {(outcome,): count for outcome, count in knowledge.tokens.counters.items()},
            metrics.kv_events: self._kv_events,
            metrics.peers_present: lambda: sum(peer.present for peer in self.peers.peers),
            metrics.switchback_pairs: lambda: 0 if self.switchback is None else self.switchback.pairs,
            metrics.switchback_left: lambda: self.switchback is not None and self.switchback.state == "left",
            metrics.switchback_change: self._switchback_change,
            metrics.worker_stream_connected: self._streams_connected,
        }
        by_worker: dict[Gauge, Callable[[Pool, Member], float | None]] = {
            metrics.worker_running: lambda pool, member: pool.keeper.running(member.entry.id),
            metrics.worker_places: lambda _, member: member.entry.places,
            metrics.worker_healthy: lambda _, member: member.health.healthy,
            metrics.breaker_state: lambda pool, member: BREAKER_STATES[member.breaker.state(pool.clock())],
            metrics.kv_claims_believed: lambda pool, member: knowledge.claims[pool.name].belief(pool.row_of(member)),
            metrics.worker_prefill_tokens: lambda pool, member: pool.keeper.fleet.prefill_tokens[pool.row_of(member)],
            metrics.worker_others: lambda pool, member: pool.others(member),
            metrics.worker_reported_requests: lambda _, member: (
                None if member.report is None else member.report.running + member.report.waiting
            ),
            metrics.worker_kv_used: lambda _, member: None if member.report is None else member.report.kv_used,
            metrics.worker_report_age: lambda pool, member: (
                None if member.report is None else pool.clock() - member.reported_s
            ),
            metrics.distinct_experts: lambda pool, member: pool.keeper.distinct(pool.row_of(member)),
        }
        reads |= {gauge: functools.partial(self._each, value) for gauge, value in by_worker.items()}
        for metric, read in reads.items():
            metric.read = read
        knowledge.tokens.observe = metrics.tokenise_seconds.observe

    def _kv_events(self) -> dict[tuple[str, ...], float]:
        streams = self.knowledge.streams.values()
        return {
            ("applied",): sum(stream.counters["messages"] for stream in streams),
            ("replayed",): sum(stream.directory.counters.replayed for stream in streams),
            ("gap",): sum(stream.directory.counters.gaps for stream in streams),
            ("malformed",): sum(
                stream.counters["malformed"] + stream.directory.counters.undecodable for stream in streams
            ),
            ("refused",): sum(stream.directory.counters.refused for stream in streams),
        }

    def _switchback_change(self) -> dict[tuple[str, ...], float]:
        changes = {} if self.switchback is None else self.switchback.changes
        return {
            (measure, bound): value
            for measure, change in changes.items()
            for bound, value in (("mean", change.percent), ("low", change.low), ("high", change.high))
            if value is not None
        }

    def _streams_connected(self) -> dict[tuple[str, ...], float]:
        return {
            (id, name): float(connected)
            for pool in self.pools.values()
            for id, member in pool.members.items()
            for name, connected in self.streams_of(pool, member).items()
        }

    def _each(self, value: Callable[[Pool, Member], float | None]) -> dict[tuple[str, ...], float]:
        """Return a value of every worker that has one."""
        return {
            (id,): float(known)
            for pool in self.pools.values()
            for id, member in pool.members.items()
            if (known := value(pool, member)) is not None
        }


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []
