"""Metrics of a fleet's run: latencies, share within limits, distinct experts, and utilisation of workers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check
from coterie.sim.metrics import PERCENTILES


class FleetRun(NamedTuple):
    """One simulated run. [request] in the order given, [step] in order of start, [worker] prefill workers first.

    The time of an event that did not happen is NaN, and its worker is -1.
    """

    arrival_s: NDArray[np.float64]
    prefill_start_s: NDArray[np.float64]
    prefill_end_s: NDArray[np.float64]
    ready_s: NDArray[np.float64]
    """[request] time at which the KV cache is on the decoder."""
    decode_start_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    """[request] prompt tokens found in a prefix cache, which were not computed."""
    kept_tokens: NDArray[np.int64]
    """[request] prompt tokens found in the prefix cache of a worker that only decodes, which were not transferred."""
    decoded: NDArray[np.int64]
    """[request] number of decode steps that the request took part in."""
    prefiller: NDArray[np.int64]
    decoder: NDArray[np.int64]
    """[request] decode worker, numbered from 0 without the prefill workers."""
    dropped: NDArray[np.bool_]
    """[request] whether the request was dropped because it exceeds a worker's KV memory."""
    running: int
    """Number of requests on a worker when the run ended."""
    queued: int
    """Number of requests that had arrived but were on no worker when the run ended, postponed ones included."""
    postponed: int
    """Number of requests whose arrival was postponed because their recording was in flight."""
    most_in_flight: int
    end_s: float
    prefill_workers: int
    decode_workers: int
    kv_most: NDArray[np.int64]
    """[worker] most KV blocks in use at once, cached prefixes included."""
    kv_held: NDArray[np.int64]
    """[worker] KV blocks that requests held when the run ended, without cached prefixes."""
    step_worker: NDArray[np.int32]
    step_start_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    step_decoding: NDArray[np.int32]
    """[step] number of tokens decoded."""
    step_prefill: NDArray[np.int32]
    """[step] number of prompt tokens computed."""
    step_distinct: NDArray[np.float64]
    """[step] experts touched, mean over layers."""

    @property
    def token_steps(self) -> int:
        return int(self.step_decoding.sum(dtype=np.int64) + self.step_prefill.sum(dtype=np.int64))

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """[request] seconds per token after the first; NaN for requests of one token."""
        after = self.output_tokens - 1
        return np.where(after > 0, (self.finish_s - self.first_token_s) / np.maximum(after, 1), np.nan)


class LatencyLimits(NamedTuple):
    """Latency limits (service-level objectives)."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class LatencySummary(NamedTuple):
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> LatencySummary:
        known = seconds[np.isfinite(seconds)] * 1e3
        if not known.size:
            return cls(*(math.nan,) * 5)
        return cls(float(known.mean()), *(float(value) for value in np.percentile(known, PERCENTILES)))


class FleetSummary(NamedTuple):
    """Summary of a run over a window of time."""

    requests: int
    """Requests that arrived in the window and finished before the run ended."""
    ttft: LatencySummary
    """Time from arrival to the first token."""
    tpot: LatencySummary
    """Time per token after the first."""
    e2e: LatencySummary
    """Time from arrival to the last token."""
    within_limits: float
    """Share of the arrived requests within both latency limits; unfinished requests count as outside."""
    goodput: float
    """Requests per second within both latency limits."""
    tokens_per_s: float
    """Decoded tokens per second."""
    distinct: float
    """Experts touched per layer of a decode step, mean over steps; steps with prompt tokens are excluded."""
    distinct_by_token: float
    """Experts touched per layer of a decode step, mean over decoded tokens."""
    step_ms: float
    """Mean time of a decode step without prompt tokens."""
    mean_batch: float
    """Mean number of requests in a decode step without prompt tokens."""
    cached_share: float
    """Share of the finished requests' prompt tokens found in a prefix cache."""
    mean_in_flight: float
    most_in_flight: int
    busy: NDArray[np.float64]
    """[worker] share of the window in which the worker ran steps."""
    worker_in_flight: NDArray[np.float64]
    """[decoder] number of requests between handover and end, mean over the window."""


def summarise_fleet(
    run: FleetRun, limits: LatencyLimits | None = None, since_s: float = 0.0, until_s: float = math.inf
) -> FleetSummary:
    """Summarise requests that arrived and steps that began in a window.

    By default it is the whole run, including the phases in which the fleet fills and drains.
    """
    until_s = min(until_s, run.end_s)
    check(since_s < until_s, f"since_s={since_s} must be before until_s={until_s}")
    span = until_s - since_s
    arrived = (run.arrival_s >= since_s) & (run.arrival_s <= until_s)
    done = arrived & np.isfinite(run.finish_s)
    ttft, tpot = (run.first_token_s - run.arrival_s)[done], run.tpot_s[done]
    limits = limits or LatencyLimits()
    kept = int(((ttft <= limits.ttft_s) & (np.isnan(tpot) | (tpot <= limits.tpot_s))).sum())
    steps = (run.step_start_s >= since_s) & (run.step_start_s < until_s)
    decoding = run.step_decoding[steps].astype(np.int64)
    alone = (decoding > 0) & (run.step_prefill[steps] == 0)
    workers = run.prefill_workers + run.decode_workers
    who, seconds, distinct = run.step_worker[steps], run.step_s[steps], run.step_distinct[steps]
    ends = np.where(np.isfinite(run.finish_s), run.finish_s, run.end_s)
    handed = np.where(np.isfinite(run.prefill_end_s) & (run.prefill_workers > 0), run.prefill_end_s, run.arrival_s)
    routed = run.decoder >= 0
    here = _overlap(handed[routed], ends[routed], since_s, until_s)
    prompts = int(run.prompt_tokens[done].sum())
    return FleetSummary(
        requests=int(done.sum()),
        ttft=LatencySummary.of(ttft),
        tpot=LatencySummary.of(tpot),
        e2e=LatencySummary.of((run.finish_s - run.arrival_s)[done]),
        within_limits=kept / max(1, int(arrived.sum())),
        goodput=kept / span,
        tokens_per_s=float(decoding.sum() / span),
        distinct=_mean(distinct[alone]),
        distinct_by_token=_mean(distinct[alone], decoding[alone]),
        step_ms=1e3 * _mean(seconds[alone]),
        mean_batch=_mean(decoding[alone].astype(np.float64)),
        cached_share=int(run.cached_tokens[done].sum()) / prompts if prompts else 0.0,
        mean_in_flight=float(_overlap(run.arrival_s, ends, since_s, until_s)[~run.dropped].sum() / span),
        most_in_flight=run.most_in_flight,
        busy=np.bincount(who, np.minimum(run.step_start_s[steps] + seconds, until_s) - run.step_start_s[steps], workers)
        / span,
        worker_in_flight=np.bincount(run.decoder[routed], here, run.decode_workers) / span,
    )


def _mean(values: NDArray[np.float64], weights: NDArray[np.integer] | None = None) -> float:
    return float(np.average(values, weights=weights)) if values.size else math.nan


def _overlap(start: NDArray[np.float64], end: NDArray[np.float64], since: float, until: float) -> NDArray[np.float64]:
    """Return the seconds of each interval inside the window; 0 if it did not begin."""
    inside = np.minimum(end, until) - np.maximum(start, since)
    return np.where(np.isfinite(inside), np.maximum(inside, 0.0), 0.0)
