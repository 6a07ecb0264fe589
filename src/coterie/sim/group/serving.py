"""One expert-parallel group that serves arriving requests: prefill and decode share steps, ranks wait for each other.

Every token replays its recorded experts. Attention is computed in one of two ways:

* data parallel: a request lives on one rank, which computes its attention. Tokens are sent to their experts and back.
* tensor parallel: all ranks compute a part of every token's attention. In each MoE layer every rank dispatches an equal
  share of the tokens. The `collectives` setting chooses how partial results are summed and gathered.

A step has one token of every decoding request, then pieces of prompts in order up to `chunk_tokens` tokens. The last
piece of a prompt gives the first token, as on a worker of both roles. Wrong for engines that preempt, that are limited
by KV memory, or whose ranks do not wait for each other. Host time between steps is not modelled.

The placement may change during a run: weights move, while the engine stops or beside its steps, and each layer switches
when its weights have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.composition import StepTables
from coterie.costs.exchange import BYTES_PER_VALUE, crossing_links, ring_time
from coterie.costs.step import ONE_DEVICE, StepModel
from coterie.errors import check, check_at_least
from coterie.sim.fleet.requests import FleetRequests, check_fleet_requests
from coterie.sim.group._serve import (
    ACTIVATIONS,
    DECODED,
    EXCHANGE,
    EXPERTS,
    MOVES,
    PROMPT,
    REMOTE,
    REST,
    RING,
    START,
    Progress,
    serve,
)
from coterie.sim.group.prompts import IN_ORDER, PromptTables, prompt_tables, shuffled_tables
from coterie.sim.group.step import SlotTables, check_group, slot_tables
from coterie.types import ModelSpec, Placement

MOST_RANKS = 64
"""Largest number of ranks: a token's copies are tracked with one bit per rank in a 64-bit word."""

MOST_AHEAD = 2
"""A rank with this many requests more than the rank with fewest gets no further ones while others are eligible."""

Collectives = Literal["all_reduce", "reduce_scatter", "replicated"]
PASSES: dict[Collectives, int] = {"all_reduce": 3, "reduce_scatter": 2, "replicated": 4}
"""Passes around the ring in a MoE layer. all_reduce: two after attention, one all-gather after the experts.
reduce_scatter: one after attention, one all-gather after the experts. replicated: an all-reduce (two passes) after
attention and after the experts, and no all-to-all."""
DENSE_PASSES = 4
"""Passes around the ring in a dense layer: an all-reduce (two passes) after attention and after the MLP."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of a serving group."""

    prompt_tokens: int
    """Length of every prompt, in tokens."""
    places: int = 256
    """Requests that a rank runs at once; with tensor-parallel attention, requests that all ranks run together."""
    chunk_tokens: int = 2048
    """Token budget of a step on a rank, decoded tokens included; with tensor-parallel attention, of the whole group."""
    piece_tokens: int = 256
    """Tokens in a piece of a prompt."""
    deduplicate: bool = False
    """Send a token at most once to a rank, however many of its experts are there."""
    collectives: Collectives | None = None
    """None for data-parallel attention. Otherwise attention is tensor parallel with these collectives (see PASSES)."""

    def __post_init__(self) -> None:
        check_at_least(1, prompt_tokens=self.prompt_tokens, places=self.places, piece_tokens=self.piece_tokens)
        least = self.places + self.piece_tokens
        check(
            self.chunk_tokens >= least,
            f"chunk_tokens={self.chunk_tokens} must be at least places + piece_tokens = {least}: "
            "a prompt could wait for ever",
        )
        check(
            self.collectives is None or self.collectives in PASSES,
            f"collectives={self.collectives!r} must be one of {', '.join(PASSES)}, or None",
        )


def sharded(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return one rank's part of a model whose attention, dense MLPs and output head are tensor parallel.

    Experts stay whole. Heads are rounded up if they do not divide; with fewer KV heads than ranks, ranks share a head.
    """

    def part(size: int) -> int:
        return -(-size // ranks)

    return replace(
        spec,
        num_heads=part(spec.num_heads),
        num_kv_heads=part(spec.num_kv_heads),
        vocab_size=part(spec.vocab_size),
        shared_intermediate_size=part(spec.shared_intermediate_size),
        dense_intermediate_size=part(spec.dense_intermediate_size),
    )


class GroupPrices(NamedTuple):
    """Step prices of a model and its settings, as tables. They do not depend on the placement."""

    model: StepModel
    settings: ServeSettings
    tables: StepTables
    links: NDArray[np.float64]
    """[5] prices of the exchange, for `exchange_us`."""
    routing: NDArray[np.float64]
    """[tokens] microseconds of routing in all layers, by a rank's share of the tokens. Empty with data-parallel
    attention: `tables` then includes routing."""
    ring: NDArray[np.float64]
    """[2] microseconds of a step's ring collectives: the fixed part, and per token."""
    spread: int
    """With tensor-parallel attention, ranks that share a step's tokens in MoE layers; 1 if each rank has all."""

    @classmethod
    def of(cls, model: StepModel, settings: ServeSettings) -> GroupPrices:
        spec, ranks = model.spec, model.topology.num_ranks
        check(ranks <= MOST_RANKS, f"num_ranks={ranks} must be at most {MOST_RANKS}")
        most = settings.chunk_tokens * ranks
        links = crossing_links(spec, model.topology, model.options.overlap)
        if settings.collectives is None:
            return cls(
                model, settings, replace(model, topology=ONE_DEVICE).tables(most), links, np.empty(0), np.zeros(2), 1
            )
        lane = replace(model, spec=sharded(spec, ranks), routing=None, topology=ONE_DEVICE)
        spread = 1 if settings.collectives == "replicated" else ranks
        routing = np.array([model.routing_us(tokens) for tokens in range(-(-most // spread) + 1)])
        around = ring_time(model.topology)
        passes = PASSES[settings.collectives] * spec.num_moe_layers + DENSE_PASSES * (
            spec.num_layers - spec.num_moe_layers
        )
        return cls(
            model=model,
            settings=settings,
            tables=lane.tables(settings.chunk_tokens),
            links=links if spread > 1 else np.zeros_like(links),
            routing=spec.num_moe_layers * routing,
            ring=passes * np.array([around.fixed_us, around.byte_us * (BYTES_PER_VALUE * spec.hidden_size)]),
            spread=spread,
        )


class ServedSteps(NamedTuple):
    """Steps of a run; arrays are [step]."""

    start_s: NDArray[np.float64]
    rest_s: NDArray[np.float64]
    """Attention, dense layers and routing of the busiest rank."""
    experts_s: NDArray[np.float64]
    all_to_all_s: NDArray[np.float64]
    ring_s: NDArray[np.float64]
    """Time of the ring collectives of tensor parallelism."""
    moves_s: NDArray[np.float64]
    """Time by which the step was longer since weights moved beside it."""
    remote: NDArray[np.int64]
    """Number of activations whose expert was on another rank."""
    activations: NDArray[np.int64]
    decoded: NDArray[np.int64]
    """Number of decoded tokens."""
    prompt: NDArray[np.int64]
    """Number of prompt tokens."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.rest_s + self.experts_s + self.all_to_all_s + self.ring_s + self.moves_s


class GroupServedRun(NamedTuple):
    """One run; arrays are [request] in order of arrival."""

    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    """End of the step that gave the first token; NaN if there was none."""
    finish_s: NDArray[np.float64]
    decoded: NDArray[np.int64]
    """Output tokens when the run ended."""
    rank: NDArray[np.int64]
    steps: ServedSteps
    end_s: float
    queued: int
    """Number of requests that had arrived but not started when the run ended."""
    running: int

    @property
    def done(self) -> int:
        return int(np.isfinite(self.finish_s).sum())


class Rebalance(NamedTuple):
    """A change of placement during a run."""

    to: ServingGroup
    """The new placement with the same prices and requests."""
    start_s: float
    """Weights begin to move at the first step that starts then or later."""
    layers: Sequence[int]
    """Layers in the order in which they move."""
    moved_s: Sequence[float]
    """[layer of `layers`] seconds of movement until its weights have arrived, without other traffic."""
    exposed: float
    """Share of the movement's time by which steps get slower (:mod:`coterie.costs.movement`); 1: the engine stops."""


class ServingGroup:
    """Serves requests on one placement."""

    def __init__(
        self,
        prices: GroupPrices,
        placement: Placement,
        requests: FleetRequests,
        token_ranks: NDArray[np.integer] | None = None,
    ) -> None:
        """`token_ranks` [layer, row of the recordings] are predicted ranks; only with tensor-parallel attention."""
        model, settings = prices.model, prices.settings
        check_group(model, placement)
        check_fleet_requests(replace(requests, arrival_s=None), model.spec, 1)
        check(
            not (requests.prompt_tokens != settings.prompt_tokens).any(),
            f"all prompts must have prompt_tokens={settings.prompt_tokens} tokens",
        )
        self.prices, self.placement, self.requests = prices, placement, requests
        self.slots: SlotTables = slot_tables(placement)
        tensor, records = settings.collectives is not None, requests.recordings
        check(
            token_ranks is None or tensor,
            "token_ranks are for attention tensor parallel; give the requests' ranks to serve()",
        )
        counted = (records, placement, settings.prompt_tokens, settings.piece_tokens, settings.deduplicate)
        self.predicted = (
            _predicted(token_ranks, placement, len(records.expert_ids)) if tensor else np.empty((0, 0), np.int64)
        )
        self.prompts: PromptTables = shuffled_tables(*counted, self.predicted) if tensor else prompt_tables(*counted)

    def serve(
        self,
        arrival_s: NDArray[np.float64],
        ranks: NDArray[np.integer] | None = None,
        until_s: float = np.inf,
        affinity: NDArray[np.floating] | None = None,
        changes: Sequence[Rebalance] = (),
    ) -> GroupServedRun:
        """Serve the first len(arrival_s) requests until all are done or until `until_s`.

        With data-parallel attention, `ranks` [request] gives the rank of each request. Without it a request is assigned
        on arrival. Eligible are ranks with no prompt left to compute or, if all have some, ranks with less than one
        prompt more than the least; ranks MOST_AHEAD requests ahead of another are excluded. Among these the highest
        `affinity` [recording, rank] wins, then the fewest requests. `changes` of the placement follow each other.
        """
        count, tensor = len(arrival_s), self.prices.settings.collectives is not None
        requests = replace(
            self.requests,
            recorded=self.requests.recorded[:count],
            prompt_tokens=self.requests.prompt_tokens[:count],
            output_tokens=self.requests.output_tokens[:count],
            arrival_s=arrival_s,
        )
        check_fleet_requests(requests, self.prices.model.spec, None)
        lanes = 1 if tensor else self.placement.num_ranks
        lane = _lanes(ranks, count, lanes, tensor)
        scores = np.zeros((len(requests.recordings), lanes)) if affinity is None else np.asarray(affinity, np.float64)
        check(
            scores.shape == (len(requests.recordings), lanes),
            f"affinity has shape {scores.shape}; expected {(len(requests.recordings), lanes)}",
        )
        settings, records, tables = self.prices.settings, requests.recordings, self.prices.tables
        slots, prompts = self.slots, self.prompts
        check(not (tensor and changes), "changes of the placement are for data-parallel attention")
        if changes:  # the tables of layers that switch are overwritten
            slots, prompts = deepcopy((slots, prompts))
        state = Progress.start(lane, lanes, settings.places, slots.copies.shape)
        logs: list[NDArray[np.float64]] = []

        def run(until_s: float, exposed: float = 0.0, moved_s: float = 0.0) -> None:
            logs.append(
                serve(
                    state,
                    np.asarray(arrival_s, np.float64),
                    np.ascontiguousarray(scores),
                    MOST_AHEAD,
                    requests.recorded,
                    requests.output_tokens,
                    records.expert_ids,
                    records.decode_row,
                    records.decode_rows,
                    slots,
                    self.predicted,
                    prompts,
                    tables,
                    self.prices.links,
                    self.prices.routing,
                    self.prices.ring,
                    self.prices.spread,
                    settings.chunk_tokens,
                    settings.prompt_tokens,
                    settings.deduplicate,
                    until_s,
                    exposed,
                    moved_s,
                )
            )

        for change in changes:
            if change.start_s >= until_s:
                break
            run(change.start_s)
            begun_s, length_s = max(change.start_s, state.clock[0]), max(change.moved_s, default=0.0)
            if change.exposed >= 1.0:
                state.clock[0] = begun_s + length_s
            for layer, moved_s in zip(change.layers, change.moved_s, strict=True):
                if change.exposed < 1.0:
                    run(min(begun_s + moved_s, until_s), change.exposed, begun_s + length_s)
                for mine, new in zip(slots, change.to.slots, strict=True):
                    mine[layer] = new[layer]
                prompts.switch(change.to.prompts, layer)
        run(until_s)
        steps = _steps(np.concatenate(logs))
        return GroupServedRun(
            arrival_s,
            state.first_s,
            state.finish_s,
            state.decoded,
            lane,
            steps,
            float(state.clock[0]),
            int(state.lanes[2].sum()),
            int(state.lanes[4].sum()),
        )


def _predicted(token_ranks: NDArray[np.integer] | None, placement: Placement, rows: int) -> NDArray[np.int64]:
    shape = (placement.num_layers, rows)
    if token_ranks is None:
        return np.full(shape, IN_ORDER, np.int64)
    check(
        token_ranks.shape == shape,
        f"token_ranks has shape {token_ranks.shape}; expected {shape}, [layer, row of recordings]",
    )
    check(
        token_ranks.min(initial=0) >= IN_ORDER and token_ranks.max(initial=0) < placement.num_ranks,
        f"token_ranks must be in {IN_ORDER} … {placement.num_ranks - 1}",
    )
    return np.ascontiguousarray(token_ranks, np.int64)  # one dtype and layout: the loop is compiled once


def _lanes(ranks: NDArray[np.integer] | None, count: int, lanes: int, tensor: bool) -> NDArray[np.int64]:
    if ranks is None:
        return np.full(count, 0 if tensor else -1, np.int64)
    check(not tensor, "with attention tensor parallel a request has no rank; give ranks=None")
    check(len(ranks) == count, f"ranks must have one rank for each of {count} requests; it has {len(ranks)}")
    check(not count or 0 <= ranks.min() <= ranks.max() < lanes, f"ranks must be in 0 … {lanes - 1}")
    return np.array(ranks, np.int64)


def _steps(log: NDArray[np.float64]) -> ServedSteps:
    return ServedSteps(
        start_s=log[:, START],
        rest_s=1e-6 * log[:, REST],
        experts_s=1e-6 * log[:, EXPERTS],
        all_to_all_s=1e-6 * log[:, EXCHANGE],
        ring_s=1e-6 * log[:, RING],
        moves_s=1e-6 * log[:, MOVES],
        remote=log[:, REMOTE].astype(np.int64),
        activations=log[:, ACTIVATIONS].astype(np.int64),
        decoded=log[:, DECODED].astype(np.int64),
        prompt=log[:, PROMPT].astype(np.int64),
    )


class ServeSummary(NamedTuple):
    """Metrics of a run. The `…_pct` fields are percentages of the time of all steps."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    tokens_per_s: float
    """Prompt and decoded tokens per second, over steps that start between the first and the last arrival."""
    local_rate: float
    """Share of activations whose expert is on the token's own rank."""
    all_to_all_pct: float
    ring_pct: float
    experts_pct: float
    step_ms: float
    """Mean time of a step."""


def summarise_served(run: GroupServedRun) -> ServeSummary:
    """Summarise a run in which every request finished."""
    check(
        run.done >= len(run.arrival_s) and run.done,
        f"{run.done} of {len(run.arrival_s)} requests finished; metrics are of whole runs",
    )
    ttft, e2e = 1e3 * (run.first_s - run.arrival_s), 1e3 * (run.finish_s - run.arrival_s)
    steps, seconds = run.steps, run.steps.seconds
    counted = steps.start_s <= run.arrival_s[-1]
    span = float((steps.start_s + seconds)[counted].max() - run.arrival_s[0])
    total = float(seconds.sum())
    return ServeSummary(
        ttft_p50_ms=float(np.quantile(ttft, 0.5)),
        ttft_p99_ms=float(np.quantile(ttft, 0.99)),
        e2e_p50_ms=float(np.quantile(e2e, 0.5)),
        e2e_p99_ms=float(np.quantile(e2e, 0.99)),
        tokens_per_s=float((steps.prompt + steps.decoded)[counted].sum()) / span,
        local_rate=1.0 - float(steps.remote.sum()) / float(steps.activations.sum()),
        all_to_all_pct=100.0 * float(steps.all_to_all_s.sum()) / total,
        ring_pct=100.0 * float(steps.ring_s.sum()) / total,
        experts_pct=100.0 * float(steps.experts_s.sum()) / total,
        step_ms=1e3 * float(seconds.mean()),
    )
