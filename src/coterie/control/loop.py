"""The live loop: finished requests → drift → a re-fit in the background → score → swap or keep, with the reason.

    observe ──► intake (wrong, late, duplicated: counted, ignored) ──► windows of requests
    tick    ──► do the newest windows differ from the fit's requests? ──► FitJob (the driver runs it)
            ──► candidate: both fits route the newest requests, on which neither was fitted ──► swap, or keep
            ──► after a swap: score the previous fit on requests since the swap ──► fall back, or go on

The loop also re-fits when there are several times as many requests of the same traffic as the fit was made from, since
a fit on few requests is poor. After a candidate that does not pay, drift is measured against the traffic that the
candidate was made from, so that only different traffic, or much more of the same, starts the next re-fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.control.advice import Advice, PlacementAdvisor
from coterie.control.base import ControlEvent, ControlSettings, FitJob, Kind, LoadSeen, LoopShape, RequestSeen, Tick
from coterie.control.intake import Intake, is_number
from coterie.control.scoring import FitComparison, Scorer
from coterie.control.traffic import Kept, Traffic, TrafficSample, reference_of, sample_of
from coterie.control.written import ReportedMap
from coterie.costs.lines import DecodeStepPrices
from coterie.errors import check, check_at_least
from coterie.routing import Router, RouterFit
from coterie.types import Placement

EARLY = 0.2
"""Share of the allowed error probability that the early score of a candidate, on half of the requests, may use."""
FALL_BACK_CHECKS = 4
"""Times that the previous fit is scored after a swap, each after twice as many requests as the time before."""


class Known(NamedTuple):
    """A fit and the requests that it was made from."""

    fit: RouterFit
    newest: int
    """Serial number of the newest of these requests; -1 for the fit that the loop started with."""
    sample: TrafficSample


class Candidate(NamedTuple):
    """A fit that waits to be scored."""

    known: Known
    since_s: float
    looked: bool = False
    """Whether the candidate was already scored on half of the requests."""


class Watch(NamedTuple):
    """The fit that was in force before the last swap, scored for some time in case it is better."""

    known: Known
    since: int
    """Serial number of the newest request at the swap."""
    after: int
    """Number of requests since the swap at which the fit is next scored."""
    checks: int


class Swap(NamedTuple):
    """A fit handed to the driver, which has not confirmed the swap yet."""

    known: Known
    back: bool
    at_s: float


class ControlLoop:
    """Observes a fleet and decides when to re-fit its router. Has no clock; see the module docstring."""

    def __init__(
        self,
        shape: LoopShape,
        fit: RouterFit,
        make: Callable[[RouterFit], Router],
        settings: ControlSettings | None = None,
        *,
        batch: int = 16,
        prices: DecodeStepPrices | None = None,
        advisor: PlacementAdvisor | None = None,
        now_s: float = 0.0,
    ) -> None:
        """Start with `fit` in force.

        `make` creates the pool's router from a fit, for scoring. `batch` is the mean number of requests in a worker's
        step. Without `prices` a step's time is the number of experts it touches. `advisor` gets the loads.
        """
        shape.check()
        check_at_least(1, batch=batch)
        check(
            fit.learned.shape == (shape.num_layers, shape.num_experts),
            f"the fit is for {fit.num_layers} layers of {fit.num_experts} experts; "
            f"the loop for {shape.num_layers} of {shape.num_experts}",
        )
        self.shape, self.settings, self.batch = shape, settings or ControlSettings(), batch
        self.intake = Intake(shape, self.settings, now_s)
        self.counters = self.intake.counters
        self.traffic = Traffic(shape, self.settings)
        self.scorer, self.advisor = Scorer(make, batch, prices), advisor
        self.events: deque[ControlEvent] = deque(maxlen=self.settings.events)
        sample = reference_of(fit)
        self._in_force = Known(fit.widened(shape.workers), -1, sample)
        self._looked_at = sample
        self._job: tuple[FitJob, TrafficSample] | None = None
        """A re-fit that the driver is running, and the sample of its requests."""
        self._candidate: Candidate | None = None
        self._watch: Watch | None = None
        self._swap: Swap | None = None
        self._started_s: float | None = None
        self._resized = False
        self._new_window = False
        self._told_of: dict[str, str] = {}
        self._seconds = 0.0
        self._swapped_s: float | None = None
        self._jobs = 0
        self._rows: dict[str, int] = {}
        """Decode worker → its row in the fit."""
        self._tick_events: list[ControlEvent] = []

    # ------------------------------------------------------------------------------------------------------- inputs

    @property
    def fit(self) -> RouterFit:
        """The fit in force."""
        return self._in_force.fit

    @property
    def advice(self) -> Advice | None:
        """The current placement advice; None without an advisor or before its first window."""
        return None if self.advisor is None else self.advisor.advice

    def written(self, plan_id: int, path: str, wait_s: float) -> None:
        """Record that the plan of an advice was written; it is applied when the maps that workers report say so."""
        if self.advisor is not None:
            self._advised(self.advisor.written(plan_id, path, wait_s, self.intake.now_s))

    def follow(self, worker: str, version: int, placement: Placement) -> None:
        """Take the expert map in force at a worker: advice starts from it."""
        if self.advisor is not None:
            self._advised(self.advisor.follow(worker, ReportedMap(version, placement), self.intake.now_s))

    def bind(self, workers: Mapping[str, int | None], rows: Mapping[str, int] | None = None) -> None:
        """Set the workers, which rank of the advisor's group each is, if any, and the rows of those that decode.

        A claim to a rank that cannot hold is ignored, with an event.
        """
        self._rows = dict(rows or {})
        for worker, words in ({} if self.advisor is None else self.advisor.bind(workers)).items():
            self._tell("ignored", words, {"reason": "placement_rank", "worker": worker}, count="ignored_placement_rank")

    def observe(self, seen: RequestSeen | LoadSeen) -> None:
        """Take a finished request or a worker's load; invalid ones are counted and ignored."""
        if self.intake.refused(seen) is not None:
            return
        if isinstance(seen, RequestSeen):
            self._new_window |= self.traffic.add(seen)
        elif self.advisor is not None and not self.advisor.observe(seen):
            self.intake.ignore("overlapping_load", seen.worker)

    def candidate(self, fit: RouterFit, seconds: float) -> None:
        """Take the fit that a job returned after `seconds`. It is scored at later ticks."""
        if self._job is None:
            self._tell("refit_kept", "no job was under way")
            return
        (job, sample), self._job = self._job, None
        if job.workers != self.shape.workers:
            self._tell("refit_kept", f"it is for {job.workers} workers; there are {self.shape.workers} now")
            return
        if not _fits(fit, self.shape):
            self._tell("refit_failed", "the job's result is no fit for this model and fleet", count="refits_failed")
        else:
            self._candidate = Candidate(Known(fit, int(job.calibration.requests[-1]), sample), self.intake.now_s)
            self.counters["refits_made"] += 1
            self._seconds = seconds if is_number(seconds) else 0.0

    def fit_failed(self, problem: str) -> None:
        """Record that the job raised an error."""
        if self._job is not None:
            self._looked_at, self._job = self._job[1], None
        self._tell("refit_failed", str(problem)[:500], count="refits_failed")

    def swapped(self, now_s: float) -> None:
        """Record that the fit of the last `Tick.use` is in force."""
        if self._swap is None:
            return
        (known, back, _), before, self._swap = self._swap, self._in_force, None
        self._in_force = known._replace(fit=known.fit.widened(self.shape.workers))
        # After a fall back, drift is measured against the present traffic: the older fit was scored better on it.
        alike = self.traffic.alike() if back else []
        self._looked_at = sample_of(alike) if alike else known.sample
        self.counters["swaps"] += 1
        if self.advisor is not None:
            self._advised(self.advisor.rerouted(self._sent(), self.intake.now_s))
        self._swapped_s = float(now_s) if is_number(now_s) else self.intake.now_s
        self._watch = None if back else Watch(before, self.traffic.serial - 1, self.settings.score_requests, 0)

    def _sent(self) -> dict[str, NDArray[np.float64]]:
        """Forecast [layer, expert] tokens that the fit in force sends to each worker, by routing the newest requests.

        Empty if there are fewer than two of the present traffic, or if routing fails.
        """
        newest = self.traffic.alike()[-self.settings.score_requests :]
        try:
            sent = self.scorer.sent(self.fit, newest, self.shape.workers) if len(newest) > 1 and self._rows else ()
        except Exception as error:  # a plugin's router may raise anything
            self._tell("too_little", f"no forecast of what the router sends: {error}"[:500])
            sent = ()
        return {worker: sent[row] for worker, row in self._rows.items() if 0 <= row < len(sent)}

    def swap_failed(self, now_s: float, problem: str) -> None:
        """Record that the fit of the last `Tick.use` could not be put in force; the previous fit still is."""
        if self._swap is not None:
            self._looked_at, self._swap = self._swap.known.sample, None
        values = {"at_s": now_s} if is_number(now_s) else {}
        self._tell("swap_failed", str(problem)[:500], values, count="swaps_failed")

    def resize(self, workers: int) -> None:
        """Set the number of decode workers. A candidate or watched fit for another number is dropped."""
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            self.intake.ignore("workers")
            return
        if workers == self.shape.workers:
            return
        self.shape = self.intake.shape = self.traffic.shape = self.shape._replace(workers=workers)
        self._in_force = self._in_force._replace(fit=self._in_force.fit.widened(workers))
        if self._candidate is not None:
            self._tell("refit_kept", f"the fleet has {workers} workers now")
        self._candidate = self._watch = None
        self._resized = True

    # ------------------------------------------------------------------------------------------------------ decision

    def tick(self, now_s: float) -> Tick:
        """Decide what to do now. Cheap, unless a fit must be scored."""
        timely, advisor = self.intake.tick(now_s), self.advisor
        for event in self.intake.untold:
            self._add(event)
        self.intake.untold.clear()
        use, job = (self._weigh(), self._consider()) if timely else (None, None)
        try:
            if timely and advisor:
                self._advised(advisor.tick(self.intake.now_s, list(self.traffic.kept)))
        except Exception as error:  # a plugin's planner may raise anything
            self._tell("plan_kept", f"planning failed: {error}"[:500], count="plans_failed")
        events, self._tick_events = self._tick_events, []
        return Tick(events, job, use)

    def _weigh(self) -> RouterFit | None:
        """Score the candidate or the previous fit if due; return a fit to swap in, or None."""
        if self._swap is not None:
            if self.intake.now_s - self._swap.at_s > self.settings.candidate_s:
                self.swap_failed(self.intake.now_s, "nobody said whether it was done")
            return None
        try:
            if self._candidate is not None:
                return self._weigh_candidate(self._candidate)
            return None if self._watch is None else self._weigh_before(self._watch)
        except Exception as error:  # a plugin's router may raise anything
            self._candidate = self._watch = None
            self._tell("refit_failed", f"scoring failed: {error}"[:500], count="refits_failed")
            return None

    def _weigh_candidate(self, candidate: Candidate) -> RouterFit | None:
        """Score the candidate on the newest requests; it is taken early, on half of them, if it is far better."""
        settings, known = self.settings, candidate.known
        newer = self.traffic.newer(max(known.newest, self._in_force.newest))
        whole = len(newer) >= settings.score_requests
        if not whole and (candidate.looked or 2 * len(newer) < settings.score_requests):
            if self.intake.now_s - candidate.since_s > settings.candidate_s:
                self._keep(known, f"{len(newer)} newer requests came in {settings.candidate_s:g} s", {})
            return None
        scored = self._compare(known.fit, newer, 1.0 - (1.0 - settings.confidence) * (1.0 if whole else EARLY))
        better = scored.saving > settings.margin and scored.bound > 0
        if not whole and not better:
            self._candidate = candidate._replace(looked=True)
            return None
        self._candidate = None
        values = scored.values() | {"fit_s": self._seconds}
        if not better:
            self._keep(known, f"it would save {scored.words}", values)
            return None
        self._tell("refit_taken", f"it saves {scored.words}", values, count="refits_taken")
        self._swap = Swap(known, False, self.intake.now_s)
        return known.fit

    def _keep(self, known: Known, reason: str, values: Mapping[str, float | str]) -> None:
        self._candidate = None
        self._looked_at = known.sample
        self._tell("refit_kept", reason, values, count="refits_kept")

    def _weigh_before(self, watch: Watch) -> RouterFit | None:
        """Score the fit before the swap on requests since the swap; return it if it is better."""
        newer = self.traffic.newer(max(watch.since, self._in_force.newest))
        if len(newer) < min(watch.after, self.traffic.most):
            return None
        scored = self._compare(watch.known.fit, newer, self.settings.confidence)
        if scored.saving > self.settings.margin and scored.bound > 0:
            self._tell("fall_back", f"the fit before saves {scored.words}", scored.values(), count="fall_backs")
            self._swap = Swap(watch.known, True, self.intake.now_s)
            return watch.known.fit
        done = watch.checks + 1 >= FALL_BACK_CHECKS
        self._watch = None if done else watch._replace(after=2 * watch.after, checks=watch.checks + 1)
        return None

    def _compare(self, candidate: RouterFit, newer: list[Kept], sure: float) -> FitComparison:
        newest = newer[-self.settings.score_requests :]
        return self.scorer.compare(self.fit, candidate, newest, self.shape.workers, self.settings.pieces, sure)

    def _consider(self) -> FitJob | None:
        """Start a re-fit if the traffic has changed, or if there are many more requests of it."""
        if self._job is not None or self._candidate is not None or self._swap is not None or not self._new_window:
            return None
        self._new_window = False
        settings, traffic = self.settings, self.traffic
        ratio = traffic.shown_ratio(self._looked_at)
        alike = traffic.alike()[-settings.fit_requests :]
        why = self._why(traffic.drifted(self._looked_at), ratio, len(alike))
        if why is None:
            return None
        values = {"ratio": ratio, "requests": float(len(alike))}
        needed = max(settings.min_requests, 4 * self.shape.workers)
        if len(alike) < needed:
            self._once("too_little", f"{why}; {len(alike)} requests of it, {needed} are needed", values)
            return None
        now_s = self.intake.now_s
        if self._started_s is not None and now_s < self._started_s + settings.cooldown_s:
            self._once("cooldown", f"{why}; the last re-fit began {now_s - self._started_s:.3g} s ago", values)
            return None
        return self._start(alike, why, values)

    def _why(self, drifted: bool | None, ratio: float, alike: int) -> str | None:
        """Return the reason for a re-fit in words, or None."""
        settings = self.settings
        if self._resized:
            return f"the fleet has {self.shape.workers} workers now"
        much = f"differ {ratio:.3g} times as much as chance gives"
        if drifted:
            values = {"ratio": ratio, "half_life_windows": self.traffic.drift.estimate().half_life}
            self._once("drift", f"{settings.drift_windows} windows {much}", values)
            return "the traffic changed"
        if drifted is not None:
            self._once("no_drift", f"the newest windows {much}")
        fitted = self._looked_at.requests
        grown = fitted < settings.fit_requests and alike >= settings.growth * fitted
        return f"{alike} requests of the traffic that {fitted} were fitted on" if grown else None

    def _start(self, alike: list[Kept], why: str, values: Mapping[str, float | str]) -> FitJob:
        seed = int(np.random.SeedSequence([self.settings.seed, self._jobs]).generate_state(1)[0])
        self._jobs += 1
        job = FitJob(
            self.traffic.calibration(alike), self.shape.workers, self.batch, seed, self.fit.weighting, self.fit.profiles
        )
        self._job, self._started_s, self._resized = (job, sample_of(alike)), self.intake.now_s, False
        self._told_of.pop("waiting", None)
        self._tell("refit_started", f"{why}: {len(alike)} requests", values, count="refits_started")
        return job

    # -------------------------------------------------------------------------------------------------------- telling

    def status(self) -> dict[str, Any]:
        """Return the state of the loop as plain values."""
        return {
            "now_s": self.intake.now_s,
            "model": self.shape.model,
            "workers": self.shape.workers,
            "kept_requests": len(self.traffic.kept),
            "windows": len(self.traffic.windows),
            "drift_ratio": self.traffic.shown_ratio(self._looked_at),
            "drift": self.traffic.drift.estimate().reason,
            "fit_requests": self._in_force.sample.requests,
            "swapped_s": self._swapped_s,
            "job": self._job is not None,
            "candidate": self._candidate is not None,
            "swap": self._swap is not None,
            "watching": self._watch is not None,
            "counters": dict(self.counters),
        }

    def _once(self, kind: Kind, reason: str, values: Mapping[str, float | str] | None = None) -> None:
        """Make an event unless the last one of its group was of the same kind.

        The groups are the state of the traffic, and the condition that delays a re-fit.
        """
        sort = "traffic" if kind in ("drift", "no_drift") else "waiting"
        if self._told_of.get(sort) != kind:
            self._told_of[sort] = kind
            self._tell(kind, reason, values)

    def _tell(
        self, kind: Kind, reason: str, values: Mapping[str, float | str] | None = None, count: str | None = None
    ) -> None:
        """Make an event, and count it under the name `count`, if given."""
        if count is not None:
            self.counters[count] += 1
        self._add(ControlEvent(self.intake.now_s, kind, reason, values or {}))

    def _advised(self, events: Iterable[ControlEvent]) -> None:
        """Add events of the advisor, and count the plans that were applied or not taken."""
        for event in events:
            self.counters["plans_applied"] += bool(event.values.get("applied"))
            self.counters["plans_not_taken"] += event.kind == "plan_not_taken"
            self._add(event)

    def _add(self, event: ControlEvent) -> None:
        self.events.append(event)
        self._tick_events.append(event)
        del self._tick_events[: -self.settings.events]


def _fits(fit: object, shape: LoopShape) -> bool:
    """Return whether `fit` is a RouterFit for this model and this number of workers."""
    return (
        isinstance(fit, RouterFit)
        and fit.learned_ is not None
        and fit.learned.shape == (shape.num_layers, shape.num_experts)
        and fit.workers == shape.workers
    )
