"""What routers learn from calibration requests, in one file: signature, centroids, profiles, forecast.

Two views of the same requests. For expert-locality routing as published: signatures, and a centroid of them for each
worker. For routing by expected distinct experts: a profile for each worker, the mean activation probabilities in decode
of the requests that the union-minimising clusters give it, and a forecast that turns a request's prefill into its own.
Row w of both belongs to worker w: the clusters are matched by the requests they share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie._numba import njit
from coterie.errors import ConfigError, InputError, TraceError
from coterie.footprints import accumulate_load
from coterie.footprints.signatures import Counts, Signature, Weighting
from coterie.routing._dots import products
from coterie.routing.clustering import Labels, cluster
from coterie.routing.forecast import Forecast
from coterie.routing.union import cluster_profiles, union_clusters
from coterie.traces.activations import ActivationTrace
from coterie.traces.store import ArrayFile
from coterie.types import PREFILL

FORMAT, VERSION = "coterie-router", 1
NARROW_BYTES = 1 << 20
"""Centroids past this size are kept in 8 bits: reading them is what a similarity costs."""
RESTART_CELLS = 2e8
"""Of random starts of the union search, each costing about requests x cells x workers: ten where that is small."""
Progress = Callable[[str, int, int], None]


class Calibration(NamedTuple):
    """Counts of requests, before and after the moment they are routed: [request, layer, expert] each."""

    prefill: NDArray[np.uint32]
    decode: NDArray[np.uint32]
    gates: NDArray[np.float32] | None
    """Gate-probability mass of prefill, where the trace has gate weights."""
    requests: NDArray[np.int64]
    """[request] its index in the trace."""
    halved: bool
    """The trace has one phase: first and second halves of a request stand for prefill and decode."""
    model: str
    top_k: int

    def take(self, rows: NDArray[np.integer]) -> Calibration:
        gates = None if self.gates is None else self.gates[rows]
        return self._replace(
            prefill=self.prefill[rows], decode=self.decode[rows], gates=gates, requests=self.requests[rows]
        )

    @property
    def probabilities(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[request, cell] activation probabilities in prefill and in decode."""
        return activation_probabilities(self.prefill, self.top_k), activation_probabilities(self.decode, self.top_k)


def activation_probabilities(counts: Counts, top_k: int) -> NDArray[np.float32]:
    """[request, cell] of counts [request, layer, expert]: the share of tokens that activate the cell."""
    flat = np.array(counts.reshape(len(counts), -1), np.float32)
    flat /= np.asarray(tokens_of(counts, top_k), np.float32)[:, None]
    return flat


def tokens_of(counts: Counts, top_k: int) -> NDArray[np.float64]:
    """[request] tokens that counts [request, layer, expert] are of; at least 1."""
    sums = counts.sum(axis=(1, 2), dtype=np.float64)
    return np.asarray(np.maximum(sums / (counts.shape[1] * top_k), 1.0), np.float64)


def calibration(
    trace: ActivationTrace, requests: NDArray[np.integer] | None = None, progress: Progress | None = None
) -> Calibration:
    """Count a trace's requests, or those of them; requests that lack a phase are left out.

    Where the trace has one phase only, a request's first half stands for its prefill.
    """
    wanted = np.arange(trace.num_requests) if requests is None else np.asarray(requests, np.int64)
    phases = {int(p) for segment in trace.segments for p in np.unique(segment.tokens.phase)}
    halved, meta = len(phases) < 2, trace.meta
    shape = (len(wanted), meta.num_layers, meta.num_experts)
    prefill, decode = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
    has_gates = all(segment.tokens.gate_weights is not None for segment in trace.segments)
    gates = np.zeros(shape, np.float32) if has_gates else None
    kept = []
    for row, request in enumerate(wanted):
        tokens = trace.request(int(request))
        first = np.arange(len(tokens.phase)) < len(tokens.phase) // 2 if halved else tokens.phase == PREFILL
        if first.any() and not first.all():
            accumulate_load(tokens.expert_ids[first], prefill[row])
            accumulate_load(tokens.expert_ids[~first], decode[row])
            if gates is not None and tokens.gate_weights is not None:
                _add_gates(tokens.expert_ids[first], tokens.gate_weights[first].astype(np.float32), gates[row])
            kept.append(row)
        if progress is not None:
            progress("Counting requests", row + 1, len(wanted))
    rows = np.array(kept, np.int64)
    counted = Calibration(prefill, decode, gates, wanted, halved, meta.model, meta.top_k)
    return counted if len(rows) == len(wanted) else counted.take(rows)


@dataclass(frozen=True, slots=True, eq=False)
class FittedRouting:
    """All that a router needs to know of a model and its traffic; made by :meth:`fit`."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    signature: Signature
    centroids: NDArray[np.float32]
    """[worker, cell of kept layers] of length 1."""
    profiles: NDArray[np.float32]
    """[worker, cell] mean activation probabilities in decode."""
    forecast: Forecast
    shares: NDArray[np.float32]
    """[worker] of the calibration requests in the worker's union-minimising cluster."""
    batch: int
    """Requests of a decode step that the profiles were made for."""
    _narrow: NDArray[np.int8] | None = field(init=False, repr=False, default=None)
    _scales: NDArray[np.float32] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        cells, workers = self.num_layers * self.num_experts, len(self.centroids)
        expected = {
            "signature.weights": (self.signature.weights.shape, (self.num_layers, self.num_experts)),
            "centroids": (self.centroids.shape, (workers, self.signature.cells)),
            "profiles": (self.profiles.shape, (workers, cells)),
            "forecast.after": (self.forecast.after.shape, (cells,)),
            "shares": (self.shares.shape, (workers,)),
        }
        for name, (found, right) in expected.items():
            if found != right:
                raise ConfigError(f"{name} has shape {found}; it must be {right}")
        if workers < 1 or self.batch < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"workers={workers} and batch={self.batch} must be at least 1, "
                f"top_k={self.top_k} in 1 … {self.num_experts}"
            )
        for name in ("centroids", "profiles", "shares"):
            if not np.isfinite(getattr(self, name)).all():
                raise ConfigError(f"{name} must be finite")
        if self.centroids.nbytes > NARROW_BYTES:
            scales = np.abs(self.centroids).max(axis=1) / 127
            scales = np.where(scales > 0, scales, 1.0).astype(np.float32)
            object.__setattr__(self, "_narrow", np.round(self.centroids / scales[:, None]).astype(np.int8))
            object.__setattr__(self, "_scales", scales / np.float32(_WIDE))

    @property
    def workers(self) -> int:
        return len(self.centroids)

    @classmethod
    def fit(
        cls,
        source: ActivationTrace | Calibration,
        workers: int,
        rng: Generator,
        *,
        speeds: NDArray[np.floating] | None = None,
        batch: int = 16,
        weighting: Weighting = "count_idf",
        report: Callable[[str, float], None] | None = None,
    ) -> FittedRouting:
        """Learn from calibration requests; `report` is told each part's name and seconds.

        `gate` cannot be routed by: a request comes with counts.
        """
        if weighting == "gate":
            raise ConfigError("weighting='gate' cannot be fitted for routing: requests come with counts, not gates")
        known = calibration(source) if isinstance(source, ActivationTrace) else source
        if len(known.prefill) < max(3, workers):
            raise ConfigError(
                f"{len(known.prefill)} calibration requests have both phases; {workers} workers need {max(3, workers)}"
            )
        watch = _Watch(report)
        layers, experts = known.prefill.shape[1:]
        before, after = known.probabilities
        watch("probabilities")
        signature = Signature.fit(known.prefill, known.decode, rng, weighting=weighting)
        watch("signature")
        signatures = signature.transform_all(known.prefill)
        found = cluster(signatures, workers, rng, speeds=speeds)
        watch("cosine clusters")
        forecast = Forecast.fit(before, after, tokens_of(known.prefill, known.top_k).astype(np.int64), rng)
        watch("forecast")
        pooled = activation_probabilities(known.prefill + known.decode, known.top_k)
        restarts = int(np.clip(RESTART_CELLS / (pooled.size * workers), 1, 10))
        union = union_clusters(pooled, workers, batch, rng, speeds=speeds, starts=(found.labels,), restarts=restarts)
        labels = _follow(union.labels, found.labels, workers, speeds)
        watch("union clusters")
        return cls(
            known.model,
            layers,
            experts,
            known.top_k,
            signature,
            found.centroids,
            cluster_profiles(after, labels, workers),
            forecast,
            np.asarray(np.bincount(labels, minlength=workers) / len(labels), np.float32),
            batch,
        )

    def similarities(self, footprint: Counts) -> NDArray[np.float32]:
        """[worker] cosine of a request's signature with each centroid, from its prefill's counts [layer, expert]."""
        own = self.signature.transform(footprint)
        out = np.empty(self.workers, np.float32)
        if self._narrow is None or self._scales is None:
            products(self.centroids, own, out)
        else:
            _narrow_similarities(self._narrow, self._scales, np.asarray(own * _WIDE, np.int16), out)
        return out

    def profile(self, footprint: Counts) -> NDArray[np.float32]:
        """[cell] activation probabilities expected in decode, from the prefill's counts; popularity if all are 0."""
        shape = (self.num_layers, self.num_experts)
        if footprint.shape != shape:
            raise ConfigError(f"footprint has shape {footprint.shape}; {self.model} was fitted for {shape}")
        counts: NDArray[Any] = np.ascontiguousarray(footprint).reshape(-1)
        tokens = _total(counts) / (self.num_layers * self.top_k)
        return self.forecast.predict(counts, tokens)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, replacing an older one whole; the same values give the same bytes."""
        from safetensors.numpy import save

        file, seen = Path(path), self.forecast
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "batch": self.batch,
            "weighting": self.signature.weighting,
            "own": seen.own,
            "noise": seen.noise,
            "ridge": seen.ridge,
        }
        # One entry of metadata: the library writes several in an order that differs from run to run.
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        data = save(arrays, {"coterie": json.dumps(about)})
        part = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            with part.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "weights": self.signature.weights,
            "layers": self.signature.layers,
            "centroids": self.centroids,
            "profiles": self.profiles,
            "shares": self.shares,
            "before": self.forecast.before,
            "after": self.forecast.after,
            "inward": self.forecast.inward,
            "outward": self.forecast.outward,
        }

    @classmethod
    def load(cls, path: str | Path, model: str | None = None, workers: int | None = None) -> FittedRouting:
        """Read a file that was saved; with `model` or `workers`, only one fitted for those."""
        file = Path(path)
        arrays = ArrayFile(file)
        about = arrays.about(FORMAT, VERSION)
        found = {name: np.array(arrays[name]) for name in _DTYPES}
        for name, dtype in _DTYPES.items():
            if found[name].dtype != dtype:
                raise TraceError(file, name, f"is {found[name].dtype}; expected {np.dtype(dtype)}")
            if not np.isfinite(found[name]).all():
                raise TraceError(file, name, "holds NaN or infinity")
        try:
            signature = Signature(str(about["weighting"]), found["weights"], found["layers"])
            forecast = Forecast(
                found["before"],
                found["after"],
                found["inward"],
                found["outward"],
                float(about["own"]),
                float(about["noise"]),
                float(about["ridge"]),
            )
            fitted = cls(
                str(about["model"]),
                int(about["num_layers"]),
                int(about["num_experts"]),
                int(about["top_k"]),
                signature,
                found["centroids"],
                found["profiles"],
                forecast,
                found["shares"],
                int(about["batch"]),
            )
        except KeyError as error:
            raise TraceError(file, f"metadata {error.args[0]}", "is missing") from None
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(file, "contents", str(error)) from None
        if model is not None and fitted.model != model:
            raise InputError(f"{file} was fitted for model {fitted.model!r}; the fleet serves {model!r}")
        if workers is not None and fitted.workers != workers:
            raise InputError(f"{file} was fitted for {fitted.workers} workers; the fleet has {workers}: fit it again")
        return fitted

    def check_workers(self, workers: int) -> None:
        """Refuse a fleet of another size."""
        if workers != self.workers:
            raise ConfigError(f"the router was fitted for {self.workers} workers; the fleet has {workers}")


_WIDE = 32767.0
"""A signature of length 1 in 16 bits. Its product with a row of 8 bits fits in 32: both lengths multiplied bound it."""
_DTYPES: dict[str, Any] = {
    "weights": np.float32,
    "layers": np.int64,
    "centroids": np.float32,
    "profiles": np.float32,
    "shares": np.float32,
    "before": np.float32,
    "after": np.float32,
    "inward": np.float32,
    "outward": np.float32,
}


class _Watch:
    """Tells how long each part took."""

    def __init__(self, report: Callable[[str, float], None] | None) -> None:
        self._report = report
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        if self._report is not None:
            self._report(part, now - self._last)
        self._last = now


def _follow(labels: Labels, leading: Labels, workers: int, speeds: NDArray[np.floating] | None) -> Labels:
    """The same clusters under the numbers of those they share most requests with; only workers alike change places."""
    shared = np.zeros((workers, workers))
    np.add.at(shared, (labels, leading), 1.0)
    if speeds is not None:
        shared[np.not_equal.outer(np.asarray(speeds), np.asarray(speeds))] = -float(len(labels))
    return np.asarray(linear_sum_assignment(shared, maximize=True)[1][labels], np.int64)


@njit(fastmath=True)
def _total(counts: NDArray[Any]) -> float:
    """A third of the time of NumPy's sum at 6,144 cells."""
    total = np.float32(0.0)
    for cell in range(len(counts)):
        total += np.float32(counts[cell])
    return np.float64(total)


@njit(fastmath=True)
def _narrow_similarities(
    rows: NDArray[np.int8], scales: NDArray[np.float32], own: NDArray[np.int16], out: NDArray[np.float32]
) -> None:
    for worker in range(rows.shape[0]):
        total = np.int32(0)
        for cell in range(rows.shape[1]):  # casts keep Numba from widening to 64 bits, which is not vectorised
            total = np.int32(total + np.int32(np.int32(rows[worker, cell]) * np.int32(own[cell])))
        out[worker] = total * scales[worker]


@njit()
def _add_gates(expert_ids: NDArray[Any], weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    tokens, layers, k = expert_ids.shape
    for token in range(tokens):
        for layer in range(layers):
            for j in range(k):
                out[layer, expert_ids[token, layer, j]] += weights[token, layer, j]
