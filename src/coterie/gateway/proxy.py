"""A small proxy that drives a fleet: prefill workers in turn, each request's decode worker chosen by a router.

The prefill worker answers one token and the prompt's footprint (:mod:`coterie.wire.handoff`); with that in hand the
router picks the decode worker, in a :class:`~coterie.routing.fleet.Fleet` that this class keeps up to date: a request
is admitted when it is routed and leaves when it is answered. Workers are real vLLM servers or reference workers alike.

The data-parallel ranks of one engine are workers too: :func:`rank_clients` makes a client of each, which names its rank
in vLLM's request header. Such an engine prefills for itself, so there is no prefill worker and no footprint in time: a
prediction stands for it (:func:`predict_with`).

A worker that fails (no connection, HTTP 5xx) is marked dead and gets nothing more until :meth:`RoutedFleet.look` finds
it well; its request is tried once more elsewhere. KV already handed over is not offered twice: the second decode worker
computes the prompt, because the first may have taken the blocks and the prefill worker given them to another request.
A request that a worker refuses (HTTP 4xx) is its own fault and is answered so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.net.http_client import Answer, Client
from coterie.predictors.base import Predictor, PredictRequest
from coterie.routing import Fleet, Request, Router
from coterie.wire.footprints import WireFootprint, footprint_of, without_footprint
from coterie.wire.handoff import decode_body, prefill_body

KEPT_PROBLEMS = 5


@dataclass(slots=True)
class FleetCounts:
    served: int = 0
    failed: int = 0
    """Requests answered with a problem."""
    handoffs: int = 0
    """Requests that a prefill worker answered."""
    footprints: int = 0
    """Requests routed with a footprint."""
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
    """Reasons of the first few failures."""

    def note(self, problem: str | None) -> None:
        if problem is not None and len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(problem)


class Served(NamedTuple):
    """Result of one request."""

    name: str
    body: dict[str, Any] | None
    """Body of the decode worker's answer; None if it failed."""
    decoder: int | None
    footprint: WireFootprint | None
    reason: str
    """Reason of the router's choice."""
    started_s: float
    """Start, by the monotonic clock."""
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


Predict = Callable[[Mapping[str, Any]], NDArray[Any] | None]
"""Body of a request → footprint [layer, expert] that is expected of it; None where nothing is known."""


def predict_with(predictor: Predictor) -> Predict:
    """Ask a predictor for the footprint of a body whose prompt is given as token ids; of others nothing is known."""

    def predict(body: Mapping[str, Any]) -> NDArray[Any] | None:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            return None
        return predictor.predict(PredictRequest(token_ids=np.array(prompt)))

    return predict


def rank_clients(url: str, ranks: int) -> list[Client]:
    """A client of each data-parallel rank of one engine; open and close them as others."""
    return [Client(url, data_parallel_rank=rank) for rank in range(ranks)]


class RoutedFleet:
    """Prefill workers, decode workers and the router between them. Close the clients yourself."""

    def __init__(
        self,
        prefill: Sequence[Client],
        decoders: Sequence[Client],
        router: Router,
        fleet: Fleet,
        predict: Predict | None = None,
    ) -> None:
        """`fleet` is the router's view of the decoders; give an empty one, the proxy keeps it up to date.

        `predict` gives the footprint of a request that no prefill worker has answered with one. With it there need not
        be a prefill worker.
        """
        if not decoders or not (prefill or predict):
            raise ConfigError(
                f"{len(prefill)} prefill and {len(decoders)} decode workers: at least one of each, or predict"
            )
        self.router = router
        self._predict = predict
        if len(fleet) != len(decoders):
            raise ConfigError(f"fleet has {len(fleet)} workers; there are {len(decoders)} decode workers")
        self.fleet = fleet
        self.prefill_alive = [True] * len(prefill)
        self.counts = FleetCounts()
        self._prefill, self._decoders = list(prefill), list(decoders)
        self._turn = 0

    async def serve(
        self, path: str, body: Mapping[str, Any], name: str | None = None, domain: str | None = None
    ) -> Served:
        """Serve one request, not streamed."""
        name = name or uuid.uuid4().hex
        started = time.monotonic()
        request = {"request_id": name, **body, "stream": False}
        first = await self._prefilled(path, request, name)
        prefill_s = time.monotonic() - started
        if first is not None and first.problem is not None:
            return self._done(
                Served(
                    name=name,
                    body=None,
                    decoder=None,
                    footprint=None,
                    reason="",
                    started_s=started,
                    prefill_s=prefill_s,
                    total_s=prefill_s,
                    problem=first.problem,
                )
            )
        self.counts.handoffs += first is not None
        params, footprint = self._params(first)
        tokens = int((first.body or {}).get("usage", {}).get("prompt_tokens", 0)) if first is not None else 0
        counts: NDArray[Any] | None = None if footprint is None else footprint.counts
        if counts is None and self._predict is not None:
            counts = self._predict(body)
        wanted = Request(name, tokens, counts, domain)
        answer, worker, reason = Answer(0, 0.0, None, "it was not sent"), None, ""
        for attempt in range(2):
            try:
                decision = self.router.route(wanted, self.fleet)
            except UnavailableError as error:
                answer = answer._replace(problem=answer.problem if attempt else str(error))
                break
            worker, reason = decision.worker, decision.reason
            self.counts.retried += attempt
            self.fleet.admit(name, worker, tokens, decision.profile)
            try:
                answer = await _ask(self._decoders[worker], path, decode_body(request, params), name)
            finally:
                self.fleet.finish(name)
            if not answer.server_failed:
                break
            self.fleet.alive[worker] = False
            self.counts.decode_failures += 1
            self.counts.note(answer.problem)
            params = {}
        total_s = time.monotonic() - started
        return self._done(
            Served(
                name=name,
                body=answer.body,
                decoder=worker,
                footprint=footprint,
                reason=reason,
                started_s=started,
                prefill_s=prefill_s,
                total_s=total_s,
                problem=answer.problem,
            )
        )

    async def look(self) -> int:
        """Check the health of workers marked dead; returns how many are well again."""
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

    async def _prefilled(self, path: str, request: Mapping[str, Any], name: str) -> Answer | None:
        """A prefill worker's answer or refusal; None if two of them failed or none is alive."""
        for _ in range(2):
            alive = [number for number, alive in enumerate(self.prefill_alive) if alive]
            if not alive:
                return None
            number = alive[self._turn % len(alive)]
            self._turn += 1
            answer = await _ask(self._prefill[number], path, prefill_body(request), name)
            if not answer.server_failed:
                return answer
            self.prefill_alive[number] = False
            self.counts.prefill_failures += 1
            self.counts.note(answer.problem)
        return None

    def _params(self, first: Answer | None) -> tuple[dict[str, Any], WireFootprint | None]:
        """Body for the decode worker, and the prompt's footprint."""
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


async def _ask(client: Client, path: str, body: Mapping[str, Any], name: str) -> Answer:
    """The worker's answer; a problem names the worker."""
    answer = await client.post(path, body, name)
    return answer if answer.problem is None else answer._replace(problem=f"{client.url}: {answer.problem}")
