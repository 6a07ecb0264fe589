"""The request router for Ray Serve: a deployment's replicas are chosen by a router of Coterie.

    request_router_config:
      request_router_class: coterie.stacks.ray.router.ExpertRouter
      request_router_kwargs: {router: latency_aware, fit: /fits/gpt-oss-20b.safetensors}

The keyword arguments are the fields of :class:`~coterie.gateway.fleet.spec.RouterSpec`. A request's footprint is read
from ``kv_transfer_params`` in an argument of the call; the ids of replicas that have failed it from its `tried`.

Serve pickles this module by value: whatever a process must have once is in :mod:`~coterie.stacks.ray.ledger`. It makes
one router in every process that has a handle. Each sees its own requests, and those of others by the number
of requests that a replica reports when it accepts one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec

from coterie.stacks.ray.installed import PendingRequest, ReplicaID, RequestRouter, RunningReplica, metrics
from coterie.stacks.ray.ledger import open_ledger, read_request

P = ParamSpec("P")
LOG = logging.getLogger("ray.serve")


class ExpertRouter(RequestRouter):
    """Chooses replicas with a fleet keeper. Whatever fails, Serve gets all replicas and takes the shortest queue."""

    def initialize_state(self, **kwargs: Any) -> None:
        self.deployment = f"{self.app_name}/{self._deployment_id.name}"
        self.ledger = open_ledger(self.deployment, kwargs)
        if self.ledger.problem:
            LOG.error("%s: the shortest queue chooses: %s", self.deployment, self.ledger.problem)
        self._numbers = itertools.count()
        self._attempts: dict[int, str] = {}
        """Identity of a pending request that waits for a replica → its attempt."""
        self._decisions = metrics.Counter(
            "coterie_router_decisions",
            "Replicas chosen, by outcome (router, or the reason of a fallback) and source of the footprint.",
            ("deployment", "outcome", "footprint"),
        )
        self._requests = metrics.Gauge(
            "coterie_router_requests", "Requests admitted and not finished.", ("deployment",)
        ).set_default_tags({"deployment": self.deployment})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        attempt = None if pending_request is None else self._attempts.get(id(pending_request))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all queues are full, Serve asks again, but later
        if pending_request is None or attempt is None:  # only asked, not to be sent from here
            return [candidate_replicas]
        # Of the calls that share the id of a request Serve remembers one, and would hand no replica to the others.
        self._add_pending_request_to_indices(pending_request)
        try:
            by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            known = read_request((*pending_request.args, *pending_request.kwargs.values()))
            choice, order = self.ledger.choose(attempt, known.request, pending_request.kwargs.get("tried") or ())
            tags = {"outcome": choice.fallback or "router", "footprint": known.footprint}
            self._decisions.inc(tags={"deployment": self.deployment, **tags})
            return [[by_id[name]] for name in order if name in by_id] or [candidate_replicas]
        except Exception:
            LOG.exception("%s: the router failed, the shortest queue chooses", self.deployment)
            return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Follow an attempt: if the request is cancelled before it is sent, Serve calls no hook."""
        attempt = self._attempts[id(pending_request)] = f"{next(self._numbers):x}"
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._guarded(self.ledger.dropped, attempt)
            raise
        finally:
            del self._attempts[id(pending_request)]
        request = pending_request.metadata.internal_request_id
        self._guarded(self.ledger.sent, attempt, request, replica.replica_id.unique_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._guarded(self.ledger.ended, internal_request_id, replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._guarded(self.ledger.reported, replica_id.unique_id, num_ongoing_requests)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._guarded(self.ledger.died, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        places = {replica.replica_id.unique_id: replica.max_ongoing_requests for replica in replicas}
        self._guarded(self.ledger.keeper.follow, places)
        super().update_replicas(replicas)

    def _guarded(self, do: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            do(*args, **kwargs)
        except Exception:
            LOG.exception("%s: the router's books are wrong by one event", self.deployment)
        self._requests.set(len(self.ledger.keeper.requests))
