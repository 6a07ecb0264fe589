"""The newest requests, in windows, and a test whether a window differs from another or from a fit's requests.

A request is described by its activation probabilities in decode, p [expert index]. A window of n requests has a mean m
and a scatter s, the mean squared distance from m. Two sets of the same traffic with n and N requests differ by

    |m - M|^2  =  s x (1/n + 1/N)      on average

so the ratio of the two sides is near 1 if nothing has changed, whatever the model and the mix of requests. Its spread
by chance depends on the number of directions in which requests differ, d = (sum of variances)^2 ÷ sum of their squares:
the ratio is distributed like chi-squared with d degrees of freedom, divided by d. An abrupt shift raises the ratio at
once, a slow one gradually.

Wrong if the requests of a window depend on each other (one client sends fifty similar ones): the ratio is then above 1
without drift, and re-fits are tried that do not pay. A re-fit is never taken for the ratio alone.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.control.base import ControlSettings, LoopShape, RequestSeen
from coterie.placement.triggers.drift import DriftEstimator
from coterie.routing import Calibration, RouterFit

WINDOWS = 64
"""Number of newest windows that are kept."""
RARE = 1e-3
"""False-alarm rate: share of windows of the same traffic that may be taken for different traffic."""
UNKNOWN_REQUESTS = 64
"""Assumed number of requests behind a fit whose file does not state it."""


class Kept(NamedTuple):
    """A finished request as the loop stores it."""

    serial: int
    at_s: float
    worker: str
    prefill: NDArray[np.uint32]
    decode: NDArray[np.uint32]
    tokens: float
    """Number of decoded tokens."""


def activations_per_token(kept: Kept) -> NDArray[np.floating]:
    """Return [expert index] the request's activations per decoded token."""
    return kept.decode.ravel() / np.float32(max(1.0, kept.tokens))


class TrafficSample(NamedTuple):
    """Mean and scatter of a set of requests."""

    first: int
    """Serial number of the first request; -1 for the requests of a fit."""
    requests: int
    mean: NDArray[np.float32]
    """[expert index] activation probabilities in decode."""
    scatter: float
    """Mean over requests of the squared distance from `mean`."""
    directions: float = 1.0
    """Effective number of directions in which the requests differ: d in the module docstring."""

    @property
    def chance(self) -> float:
        """Drift ratio that windows of the same traffic exceed with probability `RARE`."""
        from scipy.special import gammaincinv  # slow to import

        return float(2 * gammaincinv(self.directions / 2, 1.0 - RARE) / self.directions)


def reference_of(fit: RouterFit) -> TrafficSample:
    """Estimate the sample behind a fit from its clusters; the scatter is unknown and set to 0."""
    learned = fit.learned
    count = UNKNOWN_REQUESTS if learned.seen is None else max(1, len(learned.seen))
    return TrafficSample(-1, count, np.asarray(learned.shares @ learned.profiles, np.float32), 0.0)


def drift_ratio(window: TrafficSample, other: TrafficSample) -> float:
    """Return the squared distance of two samples ÷ its expectation by chance; near 1 if the traffic is the same."""
    gap = window.mean - other.mean
    by_chance = max(window.scatter, other.scatter, 1e-12) * (1.0 / window.requests + 1.0 / other.requests)
    return float(gap @ gap) / by_chance


def differs(window: TrafficSample, other: TrafficSample, least: float) -> bool:
    """Return whether a window is different traffic: its drift ratio is above both `least` and `window.chance`."""
    return drift_ratio(window, other) > max(least, window.chance)


class Traffic:
    """The newest requests and their windows."""

    def __init__(self, shape: LoopShape, settings: ControlSettings) -> None:
        self.shape, self.settings = shape, settings
        room = settings.kept_bytes // (8 * shape.num_layers * shape.num_experts) - settings.score_requests
        self.most = min(settings.fit_requests, max(room, settings.min_requests)) + settings.score_requests
        self.kept: deque[Kept] = deque()
        self.windows: deque[TrafficSample] = deque(maxlen=WINDOWS)
        self.drift = DriftEstimator(shape.num_layers, shape.num_experts)
        self.serial = 0
        """Serial number of the next request."""
        self._open: list[Kept] = []

    def add(self, seen: RequestSeen) -> bool:
        """Store a request; return True if it completes a window."""
        kept = Kept(
            serial=self.serial,
            at_s=float(seen.at_s),
            worker=seen.worker,
            prefill=seen.prefill.astype(np.uint32),
            decode=seen.decode.astype(np.uint32),
            tokens=float(seen.decode.sum()) / (self.shape.num_layers * self.shape.top_k),
        )
        self.serial += 1
        if len(self.kept) >= self.most:  # drop the oldest, or the worker's own oldest if it has more than half of all
            own = [at for at, older in enumerate(self.kept) if older.worker == kept.worker]
            del self.kept[own[0] if self.shape.workers > 1 and 2 * len(own) > self.most else 0]
        self.kept.append(kept)
        self._open.append(kept)
        if len(self._open) < self.settings.window:
            return False
        self.windows.append(sample_of(self._open))
        self.drift.update(np.stack([kept.decode for kept in self._open]).sum(axis=0, dtype=np.float64))
        self._open = []
        return True

    def newer(self, serial: int) -> list[Kept]:
        """Return the kept requests with a higher serial number, oldest first."""
        return [kept for kept in self.kept if kept.serial > serial]

    def alike(self) -> list[Kept]:
        """Return the kept requests of the newest window's traffic, oldest first; the open window is included."""
        if not self.windows:
            return list(self._open)
        pooled, since = self.windows[-1], self.windows[-1].first
        for window in reversed(list(self.windows)[:-1]):
            if differs(window, pooled, self.settings.drift_ratio):
                break
            pooled, since = _pooled(window, pooled), window.first
        return self.newer(since - 1)

    def shown_ratio(self, reference: TrafficSample) -> float:
        """Return the least drift ratio of the newest `drift_windows` windows to a reference; 0 if there are fewer."""
        newest = self._newest()
        return min(drift_ratio(window, reference) for window in newest) if newest else 0.0

    def drifted(self, reference: TrafficSample) -> bool | None:
        """Return whether the newest `drift_windows` windows all differ from a reference; None if there are fewer."""
        newest = self._newest()
        return all(differs(window, reference, self.settings.drift_ratio) for window in newest) if newest else None

    def _newest(self) -> list[TrafficSample]:
        """Return the newest `drift_windows` windows; none if there are fewer."""
        count = self.settings.drift_windows
        return list(self.windows)[-count:] if len(self.windows) >= count else []

    def calibration(self, requests: list[Kept]) -> Calibration:
        return Calibration(
            prefill=np.stack([kept.prefill for kept in requests]),
            decode=np.stack([kept.decode for kept in requests]),
            gates=None,
            requests=np.array([kept.serial for kept in requests], np.int64),
            halved=False,
            model=self.shape.model,
            top_k=self.shape.top_k,
        )


def sample_of(requests: list[Kept]) -> TrafficSample:
    chances = np.stack([activations_per_token(kept) for kept in requests]).astype(np.float32)
    mean = chances.mean(axis=0)
    products = (chances - mean) @ (chances - mean).T
    total, squares = float(np.trace(products)), float((products**2).sum())
    directions = max(1.0, total**2 / squares) if squares > 0 else 1.0
    return TrafficSample(requests[0].serial, len(requests), mean, total / max(1, len(requests) - 1), directions)


def _pooled(a: TrafficSample, b: TrafficSample) -> TrafficSample:
    requests = a.requests + b.requests
    share = a.requests / requests
    return TrafficSample(
        min(a.first, b.first),
        requests,
        a.mean * np.float32(share) + b.mean * np.float32(1 - share),
        a.scatter * share + b.scatter * (1 - share),
        min(a.directions, b.directions),
    )
