"""Recorded traces as fleets of the ELDR suite, and the metrics of a router's run on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.bench import REQUESTS, Bench, Halves, MeasuredSpan, Source, bench_of, split
from coterie.errors import ConfigError
from coterie.footprints.signatures import Signature, Weighting
from coterie.routing import Calibration, Router, calibration
from coterie.routing.clustering import cluster
from coterie.sim import FleetRun, summarise_fleet
from coterie.sim.fleet.requests import split_recordings
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_as

TRACES = {"gpt-oss-20b": "gpt-oss-20b/routing.npz", "deepseek-v2-lite": "deepseek-v2-lite/routing_tokens.npz"}
BALANCERS = ("random", "round_robin", "join_shortest_queue", "power_of_two")
"""Routers that look only at load, or at nothing."""
ROUTERS = (*BALANCERS, "domain", "pressure", "locality_band", "latency_aware")


@lru_cache(maxsize=4)
def load_source(path: Path) -> Source:
    trace = read_as(ActivationTrace, path)
    return Source(trace, calibration(trace))


def recorded_source(data: Path, name: str) -> Source:
    return load_source(data / "activations" / TRACES[name])


class Outcome(NamedTuple):
    """Metrics of the steady part of a run."""

    active_experts: float
    """Distinct experts per layer and step, mean over steps."""
    active_experts_by_token: float
    """The same, steps weighted by their tokens."""
    active_experts_by_time: float
    """The same, steps weighted by their duration."""
    experts_at_rows: float
    """Ratio to round robin's steps of equal batch size, weighted by tokens; 1 for round robin."""
    tpot_p50_ms: float
    tpot_p99_ms: float
    tpot_mean_ms: float
    """Mean over requests."""
    tpot_token_ms: float
    """Mean over tokens."""
    step_ms: float
    requests: int
    uneven: float
    """Coefficient of variation of the decoders' mean loads."""


def decode_steps(run: FleetRun, window: MeasuredSpan) -> NDArray[np.bool_]:
    begun = run.step_start_s
    inside = (begun >= window.since_s) & (begun < window.until_s)
    return np.asarray(inside & (run.step_decoding > 0) & (run.step_prefill == 0))


Curve = NDArray[np.float64]
"""Polynomial: log(experts of a step) as a function of log(requests in it)."""


def experts_by_rows(run: FleetRun, window: MeasuredSpan) -> Curve:
    steps = decode_steps(run, window)
    rows, experts = run.step_decoding[steps], run.step_distinct[steps]
    return np.polyfit(np.log(rows), np.log(experts), min(3, len(np.unique(rows)) - 1))


def outcome(run: FleetRun, window: MeasuredSpan, mixed: Curve) -> Outcome:
    """Return the metrics of the window; `mixed` is :func:`experts_by_rows` of round robin's run."""
    summary = summarise_fleet(run, since_s=window.since_s, until_s=window.until_s)
    loads, steps = summary.worker_in_flight, decode_steps(run, window)
    rows, experts = run.step_decoding[steps], run.step_distinct[steps]
    done = (run.arrival_s >= window.since_s) & (run.arrival_s <= window.until_s) & np.isfinite(run.tpot_s)
    return Outcome(
        active_experts=summary.distinct,
        active_experts_by_token=summary.distinct_by_token,
        active_experts_by_time=float(np.average(experts, weights=run.step_s[steps])),
        experts_at_rows=float(np.average(experts / np.exp(np.polyval(mixed, np.log(rows))), weights=rows)),
        tpot_p50_ms=summary.tpot.p50,
        tpot_p99_ms=summary.tpot.p99,
        tpot_mean_ms=summary.tpot.mean,
        tpot_token_ms=1e3 * float(np.average(run.tpot_s[done], weights=run.output_tokens[done] - 1)),
        step_ms=summary.step_ms,
        requests=summary.requests,
        uneven=float(loads.std() / loads.mean()),
    )


def compare_routers(
    bench: Bench, chosen: dict[str, Router], on_base: Callable[[FleetRun], None] | None = None
) -> dict[str, Outcome]:
    """Return the metrics of every router's run; `on_base` is called with the run of round robin, which comes first."""
    outcomes: dict[str, Outcome] = {}
    mixed: Curve | None = None
    for name, run, window in bench.runs(chosen):
        if mixed is None:
            mixed = experts_by_rows(run, window)
            if on_base is not None:
                on_base(run)
        outcomes[name] = outcome(run, window, mixed)
    return outcomes


def closed_bench(source: Source, decoders: int, per_decoder: int, seed: int, requests: int = REQUESTS) -> Bench:
    """Build a closed loop on a recorded trace; half of the requests are for fitting."""
    halves = split(source, seed)
    recordings = split_recordings(source.trace, halves.test)
    if decoders * per_decoder > len(recordings):
        half = f"half of {source.trace.meta.model} has {len(recordings)}"
        raise ConfigError(f"{decoders} x {per_decoder} in flight need as many recordings; {half}")
    return bench_of(source, halves, recordings, decoders, per_decoder, seed, requests)


def with_clusters(
    bench: Bench, counts: Calibration, halves: Halves, weighting: Weighting, balanced: bool = True
) -> Bench:
    """Return the same fleet with requests compared by another signature, or clustered without balance."""
    rng = np.random.default_rng([bench.seed, 3])
    known = counts.take(np.flatnonzero(np.isin(counts.requests, halves.fit)))
    shown: NDArray[Any] = known.prefill
    served = bench.requests
    if weighting == "gate":
        if known.gates is None or counts.gates is None:
            raise ConfigError("the trace has no gate weights")
        mass = counts.gates[np.isin(counts.requests, halves.test)]
        shown, served = known.gates, replace(served, recordings=replace(served.recordings, footprint=mass))
    signature = Signature(weighting).fit(shown, known.decode, rng)
    clusters = cluster(signature.transform_all(shown), bench.config.decode_workers, rng, balanced=balanced)
    fitted = replace(bench.fitted)
    fitted.learned_ = bench.fitted.learned.changed(signature=signature, centroids=clusters.centroids)
    return replace(bench, fitted=fitted, requests=served)
