"""Whether a worker is healthy, by its answers to health checks: thresholds, so that one lost answer changes nothing.

A worker that joins is not healthy until it first answers: engines load weights for minutes. From then on it takes
`unhealthy_after` failures in a row to be unhealthy, and `healthy_after` successes in a row to come back.

Pure: the clock is passed in, in seconds; the caller asks the worker when :attr:`Health.next_check_s` has come.
"""

from __future__ import annotations

import msgspec
from numpy.random import Generator

from coterie.errors import check_at_least, check_not_negative, check_positive

JITTER = 0.2
"""Share of the time between two checks that is added at random, so that workers are not all asked at once."""


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a worker is asked, and when it gets no more requests."""

    every_s: float = 2.0
    """Time between two checks of ``/health``."""
    timeout_s: float = 2.0
    unhealthy_after: int = 3
    """Failed checks in a row after which a worker is closed."""
    healthy_after: int = 2
    """Good checks in a row after which it is open again."""
    failures: int = 5
    """Failed requests (no connection, HTTP 5xx) within `window_s` that open its circuit breaker."""
    window_s: float = 30.0
    open_s: float = 5.0
    """Time before one request probes a worker whose breaker is open."""
    retries: int = 6
    """Times that a request is sent again if a worker fails it before the first byte of its answer."""
    retry_s: float = 30.0
    """Time from a request's first failure in which it goes to workers again that were tried."""
    backoff_s: float = 0.05
    """Mean wait before a retry; it doubles with each, five times at most, and is drawn at random."""

    def __post_init__(self) -> None:
        check_positive(every_s=self.every_s, timeout_s=self.timeout_s, window_s=self.window_s)
        check_positive(open_s=self.open_s, retry_s=self.retry_s)
        check_at_least(
            1, unhealthy_after=self.unhealthy_after, healthy_after=self.healthy_after, failures=self.failures
        )
        check_at_least(0, retries=self.retries)
        check_not_negative(backoff_s=self.backoff_s)


DEFAULTS = HealthSettings()


class Health:
    """Health of one worker."""

    def __init__(self, rng: Generator, now: float, settings: HealthSettings = DEFAULTS, healthy: bool = False) -> None:
        """`rng` draws the jitter. `healthy` trusts a worker before its first check, as one that was saved healthy."""
        self.settings = settings
        self.healthy = healthy
        self.next_check_s = now
        """Time of the next check; the first is due at once."""
        self.checks = 0
        self.failures = 0
        self._rng = rng
        self._seen = healthy
        """Whether it was ever healthy: the first success is enough then."""
        self._in_row = 0
        """Results in a row that speak against `healthy`."""

    def record(self, ok: bool, now: float) -> bool:
        """Take the result of a check; returns whether `healthy` changed. Sets the time of the next check."""
        chosen = self.settings
        self.checks += 1
        self.failures += not ok
        self.next_check_s = now + chosen.every_s * (1.0 + JITTER * float(self._rng.random()))
        if ok == self.healthy:
            self._in_row = 0
            return False
        self._in_row += 1
        needed = chosen.unhealthy_after if self.healthy else chosen.healthy_after if self._seen else 1
        if self._in_row < needed:
            return False
        self.healthy, self._in_row, self._seen = ok, 0, True
        return True
