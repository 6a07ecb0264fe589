"""Assignment of a pool's workers to rows of a fleet, as they join, leave and rejoin; swaps of the router.

Rows are stable: a worker that leaves and rejoins gets its old row and the request statistics learned there, unless
another worker took the row. A new fleet object is made when another row is needed; running requests are carried over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, UnknownNameError
from coterie.gateway.fleet.spec import Made, Maker, PoolShape, RouterSpec, maker, try_out
from coterie.routing import Fleet

MOST_ROWS = 1 << 14
NO_SPEC = RouterSpec()

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


class FleetRows:
    """Workers of a pool and their rows; :class:`~coterie.gateway.fleet.keeper.FleetKeeper` adds the requests."""

    def __init__(self, spec: RouterSource, context: Mapping[str, Any] | None) -> None:
        self.fallbacks: Counter[str] = Counter()
        """Reason → number of requests that were placed without the router."""
        self.spec = spec
        """Spec or function that the router was made from."""
        self._members: dict[str, WorkerRow] = {}
        self._ids: list[str | None] = []
        """Id of the worker on each row; None if the row is free."""
        self._last: list[str | None] = []
        """Id of the present or last worker of each row; None if the row was never used."""
        self._left: dict[int, None] = {}
        """Rows whose workers left, in the order of leaving."""
        self.open_workers = 0
        """Number of workers that may be chosen."""
        self._make = _maker(spec, context)
        self._made = self._prepared(self._make, 1, {})
        self._write_rows()

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

    def row_of(self, worker_id: str) -> int:
        return self._member(worker_id).row

    def running(self, worker_id: str) -> int:
        """Return the number of requests at a worker, including those that wait there."""
        return int(self.fleet.running[self.row_of(worker_id)])

    def is_open(self, worker_id: str) -> bool:
        return self._member(worker_id).open

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._members

    def __len__(self) -> int:
        """Return the number of workers in the pool, open or closed."""
        return len(self._members)

    def join(self, worker_id: str, places: int, speed: float = 1.0, held: Mask | None = None) -> int:
        """Add a worker, or change the one with this id; return its row. A new worker is open.

        The values are those of a :class:`~coterie.gateway.config.WorkerEntry`, which checks them. `held` are the
        experts that the worker holds; None for all.
        """
        before = self._members.get(worker_id)
        at = self._row_for(worker_id) if before is None else before.row
        member = WorkerRow(at, places, speed, held, before is None or before.open)
        members = {**self._members, worker_id: member}
        remade = before is None and (at >= len(self._ids) or self._made.by_worker)
        if remade or (held is not None and self.fleet.local is None):
            self._use(self._prepared(self._make, max(at + 1, len(self._ids)), members), members, priors=True)
        else:
            self._members = members
            _set_row(self.fleet, member)
            self.fleet.local = _masks(members, self.rows)
            self._write_rows()
        return at

    def leave(self, worker_id: str) -> bool:
        """Remove a worker; its running requests stay counted until they finish. Return whether it was in the pool."""
        gone = self._members.pop(worker_id, None)
        if gone is None:
            return False
        self.open_workers -= gone.open
        self._ids[gone.row] = None
        self._left[gone.row] = None
        self.fleet.alive[gone.row] = False
        self.fleet.local = _masks(self._members, self.rows)
        return True

    def set_open(self, worker_id: str, open: bool) -> None:
        """Set whether a worker may be chosen: breakers, health checks and drains close it."""
        member = self._member(worker_id)
        if member.open != open:
            self._members[worker_id] = member._replace(open=open)
            self.open_workers += 1 if open else -1
            self.fleet.alive[member.row] = open

    def reload(self, spec: RouterSource, context: Mapping[str, Any] | None = None) -> None:
        """Swap the router and the fleet; running requests keep their rows and their load.

        A router that cannot be made, or that fails on a plain request, raises ConfigError, and the old one stays.
        Loops that are not compiled yet are compiled here: to keep an event loop free, run :func:`check_spec` in a
        thread first.
        """
        make = _maker(spec, context)
        made = self._prepared(make, self._rows_needed(), self._members)
        self._make, self.spec = make, spec
        self._use(made, self._members)

    def _member(self, worker_id: str) -> WorkerRow:
        member = self._members.get(worker_id)
        if member is None:
            raise UnknownNameError("worker", worker_id, self._members)
        return member

    def _hide(self, exclude: Collection[str]) -> list[int]:
        """Close workers for one decision; return the rows that were open."""
        alive = self._made.fleet.alive
        rows = {worker.row for name in exclude if (worker := self._members.get(name)) is not None and worker.open}
        for row in rows:
            alive[row] = False
        return list(rows)

    def _row_for(self, worker_id: str) -> int:
        """Return a new worker's row: its old row, an unused, the longest abandoned, or a new row."""
        free = [row for row, there in enumerate(self._ids) if there is None and row not in self._left]
        mine = [row for row in self._left if self._last[row] == worker_id]
        left = [row for row in self._left if self._made.fixed or not self.fleet.running[row]]
        rows = mine or free or left or [self.rows]
        if rows[0] >= MOST_ROWS:
            raise ConfigError(f"the pool has {MOST_ROWS} workers, the most it can have: {worker_id!r} cannot join")
        return rows[0]

    def _rows_needed(self) -> int:
        """Return the number of rows up to the last one with a worker or a running request."""
        used = self.fleet.running > 0
        for worker in self._members.values():
            used[worker.row] = True
        return int(np.flatnonzero(used)[-1]) + 1 if used.any() else 1

    def _prepared(self, make: Maker, rows: int, members: Mapping[str, WorkerRow]) -> Made:
        """Make a router, test it, and return it with a fleet that has the members' places and speeds."""
        made = make(PoolShape(rows, {worker_id: worker.row for worker_id, worker in members.items()}))
        fleet = made.fleet
        if len(fleet) < rows:
            raise ConfigError(f"the fleet has {len(fleet)} rows; the pool needs {rows}")
        fleet.local = _masks(members, len(fleet))
        try_out(made)
        fleet.alive[:] = False
        for worker in members.values():
            _set_row(fleet, worker)
        return made

    def _use(self, made: Made, members: Mapping[str, WorkerRow], priors: bool = False) -> None:
        """Swap the router and the fleet; running requests stay on their rows. `priors` keeps each row's statistics."""
        made.fleet.take_over(self.fleet, priors)
        self._made, self._members = made, dict(members)
        self._write_rows()

    def _write_rows(self) -> None:
        """Recompute ids, free rows and the number of open workers from the members and the size of the fleet."""
        rows = len(self.fleet)
        self._ids = [None] * rows
        self._last = [*self._last[:rows], *[None] * (rows - len(self._last))]
        for worker_id, worker in self._members.items():
            self._ids[worker.row] = self._last[worker.row] = worker_id
        self._left = {row: None for row in self._left if row < rows and self._ids[row] is None}
        self.open_workers = sum(worker.open for worker in self._members.values())


def check_spec(spec: RouterSpec, context: Mapping[str, Any] | None = None, workers: int = 1) -> None:
    """Raise ConfigError if no router can be made from a spec. Compiles its loops, so that a later reload is fast."""
    try_out(maker(spec, context)(PoolShape(workers, {})))


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
