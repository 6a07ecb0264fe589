"""Cells with shared prefixes: the joint router against its KV term alone and its expert term alone, on whole workers.

Eight workers of both roles, each with all experts and a prefix cache of its own (:mod:`coterie.sim.fleet`). Prompts are
as long as Mooncake's and arrive by a clock; the router is asked at arrival, when the KV term can still save prefill.

A worker that holds all experts is as local as any other, so the expert term needs another meaning here, or it does
nothing: a worker's *home experts* are those that its cluster of calibration requests activates most. The term then
brings like requests together, which lowers the distinct experts of a step.

Requests that share a prefix use like experts, as requests of one topic do: recordings are clustered by footprint, and
requests that share a prefix replay recordings of one cluster. The router sees a prompt's own footprint, the best that a
predictor could give. Both flatter the expert term.

    share of a prompt that is a shared prefix    0, ¼, ½, ¾ (generated); and Mooncake's own prefixes, where its trace is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.bench import ROOM, STEADY_ARRIVALS, steady
from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.costs.step import StepModel, in_order
from coterie.errors import ConfigError
from coterie.footprints.signatures import Signature
from coterie.models import get_model
from coterie.placement.holdings import bit_words
from coterie.routing import Decision, Fleet, Request, Router, RouterFit, routers
from coterie.routing.clustering import cluster
from coterie.routing.joint import Joint
from coterie.sim.fleet.metrics import FleetRun, summarise_fleet
from coterie.sim.fleet.requests import FleetRequests, Recordings, draw_requests
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.traces import RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.types import BYTES_PER_WEIGHT, INFINIBAND_400G, Topology
from coterie_lab.suites.eldr.synthetic import MOONCAKE, SyntheticSize, load_arrivals
from coterie_lab.suites.joint.cells import DEVICE_BYTES, SIZE, USABLE, split_trace

WORKERS = 8
LOAD = 0.7
"""Rate of arrivals, as a share of what round robin serves where nothing is shared."""
REQUESTS = 1200
LONGEST_PROMPT = 16_384
BLOCK_TOKENS = 512
"""Tokens of a block, as in Mooncake's trace."""
LENGTHS = LognormalLengths(8_000, 0.8, 340, 0.6, LONGEST_PROMPT)
"""Lengths near those of Mooncake's conversations below 16,384 tokens."""
SHARES = (0.0, 0.25, 0.5, 0.75)
KINDS = 8
"""Clusters of recordings."""
FAMILIES = 8
"""Shared prefixes of each kind; their popularity follows Zipf's law."""
RECORDED, SYNTHETIC = "gpt-oss-20b", "qwen3-30b-a3b"
PRICED = ("gpt-oss-20b", "deepseek-v2-lite")
"""Recorded models that are served on pairs and groups too."""
LIGHT = 0.01
"""Weight of uncached tokens at which a full worker weighs as much as 3,000 of them; published is 1, and 30."""

ROUND_ROBIN, SHORTEST, LATENCY = "round robin", "shortest queue", "latency-aware"
KV_ONLY, EXPERT_ONLY, JOINT, NO_HOMES = "KV only", "expert only", "joint", "joint, no home experts"
LIGHT_KV, LIGHT_JOINT = "KV only, KV / 100", "joint, KV / 100"
ONE_DEVICE = "latency-aware, one device's prices"
"""Prices of before: a worker is one device, and what it lacks of a prompt is computed there, wherever it was before."""


class Variant(NamedTuple):
    router: str
    settings: dict[str, float]
    base: str | None
    """Variant that it is compared with, on the same requests."""


class FleetKind(NamedTuple):
    """Workers with all experts: single GPUs, or groups of several."""

    workers: int = WORKERS
    per_worker: int = 8
    """Requests of a worker in the closed run that sets the rate."""
    ranks: int = 1
    prefill_workers: int = 0
    """Workers that compute prompts; without any, those that decode compute them."""


WHOLE, PAIRS, GROUPS = "whole workers", "pairs", "groups"
FLEETS = {WHOLE: FleetKind(), PAIRS: FleetKind(prefill_workers=6), GROUPS: FleetKind(4, 24, 4)}
"""Six prefill workers keep up with eight decoders at these lengths."""

VARIANTS = {
    ROUND_ROBIN: Variant("round_robin", {}, None),
    SHORTEST: Variant("join_shortest_queue", {}, ROUND_ROBIN),
    KV_ONLY: Variant("joint", {"experts": 0.0}, SHORTEST),
    EXPERT_ONLY: Variant("joint", {"kv": 0.0}, SHORTEST),
    JOINT: Variant("joint", {}, KV_ONLY),
    NO_HOMES: Variant("joint", {}, KV_ONLY),
    LIGHT_KV: Variant("joint", {"kv": LIGHT, "experts": 0.0}, SHORTEST),
    LIGHT_JOINT: Variant("joint", {"kv": LIGHT}, LIGHT_KV),
    LATENCY: Variant("latency_aware", {}, SHORTEST),
    ONE_DEVICE: Variant("latency_aware", {}, SHORTEST),
}
"""By configuration. The latency-aware router prices experts, load and the prompt tokens that are not cached."""


class PrefixCell(NamedTuple):
    trace: str
    share: float | None
    """Share of a prompt that is a shared prefix; None: Mooncake's own arrivals, lengths and prefixes."""
    seed: int
    fleet: str = WHOLE


class PrefixOutcome(NamedTuple):
    """Metrics of the steady part of a run."""

    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p99_ms: float
    hit_pct: float
    """Prompt tokens found in the worker's cache, percent."""
    experts_per_step: float
    """Distinct experts of a layer in a decode step, steps weighted by their tokens."""
    uneven: float
    """Load of the most loaded worker ÷ the mean."""
    postponed_pct: float
    """Requests that had to wait for another use of their recording, percent."""
    correlation: float
    """Of the price of a request's decision with the time that it then took, each per output token; nan if unpriced."""


PrefixOutcomes = dict[str, PrefixOutcome]
"""By variant."""


def serve_prefix_cell(
    cell: PrefixCell, data: Path | None, requests: int | None = None, size: SyntheticSize = SIZE
) -> PrefixOutcomes:
    """Serve the same requests under every variant."""
    kind = FLEETS[cell.fleet]
    _, recordings, fitted = split_trace(cell.trace, cell.seed, kind.workers, kind.per_worker, data, size)
    model = step_model(get_model(cell.trace), "h200", "bf16", Topology(kind.ranks))
    placement, places, kept = in_order(model), ROOM * kind.per_worker, kind.ranks * kv_tokens(model)
    config = FleetConfig(decode_workers=kind.workers, both=True, places=places, kv_tokens=kept)
    if kind.prefill_workers:
        config = replace(
            config, both=False, prefill_workers=kind.prefill_workers, prefill_kv_tokens=kept, link=INFINIBAND_400G
        )
    serve = partial(run_fleet, model=model, config=config, placement=placement)
    count, in_flight = requests or REQUESTS, kind.workers * kind.per_worker
    rate = LOAD * served_a_second(draw_shared(cell, recordings, count, data), serve, in_flight)
    drawn = draw_shared(cell, recordings, count, data, rate)
    lengths = int(np.mean(drawn.prompt_tokens)), float(np.mean(drawn.output_tokens))
    prices = DecodeStepPrices.of(model, kind.per_worker, *lengths, placement=placement)
    before = DecodeStepPrices.of(model, kind.per_worker, *lengths)
    before = replace(before, transfer_us=before.prefill_us * (kind.per_worker + 1))
    outcomes: PrefixOutcomes = {}
    for name, variant in VARIANTS.items():
        if cell.fleet == WHOLE if name == ONE_DEVICE else cell.fleet != WHOLE and name not in (SHORTEST, LATENCY):
            continue
        cost = before if name == ONE_DEVICE else prices
        router = Noted(routers.make(variant.router, {"fitted": fitted, "cost": cost, "seed": 0}, **variant.settings))
        fleet = fitted.fleet(config.places)
        fleet.local = None if name == NO_HOMES or cell.fleet != WHOLE else home_experts(fitted)
        run = serve(drawn, router=router, fleet=fleet, duplicates="postpone")
        outcomes[name] = _outcome(run, router.prices if variant.router == "latency_aware" else {})
    return outcomes


class Noted:
    """A router, and the price of each of its decisions."""

    def __init__(self, router: Router) -> None:
        self.router, self.prices = router, dict[int, float]()

    def route(self, request: Request, fleet: Fleet) -> Decision:
        decision = self.router.route(request, fleet)
        self.prices[int(request.id)] = float(decision.scores[decision.worker])
        return decision


def kv_tokens(model: StepModel) -> int:
    """Return the tokens of KV cache that fit beside the weights in a worker's memory."""
    spec = model.spec
    weights = spec.num_moe_layers * spec.num_experts * spec.expert_bytes(model.dtype)
    others = 2 * spec.vocab_size * spec.hidden_size * BYTES_PER_WEIGHT["bf16"]
    return int((USABLE * DEVICE_BYTES - weights - others) // spec.kv_bytes_per_token)


def home_experts(fitted: RouterFit) -> NDArray[np.uint64]:
    """Return the experts that a worker's cluster activates most, as many as `joint` counts: [worker, layer, word]."""
    profiles = fitted.profiles.reshape(WORKERS, fitted.num_layers, fitted.num_experts)
    most = min(Joint().top, fitted.num_experts // 2)
    held = np.zeros(profiles.shape, bool)
    np.put_along_axis(held, np.argsort(-profiles, axis=2, kind="stable")[:, :, :most], True, axis=2)
    return bit_words(held)


def kinds_of(recordings: Recordings, rng: Generator) -> NDArray[np.int64]:
    """Cluster recordings by footprint, as many in each cluster: [recording] cluster."""
    shown = recordings.footprint
    assert shown is not None
    signatures = Signature().fit(shown, shown, rng).transform_all(shown)
    return cluster(signatures, KINDS, rng).labels


def draw_shared(
    cell: PrefixCell, recordings: Recordings, count: int, data: Path | None, rate: float | None = None
) -> FleetRequests:
    """Draw requests with shared prefixes; those that share a prefix replay recordings of one kind."""
    rng = np.random.default_rng([cell.seed, 9])
    if cell.share is None:
        if data is None:
            raise ConfigError("Mooncake's prefixes need the folder of real data")
        trace = load_arrivals(data / "requests" / MOONCAKE)
        start = int(rng.integers(max(1, len(trace) - count + 1)))
        trace = spread(trace.take(slice(start, start + count)))
        kinds = inherited_kinds(trace, rng)
    else:
        kinds = rng.integers(KINDS, size=count)
        trace = shared_prefixes(cell.share, kinds, rng)
    drawn = draw_requests(recordings, len(trace), rng, trace, rate, LONGEST_PROMPT)
    return replace(drawn, recorded=recordings_of(kinds, kinds_of(recordings, rng), rng))


def shared_prefixes(share: float, kinds: NDArray[np.int64], rng: Generator) -> RequestTrace:
    """Draw Poisson arrivals; `share` of a prompt's tokens, in whole blocks, is the prefix of its family."""
    count = len(kinds)
    prompts, outputs = LENGTHS.draw(kinds, rng)
    popularity = 1.0 / np.arange(1, FAMILIES + 1)
    families = kinds * FAMILIES + rng.choice(FAMILIES, count, p=popularity / popularity.sum())
    longest = LONGEST_PROMPT // BLOCK_TOKENS
    own = KINDS * FAMILIES * longest + longest * np.arange(count)
    blocks = []
    for family, first, prompt in zip(families.tolist(), own.tolist(), prompts.tolist(), strict=True):
        held, shared = prompt // BLOCK_TOKENS, round(share * prompt / BLOCK_TOKENS)
        blocks.append(np.r_[family * longest + np.arange(min(shared, held)), first + np.arange(max(0, held - shared))])
    times = np.cumsum(rng.exponential(1.0, count))
    return RequestTrace(prompts, outputs, times, prefix_blocks=blocks, block_tokens=BLOCK_TOKENS)


def spread(trace: RequestTrace) -> RequestTrace:
    """Spread requests of one arrival time evenly until the next: Mooncake's clock ticks every 3 s."""
    assert trace.arrival_s is not None
    ticks, first, count = np.unique(trace.arrival_s, return_index=True, return_counts=True)
    gaps = np.diff(ticks, append=ticks[-1] + (ticks[-1] - ticks[0]) / max(1, len(ticks) - 1))
    within = (np.arange(len(trace)) - np.repeat(first, count)) / np.repeat(count, count)
    return replace(trace, arrival_s=np.repeat(ticks, count) + within * np.repeat(gaps, count))


def inherited_kinds(trace: RequestTrace, rng: Generator) -> NDArray[np.int64]:
    """Give each request the kind of the request that brought its longest known prefix: [request] kind.

    A known prefix of one block does not count: all of Mooncake's conversations begin with the same block.
    """
    brought: dict[int, int] = {}
    kinds = np.empty(len(trace), np.int64)
    for row, blocks in enumerate(trace.prefix_blocks or ()):
        known = [brought[block] for block in blocks[1:].tolist() if block in brought]
        kinds[row] = known[-1] if known else rng.integers(KINDS)
        for block in blocks[1:].tolist():
            brought.setdefault(block, int(kinds[row]))
    return kinds


def recordings_of(kinds: NDArray[np.int64], clusters: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
    """Choose recordings of each request's kind in turn, so that uses of one are far apart: [request] recording."""
    order = [rng.permutation(np.flatnonzero(clusters == kind)) for kind in range(KINDS)]
    turns = np.zeros(KINDS, np.int64)
    recorded = np.empty(len(kinds), np.int64)
    for row, kind in enumerate(kinds.tolist()):
        recorded[row] = order[kind][turns[kind] % len(order[kind])]
        turns[kind] += 1
    return recorded


def served_a_second(requests: FleetRequests, serve: Callable[..., FleetRun], in_flight: int) -> float:
    """Return the requests per second that round robin serves in a closed loop without shared prefixes."""
    alone = replace(requests, arrival_s=None, blocks=None, block_offsets=None)
    run = serve(alone, router=routers.make("round_robin"), in_flight=in_flight, duplicates="allow")
    window = steady(run, in_flight)
    ended = (run.finish_s >= window.since_s) & (run.finish_s < window.until_s)
    return float(ended.sum() / (window.until_s - window.since_s))


def _outcome(run: FleetRun, prices: dict[int, float]) -> PrefixOutcome:
    since, until = map(float, np.nanquantile(run.arrival_s, STEADY_ARRIVALS))
    summary = summarise_fleet(run, since_s=since, until_s=until)
    load = summary.worker_in_flight
    steady = [row for row in prices if since <= run.arrival_s[row] < until and np.isfinite(run.finish_s[row])]
    took = (run.finish_s - np.fmax(run.arrival_s, run.prefill_end_s if run.prefill_workers else 0))[steady]
    priced = [prices[row] for row in steady]
    return PrefixOutcome(
        ttft_mean_ms=summary.ttft.mean,
        ttft_p50_ms=summary.ttft.p50,
        ttft_p99_ms=summary.ttft.p99,
        tpot_mean_ms=summary.tpot.mean,
        tpot_p99_ms=summary.tpot.p99,
        hit_pct=100.0 * summary.cached_share,
        experts_per_step=summary.distinct_by_token,
        uneven=float(load.max() / load.mean()),
        postponed_pct=100.0 * run.postponed / len(run.arrival_s),
        correlation=float(np.corrcoef(priced, took / np.maximum(run.decoded[steady], 1))[0, 1]) if priced else np.nan,
    )
