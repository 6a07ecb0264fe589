"""A fleet for a Python program: the gateway's routing and handoff, without its HTTP server.

    async with RoutedFleet(prefill, decoders, router, Fleet([16, 16])) as fleet:
        served = await fleet.serve("/v1/completions", {"prompt": "Name three rivers.", "max_tokens": 8})

Prefill workers are chosen round-robin; the router picks the decode worker by the footprint in the prefill's answer.
Handshake, retries, circuit breakers and the release of KV are those of :mod:`coterie.gateway.exchange`. Workers are
vLLM servers or reference workers. There are no health checks: when a worker's requests fail its circuit breaker opens,
and it gets no requests until a probe succeeds.

The data-parallel ranks of one engine can be workers too (:func:`rank_entries`). Such an engine does its own prefill, so
no footprint is known before routing: a predicted one is used instead (:func:`predict_with`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_at_least
from coterie.gateway.config import GatewayConfig, LimitSettings, Role, WorkerEntry
from coterie.gateway.exchange.call import Call, Outcome, checked_id, encode_object, make_call
from coterie.gateway.exchange.flow import Flow, PlainFlow
from coterie.gateway.exchange.knowledge import NOTHING, Knowledge, KnownPrompt
from coterie.gateway.exchange.observing import Watcher
from coterie.gateway.exchange.pool import DECODE, PREFILL, Member, Pool
from coterie.gateway.exchange.vllm_pair import VllmPairFlow
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.keeper import Choice, FleetKeeper
from coterie.gateway.fleet.spec import Made, PoolShape, RouterSpec
from coterie.gateway.signals.predicted import Footprints
from coterie.net.http1.messages import HttpError
from coterie.net.http1.responder import Responder
from coterie.net.http_client import error_message, server_url
from coterie.predictors.base import Predictor, PredictRequest
from coterie.routing import Fleet, Request, Router
from coterie.wire.footprints import WireFootprint

KEPT_PROBLEMS = 5
PATIENT = LimitSettings(connect_s=10.0, prefill_s=3600.0, first_token_s=3600.0)
"""Long timeouts: answers are not streamed, and a request may wait long in the queue of a busy worker."""
DEFAULT_HEALTH = HealthSettings()
JSON = [(b"content-type", b"application/json")]


class Collected(Responder):
    """A sink that keeps the answer, for callers without a connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.started = self.ended = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def send(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.start(status, [*([(b"content-type", content_type)] if content_type else []), *headers], len(body))
        self.pieces.append(body)
        self.end()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None = None) -> None:
        del length
        self.status, self.headers, self.started = status, list(headers), True

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    async def drain(self) -> None:
        return

    def end(self) -> None:
        self.ended = True

    def fail(self, error: HttpError) -> None:
        self.pieces.append(error.event())
        self.end()


@dataclass(slots=True)
class FleetCounts:
    served: int = 0
    failed: int = 0
    """Requests whose result holds a problem."""
    handoffs: int = 0
    """Requests for which a prefill worker answered."""
    footprints: int = 0
    """Requests routed with a footprint from a prefill worker."""
    incomplete: int = 0
    """Footprints that lack the experts of some prompt tokens."""
    damaged: int = 0
    """Footprints that could not be read or are impossible; their requests were routed without one."""
    prefill_failures: int = 0
    """Times a prefill worker failed."""
    decode_failures: int = 0
    """Times a decode worker failed."""
    retried: int = 0
    """Times a request was sent to another decode worker."""
    fallbacks: int = 0
    """Times the decode worker was chosen without the router: the router failed, or no worker was open."""
    problems: list[str] = field(default_factory=list)
    """Reasons of the first `KEPT_PROBLEMS` failures."""

    def note(self, problem: str | None) -> None:
        if problem is not None and len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(problem)


class Served(NamedTuple):
    """Result of one request."""

    name: str
    body: dict[str, Any] | None
    """Body of the decode worker's answer; None if the request failed."""
    decoder: int | None
    """Index of the decode worker that answered; None if none did."""
    footprint: WireFootprint | None
    reason: str
    """Reason of the router's choice."""
    started_s: float
    """Start of the request, by the monotonic clock."""
    prefill_s: float
    total_s: float
    problem: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer; the request must set ``return_token_ids``."""
        if self.body is None:
            raise ConfigError(f"request {self.name!r} was not answered: {self.problem}")
        found = self.body["choices"][0].get("token_ids")
        if found is None:
            raise ConfigError("the answer has no token ids: ask with return_token_ids=true")
        return [int(token) for token in found]


Predict = Callable[[Mapping[str, Any]], NDArray[Any] | None]
"""Function from a request's body to its expected footprint [layer, expert]; None if nothing is known."""


def predict_with(predictor: Predictor) -> Predict:
    """Return a function that predicts the footprint of a body whose prompt is token ids; None for other bodies."""

    def predict(body: Mapping[str, Any]) -> NDArray[Any] | None:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            return None
        return predictor.predict(PredictRequest(token_ids=np.array(prompt)))

    return predict


def rank_entries(url: str, ranks: int) -> list[WorkerEntry]:
    """Return one worker entry for each data-parallel rank of an engine."""
    check_at_least(1, ranks=ranks)
    return [WorkerEntry(id=f"rank-{rank}", url=server_url(url), data_parallel_rank=rank) for rank in range(ranks)]


class RoutedFleet:
    """Prefill workers, decode workers and the router between them. Use it in ``async with``: it owns connections."""

    def __init__(
        self,
        prefill: Sequence[str | WorkerEntry],
        decoders: Sequence[str | WorkerEntry],
        router: Router,
        fleet: Fleet,
        predict: Predict | None = None,
        *,
        key: str | None = None,
        limits: LimitSettings = PATIENT,
        health: HealthSettings = DEFAULT_HEALTH,
    ) -> None:
        """Workers are URLs, or entries of a gateway's config.

        `fleet` is the router's view of the decoders, with their places and speeds; pass it without requests, it is kept
        up to date. `predict` returns the footprint of a request without one from a prefill worker; with `predict`,
        prefill workers are optional. `key` is the bearer key for the workers' private endpoints. Of `health` only the
        settings of retries and breakers are used.
        """
        if not decoders or not (prefill or predict):
            raise ConfigError(
                f"{len(prefill)} prefill and {len(decoders)} decode workers: at least one of each, or predict"
            )
        if len(fleet) != len(decoders):
            raise ConfigError(f"fleet has {len(fleet)} workers; there are {len(decoders)} decode workers")
        held = [None] * len(fleet) if fleet.local is None else list(fleet.local.copy())

        def made(_: PoolShape) -> Made:
            fleet.alive[:] = True
            return Made(type(router).__name__, router, fleet)

        first, second = _entries(prefill, "prefill"), _entries(decoders, "decode", fleet)
        config = GatewayConfig(
            workers=first + second, handshake="vllm" if first else "none", limits=limits, health=health
        )
        self.counts = FleetCounts()
        self.prefill = Pool(PREFILL, FleetKeeper(RouterSpec("round_robin")))
        self.decode = Pool(DECODE, FleetKeeper(made))
        for pool, entries, masks in ((self.prefill, first, [None] * len(first)), (self.decode, second, held)):
            for entry, mask in zip(entries, masks, strict=True):
                pool.add(Member(entry, config, key, pool.rng, pool.clock(), healthy=True), mask)
        knows, counter = _Expected(predict), _Counter(self.counts)
        self._flow: Flow = PlainFlow(self.decode, config, knows, counter)
        if first:
            self._flow = VllmPairFlow(self.prefill, self.decode, config, knows, counter)
        self._total_s = limits.total_s
        self._in_flight: set[str] = set()

    @property
    def fleet(self) -> Fleet:
        """The decoders as the router sees them."""
        return self.decode.keeper.fleet

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._flow.close()
        for pool in (self.prefill, self.decode):
            await pool.close()

    async def serve(
        self, path: str, body: Mapping[str, Any], name: str | None = None, domain: str | None = None
    ) -> Served:
        """Serve one request, not streamed; a failure is returned in the result, not raised.

        `name` identifies the request in the workers' events and logs; the default is the body's `request_id`, or a
        fresh name.
        """
        started, sink, found = time.monotonic(), Collected(), Outcome(500)
        answer: dict[str, Any] | None = None
        name = name if name is not None else body.get("request_id")
        try:
            call = self._call(path, body, name, domain)
            name = call.name
            self._in_flight.add(name)
            try:
                async with asyncio.timeout(self._total_s):
                    found = await self._flow.serve(call, sink, NOTHING)
            finally:
                self._in_flight.discard(name)
            answer, problem = _read(sink, found)
        except HttpError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no answer within {self._total_s:g} s"
        self.counts.served += problem is None
        self.counts.failed += problem is not None
        self.counts.note(problem)
        return Served(
            name=str(name),
            body=answer,
            decoder=None if found.worker is None else self.decode.keeper.members[found.worker].row,
            footprint=found.footprint,
            reason="" if found.decision is None else found.decision.reason,
            started_s=started,
            prefill_s=found.prefill_s,
            total_s=time.monotonic() - started,
            problem=problem,
        )

    def _call(self, path: str, body: Mapping[str, Any], name: Any, domain: str | None) -> Call:
        data = encode_object({**body, "stream": False})
        if name is not None:
            name = checked_id(str(name).encode("utf-8", "surrogatepass"))
            if name in self._in_flight:
                raise HttpError(400, f"another request named {name!r} is in flight")
        return make_call(path, data, request_id=name, headers=JSON, domain=domain)


class _Expected(Knowledge):
    """Source of a request's footprint: its prefill, else `predict`."""

    def __init__(self, predict: Predict | None) -> None:
        self._predict = predict
        self.footprints = Footprints()  # learns the shape that later footprints must have

    def wanted(
        self, pool: Pool, call: Call, known: KnownPrompt, footprint: WireFootprint | None, prefilled: bool
    ) -> tuple[Request, str]:
        counts: NDArray[Any] | None = None
        source = "none"
        if footprint is not None:
            counts, source = footprint.counts, "answer"
        elif self._predict is not None and pool.name == DECODE:
            counts = self._predict(call.body)
            source = "none" if counts is None else "predictor"
        return Request(call.id, known.tokens, counts, call.domain, prefilled=prefilled), source

    def routed(self, pool: Pool, row: int, known: KnownPrompt, cached_tokens: int | None = None) -> None:
        del pool, row, known, cached_tokens  # prefixes are not tracked


class _Counter(Watcher):
    """Observer that counts handoffs, failures, retries and fallbacks."""

    def __init__(self, counts: FleetCounts) -> None:
        self._counts = counts

    def decided(self, pool: Pool, call: Call, wanted: Request, choice: Choice, seconds: float, source: str) -> None:
        del call, wanted, seconds, source
        if pool.name == DECODE and choice.fallback is not None:
            self._counts.fallbacks += 1
            self._counts.note(choice.decision.reason)

    def failed(self, member: Member, kind: str) -> None:
        prefill = member.entry.role == "prefill"
        self._counts.prefill_failures += prefill
        self._counts.decode_failures += not prefill
        self._counts.note(f"{member.entry.id} ({member.entry.url}) failed: {kind}")

    def retried(self, pool: Pool, call: Call, failure: str) -> None:  # noqa: ARG002 (an observer's)
        self._counts.retried += pool.name == DECODE

    def not_handed_over(self) -> None:
        pass

    def handed_over(self, footprint: WireFootprint | None, problem: str | None, cached_tokens: int | None) -> None:  # noqa: ARG002
        self._counts.handoffs += 1
        self._counts.damaged += problem is not None
        self._counts.footprints += footprint is not None
        self._counts.incomplete += footprint is not None and footprint.missing > 0
        self._counts.note(problem)


def _entries(workers: Sequence[str | WorkerEntry], role: Role, fleet: Fleet | None = None) -> list[WorkerEntry]:
    """Return worker entries of one role; workers given as URLs are numbered, places and speeds are the fleet's."""
    found = []
    for number, one in enumerate(workers):
        entry = one if isinstance(one, WorkerEntry) else WorkerEntry(id=f"{role}-{number}", url=server_url(one))
        if fleet is not None:
            places, speed = int(fleet.places[number]), float(fleet.speeds[number])
            entry = msgspec.structs.replace(entry, places=places, speed=speed)
        found.append(msgspec.structs.replace(entry, role=role))
    return found


def _read(sink: Collected, found: Outcome) -> tuple[dict[str, Any] | None, str | None]:
    """Return the body of a collected answer and None, or None and the problem with it."""
    try:
        body = msgspec.json.decode(sink.body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        body = None
    who = found.worker or found.prefill
    if sink.status != 200:
        return None, f"{who}: HTTP {sink.status}: {error_message(body, sink.body)}"
    if found.problem is not None:
        return None, f"{who}: {found.problem}"
    return (body, None) if isinstance(body, dict) else (None, f"{who}: the answer is not a JSON object")
