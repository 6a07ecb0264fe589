"""Decode workers and requests of one Dynamo component, in a fleet keeper, and what is known of a request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.knowledge import footprints_of
from coterie.gateway.exchange.pool import DECODE
from coterie.gateway.fleet.keeper import Choice, FleetKeeper, WorkerRow
from coterie.gateway.watching.metrics import Metrics
from coterie.routing import Request
from coterie.wire.footprints import read_footprint, without_footprint

REST_S = 10.0
"""Seconds that an instance which could not be reached gets no requests. Dynamo still lists a dead one for about 8 s."""
MOST_ERRORS = 3
PLACES = 16
"""Requests that an instance runs at once, if its model card does not say."""
PARAMS = "kv_transfer_params"


class DecodeRequest(NamedTuple):
    """A request of the frontend: as it is passed on, and its routing signals."""

    passed: dict[str, Any]
    """The request without the footprint, which decode workers do not use."""
    ids: list[int]
    """Token ids of the prompt."""
    counts: NDArray[Any] | None
    """Footprint, [layer, expert]; None if unknown."""
    prefilled: bool
    """Whether the KV of the prompt is handed over by a prefill worker."""


class Decoders:
    """Instances by id, and the requests at each. Not thread-safe: belongs to the component's event loop."""

    def __init__(self, config: GatewayConfig, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.keeper, self.metrics = FleetKeeper(config.decode), metrics
        self.footprints = footprints_of(config)
        self._clock = clock
        self._resting: dict[str, float] = {}
        """Instance that could not be reached → time until which it gets no requests."""
        self._errors: Counter[str] = Counter()
        """Instance → errors since its last answer."""
        self._gauges()

    def _gauges(self) -> None:
        keeper, metrics = self.keeper, self.metrics

        def by_worker(value: Callable[[str, WorkerRow], float]) -> Callable[[], dict[tuple[str], float]]:
            return lambda: {(name,): float(value(name, worker)) for name, worker in keeper.members.items()}

        metrics.in_flight.read = lambda: len(keeper.requests)
        metrics.worker_running.read = by_worker(lambda name, _: keeper.running(name))
        metrics.worker_places.read = by_worker(lambda _, worker: worker.places)
        metrics.distinct_experts.read = by_worker(lambda _, worker: keeper.distinct(worker.row))

    def listed(self, places: Mapping[str, int]) -> None:
        """Take Dynamo's list of instances, id → most requests at once.

        Instances that could not be reached stay out for :data:`REST_S`, unless there are no others.
        """
        now = self._clock()
        self._resting = {name: until for name, until in self._resting.items() if name in places and now < until}
        wanted = {name: most for name, most in places.items() if name not in self._resting} or places
        for gone in self.keeper.follow(wanted):
            self.metrics.forget_worker(gone)

    def failed(self, name: str) -> None:
        """Count an error of an instance; the last of :data:`MOST_ERRORS` in a row removes it.

        Otherwise one that fails at once would look idle, and get all requests.
        """
        self._errors[name] += 1
        if self._errors[name] == MOST_ERRORS:
            self.lost(name, "status_5xx")

    def answered(self, name: str) -> None:
        self._errors.pop(name, None)

    def lost(self, name: str, kind: str) -> None:
        """Remove an instance at once that could not be reached, or whose answer broke off."""
        self._errors.pop(name, None)
        self.metrics.worker_failures.inc(name, kind)
        self._resting[name] = self._clock() + REST_S
        if name in self.keeper.members:
            self.keeper.leave(name)
            self.metrics.forget_worker(name)

    # ------------------------------------------------------------------------------------------------------- requests

    def read(self, request: Mapping[str, Any]) -> DecodeRequest:
        """Read a request of the frontend. The footprint is the prefill's; without one it is predicted."""
        ids, result = request["token_ids"], request.get("prefill_result") or {}
        handed = result.get("disaggregated_params") or {}
        params = handed.get(PARAMS) or {}
        tokens, source = np.asarray(ids, np.int64), "answer"
        footprint, problem = read_footprint(params, self.footprints.shape, self.footprints.top_k)
        counts: NDArray[Any] | None
        if footprint is not None:
            counts = footprint.counts
            self.footprints.learn(tokens, footprint)
        else:
            counts, source = self.footprints.footprint(tokens, len(ids))
        if problem is not None:
            source = "damaged"
        self.metrics.footprints.inc(source)
        kept, passed = without_footprint(params), dict(request)
        if len(kept) < len(params):
            passed["prefill_result"] = {**result, "disaggregated_params": {**handed, PARAMS: kept}}
        return DecodeRequest(passed, ids, counts, bool(kept))

    def choose(
        self, key: str, known: DecodeRequest, cached: Mapping[str, int] | None, tried: Collection[str] = ()
    ) -> Choice:
        """Choose an instance and admit the request to it. Raises UnavailableError if there is none.

        `cached` are the leading tokens of the prompt that instances hold, by id; None if unknown.
        """
        started, held = time.perf_counter(), None
        if cached is not None:
            held = np.zeros(self.keeper.rows, np.int64)
            for name, member in self.keeper.members.items():
                held[member.row] = min(cached.get(name, 0), len(known.ids) - 1)  # an engine computes at least one
        wanted = Request("", len(known.ids), known.counts, cached_tokens=held, prefilled=known.prefilled)
        choice = self.keeper.route(key, wanted, tried)
        metrics = self.metrics
        metrics.decision_seconds.observe(time.perf_counter() - started, DECODE)
        metrics.routed.inc(DECODE, choice.worker_id)
        if choice.fallback is not None:
            metrics.fallbacks.inc(choice.fallback)
        if held is not None:
            metrics.cached_tokens.inc(DECODE, "expected", by=held.item(choice.row))
        return choice
