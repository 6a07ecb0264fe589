"""Demand for experts by request, by worker and in total, and the part of it that a rank does not hold.

Two trackers have one interface. :class:`DemandTracker` decays: with every record, earlier ones are multiplied by
`decay`. :class:`WindowTracker` keeps the last windows whole and forgets a window at a time, which suits what must
not mix old with new (fitting on one window, scoring on the next). Requests are remembered up to a number; the one
that was recorded longest ago is forgotten first.

Wrong for idle workers: without records nothing decays, so a worker that fell silent keeps asking for what it did.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_at_least, check_positive_share

Demand = NDArray[np.float64]
Counts = NDArray[np.integer] | NDArray[np.floating]

_LARGEST_SCALE = 1e100
"""Scales grow by 1 ÷ decay a record; past this the values are scaled back, once in 23,000 records at 0.99."""


class Mismatch(NamedTuple):
    """Demand compared with the experts held."""

    score: float
    """Share of the demand whose expert is not held; 0 without demand."""
    needed: NDArray[np.int64]
    """[n, 2] layer and expert of demand that is not held, highest demand first."""
    underused: NDArray[np.int64]
    """[n, 2] layer and expert of what is held and asked for less than the median of what is asked for at all, least
    wanted first."""


def mismatch(demand: Demand, held: NDArray[np.bool_]) -> Mismatch:
    """Compare demand [layer, expert] on a rank or worker with the experts it holds [layer, expert]."""
    if demand.shape != held.shape:
        raise ConfigError(f"held has shape {held.shape}; demand has {demand.shape}")
    wanted = demand > 0
    total = float(demand.sum())
    score = float(demand[~held].sum()) / total if total > 0 else 0.0
    needed = _by_demand(demand, wanted & ~held, descending=True)
    # Without any demand there is no telling what is underused.
    under = held & (demand < np.median(demand[wanted])) if wanted.any() else np.zeros_like(held)
    return Mismatch(score, needed, _by_demand(demand, under, descending=False))


def _by_demand(demand: Demand, chosen: NDArray[np.bool_], *, descending: bool) -> NDArray[np.int64]:
    """Ties by layer, then by expert."""
    ids = np.argwhere(chosen)
    value = demand[chosen]
    return ids[np.argsort(-value if descending else value, kind="stable")]


class _Decayed:
    """A decayed sum of which nothing but a scale changes when it ages."""

    __slots__ = ("_scale", "_values")

    def __init__(self, shape: tuple[int, int]) -> None:
        self._values = np.zeros(shape)
        self._scale = 1.0

    def add(self, counts: Counts, decay: float) -> None:
        if self._scale > _LARGEST_SCALE:
            self._values /= self._scale
            self._scale = 1.0
        self._scale /= decay
        self._values += counts * self._scale

    @property
    def value(self) -> Demand:
        return np.asarray(self._values / self._scale)


class _Tracker:
    def __init__(self, num_layers: int, num_experts: int, num_workers: int, max_requests: int) -> None:
        check_at_least(
            1, num_layers=num_layers, num_experts=num_experts, num_workers=num_workers, max_requests=max_requests
        )
        self.shape = (num_layers, num_experts)
        self.num_workers = num_workers
        self.max_requests = max_requests

    def _check(self, worker: int, counts: Counts) -> None:
        self._check_worker(worker)
        if counts.shape != self.shape:
            raise ConfigError(f"counts has shape {counts.shape}; expected [layer, expert] = {self.shape}")
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise ConfigError("counts must be finite and not negative")

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ConfigError(f"worker={worker} must be in 0 … {self.num_workers - 1}")


class DemandTracker(_Tracker):
    """Exponentially decayed demand, [layer, expert].

    Each level ages by its own records: a request by the request's, a worker by the worker's. All workers together
    age by the `num_workers`-th root of `decay` a record, so with workers that record equally often every level looks
    back equally far.
    """

    def __init__(
        self, num_layers: int, num_experts: int, num_workers: int, *, decay: float = 0.99, max_requests: int = 256
    ) -> None:
        super().__init__(num_layers, num_experts, num_workers, max_requests)
        check_positive_share(decay=decay)
        self.decay = decay
        self._overall = _Decayed(self.shape)
        self._workers = [_Decayed(self.shape) for _ in range(num_workers)]
        self._requests: OrderedDict[Hashable, _Decayed] = OrderedDict()

    def record(self, worker: int, counts: Counts, request: Hashable | None = None) -> None:
        """Activations [layer, expert] of a step on this worker, of this request where it is one's own."""
        self._check(worker, counts)
        self._overall.add(counts, self.decay ** (1 / self.num_workers))
        self._workers[worker].add(counts, self.decay)
        if request is None:
            return
        own = self._requests.pop(request, None)
        if own is None:
            own = _Decayed(self.shape)
            if len(self._requests) == self.max_requests:
                self._requests.popitem(last=False)
        self._requests[request] = own  # at the end: recorded last
        own.add(counts, self.decay)

    @property
    def overall(self) -> Demand:
        """[layer, expert]"""
        return self._overall.value

    def worker(self, worker: int) -> Demand:
        """[layer, expert]"""
        self._check_worker(worker)
        return self._workers[worker].value

    def request(self, request: Hashable) -> Demand | None:
        """[layer, expert], or None where the request was never recorded or is forgotten."""
        own = self._requests.get(request)
        return None if own is None else own.value

    def forget(self, request: Hashable) -> None:
        """A request that is done; unknown ones are fine."""
        self._requests.pop(request, None)


class WindowTracker(_Tracker):
    """Demand of the last `windows` windows, [layer, expert], the one being filled among them."""

    def __init__(
        self, num_layers: int, num_experts: int, num_workers: int, *, windows: int = 8, max_requests: int = 256
    ) -> None:
        super().__init__(num_layers, num_experts, num_workers, max_requests)
        check_at_least(1, windows=windows)
        self.windows = windows
        self._now = 0
        self._ring = np.zeros((windows, num_workers, *self.shape))
        self._requests: OrderedDict[Hashable, dict[int, Demand]] = OrderedDict()

    def record(self, worker: int, counts: Counts, request: Hashable | None = None) -> None:
        """Activations [layer, expert] of a step on this worker, of this request where it is one's own."""
        self._check(worker, counts)
        self._ring[self._now % self.windows, worker] += counts
        if request is None:
            return
        if request not in self._requests and len(self._requests) == self.max_requests:
            self._requests.popitem(last=False)
        own = self._requests.setdefault(request, {})
        self._requests.move_to_end(request)
        own.setdefault(self._now, np.zeros(self.shape))
        own[self._now] += counts

    def roll(self) -> None:
        """Close the window and begin another; the oldest is forgotten."""
        self._now += 1
        self._ring[self._now % self.windows] = 0.0
        oldest = self._now - self.windows + 1
        for request in list(self._requests):
            own = self._requests[request]
            own.pop(oldest - 1, None)
            if not own:
                del self._requests[request]

    @property
    def series(self) -> Demand:
        """[window, layer, expert] of all workers, oldest first; the last is being filled."""
        order = np.arange(max(0, self._now - self.windows + 1), self._now + 1) % self.windows
        return np.asarray(self._ring[order].sum(axis=1))

    @property
    def overall(self) -> Demand:
        """[layer, expert]"""
        return np.asarray(self._ring.sum(axis=(0, 1)))

    def worker(self, worker: int) -> Demand:
        """[layer, expert]"""
        self._check_worker(worker)
        return np.asarray(self._ring[:, worker].sum(axis=0))

    def request(self, request: Hashable) -> Demand | None:
        """[layer, expert], or None where no window that is kept has records of it."""
        own = self._requests.get(request)
        return None if own is None else np.asarray(sum(own.values()))

    def forget(self, request: Hashable) -> None:
        """A request that is done; unknown ones are fine."""
        self._requests.pop(request, None)
