"""The keeper of a pool: maps worker ids to rows of a :class:`~coterie.routing.fleet.Fleet`, and tracks requests.

A front end calls :meth:`FleetKeeper.route` to choose a worker, and :meth:`FleetKeeper.finish` when the request ends.

Serving has priority over routing well. If a router raises or makes an invalid choice, the request goes to the shortest
queue. Such fallbacks are counted by reason, and the router's effects on the fleet are undone. If no worker is open,
requests still go to the least loaded one: breakers that are wrong about all workers must not stop the service.

Rows are stable: a worker that leaves and rejoins gets its old row and the request statistics learned there, unless
another worker took the row. Requests still running on a worker that left count on its row until they finish. A new
fleet object is made when another row is needed; running requests are carried over.

No I/O, no clock, not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import UnavailableError, check
from coterie.gateway.fleet.spec import (
    Checks,
    Fallback,
    Made,
    Maker,
    PoolShape,
    RouterSpec,
    checked_row,
    fallback_of,
    maker,
    tokens_of,
    try_out,
)
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request

MOST_ROWS = 1 << 14
NO_SPEC = RouterSpec()
"""Spec of the shortest queue."""

Mask = NDArray[np.uint64]
"""Experts held by a worker, [layer, word]: bit e of a layer is set if the worker has a slot of expert e. One row of
``Fleet.local``, which the router `joint` uses to prefer local experts."""
RouterSource = RouterSpec | Maker
"""Spec of a router, or a function that makes a router and an empty fleet for a pool."""


class WorkerRow(NamedTuple):
    """A worker of a pool and its row."""

    row: int
    places: int
    speed: float
    held: Mask | None
    open: bool


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
    """Reason why the router did not choose, a key of :attr:`FleetKeeper.fallbacks`; None if it did."""
    router: str = ""
    """Name of the router that chose; empty if it was made by a function, which has no name."""


class FleetKeeper:
    """Keeper of one pool. Construct it with the spec of a router; workers join later."""

    def __init__(self, spec: RouterSource = NO_SPEC, context: Mapping[str, Any] | None = None) -> None:
        """`spec` describes the router.

        `context` holds values that a spec cannot express: `fitted` (a RouterFit), `cost` (DecodeStepPrices),
        `placement`, `labels` by row, and parameters of a plugin's router.
        """
        self.fallbacks: Counter[str] = Counter()
        """Reason → number of requests that were placed without the router."""
        self.spec = spec
        """Spec or function that the router was made from."""
        self.members: dict[str, WorkerRow] = {}
        """Worker id → its row and settings, open or closed; read-only for callers."""
        self._ids: list[str | None] = []
        """Id of the worker on each row; None if the row is free."""
        self._last: list[str | None] = []
        """Id of the present or last worker of each row; None if the row was never used."""
        self._left: dict[int, None] = {}
        """Rows whose workers left, in the order of leaving."""
        self.open_workers = 0
        """Number of workers that may be chosen."""
        self.requests: dict[str, Choice] = {}
        """Requests admitted and not finished; read-only for callers."""
        self.baseline = False
        """Whether the shortest queue chooses, for a comparison. The router is asked all the same: the fleet keeps the
        profiles of requests, and needs them when the router chooses again."""
        self._shortest = JoinShortestQueue()
        self._checks = Checks()
        self._make = _maker(spec, context)
        self._made = self._prepared(self._make, 1, {})
        self._write_rows()

    # -------------------------------------------------------------------------------------------------------- workers

    @property
    def ids(self) -> list[str | None]:
        """Id of the worker on each row; None if the row is free."""
        return list(self._ids)

    @property
    def rows(self) -> int:
        """Number of rows of the fleet, free ones included."""
        return len(self._ids)

    @property
    def fleet(self) -> Fleet:
        """The fleet that routers see; read-only for callers. A reload or a growing pool replaces the object."""
        return self._made.fleet

    def running(self, worker_id: str) -> int:
        """Return the number of requests at a worker, including those that wait there."""
        return int(self.fleet.running[self.members[worker_id].row])

    def distinct(self, row: int) -> float:
        """Return how many distinct experts of a mean layer a step of a row's requests is expected to use."""
        layers = 1 if self._made.shape is None else self._made.shape[0]
        return float(self.fleet.distinct[row]) / layers

    def join(self, worker_id: str, places: int, speed: float = 1.0, held: Mask | None = None) -> int:
        """Add a worker, or change the one with this id; return its row. A new worker is open.

        The values are those of a :class:`~coterie.gateway.config.WorkerEntry`, which checks them. `held` are the
        experts that the worker holds; None for all.
        """
        before = self.members.get(worker_id)
        at = self._row_for(worker_id) if before is None else before.row
        member = WorkerRow(at, places, speed, held, before is None or before.open)
        members = {**self.members, worker_id: member}
        remade = before is None and (at >= len(self._ids) or self._made.by_worker)
        if remade or (held is not None and self.fleet.local is None):
            self._use(self._prepared(self._make, max(at + 1, len(self._ids)), members), members, priors=True)
        else:
            self.members = members
            _set_row(self.fleet, member)
            self.fleet.local = _masks(members, self.rows)
            self._write_rows()
        return at

    def leave(self, worker_id: str) -> None:
        """Remove a worker; its running requests stay counted until they finish."""
        gone = self.members.pop(worker_id)
        self.open_workers -= gone.open
        self._ids[gone.row] = None
        self._left[gone.row] = None
        self.fleet.alive[gone.row] = False
        self.fleet.observe(gone.row)
        self.fleet.local = _masks(self.members, self.rows)

    def follow(self, places: Mapping[str, int]) -> list[str]:
        """Make the members those of a list, id → places, as :meth:`join` takes them; return the ids that left."""
        gone = [name for name in self.members if name not in places]
        for name in gone:
            self.leave(name)
        for name, most in places.items():
            if name not in self.members or self.members[name].places != most:
                self.join(name, most)
        return gone

    def set_open(self, worker_id: str, open: bool) -> None:
        """Set whether a worker may be chosen: breakers, health checks and drains close it."""
        member = self.members[worker_id]
        if member.open != open:
            self.members[worker_id] = member._replace(open=open)
            self.open_workers += 1 if open else -1
            self.fleet.alive[member.row] = open

    def reload(self, spec: RouterSource, context: Mapping[str, Any] | None = None) -> None:
        """Swap the router and the fleet; running requests keep their rows and their load.

        A router that cannot be made, or that fails on a plain request, raises ConfigError, and the old one stays.
        Loops that are not compiled yet are compiled here: to keep an event loop free, run :func:`check_spec` in a
        thread first.
        """
        make = _maker(spec, context)
        made = self._prepared(make, self._rows_needed(), self.members)
        self._make, self.spec = make, spec
        self._use(made, self.members)

    # ------------------------------------------------------------------------------------------------------- requests

    def route(self, request_id: str, wanted: Request, exclude: Collection[str] = ()) -> Choice:
        """Choose a worker for a request and admit it there. The caller must call `finish` in every case.

        `request_id` must be unique among running requests: generate it, do not use a client's. `wanted.cached_tokens`
        is [row]; an array made before the pool grew may be shorter. `exclude` holds the ids of workers that failed the
        request. For a request that already runs, its earlier choice is returned, unless that worker is excluded: then
        the request moves. Raises UnavailableError if the pool is empty.
        """
        known = self.requests.get(request_id)
        if known is not None:
            if known.worker_id not in exclude:
                return known
            self.finish(request_id)
        check(self.members, "the pool has no workers", UnavailableError)
        fleet, failure = self._made.fleet, ALL_CLOSED
        hidden = self._hide(exclude) if exclude else NO_ROWS
        if self.open_workers > len(hidden):
            try:
                asked = self._checks.checked(wanted, fleet)
                decision = self._made.router.route(asked, fleet)
                router = self.spec.router if isinstance(self.spec, RouterSpec) else ""
                if self.baseline:
                    decision = self._shortest.route(asked, fleet)._replace(profile=decision.profile)
                    router = NO_SPEC.router
                row = checked_row(decision, fleet)
                for hidden_row in hidden:
                    fleet.alive[hidden_row] = True
                fleet.admit(request_id, row, asked.prompt_tokens, decision.profile, uncomputed_of(asked, row))
                if decision.profile is not None:  # the fleet keeps its own copy
                    decision = decision._replace(profile=None)
                return self._began(request_id, Choice(self._ids[row] or "", row, decision, router=router))
            except Exception as error:  # a router may be a plugin: it can raise anything
                failure = fallback_of(error)
        self._undo(request_id)
        choice = self._fall_back(exclude, failure)
        tokens = tokens_of(wanted)
        fleet.admit(request_id, choice.row, tokens, None, 0 if wanted.prefilled else tokens)
        return self._began(request_id, choice)

    def finish(self, request_id: str) -> bool:
        """Remove a request that ended, failed or was cancelled; return whether it was running."""
        known = self.requests.pop(request_id, None) is not None
        if known:
            self._made.fleet.finish(request_id)
        return known

    def computed(self, request_id: str) -> None:
        """Note that the prompt of a request is computed: the first byte of its answer has arrived."""
        if request_id in self.requests:
            self._made.fleet.computed(request_id)

    def _fall_back(self, exclude: Collection[str], failure: Fallback) -> Choice:
        """Choose the shortest queue among open workers not excluded, else among all not excluded, else among all."""
        fleet, excluded = self._made.fleet, set(exclude)
        members = self.members.items()
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
        return Choice(self._ids[shortest.worker] or "", shortest.worker, decision, why.reason, NO_SPEC.router)

    def _began(self, request_id: str, choice: Choice) -> Choice:
        self.requests[request_id] = choice
        return choice

    def _undo(self, request_id: str) -> None:
        """Undo a failed decision: remove the request, and reset `alive`, which a router may have changed."""
        fleet = self._made.fleet
        if request_id in fleet:
            fleet.finish(request_id)
        fleet.alive[:] = False
        for worker in self.members.values():
            fleet.alive[worker.row] = worker.open

    # ----------------------------------------------------------------------------------------------------------- rows

    def _hide(self, exclude: Collection[str]) -> list[int]:
        """Close workers for one decision; return the rows that were open."""
        alive = self._made.fleet.alive
        rows = {worker.row for name in exclude if (worker := self.members.get(name)) is not None and worker.open}
        for row in rows:
            alive[row] = False
        return list(rows)

    def _row_for(self, worker_id: str) -> int:
        """Return a new worker's row: its old row, an unused, the longest abandoned, or a new row."""
        free = [row for row, there in enumerate(self._ids) if there is None and row not in self._left]
        mine = [row for row in self._left if self._last[row] == worker_id]
        left = [row for row in self._left if self._made.fixed or not self.fleet.running[row]]
        rows = mine or free or left or [self.rows]
        check(rows[0] < MOST_ROWS, f"the pool has {MOST_ROWS} workers, the most it can have: {worker_id!r} cannot join")
        return rows[0]

    def _rows_needed(self) -> int:
        """Return the number of rows up to the last one with a worker or a running request."""
        used = self.fleet.running > 0
        for worker in self.members.values():
            used[worker.row] = True
        return int(np.flatnonzero(used)[-1]) + 1 if used.any() else 1

    def _prepared(self, make: Maker, rows: int, members: Mapping[str, WorkerRow]) -> Made:
        """Make a router, test it, and return it with a fleet that has the members' places and speeds."""
        made = make(PoolShape(rows, {worker_id: worker.row for worker_id, worker in members.items()}))
        fleet = made.fleet
        check(len(fleet) >= rows, f"the fleet has {len(fleet)} rows; the pool needs {rows}")
        fleet.local = _masks(members, len(fleet))
        try_out(made)
        fleet.alive[:] = False
        for worker in members.values():
            _set_row(fleet, worker)
        return made

    def _use(self, made: Made, members: Mapping[str, WorkerRow], priors: bool = False) -> None:
        """Swap the router and the fleet; running requests stay on their rows. `priors` keeps each row's statistics."""
        made.fleet.take_over(self.fleet, priors)
        self._made, self.members = made, dict(members)
        self._write_rows()

    def _write_rows(self) -> None:
        """Recompute ids, free rows and the number of open workers from the members and the size of the fleet."""
        rows = len(self.fleet)
        self._ids = [None] * rows
        self._last = [*self._last[:rows], *[None] * (rows - len(self._last))]
        for worker_id, worker in self.members.items():
            self._ids[worker.row] = self._last[worker.row] = worker_id
        self._left = {row: None for row in self._left if row < rows and self._ids[row] is None}
        self.open_workers = sum(worker.open for worker in self.members.values())


def uncomputed_of(asked: Request, row: int) -> int:
    """Return the prompt tokens that a worker must compute: none if another worker has, else those not cached there."""
    if asked.prefilled:
        return 0
    return asked.prompt_tokens - (0 if asked.cached_tokens is None else asked.cached_tokens.item(row))


def _maker(spec: RouterSource, context: Mapping[str, Any] | None) -> Maker:
    return maker(spec, context) if isinstance(spec, RouterSpec) else spec


def _set_row(fleet: Fleet, worker: WorkerRow) -> None:
    row = worker.row
    fleet.places[row], fleet.speeds[row], fleet.alive[row] = worker.places, worker.speed, worker.open


def _masks(members: Mapping[str, WorkerRow], rows: int) -> Mask | None:
    """Return the experts held by each worker as bits, [row, layer, word]; None if every worker holds all.

    A worker without a mask gets all bits set.
    """
    masks = {worker.row: worker.held for worker in members.values() if worker.held is not None}
    if not masks:
        return None
    shape = next(iter(masks.values())).shape
    local = np.full((rows, *shape), np.uint64(0xFFFFFFFFFFFFFFFF))
    for row, bits in masks.items():
        local[row] = bits
    return local
