"""Whether a worker is healthy, by its answers to health checks: thresholds, so that one lost answer changes nothing.

A worker that joins is not healthy until it first answers: engines load weights for minutes. From then on it takes
`unhealthy_after` failures in a row to be unhealthy, and `healthy_after` successes in a row to come back.

Pure: the clock is passed in, in seconds; the caller asks the worker when :attr:`Health.next_check_s` has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

from coterie.errors import check_at_least, check_positive, check_share


@dataclass(frozen=True, slots=True)
class HealthSettings:
    unhealthy_after: int = 3
    """Failures in a row that make a worker unhealthy."""
    healthy_after: int = 2
    """Successes in a row that make it healthy again."""
    interval_s: float = 5.0
    """Time between two checks."""
    timeout_s: float = 3.0
    """Time after which a check without an answer has failed."""
    jitter: float = 0.2
    """Share of an interval that is added at random, so that workers are not all asked at once."""

    def __post_init__(self) -> None:
        check_at_least(1, unhealthy_after=self.unhealthy_after, healthy_after=self.healthy_after)
        check_positive(interval_s=self.interval_s, timeout_s=self.timeout_s)
        check_share(jitter=self.jitter)


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
        self.next_check_s = now + chosen.interval_s * (1.0 + chosen.jitter * float(self._rng.random()))
        if ok == self.healthy:
            self._in_row = 0
            return False
        self._in_row += 1
        needed = chosen.unhealthy_after if self.healthy else chosen.healthy_after if self._seen else 1
        if self._in_row < needed:
            return False
        self.healthy, self._in_row, self._seen = ok, 0, True
        return True
