"""One expert-parallel group that decodes in lockstep, attention data parallel: every rank is a worker.

A rank keeps the KV cache of its own requests, computes their attention and dense layers, and holds some experts of
every layer. A token whose expert is not on its rank crosses to one that has it and its result comes back; all ranks
wait for each other in every layer. Every step replays the recorded experts of each token, exactly:

    step = attention + dense + routing of the busiest rank
         + sum over layers of (experts of the slowest rank + dispatch and combine of the busiest link)

A rank's own slot takes its tokens; others go to the slots of their expert in turn. A token crosses once for each expert
it needs elsewhere, as in :mod:`coterie.costs.exchange`. Wrong for engines that send one copy to a rank with several
of them, that overlap the exchange with other work, or whose ranks do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.batching.decode_batch import DecodeBatcher
from coterie.costs.exchange import crossing_links, exchange_us, exposed
from coterie.costs.experts import slowest_us
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.placement.holdings import Demand, Held, held_by
from coterie.routing import Decision, Fleet, Request, Router, RouterFit, admit_together
from coterie.sim.fleet.requests import FleetRequests
from coterie.types import Placement


class GroupStep(NamedTuple):
    """One step's parts in seconds, and its remote activations."""

    rest_s: float
    """Attention, dense layers and routing of the busiest rank."""
    experts_s: float
    all_to_all_s: float
    remote: int
    """Activations whose expert was on another rank."""
    activations: int

    @property
    def total_s(self) -> float:
        return self.rest_s + self.experts_s + self.all_to_all_s


class Group:
    """Step times of a model on a placement; `asked` counts each rank's activations over all steps."""

    def __init__(self, model: StepModel, placement: Placement) -> None:
        spec, topology = model.spec, model.topology
        shape = (spec.num_moe_layers, spec.num_experts)
        if (placement.num_layers, placement.num_experts) != shape:
            raise ConfigError(
                f"the placement is for {placement.num_layers} layers of {placement.num_experts} experts; "
                f"{spec.name} has {shape[0]} of {shape[1]}"
            )
        if placement.num_ranks != topology.num_ranks:
            raise ConfigError(
                f"placement.num_ranks={placement.num_ranks} must equal topology.num_ranks={topology.num_ranks}"
            )
        if topology.num_nodes > 1:
            raise ConfigError(f"{topology.num_ranks} ranks in nodes of {topology.ranks_per_node}: it must be one node")
        self.model, self.placement, self.ranks = model, placement, placement.num_ranks
        self.held: Held = held_by(placement)
        self._own, self._holders, self._copies = _slot_tables(placement)
        self._rows = np.zeros(placement.slot_experts.shape)
        self._crossing = np.zeros((2, placement.num_layers, self.ranks), np.int64)
        self._turns = np.zeros(shape, np.int64)
        self._links = crossing_links(spec, topology.intra)
        self._dense_s: dict[int, float] = {}
        self.asked: Demand = np.zeros((self.ranks, *shape))

    @property
    def local(self) -> NDArray[np.uint64]:
        """[rank, layer, word] bit e is set where the rank holds expert e of the layer."""
        experts = self.held.shape[2]
        words = np.zeros((*self.held.shape[:2], -(-experts // 64)), np.uint64)
        for expert in range(experts):
            words[:, :, expert // 64] |= self.held[:, :, expert].astype(np.uint64) << np.uint64(expert % 64)
        return words

    def step(self, expert_ids: NDArray[np.integer], home: NDArray[np.int64], context: NDArray[np.int64]) -> GroupStep:
        """One token of every request: expert_ids [token, layer, k], the rank each is on, its cached tokens."""
        if expert_ids.shape[1] != self.placement.num_layers or len(expert_ids) != len(home):
            raise ConfigError(
                f"expert_ids has shape {expert_ids.shape}; expected [{len(home)}, {self.placement.num_layers}, k]"
            )
        tokens = np.bincount(home, minlength=self.ranks)
        cached = np.bincount(home, weights=context, minlength=self.ranks).astype(np.int64)
        rest = max(self._rest_s(int(n), int(held)) for n, held in zip(tokens, cached, strict=True))
        padded = np.array([self.model.options.padded(int(n)) for n in tokens], np.float64)
        self._rows.fill(0.0)
        self._crossing.fill(0)
        remote = _dispatch(
            expert_ids,
            home,
            self._own,
            self._holders,
            self._copies,
            self._turns,
            self._rows,
            self._crossing,
            self.asked,
            self.placement.slots_per_rank,
        )
        spec, options = self.model.spec, self.model.options
        experts_us, all_to_all_us = _layers_us(
            self.model.moe.array(),
            self._rows,
            self._crossing,
            padded,
            spec.expert_bytes(self.model.dtype),
            2.0 * spec.expert_params,
            options.cache_resident,
            self._links,
            options.overlap,
        )
        return GroupStep(rest, 1e-6 * experts_us, 1e-6 * all_to_all_us, int(remote), expert_ids.size)

    def _rest_s(self, tokens: int, cached: int) -> float:
        if not tokens:
            return 0.0
        if tokens not in self._dense_s:
            model, padded = self.model, self.model.options.padded(tokens)
            routing = model.routing_us(padded) * 1e-6 * model.spec.num_moe_layers
            self._dense_s[tokens] = model.dense_s(padded, tokens) + routing
        return self.model.attention_s(Batch(tokens, cached)) + self._dense_s[tokens]


def _slot_tables(placement: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """[layer, rank, expert] its slot there or -1; [layer, expert, turn] slots; [layer, expert] ranks that have it.

    Of two slots of an expert on one rank the first is used.
    """
    layers, ranks, experts = placement.num_layers, placement.num_ranks, placement.num_experts
    own = np.full((layers, ranks, experts), -1, np.int64)
    slots = placement.slot_experts
    for slot in range(placement.num_slots - 1, -1, -1):
        own[np.arange(layers), slot // placement.slots_per_rank, slots[:, slot]] = slot
    copies = (own >= 0).sum(axis=1)
    order = np.argsort(own < 0, axis=1, kind="stable")
    holders = np.take_along_axis(own, order, axis=1).transpose(0, 2, 1)
    return own, np.ascontiguousarray(holders), copies.astype(np.int64)


@njit()
def _dispatch(
    ids: NDArray[np.integer],
    home: NDArray[np.int64],
    own: NDArray[np.int64],
    holders: NDArray[np.int64],
    copies: NDArray[np.int64],
    turns: NDArray[np.int64],
    rows: NDArray[np.float64],
    crossing: NDArray[np.int64],
    asked: NDArray[np.float64],
    per_rank: int,
) -> int:
    """Add to rows [layer, slot] and crossing [sent or received, layer, rank]; activations that crossed."""
    remote = 0
    for layer in range(ids.shape[1]):
        for token in range(ids.shape[0]):
            rank = home[token]
            for at in range(ids.shape[2]):
                expert = np.int64(ids[token, layer, at])
                asked[rank, layer, expert] += 1.0
                slot = own[layer, rank, expert]
                if slot < 0:
                    turn = turns[layer, expert]
                    slot = holders[layer, expert, turn]
                    turns[layer, expert] = turn + 1 if turn + 1 < copies[layer, expert] else 0
                    crossing[0, layer, rank] += 1
                    crossing[1, layer, slot // per_rank] += 1
                    remote += 1
                rows[layer, slot] += 1.0
    return remote


@njit()
def _layers_us(
    p: NDArray[np.float64],
    rows: NDArray[np.float64],
    crossing: NDArray[np.int64],
    tokens: NDArray[np.float64],
    nbytes: float,
    flops: float,
    resident: bool,
    links: NDArray[np.float64],
    overlap: float,
) -> tuple[float, float]:
    """Experts of the slowest rank and the exchange of the busiest link, summed over layers."""
    layers, ranks = crossing.shape[1], crossing.shape[2]
    by_rank = rows.reshape(layers, ranks, rows.shape[1] // ranks)
    experts, exchange = 0.0, 0.0
    for layer in range(layers):
        slowest, busiest = slowest_us(p, by_rank[layer], tokens, nbytes, flops, resident), 0
        for rank in range(ranks):
            busiest = max(busiest, crossing[0, layer, rank], crossing[1, layer, rank])
        experts += slowest
        exchange += exposed(exchange_us(links, busiest), overlap, slowest)
    return experts, exchange


# ------------------------------------------------------------------------------------------------------ closed loop


class GroupRun(NamedTuple):
    """A closed loop, until it could no longer be kept full; arrays are [step] unless stated."""

    start_s: NDArray[np.float64]
    parts: list[GroupStep]
    tokens: NDArray[np.int64]
    busiest: NDArray[np.int64]
    """Requests on the busiest rank."""
    gaps: list[NDArray[np.float64]]
    """[token] seconds since its request's previous token; for the first one, since the request arrived."""
    arrived: NDArray[np.int64]
    """Requests that had arrived before the step."""
    ranks: NDArray[np.int64]
    """[request] rank it was routed to; -1 for none."""
    asked: Demand
    """[rank, layer, expert] activations of the rank's own tokens."""


@dataclass(slots=True)
class _Present:
    """Requests in flight; arrays are [place]."""

    request: NDArray[np.int64]
    """-1 where the place is free."""
    rank: NDArray[np.int64]
    decoded: NDArray[np.int64]
    last_s: NDArray[np.float64]
    skipped: NDArray[np.int64]
    """Steps it was passed over."""
    remote: NDArray[np.float64]
    """Expected activations of a token on other ranks."""

    @classmethod
    def none(cls, places: int) -> _Present:
        def empty() -> NDArray[np.int64]:
            return np.full(places, -1, np.int64)

        return cls(empty(), empty(), empty(), np.zeros(places), empty(), np.zeros(places))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoop:
    """Serves requests on a group, always `in_flight` at once, no two of them uses of one recording."""

    requests: FleetRequests
    model: StepModel
    fitted: RouterFit
    in_flight: int
    places: int
    """Requests that a rank can run at once."""

    def serve(self, placement: Placement, router: Router, batcher: DecodeBatcher | None = None) -> GroupRun:
        """Without a batcher all requests decode in every step."""
        group = Group(self.model, placement)
        fleet, size = self.fitted.fleet(self.places), self.in_flight
        fleet.local = group.local
        present = _Present.none(size)
        waiting, clock = list(range(len(self.requests))), 0.0
        starts, parts, tokens, busiest, gaps, arrived = [], [], [], [], [], []
        where = np.full(len(self.requests), -1, np.int64)
        records = self.requests.recordings
        while True:
            for place, request, decision in self._arrivals(waiting, present, router, fleet):
                present.request[place], present.rank[place], present.decoded[place] = request, decision.worker, 0
                present.last_s[place], present.skipped[place] = clock, 0
                if batcher is not None:
                    present.remote[place] = self.remote_of(request, group.held[decision.worker])
                where[request] = decision.worker
            if (present.request < 0).any():
                break
            run = np.arange(size) if batcher is None else self._chosen(present, batcher, group.ranks)
            asked = present.request[run]
            recorded = self.requests.recorded[asked]
            row = records.decode_row[recorded] + present.decoded[run] % records.decode_rows[recorded]
            context = self.requests.prompt_tokens[asked] + present.decoded[run]
            part = group.step(records.expert_ids[row], present.rank[run], context)
            starts.append(clock)
            arrived.append(fleet.routed)
            clock += part.total_s
            parts.append(part)
            tokens.append(len(run))
            busiest.append(int(fleet.running.max()))
            gaps.append(clock - present.last_s[run])
            present.last_s[run] = clock
            present.decoded[run] += 1
            present.skipped += 1
            present.skipped[run] = 0
            for place in run[present.decoded[run] >= self.requests.output_tokens[asked]]:
                fleet.finish(str(present.request[place]))
                present.request[place] = -1
        if not parts:
            raise ConfigError(f"{len(self.requests)} requests cannot keep {size} in flight: serve more")
        return GroupRun(
            np.array(starts), parts, np.array(tokens), np.array(busiest), gaps, np.array(arrived), where, group.asked
        )

    def _arrivals(
        self, waiting: list[int], present: _Present, router: Router, fleet: Fleet
    ) -> Iterator[tuple[int, int, Decision]]:
        """Free places, requests for them and their routing; a request whose recording is in flight waits."""
        free = np.flatnonzero(present.request < 0)
        recorded = self.requests.recorded
        busy = set(recorded[present.request[present.request >= 0]].tolist())
        taken: list[int] = []
        for at, request in enumerate(waiting):
            if len(taken) == len(free):
                break
            if int(recorded[request]) not in busy:
                busy.add(int(recorded[request]))
                taken.append(at)
        coming = [waiting[at] for at in taken]
        for at in reversed(taken):
            del waiting[at]
        asked = [self._asking(request) for request in coming]
        return zip(free.tolist(), coming, admit_together(router, asked, fleet), strict=False)

    def _asking(self, request: int) -> Request:
        records, recorded = self.requests.recordings, int(self.requests.recorded[request])
        shown = None if records.footprint is None else records.footprint[recorded]
        return Request(str(request), int(self.requests.prompt_tokens[request]), shown)

    def remote_of(self, request: int, held: NDArray[np.bool_]) -> float:
        """Expected activations per token on experts that are not `held` [layer, expert], over all layers."""
        footprint = self._asking(request).footprint
        if footprint is None:
            raise ConfigError("recordings have no footprint; remote activations cannot be expected without one")
        return float(self.fitted.profile(footprint)[~held.ravel()].sum())

    @staticmethod
    def _chosen(present: _Present, batcher: DecodeBatcher, ranks: int) -> NDArray[np.int64]:
        """Places that decode in this step: every rank picks among its own."""
        chosen = []
        for rank in range(ranks):
            mine = np.flatnonzero(present.rank == rank)
            if len(mine):
                chosen.append(mine[batcher.select(present.remote[mine], present.skipped[mine]).chosen])
        return np.sort(np.concatenate(chosen))


class GroupOutcome(NamedTuple):
    """Metrics of the steady part of a run: after as many arrivals again as were in flight at first."""

    tbt_mean_ms: float
    tbt_p99_ms: float
    tokens_per_s: float
    all_to_all_pct: float
    """Percent of the time of all steps."""
    experts_pct: float
    remote_pct: float
    """Percent of activations."""
    uneven: float
    """Requests on the busiest rank over the mean, mean over steps."""
    decoding_pct: float
    """Percent of the requests in flight that decode in a step, mean over steps."""
    steps: int


def outcome(run: GroupRun, in_flight: int, ranks: int) -> GroupOutcome:
    steady = np.flatnonzero(run.arrived >= 2 * in_flight)
    if not len(steady):
        raise ConfigError(f"the {in_flight} in flight were not replaced once before requests ran out: serve more")
    parts = [run.parts[step] for step in steady]
    total = float(sum(part.total_s for part in parts))
    gaps = np.concatenate([run.gaps[step] for step in steady])
    return GroupOutcome(
        1e3 * float(gaps.mean()),
        1e3 * float(np.quantile(gaps, 0.99)),
        len(gaps) / total,
        100.0 * sum(part.all_to_all_s for part in parts) / total,
        100.0 * sum(part.experts_s for part in parts) / total,
        100.0 * sum(part.remote for part in parts) / sum(part.activations for part in parts),
        float(run.busiest[steady].mean()) * ranks / in_flight,
        100.0 * float(run.tokens[steady].mean()) / in_flight,
        len(steady),
    )
