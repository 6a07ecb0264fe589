"""The fleet as routers see it: one row a worker, kept up to date by whoever runs it.

Numbers are plain arrays, so that a decision over a thousand workers is a few passes over them. `missed` is what expert
locality is made of: for every worker and cell (a layer's expert) the probability that a step does not touch the expert,

    missed = exp(expected x mean over requests of log(1 - p))

where p is the probability that a token of a request activates it. Adding a request with probabilities q is then
expected to touch ``sum(q x missed)`` experts more a step. What counts is who will be there while the request that comes
now is: as requests last about as long as each other, on average half of those there now, and others in place of the
rest. So `expected`, their number, is half way between the worker's own and the fleet's mean, and the mean over requests
is half that of those it has, half that of the requests that usually come to it: those of calibration at first, then,
more and more, those that came.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError

MOST_CERTAIN = 0.999
"""Probabilities are cut here: a product with a 0 in it could never be taken apart again."""

RECENT = 32
"""Requests that came to a worker last, about, that are what usually comes to it."""

STALE = 0.1
"""Change of the fleet's mean load, of itself, after which the numbers of all workers are made anew."""


class _Resident(NamedTuple):
    worker: int
    context: int
    logs: NDArray[np.float32] | None
    """[cell] log(1 - p)"""


class Fleet:
    """Workers that decode; [worker] each. `admit`, `finish` and `refine` are for who runs it, never for routers."""

    def __init__(
        self,
        places: NDArray[np.integer] | list[int],
        cells: int = 0,
        speeds: NDArray[np.floating] | list[float] | None = None,
        usual: NDArray[np.floating] | None = None,
    ) -> None:
        """`places` is how many requests each runs at once; `cells` (layers x experts) 0 keeps no profiles.

        `usual` [worker, cell] are probabilities of a request that is usual there, before any has come; without it,
        those of the first one that comes to the fleet.
        """
        self.places = np.array(places, np.int64)
        workers = len(self.places)
        if workers < 1 or self.places.min() < 1:
            raise ConfigError(f"places={self.places.tolist()} must be at least 1 for at least one worker")
        self.speeds = np.ones(workers) if speeds is None else np.array(speeds, np.float64)
        if self.speeds.shape != (workers,) or not ((self.speeds > 0) & (self.speeds < np.inf)).all():
            raise ConfigError(f"speeds={self.speeds.tolist()} must be {workers} finite numbers above 0")
        if usual is not None and usual.shape != (workers, cells):
            raise ConfigError(f"usual has shape {usual.shape}; expected [worker, cell] = {(workers, cells)}")
        self.running = np.zeros(workers, np.int64)
        """Requests admitted and not finished, waiting ones included."""
        self.context_tokens = np.zeros(workers, np.int64)
        """Cached tokens of those requests when they were admitted, summed."""
        self.prefill_tokens = np.zeros(workers, np.int64)
        """Prompt tokens the worker must still compute."""
        self.kv_used = np.zeros(workers)
        """Share of its KV blocks in use."""
        self.alive = np.ones(workers, np.bool_)
        """A worker that is not gets nothing."""
        self.missed = np.full((workers, cells), 255, np.uint8)
        """[worker, cell] probability that a step does not touch it; 255 is 1."""
        self.expected = np.zeros(workers)
        """Requests it will have while one that comes now is there."""
        self.distinct = np.zeros(workers)
        """Experts that a step of so many touches, over all layers."""
        self.local: NDArray[np.uint64] | None = None
        """[worker, layer, word] bit e of a layer: the worker holds expert e; None where all hold all."""
        self.routed = 0
        """Requests admitted so far."""
        self._logs = np.zeros((workers, cells))
        self._profiled = np.zeros(workers, np.int64)
        self._usual = None if usual is None else np.array(usual, np.float32)
        self._usual_logs = np.zeros((workers, cells), np.float32) if self._usual is None else _logs(self._usual)
        self._mean = 0.0
        self._residents: dict[str, _Resident] = {}

    def __len__(self) -> int:
        return len(self.places)

    @property
    def open(self) -> NDArray[np.bool_]:
        """[worker] alive, with a place free; where no living one has any, all living ones, which then queue."""
        free = self.alive & (self.running < self.places)
        return free if free.any() else self.alive

    def admit(self, request_id: str, worker: int, context: int = 0, profile: NDArray[np.float32] | None = None) -> None:
        """A request was routed to a worker."""
        if request_id in self._residents:
            worker = self._residents[request_id].worker
            raise ConfigError(f"request {request_id!r} is in the fleet already, on worker {worker}")
        if not 0 <= worker < len(self):
            raise ConfigError(f"worker={worker} must be in 0 … {len(self) - 1}")
        logs = None if profile is None else self._checked(profile)
        self._residents[request_id] = _Resident(worker, context, logs)
        self.running[worker] += 1
        self.context_tokens[worker] += context
        self.routed += 1
        if profile is not None and logs is not None:
            if self._usual is None:
                self._usual = np.tile(np.asarray(profile, np.float32), (len(self), 1))
                self._usual_logs[:] = logs
            else:
                _follow(self._usual[worker], self._usual_logs[worker], np.asarray(profile, np.float32))
        self._shift(worker, logs, 1)

    def finish(self, request_id: str) -> None:
        """It ended, or went away."""
        gone = self._known(request_id)
        del self._residents[request_id]
        self.running[gone.worker] -= 1
        self.context_tokens[gone.worker] -= gone.context
        self._shift(gone.worker, gone.logs, -1)

    def refine(self, request_id: str, profile: NDArray[np.float32]) -> None:
        """What is known of a running request became better: its own decode was seen."""
        known, logs = self._known(request_id), self._checked(profile)
        self._residents[request_id] = known._replace(logs=logs)
        self._shift(known.worker, known.logs, -1, refresh=False)
        self._shift(known.worker, logs, 1)

    def _known(self, request_id: str) -> _Resident:
        known = self._residents.get(request_id)
        if known is None:
            raise ConfigError(f"request {request_id!r} is not in the fleet")
        return known

    def _checked(self, profile: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(profile) != self.missed.shape[1]:
            raise ConfigError(f"profile has {len(profile)} cells; the fleet keeps {self.missed.shape[1]}")
        return _logs(profile)

    def _shift(self, worker: int, logs: NDArray[np.float32] | None, sign: int, refresh: bool = True) -> None:
        """Count a request's experts in or out; numbers of workers follow."""
        if not self.missed.shape[1]:
            return
        if logs is not None:
            self._profiled[worker] += sign
            _add(self._logs[worker], logs, float(sign), not self._profiled[worker])
        if not refresh:
            return
        mean = float(self.running[self.alive].mean()) if self.alive.any() else 0.0
        if abs(mean - self._mean) > max(STALE * self._mean, 1e-9 if self._mean < 1 else 0.0):
            self._mean = mean
            for every in range(len(self)):
                self._refresh(every)
        else:
            self._refresh(worker)

    def _refresh(self, worker: int) -> None:
        count, expected = int(self._profiled[worker]), (self.running[worker] + self._mean) / 2
        self.expected[worker] = expected
        there, come = (expected / (2 * count), expected / 2) if count else (0.0, expected)
        self.distinct[worker] = _spread(
            self._logs[worker], self._usual_logs[worker], there, come, self.missed[worker]
        )


def _logs(profile: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.log1p(-np.clip(profile, 0.0, MOST_CERTAIN)).astype(np.float32)


@njit()
def _add(logs: NDArray[np.float64], one: NDArray[np.float32], sign: float, last: bool) -> None:
    for cell in range(len(logs)):
        logs[cell] = 0.0 if last else logs[cell] + sign * one[cell]  # rounding ends with the last one


@njit(fastmath=True)
def _follow(usual: NDArray[np.float32], logs: NDArray[np.float32], one: NDArray[np.float32]) -> None:
    """Move what is usual towards a request that came."""
    for cell in range(len(usual)):
        usual[cell] += (one[cell] - usual[cell]) * np.float32(1.0 / RECENT)
        logs[cell] = np.log1p(-min(max(usual[cell], np.float32(0.0)), np.float32(MOST_CERTAIN)))


@njit(fastmath=True)
def _spread(
    logs: NDArray[np.float64], usual: NDArray[np.float32], there: float, come: float, missed: NDArray[np.uint8]
) -> float:
    """Fill `missed`; experts that a step touches."""
    distinct = 0.0
    for cell in range(len(logs)):
        left = np.exp(np.float32(min(there * logs[cell] + come * usual[cell], 0.0)))
        missed[cell] = np.uint8(np.float32(255.0) * left + np.float32(0.5))
        distinct += 1.0 - left
    return distinct
