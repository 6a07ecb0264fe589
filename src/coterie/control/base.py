"""Inputs, outputs and settings of the live loop.

The loop has no clock, no socket and no thread. Its driver (a gateway, a simulator, a replay) passes in finished
requests and loads, calls `tick` when it chooses, runs the fit jobs and swaps the router. The loop knows the time only
from its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_not_negative, check_positive, check_positive_share
from coterie.footprints.signatures import Weighting
from coterie.routing import Calibration, RouterFit
from coterie.routing.clustering import best_columns


@dataclass(frozen=True, slots=True, eq=False)
class FitJob:
    """Fit a router to given requests. Pure and picklable: the same job gives the same fit in any process."""

    calibration: Calibration
    workers: int
    batch: int
    seed: int
    weighting: Weighting = "count_idf"
    like: NDArray[np.float32] | None = None
    """[worker, expert index] profiles of the fit in force. The new clusters are assigned to the workers with the most
    similar profiles, so that a swap moves as little traffic as possible."""

    def run(self) -> RouterFit:
        everywhere = bool((self.calibration.prefill > 0).all())  # count_idf would weight all experts with 0
        fit = RouterFit(self.workers, self.batch, "count" if everywhere else self.weighting)
        fit.fit(self.calibration, np.random.default_rng([self.seed, 17]))
        if self.like is not None and self.like.shape == fit.profiles.shape:
            _reorder(fit, self.like)
        return fit


def _reorder(fit: RouterFit, like: NDArray[np.float32]) -> None:
    """Assign clusters to workers so that the summed squared distance to the old profiles is least."""
    learned = fit.learned
    distance = ((like**2).sum(axis=1)[:, None] + (learned.profiles**2).sum(axis=1)) - 2 * like @ learned.profiles.T
    rows = best_columns(-distance)
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
    "plan_written",
    "plan_confirmed",
    "plan_not_taken",
    "map_followed",
    "action",
    "cooldown",
    "too_little",
    "ignored",
]
KINDS: tuple[str, ...] = get_args(Kind)


class LoopShape(NamedTuple):
    """Sizes of the model and of the fleet that the loop controls."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    workers: int
    """Number of decode workers: rows of the fit."""

    def check(self) -> None:
        check_at_least(1, **{name: getattr(self, name) for name in ("num_layers", "num_experts", "top_k", "workers")})
        check(self.top_k <= self.num_experts, f"top_k={self.top_k} must be at most num_experts={self.num_experts}")


class RequestSeen(NamedTuple):
    """One finished request."""

    at_s: float
    request_id: str
    worker: str
    prefill: NDArray[np.integer]
    """[layer, expert] activations of the prompt tokens."""
    decode: NDArray[np.integer]
    """[layer, expert] activations of the output tokens."""


class LoadSeen(NamedTuple):
    """Load of one worker over an interval of `seconds`."""

    at_s: float
    worker: str
    tokens: NDArray[np.float64]
    """[layer, expert] tokens in the interval."""
    steps: int
    seconds: float


class ControlEvent(NamedTuple):
    """One decision of the loop, with its reason."""

    at_s: float
    kind: Kind
    reason: str
    values: Mapping[str, float | str] = {}


class Tick(NamedTuple):
    """Decisions of the loop at one tick."""

    events: list[ControlEvent]
    job: FitJob | None = None
    """Re-fit to run in the background; pass its result to `candidate`, or its error to `fit_failed`."""
    use: RouterFit | None = None
    """Fit to put in force now, atomically; then call `swapped`, or `swap_failed`."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of the loop's decisions. Counts are numbers of finished requests."""

    window: int = 32
    """Requests in a window. The experts of a window are compared with those of the requests behind the fit."""
    min_requests: int = 64
    """Least number of requests of the same traffic for a re-fit."""
    fit_requests: int = 384
    """Largest number of requests for a re-fit: the newest of the same traffic."""
    growth: float = 3.0
    """Re-fit once there are this many times as many requests of the same traffic as the fit was made from."""
    drift_ratio: float = 2.0
    """A window counts as different traffic if its squared distance is above this multiple of the one due to chance."""
    drift_windows: int = 2
    """Consecutive windows of different traffic before a re-fit."""
    pieces: int = 8
    """Number of pieces into which the scored requests are cut; their spread bounds the saving from below."""
    score_requests: int = 128
    """Requests on which a candidate and the fit in force are compared; newer than those that either was fitted on."""
    margin: float = 0.005
    """Least predicted saving, as a share of decode time, for which the router is swapped."""
    confidence: float = 0.975
    """One-sided confidence of the saving's lower bound over the pieces, which must be above 0 for a swap."""
    cooldown_s: float = 20.0
    """Least time between the starts of two re-fits."""
    candidate_s: float = 900.0
    """Time after which a candidate that could not be scored is dropped."""
    ahead_s: float = 60.0
    """Values whose time is more than this ahead of the loop's time are ignored."""
    late_s: float = 600.0
    """Values older than this are ignored."""
    per_tick: int = 4096
    """Largest number of values from one worker between two ticks; further ones are counted and ignored."""
    kept_bytes: int = 256 << 20
    """Memory limit of the kept requests; for large models it holds fewer than `fit_requests` + `score_requests`."""
    events: int = 512
    """Number of newest events that are kept."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, drift_windows=self.drift_windows, drift_ratio=self.drift_ratio)
        check_at_least(1, per_tick=self.per_tick, events=self.events, kept_bytes=self.kept_bytes)
        check_at_least(2, window=self.window, pieces=self.pieces, growth=self.growth)
        check_at_least(3, min_requests=self.min_requests)
        check_not_negative(margin=self.margin, cooldown_s=self.cooldown_s, seed=self.seed)
        check_positive(candidate_s=self.candidate_s, ahead_s=self.ahead_s, late_s=self.late_s)
        check_positive_share(confidence=self.confidence)
        check(
            self.fit_requests >= self.min_requests,
            f"fit_requests={self.fit_requests} must be at least min_requests={self.min_requests}",
        )
        check(
            self.score_requests >= 2 * self.pieces,
            f"score_requests={self.score_requests} must be at least twice pieces={self.pieces}",
        )
