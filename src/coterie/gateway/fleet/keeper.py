"""The keeper of a pool of workers: worker ids → rows of a :class:`~coterie.routing.fleet.Fleet`, and who runs where.

A front end asks :meth:`FleetKeeper.route` for a worker, and tells :meth:`FleetKeeper.finish` when the request ended.

Serving comes before routing well. Whatever a router raises, and a choice that it may not make, falls back to the
shortest queue. It is counted by reason and leaves the fleet as it was. If no worker is open, requests go to the least
loaded one all the same: a breaker that is wrong about all workers must not stop the service.

Rows are stable: a worker that leaves and comes back gets its row again, with what the fleet learned of the requests it
usually gets, unless another took it. Requests that still run on a worker that left are counted there until they finish.

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
    """The worker that got a request."""

    worker_id: str
    row: int
    decision: Decision
    """Scores are [row]."""
    fallback: str | None = None
    """Why the router did not choose, a key of :attr:`Counters.fallbacks`; None where it did."""


class FleetKeeper(FleetRows):
    """Keeps one pool. Make one with the spec of a router; workers join later."""

    def __init__(self, spec: RouterSource = NO_SPEC, context: Mapping[str, Any] | None = None) -> None:
        """`spec` names the router.

        `context` holds values for it that a spec cannot name: `fitted` (a RouterFit), `cost` (DecodeStepPrices),
        `placement`, `labels` by row, and what a plugin's router needs.
        """
        super().__init__(spec, context)
        self._running: dict[str, Choice] = {}
        self._shortest = JoinShortestQueue()
        self._checks = Checks()

    def route(self, request_id: str, wanted: Request, exclude: Collection[str] = ()) -> Choice:
        """Choose a worker for a request and admit it there. Finish it, whatever becomes of it.

        `request_id` must differ from those of all requests that run: make it yourself, do not take a client's.
        `wanted.cached_tokens` is [row]; an array made before the pool grew may be shorter. `exclude` names workers that
        failed the request. A request that runs already is answered with its choice, unless that worker is excluded:
        then it moves. Raises UnavailableError if the pool is empty.
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
        if self._open > len(hidden):
            try:
                asked = self._checks.checked(wanted, fleet)
                decision = self._made.router.route(asked, fleet)
                row = checked_row(decision, fleet)
                for hidden_row in hidden:
                    fleet.alive[hidden_row] = True
                fleet.admit(request_id, row, asked.prompt_tokens, decision.profile)
                if decision.profile is not None:  # the fleet has its own
                    decision = decision._replace(profile=None)
                return self._began(request_id, Choice(self._ids[row] or "", row, decision))
            except Exception as error:  # a router may be anyone's code
                failure = fallback_of(error)
        self._undo(request_id)
        choice = self._fall_back(exclude, failure)
        fleet.admit(request_id, choice.row, tokens_of(wanted))
        return self._began(request_id, choice)

    def finish(self, request_id: str) -> bool:
        """Remove a request that ended, failed or was cancelled; returns whether it ran."""
        if self._running.pop(request_id, None) is None:
            return False
        self._made.fleet.finish(request_id)
        self.counters.finished += 1
        return True

    @property
    def in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    def check_integrity(self) -> None:
        """Raise AssertionError where ids, rows, requests and the fleet do not agree."""
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
            (self._open == int(alive.sum()), "number of workers that may be chosen"),
            (np.array_equal(counts, fleet.running), "requests that run"),
            (len(self._running) == self.counters.admitted - self.counters.finished, "requests that did not finish"),
        ):
            if not right:
                raise AssertionError(f"the keeper and its fleet disagree on the {what}")

    def _fall_back(self, exclude: Collection[str], failure: Fallback) -> Choice:
        """The shortest queue of the workers that are left, best of all an open one that is not excluded."""
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
        self.counters.fallbacks[why.reason] += 1
        decision = shortest._replace(told=f"{why.text}; {shortest.reason}")
        return Choice(self._ids[shortest.worker] or "", shortest.worker, decision, why.reason)

    def _began(self, request_id: str, choice: Choice) -> Choice:
        self._running[request_id] = choice
        self.counters.admitted += 1
        return choice

    def _undo(self, request_id: str) -> None:
        """Undo what was done for a decision that failed, and what a router did that must not change the fleet."""
        fleet = self._made.fleet
        if request_id in fleet:
            fleet.finish(request_id)
        fleet.alive[:] = False
        for worker in self._members.values():
            fleet.alive[worker.row] = worker.open
