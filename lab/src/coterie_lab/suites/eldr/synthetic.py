"""Fleets that recordings are too few for, on synthetic routing; and arrivals with shared prefixes on recorded routing.

Synthetic requests have a language and, within it, a topic: preferences over experts are a mixture of shared ones, the
language's and the topic's. Languages are as uneven as WildChat's (the first two have three quarters of the requests).
How much they differ was set so that steps of one language touch 3 to 10% fewer experts than mixed ones, as published.
So only the *trend* over pool sizes is a result; its height follows from that setting.

    topology         8, 16 and 24 decoders at Qwen3-30B-A3B's shape, as many requests in flight on each
    expert_parallel  decoders of 4 ranks at Qwen3-235B-A22B's shape, experts in order
    prefix_cache     Mooncake's arrivals, lengths and prefixes with gpt-oss-20b's experts, prefixes cached or not
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.bench import BASE, Halves, Source, bench_of
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.routing.calibration import calibration
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import draw_requests, phase_recordings
from coterie.sim.fleet.run import FleetConfig
from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.readers import read_as
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.types import Placement, Topology
from coterie_lab.suites.eldr.analysis import Unions, domain_unions
from coterie_lab.suites.eldr.fleets import Outcome, closed_bench, compare_routers, recorded_source

LANGUAGES = ("en", "zh", "ru", "fr", "es", "de")
SHARES = (0.45, 0.30, 0.10, 0.06, 0.05, 0.04)
TOPICS = 6
SHARED, LANGUAGE, TOPIC = 0.30, 0.20, 0.50
"""Weights of the shared, the language's and the topic's expert preferences."""
ZIPF = 0.9
CONCENTRATION = 150.0
ROUTERS = (BASE, "join_shortest_queue", "domain", "locality_band", "latency_aware")
POOLS = (8, 16, 24)
EACH = 16
EXPERT_PARALLEL, EP_DECODERS, EP_EACH = 4, 8, 32
MOONCAKE = "mooncake/conversation_trace.jsonl"
CACHE_DECODERS, CACHE_PREFILLERS, CACHE_EACH = 8, 8, 12
LONGEST_PROMPT = 16_384


@dataclass(frozen=True, slots=True)
class SyntheticSize:
    """Size of the synthetic workload; tests take less."""

    recordings: int = 1200
    fitted: int = 400
    """Recordings to fit on; the others are served, twice as many as the largest pool has in flight."""
    prompt_tokens: int = 48
    output_tokens: int = 48
    requests: int = 2400
    """Requests per run."""


FULL = SyntheticSize()
WIDE = SyntheticSize(recordings=800, fitted=300, prompt_tokens=32, output_tokens=32, requests=1000)
"""Size for 94 layers: tokens are twice as large."""


def draw_language_preferences(layers: int, experts: int, rng: Generator) -> NDArray[np.float64]:
    """Draw preferences [language x topic, layer, expert]."""
    zipf = np.arange(1, experts + 1) ** -ZIPF
    zipf /= zipf.sum()

    def some(count: int) -> NDArray[np.float64]:
        return rng.permuted(np.tile(zipf, (count, layers, 1)), axis=2)

    shared, languages = some(1), np.repeat(some(len(LANGUAGES)), TOPICS, axis=0)
    return np.asarray(SHARED * shared + LANGUAGE * languages + TOPIC * some(len(LANGUAGES) * TOPICS))


@lru_cache(maxsize=1)
def language_source(model: str, seed: int, size: SyntheticSize) -> Source:
    """Generate requests labelled with their language; their topics are known to the generator only."""
    spec, rng = get_model(model), np.random.default_rng([seed, 6])
    settings = SyntheticSettings(
        domains=tuple(f"{language}/{topic}" for language in LANGUAGES for topic in range(TOPICS)),
        mix=tuple(share / TOPICS for share in SHARES for _ in range(TOPICS)),
        concentration=CONCENTRATION,
        lengths=LognormalLengths(size.prompt_tokens, 0.5, size.output_tokens, 0.5, 4 * size.output_tokens),
    ).shaped_like(spec)
    preferences = draw_language_preferences(spec.num_moe_layers, spec.num_experts, rng)
    trace = generate(replace(settings, preferences=preferences), rng, requests=size.recordings)
    domains = [label.split("/")[0] for label in trace.requests.domains or ()]
    relabelled = ActivationTrace(trace.meta, trace.segments, replace(trace.requests, domains=domains))
    return Source(relabelled, calibration(relabelled))


def language_halves(seed: int, size: SyntheticSize) -> Halves:
    """Draw the requests to fit on; the others are served."""
    order = np.random.default_rng([seed, 0]).permutation(size.recordings)
    return Halves(np.sort(order[: size.fitted]), np.sort(order[size.fitted :]))


class SyntheticResult(NamedTuple):
    outcomes: dict[str, Outcome]
    unions: Unions


class SyntheticCell(NamedTuple):
    part: str
    decoders: int
    per_decoder: int
    seed: int


def serve_synthetic(cell: SyntheticCell, size: SyntheticSize | None = None) -> SyntheticResult:
    parallel = cell.part == "expert_parallel"
    name = "qwen3-235b-a22b" if parallel else "qwen3-30b-a3b"
    size = size or (WIDE if parallel else FULL)
    source, halves = language_source(name, cell.seed, size), language_halves(cell.seed, size)
    spec, model, placement = get_model(name), None, None
    if parallel:
        model = step_model(spec, "h200", "bf16", Topology(EXPERT_PARALLEL))
        placement = Placement.linear(spec.num_moe_layers, spec.num_experts, EXPERT_PARALLEL)
    recordings = phase_recordings(source.trace, halves.test)
    requests = max(size.requests, 4 * cell.decoders * cell.per_decoder)
    load = (cell.decoders, cell.per_decoder, cell.seed, requests)
    bench = bench_of(source, halves, recordings, *load, model, placement)
    unions = domain_unions(source, cell.per_decoder, 200, np.random.default_rng([cell.seed, 7]))
    return SyntheticResult(compare_routers(bench, {router: bench.router(router) for router in ROUTERS}), unions)


class CacheResult(NamedTuple):
    cached: dict[str, Outcome]
    uncached: dict[str, Outcome]
    cached_share: float
    """Share of prompt tokens found in the prefix cache."""
    in_flight: float
    """Mean requests per decoder."""
    prefill_ms: tuple[float, float]
    """Mean time from arrival to handoff, with and without the cache."""


@lru_cache(maxsize=4)
def load_arrivals(path: Path) -> RequestTrace:
    return read_as(RequestTrace, path).in_order()


def serve_prefixes(seed: int, data: Path, requests: int, names: tuple[str, ...] = ROUTERS) -> CacheResult:
    """Serve the same arrivals with and without prefix caching; the rate keeps about `CACHE_EACH` on a decoder."""
    source = recorded_source(data, "gpt-oss-20b")
    bench = closed_bench(source, CACHE_DECODERS, CACHE_EACH, seed, requests)
    arrivals = load_arrivals(data / "requests" / MOONCAKE)
    tokens = float(np.mean(arrivals.output_tokens))
    base = compare_routers(bench, {BASE: bench.router(BASE)})[BASE]
    rate = CACHE_DECODERS * CACHE_EACH / (tokens * base.step_ms * 1e-3)
    drawn = draw_requests(
        bench.requests.recordings, requests, np.random.default_rng([seed, 8]), arrivals, rate, LONGEST_PROMPT
    )
    # Prefill is routed by load alone, with caches and without: only what it finds in its cache differs.
    config = FleetConfig(
        decode_workers=CACHE_DECODERS,
        prefill_workers=CACHE_PREFILLERS,
        places=bench.config.places,
        prefill_policy="least_queued",
    )
    outcomes: list[dict[str, Outcome]] = []
    base_runs: list[FleetRun] = []
    for served in (drawn, replace(drawn, blocks=None, block_offsets=None)):
        open_bench = replace(bench, requests=served, config=config, in_flight=None)
        chosen = {name: open_bench.router(name) for name in names}
        outcomes.append(compare_routers(open_bench, chosen, base_runs.append))
    cached, uncached = base_runs
    share = float(cached.cached_tokens.sum() / cached.prompt_tokens.sum())
    load = float(uncached.step_decoding[uncached.step_worker >= CACHE_PREFILLERS].mean())
    waits = [1e3 * float(np.mean(run.prefill_end_s - run.arrival_s)) for run in base_runs]
    return CacheResult(outcomes[0], outcomes[1], share, load, (waits[0], waits[1]))
