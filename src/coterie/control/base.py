"""What the live loop is told, what it answers, and its settings.

The loop has no clock, no socket and no thread. Whoever drives it (a gateway, a simulator, a replay) hands it what was
seen, asks at its own times what to do, runs the jobs and swaps the router. Time comes in with the values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.errors import ConfigError, check_at_least, check_not_negative, check_positive, check_positive_share
from coterie.footprints.signatures import Weighting
from coterie.routing import Calibration, RouterFit


@dataclass(frozen=True, slots=True, eq=False)
class FitJob:
    """Fit a router to given requests. Pure and picklable: the same job gives the same fit in any process."""

    calibration: Calibration
    workers: int
    batch: int
    seed: int
    weighting: Weighting = "count_idf"
    like: NDArray[np.float32] | None = None
    """[worker, expert index] profiles of the fit in force. Clusters go to the workers whose profiles they resemble, so
    that a swap moves as little traffic as possible."""

    def run(self) -> RouterFit:
        everywhere = bool((self.calibration.prefill > 0).all())  # count_idf then tells no two requests apart
        fit = RouterFit(self.workers, self.batch, "count" if everywhere else self.weighting)
        fit.fit(self.calibration, np.random.default_rng([self.seed, 17]))
        if self.like is not None and self.like.shape == fit.profiles.shape:
            _reorder(fit, self.like)
        return fit


def _reorder(fit: RouterFit, like: NDArray[np.float32]) -> None:
    """Give each worker the cluster nearest to its old profile, all together."""
    learned = fit.learned
    distance = ((like**2).sum(axis=1)[:, None] + (learned.profiles**2).sum(axis=1)) - 2 * like @ learned.profiles.T
    rows = linear_sum_assignment(distance)[1]
    fit.learned_ = learned.changed(
        centroids=learned.centroids[rows], profiles=learned.profiles[rows], shares=learned.shares[rows]
    )


Kind = Literal[
    "drift",
    "no_drift",
    "refit_started",
    "refit_taken",
    "refit_kept",
    "refit_failed",
    "swap_failed",
    "fall_back",
    "plan_made",
    "plan_kept",
    "action",
    "cooldown",
    "too_little",
    "ignored",
]
KINDS: tuple[str, ...] = get_args(Kind)


class LoopShape(NamedTuple):
    """The model and the fleet that the loop is for."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    workers: int
    """Decode workers: rows of the fit."""

    def check(self) -> None:
        check_at_least(1, **{name: getattr(self, name) for name in ("num_layers", "num_experts", "top_k", "workers")})
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} must be at most num_experts={self.num_experts}")


class RequestSeen(NamedTuple):
    """One finished request."""

    at_s: float
    request_id: str
    worker: str
    prefill: NDArray[np.integer]
    """[layer, expert] activations of its prompt."""
    decode: NDArray[np.integer]
    """[layer, expert] activations of its output tokens."""


class LoadSeen(NamedTuple):
    """One worker's load over a piece of time."""

    at_s: float
    worker: str
    tokens: NDArray[np.float64]
    """[layer, expert] tokens."""
    steps: int
    seconds: float


class ControlEvent(NamedTuple):
    """One decision of the loop, with its reason."""

    at_s: float
    kind: Kind
    reason: str
    values: Mapping[str, float | str] = {}


class Tick(NamedTuple):
    """What the loop decided at one moment."""

    events: list[ControlEvent]
    job: FitJob | None = None
    """A re-fit to run in the background; hand its result to `candidate`, or its error to `fit_failed`."""
    use: RouterFit | None = None
    """Put this fit in force now, atomically; then call `swapped`, or `swap_failed`."""


class LoopLog(Protocol):
    """Callback: an input of the loop, by the name of what was done."""

    def __call__(self, do: str, /, **values: Any) -> None: ...


def keep_nothing(do: str, /, **values: Any) -> None:
    """The log of a loop that keeps none."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """How the loop decides. Counts are of finished requests."""

    window: int = 32
    """Requests of a window, whose experts are compared with those of the fit's requests."""
    min_requests: int = 64
    """Fewest requests of the same traffic that a fit is made from."""
    fit_requests: int = 384
    """Most requests that a fit is made from: the newest of the same traffic."""
    growth: float = 3.0
    """A fit is made again once there are this many times as many requests of the same traffic as it had."""
    drift_ratio: float = 2.0
    """A window is other traffic where its squared distance is this many times what chance gives."""
    drift_windows: int = 2
    """Windows in a row that must be other traffic before a re-fit."""
    pieces: int = 8
    """Pieces of the scored requests, over which a saving must hold."""
    score_requests: int = 128
    """Requests that a candidate and the fit in force are compared on, newer than all that either was fitted on."""
    margin: float = 0.005
    """Least predicted saving of decode time for which the router is swapped."""
    confidence: float = 0.975
    """One-sided probability of the bound that the saving must exceed 0 by, over the pieces."""
    cooldown_s: float = 20.0
    """Least time between the starts of two re-fits."""
    candidate_s: float = 900.0
    """A candidate that could not be scored for so long is dropped."""
    ahead_s: float = 60.0
    """A time this far past the last known one is not believed."""
    late_s: float = 600.0
    """What is older than this is not used."""
    per_tick: int = 4096
    """Most values that one worker may report between two ticks; more are counted and left out."""
    kept_bytes: int = 256 << 20
    """Most memory for kept requests; large models keep fewer than `fit_requests` + `score_requests`."""
    events: int = 512
    """Newest events that are kept."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(
            2, window=self.window, pieces=self.pieces, growth=self.growth, score_requests=self.score_requests
        )
        check_at_least(1, drift_windows=self.drift_windows, per_tick=self.per_tick, events=self.events)
        check_at_least(3, min_requests=self.min_requests)
        check_at_least(1, drift_ratio=self.drift_ratio, kept_bytes=self.kept_bytes)
        check_not_negative(margin=self.margin, cooldown_s=self.cooldown_s, seed=self.seed)
        check_positive(candidate_s=self.candidate_s, ahead_s=self.ahead_s, late_s=self.late_s)
        check_positive_share(confidence=self.confidence)
        if self.fit_requests < self.min_requests:
            raise ConfigError(f"fit_requests={self.fit_requests} must be at least min_requests={self.min_requests}")
        if self.score_requests < 2 * self.pieces:
            raise ConfigError(f"score_requests={self.score_requests} must be at least twice pieces={self.pieces}")
