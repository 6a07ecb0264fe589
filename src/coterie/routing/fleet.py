"""The fleet as routers see it: one row a worker, kept up to date by whoever runs it.

Numbers are plain arrays, so that a decision over a thousand workers is a few passes over them. `missed` is what expert
locality is made of: for every worker and cell (a layer's expert) the probability that a step of its requests touches
the expert not at all, ``prod over its requests of (1 - p)``. Adding a request with activation probabilities q to a
worker is then expected to touch ``sum(q x missed)`` experts more a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError

MOST_CERTAIN = 0.999
"""Probabilities are cut here: a product with a 0 in it could never be taken apart again."""


@dataclass(frozen=True, slots=True)
class _Resident:
    worker: int
    context: int
    profile: NDArray[np.float32] | None


class Fleet:
    """Workers that decode; [worker] each. `admit` and `finish` are for those who run it, never for routers."""

    def __init__(
        self, places: NDArray[np.integer] | list[int], cells: int = 0, speeds: NDArray[np.floating] | None = None
    ) -> None:
        """`places` is how many requests each runs at once; `cells` (layers x experts) 0 keeps no profiles."""
        self.places = np.array(places, np.int64)
        workers = len(self.places)
        if workers < 1 or self.places.min() < 1:
            raise ConfigError(f"places={self.places.tolist()} must be at least 1 for at least one worker")
        self.speeds = np.ones(workers) if speeds is None else np.array(speeds, np.float64)
        if self.speeds.shape != (workers,) or not ((self.speeds > 0) & (self.speeds < np.inf)).all():
            raise ConfigError(f"speeds={self.speeds.tolist()} must be {workers} finite numbers above 0")
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
        self.missed = np.ones((workers, cells), np.float32)
        """[worker, cell]"""
        self.local: NDArray[np.uint64] | None = None
        """[worker, layer, word] bit e of a layer: the worker holds expert e; None where all hold all."""
        self.routed = 0
        """Requests admitted so far."""
        self._logs = np.zeros((workers, cells))
        self._profiled = np.zeros(workers, np.int64)
        self._residents: dict[str, _Resident] = {}

    def __len__(self) -> int:
        return len(self.places)

    @property
    def open(self) -> NDArray[np.bool_]:
        """[worker] alive, with a place free; where no living one has any, all living ones, which then queue."""
        free = self.alive & (self.running < self.places)
        return free if free.any() else self.alive

    def admit(self, request_id: str, worker: int, context: int = 0, profile: NDArray[np.float32] | None = None) -> None:
        """A request that was routed to a worker."""
        if request_id in self._residents:
            raise ConfigError(f"request {request_id!r} is in the fleet already, on worker {self._where(request_id)}")
        if not 0 <= worker < len(self):
            raise ConfigError(f"worker={worker} must be in 0 … {len(self) - 1}")
        if profile is not None and len(profile) != self.missed.shape[1]:
            raise ConfigError(f"profile has {len(profile)} cells; the fleet keeps {self.missed.shape[1]}")
        self._residents[request_id] = _Resident(worker, context, profile)
        self.running[worker] += 1
        self.context_tokens[worker] += context
        self.routed += 1
        if profile is not None:
            self._profiled[worker] += 1
            _shift(self._logs[worker], self.missed[worker], profile, 1.0, MOST_CERTAIN)

    def finish(self, request_id: str) -> None:
        """It ended, or went away."""
        try:
            gone = self._residents.pop(request_id)
        except KeyError:
            raise ConfigError(f"request {request_id!r} is not in the fleet") from None
        worker = gone.worker
        self.running[worker] -= 1
        self.context_tokens[worker] -= gone.context
        if gone.profile is None:
            return
        self._profiled[worker] -= 1
        if self._profiled[worker]:
            _shift(self._logs[worker], self.missed[worker], gone.profile, -1.0, MOST_CERTAIN)
        else:  # rounding ends with the last one
            self._logs[worker], self.missed[worker] = 0.0, 1.0

    def refine(self, request_id: str, profile: NDArray[np.float32]) -> None:
        """What is known of a running request became better: its own decode was seen."""
        known = self._residents.get(request_id)
        if known is None:
            raise ConfigError(f"request {request_id!r} is not in the fleet")
        if known.profile is not None:
            _shift(self._logs[known.worker], self.missed[known.worker], known.profile, -1.0, MOST_CERTAIN)
        else:
            self._profiled[known.worker] += 1
        _shift(self._logs[known.worker], self.missed[known.worker], profile, 1.0, MOST_CERTAIN)
        self._residents[request_id] = _Resident(known.worker, known.context, profile)

    def _where(self, request_id: str) -> int:
        return self._residents[request_id].worker


@njit()
def _shift(
    logs: NDArray[np.float64], missed: NDArray[np.float32], profile: NDArray[np.float32], sign: float, most: float
) -> None:
    """Add or take away one request's factors."""
    for cell in range(len(logs)):
        if profile[cell] > 0.0:
            logs[cell] += sign * np.log1p(-min(np.float64(profile[cell]), most))
            missed[cell] = np.exp(min(logs[cell], 0.0))
