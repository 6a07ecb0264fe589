"""The newest requests, in windows, and whether a window is other traffic than the one before or than a fit's.

A request is its activation probabilities in decode, p [expert index]. A window of n requests has their mean m and
their scatter s, the mean squared distance from m. Two sets of the same traffic with n and N requests differ by

    |m - M|^2  =  s x (1/n + 1/N)      on average

so the ratio of the two sides is near 1 where nothing has changed, whatever the model and the mix of requests are. How
far chance alone takes it depends on how many directions the requests differ in, d = (sum of variances)^2 ÷ sum of their
squares: it is spread like chi-squared of d over d. An abrupt shift raises it at once, a slow one little by little.

Wrong where requests of a window depend on each other (one client sends fifty alike): then it is above 1 without drift,
and re-fits are tried that do not pay; none is taken for the ratio alone.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coterie.control.base import ControlSettings, LoopShape, RequestSeen
from coterie.placement.triggers.drift import DriftEstimate, DriftEstimator
from coterie.routing import Calibration, RouterFit

WINDOWS = 64
"""Windows that are remembered."""
RARE = 1e-3
"""Share of windows of the same traffic that may look like other traffic."""
UNKNOWN_REQUESTS = 64
"""Requests that a fit counts for where its file does not say how many it was made from."""


class Kept(NamedTuple):
    """A finished request as it is kept."""

    serial: int
    at_s: float
    worker: str
    prefill: NDArray[np.uint32]
    decode: NDArray[np.uint32]
    tokens: float
    """Tokens that it decoded."""


class TrafficSample(NamedTuple):
    """Mean and scatter of some requests."""

    first: int
    """Serial of the first of them."""
    requests: int
    mean: NDArray[np.float32]
    """[expert index] activation probabilities in decode."""
    scatter: float
    """Mean over requests of the squared distance from their mean."""
    directions: float = 1.0
    """Number of directions that the requests differ in."""

    @property
    def chance(self) -> float:
        """Ratio that chance alone exceeds once in `1 / RARE` windows."""
        return float(stats.chi2.ppf(1.0 - RARE, self.directions) / self.directions)


def reference_of(fit: RouterFit) -> TrafficSample:
    """What the requests of a fit were like, from its clusters; its scatter is not known."""
    learned = fit.learned
    count = UNKNOWN_REQUESTS if learned.seen is None else max(1, len(learned.seen))
    return TrafficSample(-1, count, np.asarray(learned.shares @ learned.profiles, np.float32), 0.0)


def drift_ratio(window: TrafficSample, other: TrafficSample) -> float:
    """Squared distance of two samples over what chance gives; near 1 where the traffic is the same."""
    gap = window.mean - other.mean
    scatter = max(window.scatter, other.scatter, 1e-12)
    return float(gap @ gap) / (scatter * (1.0 / window.requests + 1.0 / other.requests))


def differs(window: TrafficSample, other: TrafficSample, least: float) -> bool:
    """Whether a window is other traffic: `least` times as far as chance gives, and farther than it is likely to go."""
    return drift_ratio(window, other) > max(least, window.chance)


class Traffic:
    """The newest requests and the windows they make."""

    def __init__(self, shape: LoopShape, settings: ControlSettings) -> None:
        self.shape, self.settings = shape, settings
        size = shape.num_layers * shape.num_experts
        room = settings.kept_bytes // (8 * size)
        most = settings.fit_requests + settings.score_requests
        self.most = int(min(most, max(room, settings.min_requests + settings.score_requests)))
        self.kept: deque[Kept] = deque()
        self.windows: deque[TrafficSample] = deque(maxlen=WINDOWS)
        self.drift = DriftEstimator(shape.num_layers, shape.num_experts)
        self.serial = 0
        """Number of the next request."""
        self._by_worker: dict[str, int] = {}
        self._open: list[Kept] = []

    def add(self, seen: RequestSeen) -> bool:
        """Keep a request; True where a window was completed by it."""
        tokens = float(seen.decode.sum()) / (self.shape.num_layers * self.shape.top_k)
        one = Kept(
            self.serial,
            float(seen.at_s),
            seen.worker,
            seen.prefill.astype(np.uint32),
            seen.decode.astype(np.uint32),
            tokens,
        )
        self.serial += 1
        if len(self.kept) >= self.most:
            self._drop(one.worker)
        self.kept.append(one)
        self._by_worker[one.worker] = self._by_worker.get(one.worker, 0) + 1
        self._open.append(one)
        if len(self._open) < self.settings.window:
            return False
        self.windows.append(sample_of(self._open))
        self.drift.update(np.stack([kept.decode for kept in self._open]).sum(axis=0, dtype=np.float64))
        self._open = []
        return True

    def _drop(self, worker: str) -> None:
        """Make room: a worker that holds more than half of the places gives up its own oldest request."""
        own = self._by_worker.get(worker, 0)
        if self.shape.workers > 1 and 2 * own > self.most:
            at = next(at for at, kept in enumerate(self.kept) if kept.worker == worker)
            del self.kept[at]
        else:
            worker = self.kept.popleft().worker
        self._by_worker[worker] -= 1
        if not self._by_worker[worker]:
            del self._by_worker[worker]

    def newer(self, serial: int) -> list[Kept]:
        """Kept requests after this one, oldest first."""
        return [kept for kept in self.kept if kept.serial > serial]

    def alike(self) -> list[Kept]:
        """Kept requests that are the same traffic as the newest window, oldest first, the open window among them."""
        if not self.windows:
            return list(self._open)
        pooled, since = self.windows[-1], self.windows[-1].first
        for window in reversed(list(self.windows)[:-1]):
            if differs(window, pooled, self.settings.drift_ratio):
                break
            pooled, since = _pooled(window, pooled), window.first
        return self.newer(since - 1)

    def shown_ratio(self, reference: TrafficSample) -> float:
        """Least ratio of the newest windows to a reference, over all that must agree; 0 as long as there are fewer."""
        count = self.settings.drift_windows
        if len(self.windows) < count:
            return 0.0
        return min(drift_ratio(window, reference) for window in list(self.windows)[-count:])

    def drifted(self, reference: TrafficSample) -> bool | None:
        """Whether the newest windows are all other traffic than the reference; None as long as there are too few."""
        newest = list(self.windows)[-self.settings.drift_windows :]
        if len(newest) < self.settings.drift_windows:
            return None
        return all(differs(window, reference, self.settings.drift_ratio) for window in newest)

    def estimate(self) -> DriftEstimate:
        """How fast the load drifts from window to window."""
        return self.drift.estimate()

    def calibration(self, requests: list[Kept]) -> Calibration:
        return Calibration(
            prefill=np.stack([one.prefill for one in requests]),
            decode=np.stack([one.decode for one in requests]),
            gates=None,
            requests=np.array([one.serial for one in requests], np.int64),
            halved=False,
            model=self.shape.model,
            top_k=self.shape.top_k,
        )


def sample_of(requests: list[Kept]) -> TrafficSample:
    chances = np.stack([one.decode.ravel() / np.float32(max(1.0, one.tokens)) for one in requests]).astype(np.float32)
    mean = chances.mean(axis=0)
    products = (chances - mean) @ (chances - mean).T
    total, squares = float(np.trace(products)), float((products**2).sum())
    directions = total**2 / squares if squares > 0 else 1.0
    return TrafficSample(
        requests[0].serial, len(requests), mean, total / max(1, len(requests) - 1), max(1.0, directions)
    )


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
