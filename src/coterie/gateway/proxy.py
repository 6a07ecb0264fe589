"""A small proxy that drives a fleet: prefill workers in turn, each request's decode worker chosen by a router.

The prefill worker answers one token and the prompt's footprint (:mod:`coterie.wire.handoff`); with that in hand the
router picks the decode worker, in a :class:`~coterie.routing.fleet.Fleet` that this class keeps up to date: a request
is admitted when it is routed and leaves when it is answered. Workers are real vLLM servers or reference workers alike.

A worker that fails (no connection, HTTP 5xx) is marked dead and gets nothing more until :meth:`RoutedFleet.look` finds
it well; its request is tried once more elsewhere. KV already handed over is not offered twice: the second decode worker
computes the prompt, because the first may have taken the blocks and the prefill worker given them to another request.
A request that a worker refuses (HTTP 4xx) is its own fault and is answered so.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.net.http_client import Client
from coterie.routing.base import Router, RouteRequest
from coterie.routing.fleet import Fleet
from coterie.wire.footprints import WireFootprint, footprint_of, without_footprint
from coterie.wire.handoff import REQUEST_ID_HEADER, decode_body, prefill_body

PLACES = 16
"""Requests that a decode worker runs at once, unless said: the reference worker's default."""
KEPT_PROBLEMS = 5


class Reply(NamedTuple):
    """What a worker said to one body."""

    body: dict[str, Any] | None
    problem: str | None = None
    worker_failed: bool = False
    """The worker is to blame, not the request."""


class WorkerClient(Client):
    """A worker that is asked under a request's name, so that its events and logs can be found by it."""

    async def ask(self, path: str, body: Mapping[str, Any], name: str) -> Reply:
        """One body; whatever goes wrong is in the reply."""
        # A connection each: a server that closes an idle one just as it is taken again would look dead (vLLM's closes
        # after 5 s, the pool keeps 15).
        headers = {REQUEST_ID_HEADER: name, "Connection": "close"}
        try:
            async with self._session.post(self.url + path, json=body, headers=headers) as response:
                data, status = await response.read(), int(response.status)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            return Reply(None, f"{self.url}: {' '.join(str(error).split()) or type(error).__name__}", True)
        if status != 200:
            words = " ".join(data[:200].decode("utf-8", "replace").split())
            return Reply(None, f"{self.url}: HTTP {status}: {words}", status >= 500)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            return Reply(None, f"{self.url}: the answer is not a JSON object", True)
        return Reply(found)

    async def well(self) -> bool:
        try:
            return (await self.call("GET", "/health"))[0] == 200
        except UnavailableError:
            return False


@dataclass(slots=True)
class FleetCounts:
    served: int = 0
    failed: int = 0
    """Answered with a problem."""
    handoffs: int = 0
    """Requests that a prefill worker answered."""
    footprints: int = 0
    """Requests routed with one."""
    incomplete: int = 0
    """Footprints of prompts of which the prefill worker did not see every token's experts."""
    damaged: int = 0
    """Footprints that could not be read; their requests were routed without."""
    prefill_failures: int = 0
    """Times a prefill worker failed."""
    decode_failures: int = 0
    """Times a decode worker failed."""
    retried: int = 0
    """Requests whose decode was tried a second time."""
    problems: list[str] = field(default_factory=list)
    """Why, the first few."""

    def note(self, problem: str | None) -> None:
        if problem is not None and len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(problem)


class Served(NamedTuple):
    """What became of one request."""

    name: str
    body: dict[str, Any] | None
    """The decode worker's answer; None where it failed."""
    decoder: int | None
    footprint: WireFootprint | None
    reason: str
    """Of the router's choice."""
    started_s: float
    """On the monotonic clock."""
    prefill_s: float
    total_s: float
    problem: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Ids of the answer; the body must have asked for them (``return_token_ids``)."""
        if self.body is None:
            raise ConfigError(f"request {self.name!r} was not answered: {self.problem}")
        found = self.body["choices"][0].get("token_ids")
        if found is None:
            raise ConfigError("the answer has no token ids: ask with return_token_ids=true")
        return [int(token) for token in found]


class RoutedFleet:
    """Prefill workers, decode workers and the router between them. Close the clients yourself."""

    def __init__(
        self,
        prefill: Sequence[WorkerClient],
        decoders: Sequence[WorkerClient],
        router: Router,
        *,
        places: int = PLACES,
        cells: int = 0,
        usual: NDArray[np.floating] | None = None,
    ) -> None:
        """`places`, `cells` and `usual` are :class:`Fleet`'s; without cells no profile of a request is kept."""
        if not prefill or not decoders:
            raise ConfigError(f"{len(prefill)} prefill and {len(decoders)} decode workers: at least one of each")
        self.router = router
        self.fleet = Fleet([places] * len(decoders), cells, usual=usual)
        self.prefill_alive = [True] * len(prefill)
        self.counts = FleetCounts()
        self._prefill, self._decoders = list(prefill), list(decoders)
        self._turn = 0

    async def serve(
        self, path: str, body: Mapping[str, Any], name: str | None = None, domain: str | None = None
    ) -> Served:
        """One request, not streamed."""
        name = name or uuid.uuid4().hex
        started = time.monotonic()
        request = {"request_id": name, **body, "stream": False}
        first = await self._prefilled(path, request, name)
        prefill_s = time.monotonic() - started
        if first is not None and first.problem is not None:
            return self._done(Served(name, None, None, None, "", started, prefill_s, prefill_s, first.problem))
        self.counts.handoffs += first is not None
        params, footprint = self._params(first)
        tokens = int((first.body or {}).get("usage", {}).get("prompt_tokens", 0)) if first is not None else 0
        wanted = RouteRequest(name, tokens, None if footprint is None else footprint.counts, domain)
        reply, worker, reason = Reply(None, "it was not sent"), None, ""
        for attempt in range(2):
            try:
                decision = self.router.route(wanted, self.fleet)
            except UnavailableError as error:
                reply = Reply(None, reply.problem if attempt else str(error))
                break
            worker, reason = decision.worker, decision.reason
            self.counts.retried += attempt
            self.fleet.admit(name, worker, tokens, decision.profile)
            try:
                reply = await self._decoders[worker].ask(path, decode_body(request, params), name)
            finally:
                self.fleet.finish(name)
            if not reply.worker_failed:
                break
            self.fleet.alive[worker] = False
            self.counts.decode_failures += 1
            self.counts.note(reply.problem)
            params = {}
        total_s = time.monotonic() - started
        return self._done(
            Served(name, reply.body, worker, footprint, reason, started, prefill_s, total_s, reply.problem)
        )

    async def look(self) -> int:
        """Ask those marked dead for their health; how many are well again."""
        back = 0
        for number, alive in enumerate(self.prefill_alive):
            if not alive and await self._prefill[number].well():
                self.prefill_alive[number] = True
                back += 1
        for worker, client in enumerate(self._decoders):
            if not self.fleet.alive[worker] and await client.well():
                self.fleet.alive[worker] = True
                back += 1
        return back

    async def _prefilled(self, path: str, request: Mapping[str, Any], name: str) -> Reply | None:
        """A prefill worker's answer or refusal; None if two of them failed or none is alive."""
        for _ in range(2):
            alive = [number for number, alive in enumerate(self.prefill_alive) if alive]
            if not alive:
                return None
            number = alive[self._turn % len(alive)]
            self._turn += 1
            reply = await self._prefill[number].ask(path, prefill_body(request), name)
            if not reply.worker_failed:
                return reply
            self.prefill_alive[number] = False
            self.counts.prefill_failures += 1
            self.counts.note(reply.problem)
        return None

    def _params(self, first: Reply | None) -> tuple[dict[str, Any], WireFootprint | None]:
        """What the decode worker is to be given, and the footprint that came with it."""
        params = None if first is None or first.body is None else first.body.get("kv_transfer_params")
        if not isinstance(params, dict):
            return {}, None
        footprint = None
        try:
            footprint = footprint_of(params)
        except InputError as error:
            self.counts.damaged += 1
            self.counts.note(str(error))
        self.counts.footprints += footprint is not None
        self.counts.incomplete += footprint is not None and footprint.missing > 0
        return without_footprint(params), footprint

    def _done(self, served: Served) -> Served:
        if served.problem is None:
            self.counts.served += 1
        else:
            self.counts.failed += 1
            self.counts.note(served.problem)
        return served
