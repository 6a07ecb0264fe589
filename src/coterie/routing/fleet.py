"""State of the fleet for routers: one row per worker, updated by the caller that runs the fleet.

State is in plain arrays, so that a decision over a thousand workers is a few passes over them. An *expert index* is
layer x experts + expert. `missed` holds, for every worker and expert index, the probability that a step does not touch
the expert,

    missed = exp(expected x mean over requests of log(1 - p))

where p is the probability that a token of a request activates the expert. Adding a request with probabilities q is
then expected to touch ``sum(q x missed)`` more experts per step. The values describe the requests that will run beside
a request that arrives now. Requests have similar durations, so on average half of these are running now and half arrive
later. Therefore `expected`, their number, is half way between the worker's requests (`in_flight`) and the fleet's mean.
On a full worker it is at most one less than its places: a step runs no more, the others wait. The mean over requests is
taken half over the running requests, half over the worker's *prior*: the requests that the worker usually gets, from
calibration at first, then a moving average of the requests that arrived.
"""

from __future__ import annotations

from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import ConfigError, check

MOST_CERTAIN = 0.999
"""Upper limit of p: log(1 - p) of p = 1 is infinite, so such a request could not be subtracted again."""

PRIOR_WINDOW = 32
"""Window of the prior's moving average, in requests."""

UNIT = 2.0**-13
"""Unit of stored logarithms: they are whole multiples of it, so that adding and removing a request leaves no rounding
error. 32 bits hold the sums of 37,000 requests of probability `MOST_CERTAIN`."""

LEAST_LOG = -16.0
"""Lower limit of log(missed): smaller probabilities are not distinguished."""

TINY = 1e-30
"""Prior probabilities below this become 0: averaging in zeros would shrink them to denormal numbers, which are slow."""

MOST_CONTEXT = 1 << 40
"""Largest context of a request, in tokens: 64 bits hold the sum over eight million such requests."""

MOST_ACTIVATIONS = 64
"""Largest value of a profile, in activations per token: traces with repeated expert ids give more than 1."""

STALE = 0.1
"""Relative change of the fleet's mean load after which the values of all workers are recomputed."""


def checked_speeds(speeds: NDArray[np.floating] | list[float] | None, workers: int) -> NDArray[np.float64]:
    """Return [worker] relative speeds, copied; 1 for all if None."""
    known = np.ones(workers) if speeds is None else np.array(speeds, np.float64)
    check(
        known.shape == (workers,) and ((known > 0) & (known < np.inf)).all(),
        f"speeds={known.tolist()} must be {workers} finite numbers above 0",
    )
    return known


class _Resident(NamedTuple):
    worker: int
    context: int
    uncomputed: int
    """Prompt tokens that the worker has still to compute."""
    logs: NDArray[np.int32] | None
    """[expert index] log(1 - p) in multiples of `UNIT`; None if the request has no profile."""


class WorkerLoads(NamedTuple):
    """Requests of one or several front ends at every worker; arrays are [worker]."""

    running: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64]
    profiled: NDArray[np.int64]
    """Number of requests with a profile."""
    logs: NDArray[np.int32]
    """[worker, expert index] sums of their log(1 - p), in multiples of `UNIT`."""
    routed: int = 0
    """Number of requests that these front ends admitted so far."""

    @classmethod
    def none(cls, workers: int, size: int) -> WorkerLoads:
        counts = np.zeros((4, workers), np.int64)
        return cls(counts[0], counts[1], counts[2], counts[3], np.zeros((workers, size), np.int32))

    def fitted(self, workers: int, size: int) -> WorkerLoads:
        """Return the loads for so many workers: rows beyond are left out; without profiles if `size` is another."""
        made, rows = WorkerLoads.none(workers, size), min(workers, len(self.running))
        for name in ("running", "context_tokens", "prefill_tokens"):
            getattr(made, name)[:rows] = getattr(self, name)[:rows]
        if self.logs.shape[1] == size:
            made.profiled[:rows], made.logs[:rows] = self.profiled[:rows], self.logs[:rows]
        return made._replace(routed=self.routed)

    def plus(self, other: WorkerLoads) -> WorkerLoads:
        return WorkerLoads(
            self.running + other.running,
            self.context_tokens + other.context_tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.profiled + other.profiled,
            self.logs + other.logs,
            self.routed + other.routed,
        )

    def without_profiles(self) -> WorkerLoads:
        return self._replace(profiled=np.zeros_like(self.profiled), logs=np.zeros_like(self.logs))


class Fleet:
    """State of the decode workers; arrays are [worker]. The caller updates it; routers only read it."""

    def __init__(
        self,
        places: NDArray[np.integer] | list[int],
        prior: NDArray[np.floating] | None = None,
        speeds: NDArray[np.floating] | list[float] | None = None,
    ) -> None:
        """`places` [worker] is the number of requests that each worker runs at once.

        `prior` [worker, expert index] holds mean activation probabilities of the requests that a worker usually gets.
        Without a prior the fleet does not track experts: it refuses profiles, and routers that need experts refuse the
        fleet. :meth:`~coterie.routing.fitted.RouterFit.fleet` makes a fleet with fitted profiles as its prior.
        """
        self.places = np.array(places, np.int64)
        workers = len(self.places)
        check(
            workers >= 1 and self.places.min() >= 1,
            f"places={self.places.tolist()} must be at least 1 for at least one worker",
        )
        self.speeds = checked_speeds(speeds, workers)
        self._prior = np.zeros((workers, 0), np.float32) if prior is None else np.array(prior, np.float32)
        check(
            self._prior.ndim == 2 and len(self._prior) == workers,
            f"prior has shape {self._prior.shape}; expected [worker, expert index], {workers} workers",
        )
        size = self._prior.shape[1]
        self.running = np.zeros(workers, np.int64)
        """Number of requests admitted and not finished, waiting ones included."""
        self.in_flight = np.zeros(workers, np.int64)
        """Number of requests at the worker: `running`, and those of other front ends by :meth:`hear` and
        :meth:`observe`. Routers weigh this."""
        self.heard = WorkerLoads.none(workers, size)
        """Requests of other front ends, as they said last. All other arrays but `running` include them."""
        self.peak = np.zeros(workers, np.int64)
        """Largest `running` + `heard.running` since the last :meth:`observe`."""
        self.context_tokens = np.zeros(workers, np.int64)
        """Sum of the context tokens of these requests at admission."""
        self.prefill_tokens = np.zeros(workers, np.int64)
        """Number of prompt tokens still to compute, by admissions; a simulator writes the tokens of its queues."""
        self.kv_used = np.zeros(workers)
        """Share of KV blocks in use, as the worker reports it; 0 if unknown."""
        self.alive = np.ones(workers, np.bool_)
        """Whether the worker is alive; others get no requests."""
        self.missed = np.full((workers, size), 255, np.uint8)
        """[worker, expert index] probability that a step does not touch the expert; 255 stands for 1."""
        self.expected = np.zeros(workers)
        """Number of requests expected to run beside a request that arrives now."""
        self.distinct = np.zeros(workers)
        """Expected number of distinct experts in a step of `expected` requests, summed over layers."""
        self.local: NDArray[np.uint64] | None = None
        """[worker, layer, word] bitmask of the experts that the worker holds, 64 per word; None if all hold all."""
        self.routed = 0
        """Number of requests admitted so far."""
        self.in_round = np.zeros(workers, np.bool_)
        """Whether the worker got a request in this round. A round ends when every living worker got one, or one gets a
        second."""
        self._logs = np.zeros((workers, size), np.int32)
        self._profiled = np.zeros(workers, np.int64)
        self._prior_logs = _logs(self._prior)
        self._mean = 0.0
        self._tracking = False
        """False until a request has a profile: no router uses expert values before that, so none are computed."""
        self._residents: dict[str, _Resident] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._residents

    @property
    def tracks_experts(self) -> bool:
        """Whether the fleet was made with a prior."""
        return self.missed.shape[1] > 0

    @property
    def open(self) -> NDArray[np.bool_]:
        """[worker] whether it is alive with a free place; if no worker is, whether it is alive: requests then queue."""
        free = self.alive & (self.in_flight < self.places)
        return free if free.any() else self.alive

    def admit(
        self,
        request_id: str,
        worker: int,
        context: int = 0,
        profile: NDArray[np.float32] | None = None,
        uncomputed: int = 0,
    ) -> None:
        """Add a request to its worker, which must compute `uncomputed` tokens of its prompt.

        If an error is raised, the fleet is unchanged.
        """
        if request_id in self._residents:
            worker = self._residents[request_id].worker
            raise ConfigError(f"request {request_id!r} is in the fleet already, on worker {worker}")
        if not 0 <= worker < len(self):
            raise ConfigError(f"worker={worker} must be in 0 … {len(self) - 1}")
        worker, context, uncomputed, logs = index(worker), index(context), index(uncomputed), None
        if not 0 <= uncomputed <= context <= MOST_CONTEXT:
            tokens = f"uncomputed={shown(uncomputed)} and context={shown(context)}"
            raise ConfigError(f"{tokens} must be in 0 … {MOST_CONTEXT} tokens, the context the larger")
        if profile is not None:
            profile = self._checked(profile)
            logs = _logs(profile)
            _learn(self._prior[worker], profile, self._prior_logs[worker])
            self._tracking = True
        self._residents[request_id] = _Resident(worker, context, uncomputed, logs)
        self.routed += 1
        _count_in(
            worker,
            context,
            uncomputed,
            self.running,
            self.heard.running,
            self.in_flight,
            self.peak,
            self.context_tokens,
            self.prefill_tokens,
            self.in_round,
            self.alive,
        )
        self._shift(worker, logs, 1)

    def finish(self, request_id: str) -> None:
        """Remove a request that ended or was cancelled."""
        gone = self._known(request_id)
        del self._residents[request_id]
        self.running[gone.worker] -= 1
        self.in_flight[gone.worker] -= 1
        self.context_tokens[gone.worker] -= gone.context
        if gone.uncomputed:
            self.prefill_tokens[gone.worker] -= gone.uncomputed
        self._shift(gone.worker, gone.logs, -1)

    def computed(self, request_id: str) -> None:
        """Note that the prompt of a request is computed: its first token has arrived."""
        known = self._known(request_id)
        self.prefill_tokens[known.worker] -= known.uncomputed
        self._residents[request_id] = known._replace(uncomputed=0)

    def observe(self, worker: int, at_worker: int = 0, kv_used: float = 0.0) -> None:
        """Note what a worker reports: all requests that are there, and the share of its KV blocks in use.

        Requests beyond the most that were known since the last report are those of front ends that say nothing: a
        report is older than what is admitted and finished meanwhile, so no known request is taken for another's.
        Without arguments, an earlier report is forgotten.
        """
        known = int(self.running[worker] + self.heard.running[worker])
        in_flight = known + max(0, at_worker - int(self.peak[worker]))
        self.kv_used[worker], self.peak[worker] = kv_used, known
        if in_flight != self.in_flight[worker]:
            self.in_flight[worker] = in_flight
            self._shift(worker, None, 0)

    def own(self) -> WorkerLoads:
        """Return the requests of this front end, for others to :meth:`hear`."""
        heard = self.heard
        return WorkerLoads(
            self.running.copy(),
            self.context_tokens - heard.context_tokens,
            self.prefill_tokens - heard.prefill_tokens,
            self._profiled - heard.profiled,
            self._logs - heard.logs,
            self.routed - heard.routed,
        )

    def hear(self, others: WorkerLoads) -> None:
        """Replace what other front ends said before.

        A worker's report may have shown these requests already, as those of front ends that say nothing: requests that
        are new here are first taken to be those, so that none counts twice until the next report.
        """
        before, self.heard = self.heard, others
        shown = self.in_flight - self.running - before.running
        shown -= np.clip(others.running - before.running, 0, shown)
        self.in_flight[:] = self.running + others.running + shown
        np.maximum(self.peak, self.running + others.running, out=self.peak)
        for name, mine in (
            ("context_tokens", self.context_tokens),
            ("prefill_tokens", self.prefill_tokens),
            ("profiled", self._profiled),
            ("logs", self._logs),
        ):
            mine += getattr(others, name) - getattr(before, name)
        self.routed += others.routed - before.routed
        self._tracking |= bool(others.profiled.any())
        self._refresh_all()

    def take_over(self, other: Fleet, priors: bool = False) -> None:
        """Copy the requests of `other` into this empty fleet. Each stays on its row, which this fleet must have.

        This fleet keeps its own places, speeds and living workers. Profiles are dropped if the fleets track different
        experts. With `priors`, rows that both fleets have also take over the prior of `other`.
        """
        count, rows = len(self._residents), min(len(self), len(other))
        check(count == 0, f"the fleet has {count} requests; only an empty one can take over another")
        last = int(np.flatnonzero(other.running).max(initial=-1))
        check(last < rows, f"the fleet has {rows} workers; requests run on worker {last}")
        same = self.tracks_experts and self.missed.shape[1] == other.missed.shape[1]
        self.heard = other.heard.fitted(len(self), self.missed.shape[1])
        for name in ("running", "in_flight", "peak", "context_tokens", "prefill_tokens", "kv_used", "in_round"):
            getattr(self, name)[:rows] = getattr(other, name)[:rows]
        self.routed = other.routed
        if same:
            self._residents = dict(other._residents)
            self._logs[:rows], self._profiled[:rows] = other._logs[:rows], other._profiled[:rows]
            if priors:
                self._prior[:rows], self._prior_logs[:rows] = other._prior[:rows], other._prior_logs[:rows]
            self._tracking = other._tracking
        else:
            self._residents = {name: known._replace(logs=None) for name, known in other._residents.items()}
        self._refresh_all()

    def _known(self, request_id: str) -> _Resident:
        if request_id not in self._residents:
            raise ConfigError(f"request {request_id!r} is not in the fleet")
        return self._residents[request_id]

    def _checked(self, profile: NDArray[np.float32]) -> NDArray[np.float32]:
        tracked = self.missed.shape[1]
        check(tracked, "the fleet tracks no experts but a request has a profile: make the fleet with a prior")
        if profile.shape != (tracked,):  # no check: this is part of an admission
            raise ConfigError(f"profile has shape {profile.shape}; the fleet has {tracked} expert indices")
        profile = np.ascontiguousarray(profile, np.float32)
        if not _probable(profile):
            raise ConfigError(f"profile must hold finite numbers in 0 … {MOST_ACTIVATIONS}")
        return profile

    def _refresh_all(self) -> None:
        self._mean = -1.0  # differs from any mean: the next line recomputes the values of all workers
        self._shift(0, None, 0)

    def _shift(self, worker: int, logs: NDArray[np.int32] | None, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) a request's logarithms, and update the workers' expert values."""
        if not self._tracking:
            return
        if logs is not None:
            mine = self._logs[worker]
            (np.add if sign > 0 else np.subtract)(mine, logs, out=mine)
            self._profiled[worker] += sign
        self._mean = _refresh(
            worker,
            self._mean,
            self.alive,
            self.in_flight,
            self.places,
            self._profiled,
            self._logs,
            self._prior_logs,
            self.expected,
            self.distinct,
            self.missed,
        )


@njit()
def _count_in(
    worker: int,
    context: int,
    uncomputed: int,
    running: NDArray[np.int64],
    heard: NDArray[np.int64],
    in_flight: NDArray[np.int64],
    peak: NDArray[np.int64],
    context_tokens: NDArray[np.int64],
    prefill_tokens: NDArray[np.int64],
    in_round: NDArray[np.bool_],
    alive: NDArray[np.bool_],
) -> None:
    """Add a request to its worker's counts, and mark the worker in the round.

    A new round begins with a worker's second request, or once every living worker got one.
    """
    running[worker] += 1
    in_flight[worker] += 1
    peak[worker] = max(peak[worker], running[worker] + heard[worker])
    context_tokens[worker] += context
    prefill_tokens[worker] += uncomputed
    if in_round[worker]:
        in_round[:] = False
    in_round[worker] = True
    left = 0
    for every in range(len(alive)):
        left += alive[every] and not in_round[every]
    if left == 0:
        in_round[:] = False


def shown(number: int) -> str:
    """Return a number as text for a message; Python refuses to print a number of thousands of digits."""
    return str(number) if abs(number) < 1 << 64 else f"a number of {number.bit_length()} bits"


@helper()
def beside(running: int, mean: float, places: int) -> float:
    """Return how many requests are expected to run beside a request that arrives now; `mean` is the fleet's load.

    On a full worker it waits until it is one of `places` in a step.
    """
    half_way = (running + mean) / 2
    return half_way if running < places else min(half_way, places - 1.0)


# Without fastmath, which assumes that no value is NaN.
@njit()
def _probable(p: NDArray[np.float32]) -> bool:
    """Return whether all values are in 0 … `MOST_ACTIVATIONS`, up to rounding below 0; NaN is not."""
    wrong = 0
    for at in range(len(p)):
        wrong += not (np.float32(-0.001) <= p[at] <= np.float32(MOST_ACTIVATIONS))
    return wrong == 0


@njit()
def _learn(prior: NDArray[np.float32], profile: NDArray[np.float32], logs: NDArray[np.int32]) -> None:
    """Move the moving average `prior` towards a request's profile and fill `logs`; values below `TINY` become 0."""
    for at in range(len(prior)):
        mean = prior[at] + (profile[at] - prior[at]) * np.float32(1.0 / PRIOR_WINDOW)
        prior[at] = mean if abs(mean) > np.float32(TINY) else np.float32(0.0)
    _fill_logs(prior, logs)


def _logs(profiles: NDArray[np.float32]) -> NDArray[np.int32]:
    logs = np.empty(profiles.shape, np.int32)
    _fill_logs(profiles.reshape(-1), logs.reshape(-1))
    return logs


# Series, since the library's log and exp are not vectorised: 10 ns per number, 0.3 ms per request.
@njit(fastmath=True, division_raises=False)
def _fill_logs(p: NDArray[np.float32], logs: NDArray[np.int32]) -> None:
    """Fill `logs` with log(1 - p) in multiples of `UNIT`, with an error below one unit.

    With x the 16th root of 1 - p, log(1 - p) = 16 log x = 32 artanh((x - 1) / (x + 1)).
    """
    for at in range(len(p)):
        left = np.float32(1.0) - min(max(p[at], np.float32(0.0)), np.float32(MOST_CERTAIN))
        root = np.sqrt(np.sqrt(np.sqrt(np.sqrt(left))))
        t = (root - np.float32(1.0)) / (root + np.float32(1.0))
        s = t * t
        series = np.float32(1 / 3) + s * (np.float32(1 / 5) + s * np.float32(1 / 7))
        logs[at] = np.int32(np.float32(32.0 / UNIT) * t * (np.float32(1.0) + s * series) - np.float32(0.5))


@njit(fastmath=True)
def _refresh(
    worker: int,
    mean: float,
    alive: NDArray[np.bool_],
    in_flight: NDArray[np.int64],
    places: NDArray[np.int64],
    profiled: NDArray[np.int64],
    logs: NDArray[np.int32],
    prior: NDArray[np.int32],
    expected: NDArray[np.float64],
    distinct: NDArray[np.float64],
    missed: NDArray[np.uint8],
) -> float:
    """Recompute a worker's values, or all workers' if the fleet's mean load changed by `STALE`. Return that mean."""
    living, requests = 0, 0
    for every in range(len(alive)):
        if alive[every]:
            living += 1
            requests += in_flight[every]
    now = requests / max(1, living)
    stale = abs(now - mean) > max(STALE * mean, 1e-9 if mean < 1 else 0.0)
    mean = now if stale else mean
    for every in range(len(alive)):
        if stale or every == worker:
            count, expected[every] = profiled[every], beside(in_flight[every], mean, places[every])
            running_share, arriving = 0.0, expected[every]
            if count:
                running_share, arriving = arriving / (2 * count), arriving / 2
            distinct[every] = _spread(logs[every], prior[every], running_share, arriving, missed[every])
    return mean


@njit(fastmath=True)
def _spread(
    logs: NDArray[np.int32], prior: NDArray[np.int32], running_share: float, arriving: float, missed: NDArray[np.uint8]
) -> float:
    """Fill `missed` and return the expected number of distinct experts in a step.

    Computes exp(x) as exp(x / 64)^64, with a series for exp(x / 64); the error is at most 3e-6.
    """
    a, b, least = np.float32(running_share * UNIT / 64), np.float32(arriving * UNIT / 64), np.float32(LEAST_LOG / 64)
    untouched = np.float32(0.0)
    for at in range(len(logs)):
        x = max(a * np.float32(logs[at]) + b * np.float32(prior[at]), least)
        series = np.float32(1 / 6) + x * (np.float32(1 / 24) + x * np.float32(1 / 120))
        left = np.float32(1.0) + x * (np.float32(1.0) + x * (np.float32(1 / 2) + x * series))
        for _ in range(6):
            left *= left
        missed[at] = np.uint8(np.int32(np.float32(255.0) * left + np.float32(0.5)))
        untouched += left
    return len(logs) - np.float64(untouched)
