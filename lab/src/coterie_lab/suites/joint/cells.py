"""Cells of the joint suite: one split of a trace on 8 ranks of a node, with the published steps added one by one.

    standard            experts in order, round robin (and the shortest queue)
    + expert-aware      the joint router, which knows which rank holds which experts (and `latency_aware`)
    + replication       extra slots on every rank for experts that its requests use and the rank lacks
    + batch scheduling  every rank picks which requests decode, local experts first, under a budget of time per token

Calibration requests are served first, by the joint router on experts in order. From them come the demand of each rank
and the price of a step by requests and by remote activations. Other requests are then served by every configuration, in
one order. Beside the chain, with one part varied: `replicas` (fewer of them; to even out load; or none, with experts
moved to even out load), `budget` (a binding one), `locality` (the router without its load term; experts placed by
clusters of like requests), `slow link` (the chain with ranks joined by InfiniBand, as if on a node each), and `step
size` (single steps of many tokens, spread evenly over ranks: the size from which on replicas pay).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from coterie.answers.fleet.bench import CONTEXT, ROOM, split
from coterie.costs.exchange import BYTES_PER_VALUE, row_us
from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.costs.shapes import dense_shapes
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.holdings import Demand, held_by
from coterie.placement.planning.eplb import rebalance
from coterie.placement.triggers.actions import ActionManager, ActionSettings
from coterie.routing import Router, RouterFit, routers
from coterie.sim.fleet.requests import Recordings, draw_requests, phase_recordings, split_recordings
from coterie.sim.group import LockstepGroup
from coterie.types import BYTES_PER_WEIGHT, INFINIBAND_400G, NVLINK4, Link, ModelSpec, Placement, Topology, WeightDtype
from coterie_lab.suites.eldr.fleets import TRACES, recorded_source
from coterie_lab.suites.eldr.synthetic import SyntheticSize, language_halves, language_source
from coterie_lab.suites.held import cheapest_homes, placement_from_held
from coterie_lab.suites.joint.decode_batch import DecodeBatcher, DecodePrices
from coterie_lab.suites.joint.loop import GroupLoop, GroupOutcome, summarise_group
from coterie_lab.suites.shared import joined_by

RANKS = 8
EXTRA_SLOTS = 8
"""Extra slots per rank, as published; fewer where memory does not allow them."""
STANDARD, ROUTING, REPLICATION, SCHEDULING = "standard", "+ expert-aware", "+ replication", "+ batch scheduling"
CHAIN = (STANDARD, ROUTING, REPLICATION, SCHEDULING)
DTYPES: dict[str, WeightDtype] = {"gpt-oss-20b": "bf16", "deepseek-v2-lite": "bf16", "deepseek-v3": "fp8"}
SYNTHETIC = "deepseek-v3"
LOADS = {SYNTHETIC: 16, "gpt-oss-20b": 16, "deepseek-v2-lite": 8}
"""Requests in flight per rank: 128 in all, as published, or half where recordings are too few."""
SIZE = SyntheticSize(recordings=600, fitted=200, prompt_tokens=32, output_tokens=32)
TURNS = 6
"""Requests per run, as a multiple of those in flight: the first two multiples are warm-up."""
DEVICE_BYTES, USABLE = 141e9, 0.9
"""Memory of an H200, and the share usable for weights and KV cache."""
FEWER_SLOTS = (1, 2, 4)
TIGHT = 0.98
"""Budget of time between tokens that binds, as a share of the mean calibration step."""
STEP_TOKENS = (128, 1024, 8192, 32768)


class JointCell(NamedTuple):
    trace: str
    per_rank: int
    """Requests in flight per rank, on average."""
    seed: int
    """Seed for the split and the order of requests."""


class Served(NamedTuple):
    """A configuration; the key of a row."""

    part: str
    configuration: str
    router: str
    extra_slots: int = 0
    planner: str | None = None
    """Planner of the placement; None keeps experts in order."""
    budget: str | None = None
    """Budget of time between tokens."""
    link: str = NVLINK4.name
    tokens: int | None = None
    """Tokens of a single step, for part `step size`."""


Outcomes = dict[Served, GroupOutcome]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBench:
    """Calibration and test requests on one model."""

    known: GroupLoop
    served: GroupLoop

    @property
    def spec(self) -> ModelSpec:
        return self.served.model.spec

    @property
    def in_order(self) -> Placement:
        return Placement.linear(self.spec.num_moe_layers, self.spec.num_experts, RANKS)

    def router(self, name: str, **settings: Any) -> Router:
        loop = self.served
        tokens = float(np.mean(loop.requests.output_tokens))
        cost = DecodeStepPrices.of(loop.model, loop.in_flight // RANKS, CONTEXT, tokens)
        return routers.make(name, {"fitted": loop.fitted, "cost": cost, "seed": 0}, **settings)

    def linked(self, link: Link) -> GroupBench:
        """Return the same requests on ranks that are joined by another link."""
        model = joined_by(self.served.model, link)
        return GroupBench(replace(self.known, model=model), replace(self.served, model=model))

    def outcome(self, placement: Placement, router: Router, batcher: DecodeBatcher | None = None) -> GroupOutcome:
        return summarise_group(self.served.serve(placement, router, batcher), self.served.in_flight, RANKS)


class SplitTrace(NamedTuple):
    """Calibration requests of a trace, and those that are served."""

    known: Recordings
    served: Recordings
    fitted: RouterFit
    """Fit of the calibration requests."""


def split_trace(
    trace: str, seed: int, workers: int, per_worker: int, data: Path | None, size: SyntheticSize
) -> SplitTrace:
    """Split the recorded trace of this name, or a synthetic one of the model's shape."""
    if trace in TRACES:
        if data is None:
            raise ConfigError(f"{trace} is recorded; it needs the folder of real data")
        source = recorded_source(data, trace)
        halves = split(source, seed)
        known, served = (split_recordings(source.trace, half) for half in halves)
    else:
        source, halves = language_source(trace, seed, size), language_halves(seed, size)
        known, served = (phase_recordings(source.trace, half) for half in halves)
    for name, half in (("to fit", known), ("to serve", served)):
        if workers * per_worker > len(half):
            raise ConfigError(f"{workers} x {per_worker} in flight need as many recordings; {len(half)} are {name}")
    counts = source.counts.take(np.flatnonzero(np.isin(source.counts.requests, halves.fit)))
    fitted = RouterFit(workers, batch=per_worker).fit(counts, np.random.default_rng([seed, 1]))
    return SplitTrace(known, served, fitted)


def bench_of(cell: JointCell, data: Path | None, requests: int | None = None, size: SyntheticSize = SIZE) -> GroupBench:
    halves = split_trace(cell.trace, cell.seed, RANKS, cell.per_rank, data, size)
    count = requests or TURNS * RANKS * cell.per_rank
    model = step_model(get_model(cell.trace), "h200", DTYPES[cell.trace], Topology(RANKS))

    def loop(recordings: Recordings, number: int) -> GroupLoop:
        requests = draw_requests(recordings, count, np.random.default_rng([cell.seed, number]))
        return GroupLoop(requests, model, halves.fitted, RANKS * cell.per_rank, ROOM * cell.per_rank)

    return GroupBench(loop(halves.known, 3), loop(halves.served, 2))


def serve_cell(cell: JointCell, data: Path | None, requests: int | None = None, size: SyntheticSize = SIZE) -> Outcomes:
    """Serve the same requests under every configuration."""
    bench = bench_of(cell, data, requests, size)
    spec, joint, in_order = bench.spec, bench.router("joint"), bench.in_order
    asked = bench.known.serve(in_order, joint).asked
    extra = min(EXTRA_SLOTS, slots_that_fit(spec, bench.served.model.dtype, cell.per_rank * ROOM * CONTEXT))
    more = replicated(spec, asked, extra)
    loaded = decode_prices(bench, more)
    outcomes = _chain("main", bench, extra, more, loaded.prices)
    for configuration, name in ((STANDARD, "join_shortest_queue"), (ROUTING, "latency_aware")):
        outcomes[Served("main", configuration, name)] = bench.outcome(in_order, bench.router(name))
    slow = bench.linked(INFINIBAND_400G)
    outcomes |= _chain("slow link", slow, extra, more, decode_prices(slow, more).prices)
    tight = DecodeBatcher(loaded.prices, budget_us=TIGHT * loaded.step_us)
    budget = Served("budget", SCHEDULING, "joint", extra, "demand", f"{TIGHT:g} of a step")
    outcomes[budget] = bench.outcome(more, joint, tight)
    for fewer in (slots for slots in FEWER_SLOTS if slots < extra):
        some = Served("replicas", REPLICATION, "joint", fewer, "demand")
        outcomes[some] = bench.outcome(replicated(spec, asked, fewer), joint)
    packed, even = (evened(spec, asked, slots) for slots in (0, extra))
    outcomes[Served("replicas", ROUTING, "joint", 0, "eplb")] = bench.outcome(packed, joint)
    outcomes[Served("replicas", REPLICATION, "joint", extra, "eplb")] = bench.outcome(even, joint)
    outcomes[Served("locality", ROUTING, "joint, no load")] = bench.outcome(in_order, bench.router("joint", load=0.0))
    clusters, band = by_cluster(spec, bench.served.fitted), bench.router("locality_band")
    outcomes[Served("locality", ROUTING, "joint", 0, "clusters")] = bench.outcome(clusters, joint)
    outcomes[Served("locality", ROUTING, "locality_band", 0, "clusters")] = bench.outcome(clusters, band)
    alone = Served("step size", STANDARD, "even")
    replicas = alone._replace(configuration=REPLICATION, extra_slots=extra)
    placements = {
        alone: in_order,
        alone._replace(planner="eplb"): packed,
        (replicas if extra else alone)._replace(planner="demand"): more,
        (replicas if extra else alone)._replace(planner="eplb"): even,
    }
    for tokens in STEP_TOKENS:
        for served, placement in placements.items():
            rng = np.random.default_rng([cell.seed, 5, tokens])
            outcomes[served._replace(tokens=tokens)] = single_step(bench, placement, tokens, rng)
    return outcomes


def single_step(bench: GroupBench, placement: Placement, tokens: int, rng: Generator) -> GroupOutcome:
    """Run one step of tokens drawn from all that are served, as many on every rank."""
    recorded = bench.served.requests.recordings.expert_ids
    ids, home = recorded[rng.integers(0, len(recorded), tokens)], np.arange(tokens) % RANKS
    part = LockstepGroup(bench.served.model, placement).step(ids, home, np.full(tokens, CONTEXT))
    return GroupOutcome(
        tbt_mean_ms=1e3 * part.total_s,
        tbt_p99_ms=1e3 * part.total_s,
        tokens_per_s=tokens / part.total_s,
        all_to_all_pct=100.0 * part.all_to_all_s / part.total_s,
        experts_pct=100.0 * part.experts_s / part.total_s,
        remote_pct=100.0 * part.remote / part.activations,
        uneven=1.0,
        decoding_pct=100.0,
        steps=1,
    )


def _chain(part: str, bench: GroupBench, extra: int, more: Placement, prices: DecodePrices) -> Outcomes:
    """Serve the published steps; `more` is the placement with `extra` slots per rank."""
    joint, link = bench.router("joint"), bench.served.model.topology.intra.name
    replicas = Served(part, REPLICATION, "joint", extra, "demand", link=link)
    return {
        Served(part, STANDARD, "round_robin", link=link): bench.outcome(bench.in_order, bench.router("round_robin")),
        Served(part, ROUTING, "joint", link=link): bench.outcome(bench.in_order, joint),
        replicas: bench.outcome(more, joint),
        replicas._replace(configuration=SCHEDULING, budget="50 ms"): bench.outcome(more, joint, DecodeBatcher(prices)),
    }


class LearnedPrices(NamedTuple):
    prices: DecodePrices
    step_us: float
    """Mean step time with all requests decoding."""


def decode_prices(bench: GroupBench, placement: Placement) -> LearnedPrices:
    """Learn the price of a step by the requests of a rank, from calibration requests at full and at half load."""
    loop, spec, step_us, crossing = bench.known, bench.spec, list[float](), 0.0
    loads = (loop.in_flight // 2, loop.in_flight)
    for in_flight in loads:
        parts = replace(loop, in_flight=in_flight).serve(placement, bench.router("joint")).parts
        step_us.append(1e6 * float(np.mean([part.total_s for part in parts])))
        share = float(np.mean([part.remote / part.activations for part in parts]))
        crossing = share * spec.top_k * spec.num_moe_layers
    remote_us = 2.0 * row_us(spec, loop.model.topology.intra)
    slope = RANKS * (step_us[1] - step_us[0]) / (loads[1] - loads[0])
    request_us = max(0.0, slope - remote_us * crossing)
    fixed_us = max(0.0, step_us[1] - loads[1] / RANKS * (request_us + remote_us * crossing))
    return LearnedPrices(DecodePrices(fixed_us, request_us, remote_us), step_us[1])


def manager_of(spec: ModelSpec, settings: ActionSettings) -> ActionManager:
    return ActionManager(Topology(RANKS), spec.hidden_size * BYTES_PER_VALUE, spec.expert_bytes(), settings)


def replicated(spec: ModelSpec, asked: Demand, extra: int) -> Placement:
    """Place experts in order, and in `extra` slots per rank those it uses most and lacks, at most three copies each."""
    settings = ActionSettings(
        extra_slots=extra, swap_top=0, replicate_top=4 * extra, max_actions=spec.num_experts, min_saving_s=0.0
    )
    held = held_by(Placement.linear(spec.num_moe_layers, spec.num_experts, RANKS))
    return placement_from_held(manager_of(spec, settings).cycle(asked, held).held, spec.num_experts // RANKS + extra)


def evened(spec: ModelSpec, asked: Demand, extra: int) -> Placement:
    """Fill the same number of slots to even out the load, whichever rank the demand comes from."""
    slots = rebalance(asked.sum(axis=0), spec.num_experts + RANKS * extra, RANKS)
    return Placement(slots, RANKS, spec.num_experts)


def by_cluster(spec: ModelSpec, fitted: RouterFit) -> Placement:
    """Place every expert, without replicas, on the rank of the cluster of calibration requests that uses it most."""
    asked = fitted.profiles.reshape(RANKS, spec.num_moe_layers, spec.num_experts).astype(np.float64)
    settings = ActionSettings(extra_slots=0, min_saving_s=0.0)
    held = held_by(Placement.linear(spec.num_moe_layers, spec.num_experts, RANKS))
    homes = cheapest_homes(manager_of(spec, settings), asked, held)
    return placement_from_held(homes, spec.num_experts // RANKS)


def slots_that_fit(spec: ModelSpec, dtype: WeightDtype, kv_tokens: int) -> int:
    """Return the extra slots that fit on a rank beside its experts, all other weights and its requests' KV cache."""
    dense = sum(times * sum(n * k for n, k in shapes) for shapes, times in dense_shapes(spec))
    others = BYTES_PER_WEIGHT[dtype] * (dense + 2 * spec.vocab_size * spec.hidden_size)
    slot = spec.num_moe_layers * spec.expert_bytes(dtype)
    experts_per_rank = spec.num_experts // RANKS
    left = USABLE * DEVICE_BYTES - others - experts_per_rank * slot - kv_tokens * spec.kv_bytes_per_token
    return max(0, min(spec.num_experts - experts_per_rank, int(left // slot)))
