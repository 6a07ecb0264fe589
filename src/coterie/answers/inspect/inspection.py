"""Compute the statistics of a trace for ``coterie inspect``.

An activation trace is read once from end to end, whatever its size, and every expert id is checked. A load table and a
request trace have only some of the statistics. A statistic that cannot be computed is None, and `missing` gives the
reason. All randomness (the sample of requests, the draws) comes from the Generator passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.inspect.drift import Drift, measure_drift, no_drift
from coterie.answers.inspect.loads import (
    DomainSimilarity,
    LayerLoad,
    RankImbalance,
    domain_similarity,
    layer_loads,
    rank_imbalances,
)
from coterie.answers.inspect.one_pass import MAX_DOMAINS, Progress, cut_windows, run_pass
from coterie.answers.inspect.samples import DistinctExperts, PhaseCorrelation
from coterie.answers.inspect.values import number
from coterie.errors import ConfigError, TraceError
from coterie.traces import ActivationTrace, LoadTable, RequestTrace
from coterie.traces.load import choose_windows, domain_of
from coterie.traces.readers.base import Trace, kind_of

_UNLABELLED = "the trace names no domains"
_UNTIMED, _AT_ONCE = "no arrival times", "all requests arrive at once"
_OF_ACTIVATIONS = ("load", "layers", "rank_imbalance", "domains", "phase_correlation", "drift", "distinct_experts")
_PER_REQUEST = (
    "phase_correlation",
    "distinct_experts",
    "arrivals",
    "prompt_lengths",
    "output_lengths",
    "prefix_sharing",
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Statistics of a trace. Every number is a plain float or int, and never NaN."""

    trace: str
    kind: str
    """Kind of the trace: "activations", "load" or "requests"."""
    model: str | None = None
    experts: int | None = None
    top_k: int | None = None
    requests: int | None = None
    tokens: int | None = None
    """Tokens recorded (activations), counted if the table has token counts (load), or listed per request (requests)."""
    decode_tokens: int | None = None
    windows: int | None = None
    """Number of windows of a load table."""
    load: list[list[float]] | None = None
    """[layer, expert] share of the layer's activations."""
    layers: list[LayerLoad] | None = None
    rank_imbalance: list[RankImbalance] | None = None
    domains: DomainSimilarity | None = None
    phase_correlation: PhaseCorrelation | None = None
    drift: Drift | None = None
    distinct_experts: list[DistinctExperts] | None = None
    arrivals: ArrivalRate | None = None
    prompt_lengths: TokenLengths | None = None
    output_lengths: TokenLengths | None = None
    prefix_sharing: PrefixSharing | None = None
    missing: dict[str, str] = field(default_factory=dict)
    """Name of a field that is None → reason in words."""
    notes: list[str] = field(default_factory=list)
    """Caveats for reading the numbers."""


def inspect_trace(
    trace: Trace, name: str, rng: Generator, progress: Progress | None = None, window: str | None = None
) -> Inspection:
    """Compute every statistic that the trace allows; `name` is its path. Raise TraceError if it is empty or invalid.

    `window` chooses windows of a load table, as :func:`~coterie.traces.load.choose_windows` takes it.
    """
    if isinstance(trace, LoadTable):
        return _inspect_load(trace, name, rng, window)
    if window is not None:
        raise ConfigError(f"--window={window} chooses from a load table; {name} holds {kind_of(trace)}")
    if isinstance(trace, ActivationTrace):
        return _inspect_activations(trace, name, rng, progress)
    return _inspect_requests(trace, name)


def _inspect_activations(trace: ActivationTrace, name: str, rng: Generator, progress: Progress | None) -> Inspection:
    if not trace.num_requests or not trace.num_tokens:
        raise TraceError(name, "tokens", f"the trace is empty ({trace.num_requests} requests, no tokens)")
    meta, missing, notes = trace.meta, {}, []
    if trace.unfinished:
        notes.append("The recording was interrupted or still runs: this is what it holds so far.")
    chosen = _largest_domains(trace)
    windows = cut_windows(trace, rng)
    result = run_pass(trace, name, windows, chosen.index, len(chosen.names), rng, progress)
    load = result.half_windows.sum(axis=(0, 1))  # [layer, expert] activations
    correlation = result.samples.correlation()
    if correlation is None:
        sampled = "" if trace.num_requests == len(result.samples.chosen) else "sampled "
        missing["phase_correlation"] = f"no {sampled}request has both prefill and decode tokens"
    distinct = result.samples.distinct(chosen.all_domains, rng) or None
    if distinct is None:
        missing["distinct_experts"] = "the trace has no decode tokens"
    similarity = None
    if len(chosen.names) > 1:
        similarity = domain_similarity(result.domains, chosen.names, chosen.tokens, chosen.left_out)
    else:
        missing["domains"] = f"all requests are of one domain, {chosen.names[0]!r}" if chosen.names else _UNLABELLED
    if windows.width_s is None:
        drift = no_drift(
            "s",
            f"{_UNTIMED if trace.requests.arrival_s is None else _AT_ONCE}: the order of requests in "
            "time is not known, and that of a file may be by topic",
        )
    else:
        drift = measure_drift(result.half_windows, windows.width_s, "s", rng)
    if trace.num_requests > len(result.samples.chosen):
        notes.append(
            f"Distinct experts and phase correlation come from {len(result.samples.chosen):,} random requests."
        )
    ranks = _ranks(load, missing)
    arrivals, prompts, outputs, sharing = _request_parts(trace.requests, missing)
    return Inspection(
        trace=name,
        kind="activations",
        model=meta.model,
        experts=meta.num_experts,
        top_k=meta.top_k,
        requests=trace.num_requests,
        tokens=trace.num_tokens,
        decode_tokens=result.decode_tokens,
        load=_shares(load),
        layers=layer_loads(load, meta.layer_ids or range(meta.num_layers)),
        rank_imbalance=ranks,
        domains=similarity,
        phase_correlation=correlation,
        drift=drift,
        distinct_experts=distinct,
        arrivals=arrivals,
        prompt_lengths=prompts,
        output_lengths=outputs,
        prefix_sharing=sharing,
        missing=missing,
        notes=notes,
    )


def _inspect_load(table: LoadTable, name: str, rng: Generator, window: str | None) -> Inspection:
    chosen, what = choose_windows(Path(name), table, window)
    counts = table.counts[chosen]
    load = counts.sum(axis=0)  # [layer, expert]
    if not load.any():
        raise TraceError(name, "counts", f"the trace is empty ({len(chosen)} windows, no tokens)")
    missing = dict.fromkeys(_PER_REQUEST, "a load table counts tokens per expert, not single requests")
    tokens = None if table.tokens is None else table.tokens[chosen]
    notes, similarity = [f"Load: {what}."], None
    if table.labels is None:
        missing["domains"] = "windows have no labels"
        drift = measure_drift(counts[:, None].astype(np.int64), 1.0, "windows", rng)
        notes.append(
            "Drift is counted in windows; the noise within one window is not known, so lag 1 is the reference."
        )
    else:
        drift = no_drift("windows", "windows are labelled (domains), not a series in time")
        similarity = _label_similarity(counts, [table.labels[i] for i in chosen], tokens, missing)
    return Inspection(
        trace=name,
        kind="load",
        model=table.model,
        experts=table.num_experts,
        windows=len(chosen),
        tokens=None if tokens is None else int(tokens.sum()),
        load=_shares(load),
        layers=layer_loads(load, range(table.num_layers) if table.layer_ids is None else table.layer_ids.tolist()),
        rank_imbalance=_ranks(load, missing),
        domains=similarity,
        drift=drift,
        missing=missing,
        notes=notes,
    )


def _inspect_requests(table: RequestTrace, name: str) -> Inspection:
    if not len(table):
        raise TraceError(name, "requests", "the trace is empty (no requests)")
    missing = dict.fromkeys(_OF_ACTIVATIONS, "a request trace holds no activations")
    arrivals, prompts, outputs, sharing = _request_parts(table, missing)
    return Inspection(
        trace=name,
        kind="requests",
        requests=len(table),
        tokens=int(table.prompt_tokens.sum() + table.output_tokens.sum()),
        arrivals=arrivals,
        prompt_lengths=prompts,
        output_lengths=outputs,
        prefix_sharing=sharing,
        missing=missing,
    )


@dataclass(frozen=True, slots=True)
class _Domains:
    names: list[str]
    """Domains with the most tokens, largest first."""
    tokens: list[float]
    left_out: int
    index: NDArray[np.int64]
    """[request] index of its domain in `names`; -1 if its domain is left out."""
    all_domains: NDArray[np.int64] | None
    """[request] number of its domain among all domains; None if the trace has no domains."""


def _largest_domains(trace: ActivationTrace) -> _Domains:
    labels = trace.requests.domains
    if labels is None:
        return _Domains([], [], 0, np.full(trace.num_requests, -1, np.int64), None)
    # Some requests of a recording may have an empty label; these form a domain of their own.
    names, domain = np.unique(np.array([label or "(none)" for label in labels]), return_inverse=True)
    tokens = np.bincount(domain, weights=trace.lengths, minlength=len(names))
    order = np.argsort(-tokens, kind="stable")[:MAX_DOMAINS]
    place = np.full(len(names), -1, np.int64)
    place[order] = np.arange(len(order))
    return _Domains(
        [str(names[i]) for i in order],
        tokens[order].tolist(),
        len(names) - len(order),
        place[domain],
        domain.astype(np.int64),
    )


def _label_similarity(
    counts: NDArray[np.uint64], labels: Sequence[str], tokens: NDArray[np.int64] | None, missing: dict[str, str]
) -> DomainSimilarity | None:
    """Return the similarity of a load table's domains. Windows whose labels differ only after a "/" are one domain."""
    names, of_window = np.unique(np.array([domain_of(label) for label in labels]), return_inverse=True)
    if len(names) < 2:
        missing["domains"] = f"all windows are of one domain, {names[0]!s}"
        return None
    loads = np.zeros((len(names), *counts.shape[1:]))
    np.add.at(loads, of_window, counts.astype(np.float64))
    size = loads[:, 0].sum(axis=1)
    if tokens is not None:
        size = np.bincount(of_window, weights=tokens, minlength=len(names))
    order = np.argsort(-size, kind="stable")[:MAX_DOMAINS]
    picked = [str(names[i]) for i in order]
    return domain_similarity(loads[order], picked, size[order].tolist(), len(names) - len(order))


def _shares(load: NDArray[np.integer]) -> list[list[float]]:
    total = np.maximum(load.sum(axis=1, keepdims=True), 1)
    shares: list[list[float]] = (load / total).tolist()
    return shares


def _ranks(load: NDArray[np.integer], missing: dict[str, str]) -> list[RankImbalance] | None:
    found = rank_imbalances(load)
    if not found:
        missing["rank_imbalance"] = f"no power of two up to 32 divides {load.shape[1]} experts"
    return found or None


def _request_parts(
    table: RequestTrace, missing: dict[str, str]
) -> tuple[ArrivalRate | None, TokenLengths | None, TokenLengths | None, PrefixSharing | None]:
    """Return the request statistics in the order of Inspection's fields; add reasons for absent ones to `missing`."""
    arrivals, sharing = arrival_rate(table), prefix_sharing(table)
    prompts, outputs = lengths(table.prompt_tokens), lengths(table.output_tokens)
    if arrivals is None:
        missing["arrivals"] = _UNTIMED if table.arrival_s is None else _AT_ONCE
    for field_name, value in (("prompt_lengths", prompts), ("output_lengths", outputs)):
        if value is None:
            missing[field_name] = "all are 0: not recorded"
    if sharing is None:
        missing["prefix_sharing"] = "no prefix blocks were recorded"
    return arrivals, prompts, outputs, sharing


# Statistics of the request table: arrival rate, burstiness, lengths and shared prefixes.

MAX_BINS = 60
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)
MIN_DISPERSION_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Dispersion:
    window_s: float
    index: float
    """Variance ÷ mean of the number of arrivals per window: 1 for Poisson arrivals, more for bursts."""


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    duration_s: float
    mean: float
    """Mean rate, requests per second."""
    peak: float
    """Rate in the fullest bin, requests per second."""
    gap_cv: float | None
    """Coefficient of variation of the times between arrivals; 1 for Poisson arrivals."""
    dispersion: list[Dispersion]
    bin_s: float
    rate: list[float]
    """[bin] requests per second."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Distribution of the tokens per prompt, or per output."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    blocks: int
    block_tokens: int
    seen_before: float
    """Share of the prefix blocks that occurred before, in an earlier request or earlier in the same request."""


def arrival_rate(table: RequestTrace) -> ArrivalRate | None:
    """Compute the arrival statistics; None without arrival times, or if all requests arrive at once."""
    if table.arrival_s is None or table.duration_s <= 0:
        return None
    times = np.sort(table.arrival_s) - table.arrival_s.min()
    span, bins = table.duration_s, int(np.clip(len(times) // 5, 1, MAX_BINS))
    per_bin = np.histogram(times, bins, (0.0, span))[0] * bins / span
    gaps = np.diff(times)
    dispersion = []
    for window in DISPERSION_WINDOWS_S:
        whole = int(span // window)  # the last, incomplete window is left out
        if MIN_DISPERSION_WINDOWS <= whole <= 10**8:
            counts = np.bincount((times[times < whole * window] / window).astype(np.int64), minlength=whole)
            dispersion.append(Dispersion(window, float(counts.var() / counts.mean())))
    return ArrivalRate(
        duration_s=span,
        mean=(len(times) - 1) / span,
        peak=float(per_bin.max()),
        gap_cv=number(gaps.std() / gaps.mean()),
        dispersion=dispersion,
        bin_s=span / bins,
        rate=[float(v) for v in per_bin],
    )


def lengths(tokens: NDArray[np.int64]) -> TokenLengths | None:
    """Compute the distribution of `tokens` [request]; None if all are 0, which means not recorded."""
    if not len(tokens) or not tokens.any():
        return None
    p50, p90, p95, p99 = (float(v) for v in np.percentile(tokens, [50, 90, 95, 99]))
    return TokenLengths(mean=float(tokens.mean()), p50=p50, p90=p90, p95=p95, p99=p99, longest=int(tokens.max()))


def prefix_sharing(table: RequestTrace) -> PrefixSharing | None:
    """Compute how many prefix blocks repeat; None if no prefix blocks were recorded."""
    if table.prefix_blocks is None or table.block_tokens is None:
        return None
    blocks = np.concatenate([np.empty(0, np.int64), *table.prefix_blocks])
    if not len(blocks):
        return None
    return PrefixSharing(len(blocks), table.block_tokens, 1.0 - len(np.unique(blocks)) / len(blocks))
