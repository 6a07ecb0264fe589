"""Whether a worker may get requests: by its health checks, and by a circuit breaker over its requests.

Health has thresholds, so that one lost answer changes nothing. A worker that joins is not healthy until its first
successful check: engines load weights for minutes. Then `unhealthy_after` failures in a row make it unhealthy, and
`healthy_after` successes in a row healthy again. A circuit breaker stops sending to a worker that fails requests.

No I/O and no clock: the time is passed in, in seconds of any monotonic clock. The caller checks the worker at
:attr:`Health.next_check_s`.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec
from numpy.random import Generator

from coterie.errors import check_at_least, check_not_negative, check_positive

JITTER = 0.2
"""Largest random addition to the time between two checks and to a cool-down, as a share, to spread them out."""
SHARE = 0.1
"""Smallest share of failures among a window's results that opens a breaker, unless they are in a row."""
LONGEST_S = 60.0
"""Longest cool-down of a breaker in seconds, before jitter, unless `open_s` is longer."""
PROBE_S = 30.0
"""Seconds after which a probe without a result is given up, so that another may be sent."""


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of health checks, circuit breakers and retries; times in seconds."""

    every_s: float = 2.0
    """Time between two checks of ``/health``."""
    timeout_s: float = 2.0
    metrics_every_s: float = 2.0
    """Time between two readings of a worker's ``/metrics``, which tell the requests of other front ends and the KV in
    use; 0 for none."""
    unhealthy_after: int = 3
    """Failed checks in a row after which a worker is closed."""
    healthy_after: int = 2
    """Successful checks in a row after which a worker is open again."""
    failures: int = 5
    """Failed requests (no connection, HTTP 5xx) within `window_s` that open a worker's circuit breaker."""
    window_s: float = 30.0
    open_s: float = 5.0
    """Time before one request probes a worker whose breaker is open."""
    retries: int = 6
    """Most retries of a request that fails before the first byte of its answer."""
    retry_s: float = 30.0
    """Time after a request's first failure during which workers that were already tried may be tried again."""
    backoff_s: float = 0.05
    """Mean wait before the first retry; it doubles with each retry, at most five times, and has random jitter."""

    def __post_init__(self) -> None:
        check_positive(
            **{name: getattr(self, name) for name in ("every_s", "timeout_s", "window_s", "open_s", "retry_s")}
        )
        check_at_least(
            1, unhealthy_after=self.unhealthy_after, healthy_after=self.healthy_after, failures=self.failures
        )
        check_at_least(0, retries=self.retries)
        check_not_negative(backoff_s=self.backoff_s, metrics_every_s=self.metrics_every_s)


DEFAULTS = HealthSettings()


class Health:
    """Health of one worker, by its health checks."""

    def __init__(self, rng: Generator, now: float, settings: HealthSettings = DEFAULTS, healthy: bool = False) -> None:
        """`rng` draws the jitter. `healthy`: whether the worker counts as healthy before its first check."""
        self.settings = settings
        self.healthy = healthy
        self.next_check_s = now
        """Time of the next check; the first is due at once."""
        self.checks = 0
        self._rng = rng
        self._seen = healthy
        """Whether the worker was ever healthy. If not, the first successful check is enough."""
        self._in_row = 0
        """Latest check results in a row that contradict `healthy`."""

    @property
    def unreached(self) -> bool:
        """Whether the worker has never passed a check, of as many as make a worker unhealthy."""
        return not self._seen and self.checks >= self.settings.unhealthy_after

    def record(self, ok: bool, now: float) -> bool:
        """Record the result of a check and set the time of the next; return whether `healthy` changed."""
        chosen = self.settings
        self.checks += 1
        self.next_check_s = now + chosen.every_s * (1.0 + JITTER * float(self._rng.random()))
        if ok == self.healthy:
            self._in_row = 0
            return False
        self._in_row += 1
        needed = chosen.unhealthy_after if self.healthy else chosen.healthy_after if self._seen else 1
        changed = self._in_row >= needed
        if changed:
            self.healthy, self._in_row, self._seen = ok, 0, True
        return changed


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Attempt(msgspec.Struct, frozen=True):
    """Token for a request that was sent to the worker, to report its result with."""

    epoch: int
    """Number of times the breaker had opened or closed when the request was sent."""
    probe: int
    """Number of the probe; 0 for any other request."""


def is_failure(status: int) -> bool:
    """Whether an answer counts against the worker: HTTP 5xx."""
    return status >= 500


class Breaker:
    """A circuit breaker for one worker: it stops requests to a worker that fails, and probes it later.

        closed ──── failures within a window ──▶ open ──after a cool-down──▶ half-open ──one success──▶ closed
                                                  ▲                             │
                                                  └───────── a failure ─────────┘

    Failures are no connection, a reset, a time-out and HTTP 5xx. A 4xx answer is the request's own fault and shows that
    the worker works. `failures` within `window_s` open the breaker if they are in a row, as when a worker died, or are
    at least `SHARE` of the results: a busy worker that fails one request in ten thousand stays closed. Half-open lets
    one request through at a time, the probe. Every failed probe doubles the cool-down, up to `LONGEST_S`; its jitter
    keeps many gateways from probing at the same moment.

    A result counts only if the breaker has not opened or closed since the request was sent: older results say nothing
    about the worker now. So :meth:`sent` returns an attempt, which is passed back with the result. A request may be
    sent while the breaker is open, if all workers' breakers are; its success closes the breaker.
    """

    def __init__(self, rng: Generator, settings: HealthSettings = DEFAULTS) -> None:
        """`rng` draws the jitter."""
        self.settings = settings
        self._rng = rng
        self._state = BreakerState.CLOSED
        self._failures: deque[float] = deque()
        """Times of the failures within the window."""
        self._in_row = 0
        self._successes = _Window(settings.window_s)
        self._epoch = -1
        self._attempt = self._next_epoch()
        """Attempt shared by all requests of this epoch that are not probes."""
        self._tries = 0
        """Cool-downs since the breaker was last closed."""
        self._until = 0.0
        """Time at which the cool-down ends."""
        self._probe = 0
        """Number of the probe under way; 0 if there is none."""
        self._probes = 0
        self._probe_until = 0.0

    def state(self, now: float) -> BreakerState:
        cooled_down = self._state is BreakerState.OPEN and now >= self._until
        return BreakerState.HALF_OPEN if cooled_down else self._state

    def may_send(self, now: float) -> bool:
        """Whether the worker may be chosen now: closed, or half-open without a probe under way."""
        probing = self._probe and now < self._probe_until
        return self._state is BreakerState.CLOSED or (now >= self._until and not probing)

    @property
    def changes_at(self) -> float | None:
        """Time at which :meth:`may_send` becomes true without a result; None if the breaker is closed."""
        at = max(self._until, self._probe_until) if self._probe else self._until
        return None if self._state is BreakerState.CLOSED else at

    def sent(self, now: float) -> Attempt:
        """Register a request that is being sent, allowed or not; pass the returned attempt back with its result."""
        if self._state is BreakerState.CLOSED:
            return self._attempt
        if self.may_send(now):
            self._probes += 1
            self._probe, self._probe_until = self._probes, now + PROBE_S
            return Attempt(self._epoch, self._probe)
        return self._attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Record that the worker answered below HTTP 500. One success closes an open breaker."""
        if attempt.epoch != self._epoch:
            return
        if self._state is BreakerState.OPEN:
            self._state = BreakerState.CLOSED
            self._attempt = self._next_epoch()
            self._tries = self._probe = 0
        self._in_row = 0
        self._successes.add(now)

    def failed(self, attempt: Attempt, now: float) -> None:
        """Record that the worker failed. Enough failures open the breaker; a failed probe starts a new cool-down."""
        if attempt.epoch != self._epoch:
            return
        if self._state is BreakerState.OPEN:
            # Only the probe counts: a request sent in the cool-down, for lack of workers, must not lengthen it.
            if attempt.probe and attempt.probe == self._probe:
                self._open(now)
            return
        chosen, recent = self.settings, self._failures
        recent.append(now)
        while recent[0] <= now - chosen.window_s:
            recent.popleft()
        self._in_row += 1
        often = len(recent) >= SHARE * (len(recent) + self._successes.count(now))
        if len(recent) >= chosen.failures and (often or self._in_row >= chosen.failures):
            self._open(now)

    def dropped(self, attempt: Attempt) -> None:
        """Record that a request ended without a result, as when its client left; another probe may be sent."""
        if attempt.probe and attempt.probe == self._probe:
            self._probe = 0

    def _next_epoch(self) -> Attempt:
        self._epoch += 1
        return Attempt(self._epoch, 0)

    def _open(self, now: float) -> None:
        chosen = self.settings
        wait = min(chosen.open_s * 2.0 ** min(self._tries, 60), max(LONGEST_S, chosen.open_s))
        self._until = now + wait * (1.0 + JITTER * float(self._rng.random()))
        self._state = BreakerState.OPEN
        self._attempt = self._next_epoch()
        self._tries += 1
        self._probe = self._in_row = 0
        self._failures.clear()
        self._successes = _Window(chosen.window_s)


class _Window:
    """Approximate count of events in the last `window_s` / 2 to `window_s`, with two counters at any rate."""

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
