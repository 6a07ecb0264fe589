"""Values that routers learn from calibration requests, saved in one file: signature, centroids, profiles, forecast.

The same requests are clustered twice. Expert-locality routing as published uses signatures and a centroid per worker.
Routing by expected distinct experts uses a profile per worker (the mean activation probabilities in decode of the
requests in its union-minimising cluster) and a forecast of a request's own probabilities from its prefill. Row w of
both belongs to worker w: the clusters are matched by the requests they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.lines import DecodeStepPrices
from coterie.costs.step import StepModel, in_order
from coterie.errors import (
    ConfigError,
    InputError,
    TraceError,
    check,
    check_at_least,
    check_file,
    check_within,
    require_fitted,
)
from coterie.footprints.signatures import Counts, Signature, Weighting
from coterie.routing.base import Router, routers
from coterie.routing.calibration import Calibration, activation_probabilities, calibration, counted_tokens
from coterie.routing.clustering import Labels, best_columns, cluster
from coterie.routing.fleet import Fleet
from coterie.routing.forecast import DecodeForecast
from coterie.routing.learned import Learned, check_ranges
from coterie.routing.union import cluster_profiles, union_clusters
from coterie.traces.activations import ActivationTrace
from coterie.traces.store import ArrayFile, write_described

FORMAT, VERSION = "coterie-router", 1
FIT_HINT = "a fit to a trace; make it with coterie.fit_router(trace, workers)"
RESTART_WORK = 2e8
"""Work budget for all random starts of the union search; one start costs requests x expert indices x workers. 1 to 10
starts are made."""


MOST_BATCH = 1 << 16
"""Largest accepted `batch`: far more requests than any device decodes in a step."""


@dataclass(slots=True, eq=False)
class RouterFit:
    """Values that routers learn about a model and its traffic. Construct it with settings, then call :meth:`fit`."""

    workers: int
    """Number of decode workers in the fleet."""
    batch: int = 16
    """Number of requests in a worker's decode step that clusters are optimised for."""
    weighting: Weighting = "count_idf"
    """Weighting of experts in signatures. `gate` is refused: a request carries counts, not gate weights."""
    speeds: NDArray[np.floating] | None = None
    """[worker] relative speed; None if all are equal."""
    learned_: Learned | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_at_least(1, workers=self.workers)
        check_within(1, MOST_BATCH, batch=self.batch)
        check(
            self.weighting != "gate",
            "weighting='gate' cannot be fitted for routing: requests carry counts, not gate weights",
        )

    def fit(
        self,
        source: ActivationTrace | Calibration,
        rng: Generator,
        report: Callable[[str, float], None] = lambda _part, _seconds: None,
    ) -> RouterFit:
        """Learn from calibration requests; `report` is called with the name and the seconds of each part."""
        known = calibration(source) if isinstance(source, ActivationTrace) else source
        workers, requests = self.workers, len(known.prefill)
        needed = max(3, workers)
        check(requests >= needed, f"{requests} calibration requests have both phases; {workers} workers need {needed}")
        with _timed("probabilities", report):
            before, after = known.probabilities
        with _timed("signature", report):
            signature = Signature(self.weighting).fit(known.prefill, known.decode, rng)
        with _timed("cosine clusters", report):
            cosine = cluster(signature.transform_all(known.prefill), workers, rng, speeds=self.speeds)
        with _timed("forecast", report):
            tokens = counted_tokens(known.prefill, known.top_k).astype(np.int64)
            forecast = DecodeForecast().fit(before, after, tokens, rng)
        with _timed("union clusters", report):
            pooled = activation_probabilities(known.prefill + known.decode, known.top_k)
            restarts = int(np.clip(RESTART_WORK / (pooled.size * workers), 1, 10))
            union = union_clusters(
                pooled, workers, self.batch, rng, speeds=self.speeds, starts=(cosine.labels,), restarts=restarts
            )
            labels = _follow(union.labels, cosine.labels, workers, self.speeds)
        self.learned_ = Learned.of(
            model=known.model,
            num_layers=known.prefill.shape[1],
            num_experts=known.prefill.shape[2],
            top_k=known.top_k,
            signature=signature,
            centroids=cosine.centroids,
            profiles=cluster_profiles(after, labels, workers),
            forecast=forecast,
            shares=np.asarray(np.bincount(labels, minlength=workers) / len(labels), np.float32),
            seen=known.digests,
        )
        return self

    @property
    def learned(self) -> Learned:
        return require_fitted(self.learned_, "the router fit")

    @property
    def model(self) -> str:
        return self.learned.model

    @property
    def num_layers(self) -> int:
        return self.learned.num_layers

    @property
    def num_experts(self) -> int:
        return self.learned.num_experts

    @property
    def profiles(self) -> NDArray[np.float32]:
        """[worker, expert index] mean activation probabilities in decode."""
        return self.learned.profiles

    def widened(self, workers: int) -> RouterFit:
        """Return the fit extended to more workers without fitting again; for as many or fewer, the fit itself.

        Existing rows stay as they are. Each additional row repeats the cluster that then has the largest share of
        requests per worker. A fleet of fewer workers than rows has rows without a living worker.
        """
        if workers <= self.workers:
            return self
        rows = self.learned.rows_for(workers)
        wider = replace(self, workers=workers, speeds=None if self.speeds is None else np.asarray(self.speeds)[rows])
        wider.learned_ = self.learned.changed(
            centroids=self.learned.centroids[rows],
            profiles=self.learned.profiles[rows],
            shares=(self.learned.shares / np.bincount(rows))[rows].astype(np.float32),
        )
        return wider

    def router(self, name: str, model: StepModel, **settings: Any) -> Router:
        """Make a registered router for a fleet of this fit's workers, with step prices from `model`.

        `settings` are the router's own, such as ``band=0.05``; a `cost` among them replaces the prices.
        """
        cost = DecodeStepPrices.of(model, self.batch, placement=in_order(model))
        return routers.make(name, {"fitted": self, "cost": cost, "seed": 0}, **settings)

    def fleet(self, places: int, speeds: NDArray[np.floating] | list[float] | None = None) -> Fleet:
        """Make an empty fleet of workers that run `places` requests each, with the fitted profiles as priors.

        Leave room: a router can only choose workers with a free place. Four times a worker's mean number of running
        requests is plenty.
        """
        return Fleet([places] * self.workers, self.profiles, self.speeds if speeds is None else speeds)

    def similarities(self, footprint: Counts) -> NDArray[np.float32]:
        """Return [worker] the cosine of a request's signature with each centroid; `footprint` is of the prefill."""
        return self.learned.similarities(self.learned.signature.transform(footprint))

    def profile(self, footprint: Counts) -> NDArray[np.float32]:
        """Return [expert index] the activation probabilities forecast for decode, from prefill counts [layer, expert].

        If all counts are 0, these are the mean over the calibration requests.
        """
        learned = self.learned.of_shape(footprint)
        profile, tokens = learned.read(footprint)
        learned.forecast.apply(profile, tokens)
        return profile

    def for_fleet(self, footprint: Counts | None, fleet: Fleet) -> Learned:
        """Return the fitted values.

        Raises ConfigError for a footprint of another model's shape, or a fleet that does not track its experts.
        """
        if footprint is None:
            return self.learned
        learned, tracked = self.learned.of_shape(footprint), fleet.missed.shape[1]
        if tracked != footprint.size:  # no check: this is part of a decision
            raise ConfigError(
                f"{learned.model} was fitted for {footprint.size} expert indices; the fleet has {tracked}"
                if tracked
                else "the fleet tracks no experts: make it with fitted.fleet(places)"
            )
        return learned

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, replacing an older one atomically; the same values give the same bytes."""
        learned = self.learned
        kept = learned.forecast.map
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": learned.model,
            "num_layers": learned.num_layers,
            "num_experts": learned.num_experts,
            "top_k": learned.top_k,
            "batch": self.batch,
            "weighting": learned.signature.weighting,
            "own": kept.own,
            "noise": kept.noise,
            "ridge": kept.ridge,
        }
        arrays: dict[str, NDArray[Any]] = {
            "weights": learned.signature.weights,
            "layers": learned.signature.layers,
            "centroids": learned.centroids,
            "profiles": learned.profiles,
            "shares": learned.shares,
            "before": kept.before,
            "after": kept.after,
            "inward": kept.inward,
            "outward": kept.outward,
        }
        if learned.seen is not None:
            arrays["seen"] = learned.seen
        write_described(Path(path), arrays, about)

    @classmethod
    def load(cls, path: str | Path, model: str | None = None, workers: int | None = None) -> RouterFit:
        """Read a saved file; `model` and `workers`, if given, must match."""
        file = Path(path)
        arrays = ArrayFile(file)
        about = arrays.about(FORMAT, VERSION)
        found: dict[str, Any] = {name: np.array(arrays[name]) for name in _STORED}
        for name, array in found.items():
            dtype = np.dtype(np.int64 if name == "layers" else np.float32)
            check_file(array.dtype == dtype, file, name, f"is {array.dtype}; expected {dtype}")
            check_file(np.isfinite(array).all(), file, name, "holds NaN or infinity")
        seen = arrays.get("seen")
        if seen is not None and (seen.dtype != np.uint64 or seen.ndim != 1):
            raise TraceError(file, "seen", f"is {seen.dtype} of {seen.ndim} dimensions; expected uint64 of 1")
        try:
            signature = Signature.restored(str(about["weighting"]), found["weights"], found["layers"])
            forecast = DecodeForecast.restored(
                **{name: found[name] for name in ("before", "after", "inward", "outward")},
                own=float(about["own"]),
                noise=float(about["noise"]),
                ridge=float(about["ridge"]),
            )
            fitted = cls(len(found["centroids"]), int(about["batch"]), cast(Weighting, signature.weighting))
            fitted.learned_ = Learned.of(
                model=str(about["model"]),
                signature=signature,
                forecast=forecast,
                num_layers=int(about["num_layers"]),
                num_experts=int(about["num_experts"]),
                top_k=int(about["top_k"]),
                **{name: found[name] for name in ("centroids", "profiles", "shares")},
                seen=None if seen is None else np.array(seen),
            )
            check_ranges(fitted.learned_)
        except KeyError as error:
            raise TraceError(file, f"metadata {error.args[0]}", "is missing") from None
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(file, "contents", str(error)) from None
        check(
            model in (None, fitted.model),
            f"{file} was fitted for model {fitted.model!r}; the fleet serves {model!r}",
            InputError,
        )
        check(
            workers in (None, fitted.workers),
            f"{file} was fitted for {fitted.workers} workers; the fleet has {workers}: fit it again",
            InputError,
        )
        return fitted

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError if the fleet has another number of workers."""
        if workers != self.workers:  # no check: this is part of a decision
            raise ConfigError(f"the router was fitted for {self.workers} workers; the fleet has {workers}")


_STORED = ("weights", "layers", "centroids", "profiles", "shares", "before", "after", "inward", "outward")


@contextmanager
def _timed(part: str, report: Callable[[str, float], None]) -> Iterator[None]:
    """Report the seconds that the block takes."""
    start = time.perf_counter()
    yield
    report(part, time.perf_counter() - start)


def _follow(labels: Labels, leading: Labels, workers: int, speeds: NDArray[np.floating] | None) -> Labels:
    """Renumber clusters so that they share the most requests with the `leading` clusters of the same numbers.

    A cluster stays with workers of its speed.
    """
    shared = np.zeros((workers, workers))
    np.add.at(shared, (labels, leading), 1.0)
    if speeds is not None:
        shared[np.not_equal.outer(np.asarray(speeds), np.asarray(speeds))] = -float(len(labels))
    return best_columns(shared)[labels]
