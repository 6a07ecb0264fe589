"""The keeper of a pool: maps worker ids to rows of a :class:`~coterie.routing.fleet.Fleet`, and tracks requests.

A front end calls :meth:`FleetKeeper.route` to choose a worker, and :meth:`FleetKeeper.finish` when the request ends.

Serving has priority over routing well. If a router raises or makes an invalid choice, the request goes to the shortest
queue. Such fallbacks are counted by reason, and the router's effects on the fleet are undone. If no worker is open,
requests still go to the least loaded one: breakers that are wrong about all workers must not stop the service.

Rows are stable: a worker that leaves and rejoins gets its old row and the request statistics learned there, unless
another worker took the row. Requests still running on a worker that left count on its row until they finish.

No I/O, no clock, not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from coterie.errors import UnavailableError
from coterie.gateway.fleet.checks import Checks, Fallback, checked_row, fallback_of, tokens_of
from coterie.gateway.fleet.rows import NO_SPEC, FleetRows, RouterSource
from coterie.routing import Decision, JoinShortestQueue, Request

NO_ROWS: list[int] = []
ALL_CLOSED = Fallback("all_closed", "all workers are closed: the least loaded all the same")
ALL_EXCLUDED = Fallback("all_excluded", "all workers failed the request: the least loaded all the same")


class Choice(msgspec.Struct, frozen=True):
    """The worker chosen for a request."""

    worker_id: str
    row: int
    decision: Decision
    """The router's decision; its scores are [row]."""
    fallback: str | None = None
    """Reason why the router did not choose, a key of :attr:`FleetRows.fallbacks`; None if it did."""


class FleetKeeper(FleetRows):
    """Keeper of one pool. Construct it with the spec of a router; workers join later."""

    def __init__(self, spec: RouterSource = NO_SPEC, context: Mapping[str, Any] | None = None) -> None:
        """`spec` describes the router.

        `context` holds values that a spec cannot express: `fitted` (a RouterFit), `cost` (DecodeStepPrices),
        `placement`, `labels` by row, and parameters of a plugin's router.
        """
        super().__init__(spec, context)
        self._running: dict[str, Choice] = {}
        self._shortest = JoinShortestQueue()
        self._checks = Checks()

    def route(self, request_id: str, wanted: Request, exclude: Collection[str] = ()) -> Choice:
        """Choose a worker for a request and admit it there. The caller must call `finish` in every case.

        `request_id` must be unique among running requests: generate it, do not use a client's. `wanted.cached_tokens`
        is [row]; an array made before the pool grew may be shorter. `exclude` holds the ids of workers that failed the
        request. For a request that already runs, its earlier choice is returned, unless that worker is excluded: then
        the request moves. Raises UnavailableError if the pool is empty.
        """
        known = self._running.get(request_id)
        if known is not None:
            if known.worker_id not in exclude:
                return known
            self.finish(request_id)
        if not self._members:
            raise UnavailableError("the pool has no workers")
        fleet, failure = self._made.fleet, ALL_CLOSED
        hidden = self._hide(exclude) if exclude else NO_ROWS
        if self.open_workers > len(hidden):
            try:
                asked = self._checks.checked(wanted, fleet)
                decision = self._made.router.route(asked, fleet)
                row = checked_row(decision, fleet)
                for hidden_row in hidden:
                    fleet.alive[hidden_row] = True
                fleet.admit(request_id, row, asked.prompt_tokens, decision.profile)
                if decision.profile is not None:  # the fleet keeps its own copy
                    decision = decision._replace(profile=None)
                return self._began(request_id, Choice(self._ids[row] or "", row, decision))
            except Exception as error:  # a router may be a plugin: it can raise anything
                failure = fallback_of(error)
        self._undo(request_id)
        choice = self._fall_back(exclude, failure)
        fleet.admit(request_id, choice.row, tokens_of(wanted))
        return self._began(request_id, choice)

    def finish(self, request_id: str) -> bool:
        """Remove a request that ended, failed or was cancelled; return whether it was running."""
        if self._running.pop(request_id, None) is None:
            return False
        self._made.fleet.finish(request_id)
        return True

    @property
    def in_flight(self) -> int:
        """Number of requests admitted and not finished."""
        return len(self._running)

    def check_integrity(self) -> None:
        """Raise AssertionError if ids, rows, requests and the fleet disagree."""
        fleet = self.fleet
        fleet.check_integrity()
        rows = {worker_id: worker.row for worker_id, worker in self._members.items()}
        listed = {worker_id: row for row, worker_id in enumerate(self._ids) if worker_id is not None}
        alive = np.zeros(len(fleet), np.bool_)
        for worker in self._members.values():
            alive[worker.row] = worker.open
        counts = np.bincount([choice.row for choice in self._running.values()], minlength=len(fleet))
        for right, what in (
            (rows == listed, "rows of workers"),
            (len(self._ids) == len(self._last) == len(fleet), "number of rows"),
            (set(self._left) <= {row for row, there in enumerate(self._ids) if there is None}, "rows that are free"),
            (np.array_equal(alive, fleet.alive), "workers that may be chosen"),
            (self.open_workers == int(alive.sum()), "number of workers that may be chosen"),
            (np.array_equal(counts, fleet.running), "requests that run"),
        ):
            if not right:
                raise AssertionError(f"the keeper and its fleet disagree on the {what}")

    def _fall_back(self, exclude: Collection[str], failure: Fallback) -> Choice:
        """Choose the shortest queue among open workers not excluded, else among all not excluded, else among all."""
        fleet, excluded = self._made.fleet, set(exclude)
        members = self._members.items()
        why, rows = next(
            (why, rows)
            for why, rows in (
                (failure, [worker.row for name, worker in members if worker.open and name not in excluded]),
                (ALL_CLOSED, [worker.row for name, worker in members if name not in excluded]),
                (ALL_EXCLUDED, [worker.row for _, worker in members if worker.open]),
                (ALL_EXCLUDED, [worker.row for _, worker in members]),
            )
            if rows
        )
        alive = fleet.alive.copy()
        fleet.alive[:] = False
        fleet.alive[rows] = True
        try:
            shortest = self._shortest.route(Request(), fleet)
        finally:
            fleet.alive[:] = alive
        self.fallbacks[why.reason] += 1
        decision = shortest._replace(told=f"{why.text}; {shortest.reason}")
        return Choice(self._ids[shortest.worker] or "", shortest.worker, decision, why.reason)

    def _began(self, request_id: str, choice: Choice) -> Choice:
        self._running[request_id] = choice
        return choice

    def _undo(self, request_id: str) -> None:
        """Undo a failed decision: remove the request, and reset `alive`, which a router may have changed."""
        fleet = self._made.fleet
        if request_id in fleet:
            fleet.finish(request_id)
        fleet.alive[:] = False
        for worker in self._members.values():
            fleet.alive[worker.row] = worker.open
