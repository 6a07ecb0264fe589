"""Compute the statistics of a trace for ``coterie inspect``, and a verdict on what grouping and placement could gain.

An activation trace is read once from end to end, whatever its size, and every expert id is checked. A load table and a
request trace have only some of the statistics. A statistic that cannot be computed is None, and `missing` gives the
reason. All randomness (the sample of requests, the draws) comes from the Generator passed in.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.inspect.drift import Drift, measure_drift, no_drift
from coterie.answers.inspect.loads import (
    ArrivalRate,
    DomainSimilarity,
    LayerLoad,
    PrefixSharing,
    RankImbalance,
    TokenLengths,
    arrival_rate,
    domain_similarity,
    layer_loads,
    lengths,
    prefix_sharing,
    rank_imbalances,
)
from coterie.answers.inspect.samples import (
    MAX_DOMAINS,
    DistinctExperts,
    PaddingCost,
    PhaseCorrelation,
    Progress,
    Samples,
    cut_windows,
    run_pass,
)
from coterie.answers.verdicts import Verdict
from coterie.costs.presets import step_model
from coterie.costs.step import VLLM_GRAPHS, CostOptions
from coterie.errors import ConfigError, check, check_file
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta, choose_windows, domain_of
from coterie.traces.readers.base import Trace, kind_of
from coterie.traces.readers.routed_experts import find_model

RANKS = 8
"""Number of ranks that the verdict reports on, if it divides the number of experts."""
DECODERS, IN_FLIGHT = 8, 16
"""Decoders and requests per decoder of the proposed fleet; smaller if half of the recorded requests do not fill it."""
FEW_REQUESTS = 100
"""Number of requests below which the verdict warns that the results depend on the few requests recorded."""
NOTHING_PCT = 1.0
"""Saving of distinct experts, in percent, below which grouping is called next to nothing."""
_UNTIMED, _AT_ONCE = "no arrival times", "all requests arrive at once"
_UNEVEN = "no power of two up to 32 divides {} experts"
_OF_DECODE = ("phase_correlation", "distinct_experts", "padding")
_OF_ACTIVATIONS = ("load", "layers", "rank_imbalance", "domains", "drift", *_OF_DECODE)
_OF_REQUESTS = ("arrivals", "prompt_lengths", "output_lengths", "prefix_sharing")


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
    padding: list[PaddingCost] | None = None
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
    check(window is None, f"--window={window} chooses from a load table; {name} holds {kind_of(trace)}")
    if isinstance(trace, ActivationTrace):
        return _inspect_activations(trace, name, rng, progress)
    return _inspect_requests(trace, name)


def _inspection(reasons: dict[str, str], **values: Any) -> Inspection:
    """Make an inspection; `reasons` are those of statistics that may be missing."""
    return Inspection(**values, missing={name: why for name, why in reasons.items() if values.get(name) is None})


def _inspect_activations(trace: ActivationTrace, name: str, rng: Generator, progress: Progress | None) -> Inspection:
    check_file(
        trace.num_requests and trace.num_tokens,
        name,
        "tokens",
        f"the trace is empty ({trace.num_requests} requests, no tokens)",
    )
    meta, labels = trace.meta, trace.requests.domains
    # Some requests of a recording may have an empty label; these form a domain of their own.
    domains = _largest_domains(labels and [label or "(none)" for label in labels], trace.lengths)
    windows = cut_windows(trace, rng)
    counted = run_pass(trace, name, windows, domains.index, len(domains.names), rng, progress)
    load = counted.half_windows.sum(axis=(0, 1))  # [layer, expert] activations
    sampled, untimed = len(counted.samples.chosen), _UNTIMED if trace.requests.arrival_s is None else _AT_ONCE
    notes = {
        "The recording was interrupted or still runs: this is what it holds so far.": trace.unfinished,
        f"Distinct experts and phase correlation come from {sampled:,} random requests.": trace.num_requests > sampled,
    }
    one_domain = (
        f"all requests are of one domain, {domains.names[0]!r}" if domains.names else "the trace names no domains"
    )
    which = "" if trace.num_requests == sampled else "sampled "
    reasons = {
        "phase_correlation": f"no {which}request has both prefill and decode tokens",
        "distinct_experts": "the trace has no decode tokens",
        "domains": one_domain,
        "rank_imbalance": _UNEVEN.format(meta.num_experts),
    }
    padding, reasons["padding"] = _padding(meta, counted.samples, rng.spawn(1)[0])
    order = "the order of requests in time is not known, and that of a file may be by topic"
    return _inspection(
        reasons | _request_reasons(trace.requests),
        trace=name,
        kind="activations",
        model=meta.model,
        experts=meta.num_experts,
        top_k=meta.top_k,
        requests=trace.num_requests,
        tokens=trace.num_tokens,
        decode_tokens=counted.decode_tokens,
        phase_correlation=counted.samples.correlation(),
        distinct_experts=counted.samples.distinct(domains.all_domains, rng) or None,
        domains=domains.similarity(counted.domains),
        drift=no_drift("s", f"{untimed}: {order}")
        if windows.width_s is None
        else measure_drift(counted.half_windows, windows.width_s, "s", rng),
        padding=padding,
        notes=[note for note, holds in notes.items() if holds],
        **_load_parts(load, meta.layer_ids or range(meta.num_layers)),
        **_request_parts(trace.requests),
    )


def _padding(meta: TraceMeta, samples: Samples, rng: Generator) -> tuple[list[PaddingCost] | None, str]:
    """Price padding rows by whole steps of vLLM; return None and the reason if these are not known."""
    spec = find_model(meta.model)
    if spec is None or (spec.num_moe_layers, spec.num_experts) != (meta.num_layers, meta.num_experts):
        return None, "no known model has these layers"
    try:
        model = step_model(spec, options=CostOptions(graph_sizes=VLLM_GRAPHS), engine="vllm")
    except ConfigError as error:
        return None, str(error)
    return samples.padding(model, rng) or None, "too few requests have decode tokens"


def _inspect_load(table: LoadTable, name: str, rng: Generator, window: str | None) -> Inspection:
    chosen, what = choose_windows(Path(name), table, window)
    counts = table.counts[chosen]
    load = counts.sum(axis=0)  # [layer, expert]
    check_file(load.any(), name, "counts", f"the trace is empty ({len(chosen)} windows, no tokens)")
    reasons = dict.fromkeys((*_OF_DECODE, *_OF_REQUESTS), "a load table counts tokens per expert, not single requests")
    tokens = None if table.tokens is None else table.tokens[chosen]
    notes, similarity = [f"Load: {what}."], None
    if table.labels is None:
        reasons["domains"] = "windows have no labels"
        drift = measure_drift(counts[:, None].astype(np.int64), 1.0, "windows", rng)
        notes.append(
            "Drift is counted in windows; the noise within one window is not known, so lag 1 is the reference."
        )
    else:
        drift = no_drift("windows", "windows are labelled (domains), not a series in time")
        # Windows whose labels differ only after a "/" are one domain.
        sizes = counts[:, 0].sum(axis=1) if tokens is None else tokens
        domains = _largest_domains([domain_of(table.labels[i]) for i in chosen], sizes)
        loads, kept = np.zeros((len(domains.names), *counts.shape[1:])), domains.index >= 0
        np.add.at(loads, domains.index[kept], counts[kept].astype(np.float64))
        similarity = domains.similarity(loads)
        reasons["domains"] = f"all windows are of one domain, {domains.names[0]}"
    return _inspection(
        reasons | {"rank_imbalance": _UNEVEN.format(table.num_experts)},
        trace=name,
        kind="load",
        model=table.model,
        experts=table.num_experts,
        windows=len(chosen),
        tokens=None if tokens is None else int(tokens.sum()),
        domains=similarity,
        drift=drift,
        notes=notes,
        **_load_parts(load, range(table.num_layers) if table.layer_ids is None else table.layer_ids.tolist()),
    )


def _inspect_requests(table: RequestTrace, name: str) -> Inspection:
    check_file(len(table), name, "requests", "the trace is empty (no requests)")
    return _inspection(
        dict.fromkeys(_OF_ACTIVATIONS, "a request trace holds no activations") | _request_reasons(table),
        trace=name,
        kind="requests",
        requests=len(table),
        tokens=int(table.prompt_tokens.sum() + table.output_tokens.sum()),
        **_request_parts(table),
    )


@dataclass(frozen=True, slots=True)
class _Domains:
    names: list[str]
    """Domains with the most tokens, largest first."""
    tokens: list[float]
    left_out: int
    index: NDArray[np.int64]
    """[request or window] index of its domain in `names`; -1 if its domain is left out."""
    all_domains: NDArray[np.int64] | None
    """[request or window] number of its domain among all domains; None if the trace has no domains."""

    def similarity(self, loads: NDArray[np.integer] | NDArray[np.floating]) -> DomainSimilarity | None:
        """Return the similarity of loads [domain, layer, expert]; None for fewer than two domains."""
        return domain_similarity(loads, self.names, self.tokens, self.left_out) if len(self.names) > 1 else None


def _largest_domains(labels: Sequence[str] | None, tokens: NDArray[np.integer]) -> _Domains:
    """Choose the largest domains of requests or windows with `labels`, by their `tokens`."""
    if labels is None:
        return _Domains([], [], 0, np.full(len(tokens), -1, np.int64), None)
    names, domain = np.unique(np.array(labels), return_inverse=True)
    sizes = np.bincount(domain, weights=tokens, minlength=len(names))
    order = np.argsort(-sizes, kind="stable")[:MAX_DOMAINS]
    place = np.full(len(names), -1, np.int64)
    place[order] = np.arange(len(order))
    largest = [str(names[i]) for i in order]
    return _Domains(largest, sizes[order].tolist(), len(names) - len(order), place[domain], domain.astype(np.int64))


def _load_parts(load: NDArray[np.integer], layer_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "load": (load / np.maximum(load.sum(axis=1, keepdims=True), 1)).tolist(),
        "layers": layer_loads(load, layer_ids),
        "rank_imbalance": rank_imbalances(load) or None,
    }


def _request_parts(table: RequestTrace) -> dict[str, Any]:
    return {
        "arrivals": arrival_rate(table),
        "prompt_lengths": lengths(table.prompt_tokens),
        "output_lengths": lengths(table.output_tokens),
        "prefix_sharing": prefix_sharing(table),
    }


def _request_reasons(table: RequestTrace) -> dict[str, str]:
    return {
        "arrivals": _UNTIMED if table.arrival_s is None else _AT_ONCE,
        **dict.fromkeys(("prompt_lengths", "output_lengths"), "all are 0: not recorded"),
        "prefix_sharing": "no prefix blocks were recorded",
    }


# ------------------------------------------------------------------------------------------------------------- verdict


def inspect_verdict(found: Inspection) -> Verdict:
    """Say what grouping and placement could gain at most, how certain that is, and which command to run next."""
    where, rate = shlex.quote(found.trace), found.arrivals
    if found.kind == "requests":
        said = (
            "The trace gives times and lengths, no experts: whether grouping or placement pays cannot be told from it."
        )
        if rate is None:
            return Verdict(f"{said} Nor are arrival times known.", "coterie record --help")
        said += f" {rate.mean:,.3g} requests a second arrive on average, {rate.peak:,.3g} in the busiest stretch."
        return Verdict(said, f"coterie simulate {where}")
    parts = [_grouping(found)] if found.kind == "activations" else []
    known = found.rank_imbalance or []
    ranks = next((r for r in known if r.ranks == RANKS), known[-1] if known else None)
    if ranks is not None and ranks.most_gain is not None:
        parts.append(
            f"a better placement on {ranks.ranks} ranks can shorten MoE steps bound by compute by "
            f"{100 * ranks.most_gain:.0f}% at most"
        )
    said = "; ".join(parts) or "nothing here tells what grouping or placement would win"
    model, half = " --model NAME" if find_model(found.model) is None else "", (found.requests or 0) // 2
    decoders = next((n for n in (DECODERS, 4, 2) if half >= 2 * n), 0)
    then = f"coterie plan {where}{model}"
    if found.kind == "activations" and found.decode_tokens and decoders:
        in_flight = min(IN_FLIGHT, half // decoders)
        then = f"coterie fleet {where} --decoders {decoders} --in-flight {in_flight}{model}"
    return Verdict(f"{said[0].upper()}{said[1:]}. {_sure(found)}", then)


def best_grouping(steps: Sequence[DistinctExperts], smallest: int) -> DistinctExperts | None:
    """Return the batch size, from `smallest` on, at which requests of one domain save the most experts."""
    both = [step for step in steps if step.saved is not None and step.batch >= smallest]
    return max(both, key=lambda step: step.saved or 0.0, default=None)


def _grouping(found: Inspection) -> str:
    best = best_grouping(found.distinct_experts or (), 2)
    if best is None or best.saved is None:
        why = "no domain has enough requests to compare" if found.decode_tokens else "the trace has no decode tokens"
        return f"what grouping like requests would win in decode cannot be told: {why}"
    fewer = f"{100 * best.saved:.1f}% fewer experts at batch {best.batch}"
    if 100 * best.saved < NOTHING_PCT:
        return f"grouping by domain has next to nothing to win: {fewer}"
    return f"grouping like requests has something to win: by domain alone {fewer}"


def _sure(found: Inspection) -> str:
    doubts = []
    if found.requests is not None and found.requests < FEW_REQUESTS:
        doubts.append(f"{found.requests} requests are few")
    drift = found.drift
    if drift is not None and drift.half_life is not None:
        doubts.append(f"the load drifts, half of its change within {drift.half_life:,.3g} {drift.unit}")
    elif drift is not None and not drift.lag:
        if found.kind == "load" and drift.unit == "windows" and found.domains is not None:
            doubts.append("a sum over domains is more even than any of them")
        else:
            doubts.append(f"nothing tells how long it lasts ({drift.reason})")
    return f"How sure: {'; '.join(doubts)}." if doubts else "It is measured on all of the trace, which shows no drift."
