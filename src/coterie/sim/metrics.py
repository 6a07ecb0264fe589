"""Metrics of a run: latency, throughput, imbalance and fairness."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Run(NamedTuple):
    """One simulated run; [request] in order of arrival, [batch] in order of start."""

    arrival_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    skipped: NDArray[np.int64]
    """[request] times that the request was passed over."""
    batch_s: NDArray[np.float64]
    """[batch] seconds; with continuous batching, a batch is a step."""
    batch_size: NDArray[np.int64]
    """[batch] number of requests."""
    imbalance: NDArray[np.float64]
    """[batch] imbalance by the execution model: the factor of CAPS, or the load of the busiest rank ÷ the mean."""
    distinct: NDArray[np.float64]
    """[batch] experts touched, mean over layers."""


class RunSummary(NamedTuple):
    """Metrics of a run. Latency is the time from arrival to the end, waiting included."""

    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    mean_ms: float
    throughput: float
    """Requests per second, from the first arrival to the last end."""
    imbalance: float
    """Imbalance, mean over batches or steps."""
    distinct: float
    """Experts touched per layer, mean over batches or steps."""
    batch_ms: float
    """Mean time of a batch or step."""
    worst_skips: int
    """Most times that one request was passed over."""
    worst_wait_ms: float
    """Longest time from arrival to start."""


def summarise_run(run: Run) -> RunSummary:
    latency_ms = (run.finish_s - run.arrival_s) * 1e3
    p50, p90, p99, p999 = np.percentile(latency_ms, PERCENTILES)
    span_s = float(run.finish_s.max() - run.arrival_s.min())
    return RunSummary(
        requests=len(latency_ms),
        p50_ms=float(p50),
        p90_ms=float(p90),
        p99_ms=float(p99),
        p999_ms=float(p999),
        mean_ms=float(latency_ms.mean()),
        throughput=len(latency_ms) / span_s if span_s > 0 else math.inf,
        imbalance=float(run.imbalance.mean()),
        distinct=float(run.distinct.mean()),
        batch_ms=float(run.batch_s.mean() * 1e3),
        worst_skips=int(run.skipped.max()),
        worst_wait_ms=float((run.start_s - run.arrival_s).max() * 1e3),
    )
