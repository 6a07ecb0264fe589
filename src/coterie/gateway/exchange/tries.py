"""Whether a request that a worker failed, before the first byte of its answer, is worth another try.

Each worker of the pool that is not known to be unhealthy is tried once. Then comes another round, since a fleet in
trouble is often well again a second later; not if the last failure was an answer that the next worker will give as
well (HTTP 500, one that cannot be read), or if all are full. A worker that broke with the request may have died of it:
such a request is given up after :data:`MOST_SUSPECT` workers. Rounds end with `retries` failures, and `retry_s` after
the first.
"""

from __future__ import annotations

import math

from coterie.gateway.exchange.pool import Pool
from coterie.gateway.fleet.breaker import is_failure
from coterie.gateway.fleet.health import HealthSettings
from coterie.net.http1.upstream import UpstreamError

BUSY = 429
PASSING = frozenset(("connect", "reset", "timeout", 502, 503, 504))
"""Failures after which another round may help. The statuses are those of a worker that starts or drains, or of a proxy
in front of one that is gone."""
INNOCENT = PASSING - {"reset"} | {BUSY}
"""Failures that no request causes."""
MOST_SUSPECT = 3
"""Failures of other kinds after which a request is given up."""


def may_retry(status: int) -> bool:
    """Whether another worker may do better: this one failed, or is full."""
    return is_failure(status) or status == BUSY


class Tries:
    """Failures of one request in one pool. Needed from the first on: most requests have none."""

    __slots__ = ("_health", "_pool", "_since", "_suspect", "failures", "tried")

    def __init__(self, pool: Pool, health: HealthSettings) -> None:
        self.tried: set[str] = set()
        """Workers that the next try leaves out."""
        self._pool, self._health = pool, health
        self.failures = self._suspect = 0
        self._since = math.inf
        """Time of the first failure."""

    def broke(self, worker_id: str, error: UpstreamError) -> bool:
        """Count a worker that did not answer; whether to try again."""
        if error.kind == "unhealthy":  # it was found out while the request waited: that costs no try
            self._leave_out(worker_id)
            return True
        return self._failed(worker_id, error.kind)

    def refused(self, worker_id: str, status: int) -> bool:
        """Count a worker that answered with an error; whether to try again."""
        return may_retry(status) and self._failed(worker_id, status)

    def _failed(self, worker_id: str, kind: str | int) -> bool:
        now = self._pool.clock()
        self._since = min(self._since, now)
        self.failures += 1
        self._suspect += kind not in INNOCENT
        if self.failures > self._health.retries or self._suspect >= MOST_SUSPECT:
            return False
        if not self._leave_out(worker_id):
            return True
        if kind == "timeout" and worker_id not in self.tried:  # the only one, and it was waited for long enough
            return False
        return kind in PASSING and now < self._since + self._health.retry_s

    def _leave_out(self, worker_id: str) -> bool:
        """Leave out the worker and those known to be unhealthy; whether another round begins, with the others first."""
        members = self._pool.members
        well = {id for id, member in members.items() if not member.is_unhealthy} or set(members)
        out = self.tried | {worker_id}
        new_round = well <= out
        if new_round:
            out = {worker_id} if well - {worker_id} else set()
        self.tried = out | (members.keys() - well)
        return new_round
