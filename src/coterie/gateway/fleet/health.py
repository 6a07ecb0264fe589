"""Whether a worker may get requests: by its answers to health checks, and by what became of its requests.

Health has thresholds, so that one lost answer changes nothing. A worker that joins is not healthy until it first
answers: engines load weights for minutes. From then on it takes `unhealthy_after` failures in a row to be unhealthy,
and `healthy_after` successes in a row to come back. A circuit breaker stops sending to a worker that fails requests.

Pure: the clock is passed in, in seconds, of any origin; it must not go back. The caller asks the worker when
:attr:`Health.next_check_s` has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from numpy.random import Generator

from coterie.errors import ConfigError, check_at_least, check_not_negative, check_positive, check_share

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


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    failures: int = 5
    """Failures within the window that open the breaker."""
    window_s: float = 30.0
    share: float = 0.1
    """Least share of the results of the window that failures must be, unless they come in a row."""
    cool_down_s: float = 5.0
    """Time from opening to the first probe."""
    longest_s: float = 60.0
    """Longest cool-down, before jitter."""
    jitter: float = 0.2
    """Share of a cool-down that is added at random."""
    probe_s: float = 30.0
    """Time after which a probe without a result is given up, and another may be sent."""

    def __post_init__(self) -> None:
        check_at_least(1, failures=self.failures)
        check_positive(window_s=self.window_s, cool_down_s=self.cool_down_s, probe_s=self.probe_s)
        check_share(share=self.share, jitter=self.jitter)
        if not self.cool_down_s <= self.longest_s < float("inf"):
            raise ConfigError(f"longest_s={self.longest_s} must be at least cool_down_s={self.cool_down_s}, and finite")


BREAKER_DEFAULTS = BreakerSettings()


class Attempt(msgspec.Struct, frozen=True):
    """A request that was sent to the worker."""

    epoch: int
    """Times that the breaker had opened or closed before."""
    probe: int
    """Number of the probe; 0 for any other request."""


def is_failure(status: int) -> bool:
    """Whether an answer counts against the worker: HTTP 5xx."""
    return status >= 500


class Breaker:
    """A circuit breaker for one worker: it stops sending to a worker that fails, and asks again later.

        closed ──── failures within a window ──▶ open ──after a cool-down──▶ half-open ──one success──▶ closed
                                                  ▲                             │
                                                  └───────── a failure ─────────┘

    A failure is the worker's: no connection, a reset, a time-out, HTTP 5xx. A 4xx answer is the request's own fault and
    shows that the worker is well. `failures` within `window_s` open the breaker if they come in a row, as of a worker
    that died, or are at least `share` of the results: a busy worker that fails one request in ten thousand is well.
    Half-open lets one request through at a time, the probe. Every failed probe doubles the cool-down, up to
    `longest_s`; its jitter keeps many gateways from asking at the same moment.

    Results belong to the time when their request was sent: a slow request of before a breaker opened says nothing of
    the worker now. So :meth:`sent` gives an attempt, and its result is told with it. A request may be sent though the
    breaker is open (all workers' breakers are, and one must serve); its success closes the breaker.
    """

    def __init__(self, rng: Generator, settings: BreakerSettings = BREAKER_DEFAULTS) -> None:
        """`rng` draws the jitter."""
        self.settings = settings
        self.opened = 0
        """Times that it opened."""
        self._rng = rng
        self._state = BreakerState.CLOSED
        self._failures: deque[float] = deque()
        """Times of the failures within the window."""
        self._in_row = 0
        self._successes = _Window(settings.window_s)
        self._epoch = -1
        self._attempt = self._next_epoch()
        """Stands for every request that is sent while it is closed."""
        self._tries = 0
        """Cool-downs since it was last closed."""
        self._until = 0.0
        """End of the cool-down."""
        self._probe = 0
        """Number of the probe that is under way; 0: none."""
        self._probes = 0
        self._probe_until = 0.0

    def state(self, now: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now >= self._until:
            return BreakerState.HALF_OPEN
        return self._state

    def may_send(self, now: float) -> bool:
        """Whether the worker may be chosen now: closed, or half-open without a probe under way."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return not self._probe or now >= self._probe_until
        return state is BreakerState.CLOSED

    @property
    def changes_at(self) -> float | None:
        """Time when :meth:`may_send` turns true by itself; None if it is, or waits for a result alone."""
        if self._state is BreakerState.CLOSED:
            return None
        return max(self._until, self._probe_until) if self._probe else self._until

    def sent(self, now: float) -> Attempt:
        """Tell that a request is being sent, allowed or not; tell its result with what is returned."""
        if self._state is BreakerState.CLOSED:
            return self._attempt
        if self.state(now) is BreakerState.HALF_OPEN and self.may_send(now):
            self._probes += 1
            self._probe, self._probe_until = self._probes, now + self.settings.probe_s
            return Attempt(self._epoch, self._probe)
        return self._attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Tell that the worker answered, with less than HTTP 500. One success since it opened closes the breaker."""
        if attempt.epoch != self._epoch:
            return
        if self._state is BreakerState.OPEN:
            self._state = BreakerState.CLOSED
            self._attempt = self._next_epoch()
            self._tries = self._probe = 0
        self._in_row = 0
        self._successes.add(now)

    def failed(self, attempt: Attempt, now: float) -> None:
        """Tell that the worker failed."""
        if attempt.epoch != self._epoch:
            return
        if self._state is BreakerState.OPEN:
            # Sent during the cool-down, because no worker was allowed: it neither ends nor lengthens it.
            if attempt.probe and attempt.probe == self._probe:
                self._open(now)
            return
        chosen, recent = self.settings, self._failures
        recent.append(now)
        while recent[0] <= now - chosen.window_s:
            recent.popleft()
        self._in_row += 1
        often = len(recent) >= chosen.share * (len(recent) + self._successes.count(now))
        if len(recent) >= chosen.failures and (often or self._in_row >= chosen.failures):
            self.opened += 1
            self._open(now)

    def dropped(self, attempt: Attempt) -> None:
        """Tell that a request ended without a result, as when its client left: another probe may be sent."""
        if attempt.probe and attempt.probe == self._probe:
            self._probe = 0

    def _next_epoch(self) -> Attempt:
        self._epoch += 1
        return Attempt(self._epoch, 0)

    def _open(self, now: float) -> None:
        chosen = self.settings
        wait = min(chosen.cool_down_s * 2.0 ** min(self._tries, 60), chosen.longest_s)
        self._until = now + wait * (1.0 + chosen.jitter * float(self._rng.random()))
        self._state = BreakerState.OPEN
        self._attempt = self._next_epoch()
        self._tries += 1
        self._probe = self._in_row = 0
        self._failures.clear()
        self._successes = _Window(chosen.window_s)


class _Window:
    """Counts what happened in the last `window_s`, or half of it: two counters, whatever the rate."""

    __slots__ = ("_before", "_half_s", "_now", "_since")

    def __init__(self, window_s: float) -> None:
        self._half_s = window_s / 2
        self._since = float("-inf")
        self._before = self._now = 0

    def add(self, now: float) -> None:
        self._turn(now)
        self._now += 1

    def count(self, now: float) -> int:
        self._turn(now)
        return self._before + self._now

    def _turn(self, now: float) -> None:
        passed = now - self._since
        if passed >= self._half_s:
            self._before = self._now if passed < 2 * self._half_s else 0
            self._now, self._since = 0, now
