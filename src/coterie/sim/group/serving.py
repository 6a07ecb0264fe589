"""One expert-parallel group that serves arriving requests: prefill and decode share steps, ranks wait for each other.

Every token replays its recorded experts; a prompt or an output longer than the recording repeats it. Attention is
computed in one of two ways:

* data parallel: a request lives on one rank, which computes its attention. Tokens are sent to their experts and back.
* tensor parallel: all ranks compute a part of every token's attention. In each MoE layer every rank dispatches an equal
  share of the tokens. The `collectives` setting chooses how partial results are summed and gathered.

A step has one token of every decoding request, then pieces of prompts in order up to `chunk_tokens` tokens. The last
piece of a prompt gives the first token, as on a worker of both roles. A request starts when its rank has a place, and
KV memory for its prompt and its output, so that nothing is preempted; if it is larger than all of the memory, it is
dropped. Wrong for engines that preempt or whose ranks do not wait for each other. Host time between steps is not
modelled.

A router chooses the rank of each request on arrival. A controller may change the placement: weights move, while the
engine stops or beside its steps, and each layer switches when its weights have arrived. With more slots on a rank there
is less KV memory: a rank admits nothing beyond the smaller memory, and weights begin to move once all ranks fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.costs.composition import StepTables
from coterie.costs.exchange import BYTES_PER_VALUE, crossing_links, ring_time
from coterie.costs.step import ONE_DEVICE, StepModel
from coterie.errors import check, check_at_least, check_not_negative, check_positive
from coterie.routing import Fleet, Request, Router
from coterie.routing.baselines import JoinShortestQueue
from coterie.sim.fleet.requests import EndedRequests, FinishedRequest, FleetRequests, check_fleet_requests
from coterie.sim.group._serve import (
    ACTIVATIONS,
    ACTIVE,
    ARRIVED,
    BALANCE,
    CAPACITY,
    DECIDE,
    DECODED,
    ENDED,
    EXCHANGE,
    EXPERTS,
    FITS,
    GROW,
    IN_ORDER,
    KV_MOST,
    KV_USED,
    MOVES,
    PROMPT,
    QUEUED,
    REMOTE,
    REST,
    RING,
    RUNNING,
    START,
    STEPS,
    WAITING,
    Progress,
    Replayed,
    serve,
)
from coterie.sim.group.step import SlotTables, check_group, slot_tables
from coterie.types import ModelSpec, Placement

MOST_RANKS = 64
"""Largest number of ranks: price tables have a row for every token of a step."""

UNBOUNDED = 1 << 40
FIRST_STEPS = 1 << 12

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
    kv_tokens: int | Callable[[int], int] | None = None
    """KV memory of a rank in tokens, or a function that returns it from the slots of a rank in a layer; with
    tensor-parallel attention, of the whole group. None is unbounded."""

    def __post_init__(self) -> None:
        check_at_least(1, places=self.places, piece_tokens=self.piece_tokens)
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

    def kv_of(self, placement: Placement) -> int:
        """Return the KV memory of a rank beside a placement, in tokens."""
        tokens = self.kv_tokens(placement.slots_per_rank) if callable(self.kv_tokens) else self.kv_tokens
        return UNBOUNDED if tokens is None else tokens


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
    distinct: NDArray[np.float64]
    """Experts whose weights are read, mean over layers; an expert that is read on two ranks counts twice."""
    balancedness: NDArray[np.float64]
    """Mean over layers of mean ÷ max rows of a rank."""
    in_use: NDArray[np.int64]
    """Number of changes that had landed: 0 for the first placement."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.rest_s + self.experts_s + self.all_to_all_s + self.ring_s + self.moves_s


class Rebalance(NamedTuple):
    """A change of placement during a run."""

    placement: Placement
    """The new placement, maybe with another number of slots."""
    layers: Sequence[int]
    """Layers in the order in which they move; others stay as they are."""
    moved_s: Sequence[float]
    """[layer of `layers`] seconds of movement until its weights have arrived, without other traffic."""
    exposed: float
    """Share of the movement's time by which steps get slower (:mod:`coterie.costs.movement`); 1: the engine stops."""
    moved_bytes: float = 0.0
    reason: str = ""


class Landed(NamedTuple):
    """A change of placement that has ended."""

    asked_s: float
    """When the controller asked for the change."""
    start_s: float
    """When weights began to move: once all ranks had the KV memory free that new slots need."""
    end_s: float
    moved_bytes: float
    layers: int
    """Number of layers that moved."""
    reason: str


class GroupLoads(NamedTuple):
    """What the ranks counted since the last tick, as far as it is visible: older than the controller's `late_s`."""

    sources: NDArray[np.float64]
    """[rank, layer, expert] activations by the rank of the token."""
    steps: int
    ended: list[FinishedRequest]
    """Requests that finished; their worker is their rank."""


class GroupController(Protocol):
    """A controller that observes a group and may change its placement, one change at a time."""

    @property
    def every_s(self) -> float:
        """Time between ticks; the first is at `every_s`. It is read after each tick; infinite: there is no other."""

    @property
    def late_s(self) -> float:
        """Age at which counts become visible: engines gather them on all ranks and write them now and then."""

    def tick(self, now_s: float, loads: GroupLoads, /) -> Rebalance | None: ...

    def landed(self, now_s: float, placement: Placement, /) -> None:
        """Take notice that a change has ended; `placement` is in force."""


class GroupServedRun(NamedTuple):
    """One run; arrays are [request] in order of arrival, unless stated."""

    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    """End of the step that gave the first token; NaN if there was none."""
    finish_s: NDArray[np.float64]
    decoded: NDArray[np.int64]
    """Output tokens when the run ended."""
    rank: NDArray[np.int64]
    """Rank of the request; -1 if it has not arrived."""
    dropped: NDArray[np.bool_]
    """Whether prompt and output are larger than the KV memory of the rank."""
    steps: ServedSteps
    changes: list[Landed]
    """Changes of the placement that ended during the run."""
    end_s: float
    queued: int
    """Number of requests that had arrived but not started when the run ended."""
    running: int
    kv_held: NDArray[np.int64]
    """[rank] tokens of KV memory in use when the run ended."""
    kv_most: NDArray[np.int64]
    """[rank] most tokens of KV memory in use."""

    @property
    def done(self) -> int:
        return int(np.isfinite(self.finish_s).sum())


class ServingGroup:
    """Serves requests, beginning with one placement."""

    def __init__(
        self,
        prices: GroupPrices,
        placement: Placement,
        requests: FleetRequests,
        token_ranks: NDArray[np.integer] | None = None,
    ) -> None:
        """`token_ranks` [layer, row of the recordings] are predicted ranks; only with tensor-parallel attention."""
        check_group(prices.model, placement)
        check_fleet_requests(replace(requests, arrival_s=None), prices.model.spec, 1)
        self.prices, self.placement, self.requests = prices, placement, requests
        tensor = prices.settings.collectives is not None
        check(
            token_ranks is None or tensor,
            "token_ranks are for attention tensor parallel; give the requests' ranks to serve()",
        )
        rows = len(requests.recordings.expert_ids)
        self.predicted = _predicted(token_ranks, placement, rows) if tensor else np.empty((0, 0), np.int64)

    def serve(
        self,
        arrival_s: NDArray[np.float64] | None = None,
        *,
        ranks: NDArray[np.integer] | None = None,
        router: Router | None = None,
        fleet: Fleet | None = None,
        controller: GroupController | None = None,
        even: bool = False,
        until_s: float = np.inf,
    ) -> GroupServedRun:
        """Serve the first len(arrival_s) requests until all are done or until `until_s`.

        Without `arrival_s` requests arrive at their own times. With data-parallel attention, `ranks` [request] gives
        the rank of each request; without it, `router` chooses one on arrival, by default the shortest queue. `fleet`,
        empty at first, is passed to the router and kept up to date; the default tracks no experts. `controller` may
        change the placement, with data-parallel attention.

        `even` gives a lower bound of the experts' time of these steps under any placement, were experts moved before
        every step at no cost: in every step and layer each rank gets an equal part of all experts' work, each expert's
        weights are read once in the group, and every rank receives as many rows. The attention of a rank and what it
        sends stay those of its own requests. It needs a placement without replicas.
        """
        given = self.requests.arrival_s if arrival_s is None else np.asarray(arrival_s, np.float64)
        count = 0 if given is None else len(given)
        requests = replace(
            self.requests,
            recorded=self.requests.recorded[:count],
            prompt_tokens=self.requests.prompt_tokens[:count],
            output_tokens=self.requests.output_tokens[:count],
            arrival_s=given,
            block_offsets=None,
            blocks=None,
        )
        check_fleet_requests(requests, self.prices.model.spec, None)
        tensor = self.prices.settings.collectives is not None
        check(controller is None or not tensor, "changes of the placement are for data-parallel attention")
        one_each = self.placement.num_slots == self.placement.num_experts
        check(not even or (one_each and controller is None), "even=True needs a placement of one slot per expert")
        lanes = 1 if tensor else self.placement.num_ranks
        lane = _lanes(ranks, count, lanes, tensor)
        places = [self.prices.settings.places] * lanes
        kept = Fleet(places) if fleet is None else fleet
        check(len(kept) == lanes and not kept.running.any(), f"fleet must have {lanes} workers without requests")
        return _Driver(self, requests, lane, router or JoinShortestQueue(), kept, controller, even, until_s).serve()


class _Driver:
    """Calls the router and the controller, changes the placement, and runs the compiled loop in between."""

    def __init__(
        self,
        group: ServingGroup,
        requests: FleetRequests,
        lane_of: NDArray[np.int64],
        router: Router,
        fleet: Fleet,
        controller: GroupController | None,
        even: bool,
        until_s: float,
    ) -> None:
        prices, records, placement = group.prices, requests.recordings, group.placement
        settings = prices.settings
        self.model, self.settings, self.requests, self.placement = prices.model, settings, requests, placement
        self.router, self.fleet, self.controller, self.until_s, self.even = router, fleet, controller, until_s, even
        assert requests.arrival_s is not None
        self.work = Replayed(
            requests.arrival_s,
            requests.prompt_tokens,
            requests.output_tokens,
            requests.recorded,
            records.expert_ids,
            records.prompt_row,
            records.prompt_rows,
            records.decode_row,
            records.decode_rows,
            group.predicted,
        )
        self.prices = (
            prices.tables,
            prices.links,
            prices.routing,
            prices.ring,
            prices.spread,
            settings.chunk_tokens,
            settings.piece_tokens,
            settings.deduplicate,
            even,
        )
        layers, lanes = placement.num_layers, len(fleet)
        asked = np.zeros((0 if controller is None else placement.num_ranks, layers, placement.num_experts))
        self.state = Progress.start(lane_of, lanes, settings.places, settings.kv_of(placement), asked)
        self.picked = np.empty(lanes * settings.chunk_tokens, np.int64)
        self.home = np.empty((layers if len(group.predicted) else 1, len(self.picked)), np.int64)
        self.log = np.empty((FIRST_STEPS, 12))
        self.use(placement)
        self.reported, self.unseen = 0, list[FinishedRequest]()
        self.ended = EndedRequests(requests)
        self.tick_s = self.count_s = np.inf
        if controller is not None:
            check_positive(every_s=controller.every_s)
            check_not_negative(late_s=controller.late_s)
            self.tick_s, self.count_s = controller.every_s, controller.every_s - controller.late_s
        self.counts, self.counted_steps = list[_Counts](), 0
        self.moving: _Moving | None = None
        self.changes: list[Landed] = []

    def use(self, placement: Placement) -> None:
        self.slots: SlotTables = slot_tables(placement)
        self.rows = np.zeros(placement.slot_experts.shape, np.int64)
        self.state.turns[:] %= self.slots.copies

    def serve(self) -> GroupServedRun:
        clock = self.state.clock
        while True:
            moving = self.moving
            waits = moving is not None and moving.start_s is None
            exposed, end_s, next_s = 0.0, 0.0, np.inf
            if moving is not None:
                exposed, end_s, next_s = moving.change.exposed, moving.end_s, moving.next_s
            stop_s = min(self.until_s, self.tick_s, self.count_s, next_s)
            buffers = self.rows, self.picked, self.home, self.log
            why = serve(self.state, self.work, self.slots, *self.prices, *buffers, stop_s, exposed, end_s, waits)
            if why == GROW:
                self.log = np.concatenate([self.log, np.empty_like(self.log)])
            elif why == DECIDE:
                self.decide(int(self.state.counts[ARRIVED]))
            elif why == FITS and moving is not None:
                self.start_moving(moving)
            elif self.state.counts[ENDED] == len(self.requests) or stop_s >= self.until_s:
                return self.result()
            else:
                clock[0] = max(clock[0], stop_s)
                self.at_stop(float(clock[0]))

    def decide(self, request: int) -> None:
        """Ask the router for the rank of a request, over the fleet as it is now."""
        self.tell_ended()
        lanes, fleet, prompt_tokens = self.state.lanes, self.fleet, int(self.requests.prompt_tokens[request])
        fleet.prefill_tokens[:] = lanes[WAITING]
        if self.settings.kv_tokens is not None:
            fleet.kv_used[:] = lanes[KV_USED] / np.maximum(1, lanes[CAPACITY])
        records, recorded = self.requests.recordings, int(self.requests.recorded[request])
        footprint = None if records.footprint is None else records.footprint[recorded]
        domain = None if records.domains is None else records.domains[recorded]
        decision = self.router.route(Request(str(request), prompt_tokens, footprint, domain), fleet)
        rank = int(decision.worker)
        check(0 <= rank < len(fleet), f"the router chose rank {rank}; it must be in 0 … {len(fleet) - 1}")
        fleet.admit(str(request), rank, prompt_tokens, decision.profile)
        self.state.lane_of[request] = rank

    def tell_ended(self) -> None:
        """Take requests that ended out of the fleet, and keep those that finished for the controller."""
        state, ended = self.state, int(self.state.counts[ENDED])
        for request in state.ended[self.reported : ended].tolist():
            if str(request) in self.fleet:
                self.fleet.finish(str(request))
            at_s = float(state.finish_s[request])
            if self.controller is not None and not np.isnan(at_s):
                self.unseen.append(self.ended.finished(request, at_s, int(state.lane_of[request])))
        self.reported = ended

    def at_stop(self, now_s: float) -> None:
        """Switch layers whose weights have arrived, set counts aside, and tick, whichever is due."""
        if self.moving is not None and self.moving.next_s <= now_s:
            self.switch_layers(self.moving, now_s)
        if self.controller is None:
            return
        every_s, steps = self.controller.every_s, int(self.state.counts[STEPS])
        if self.count_s <= now_s:
            self.counts.append(_Counts(self.count_s, self.state.asked.copy(), steps - self.counted_steps))
            self.state.asked[:], self.counted_steps = 0.0, steps
            self.count_s += every_s * ((now_s - self.count_s) // every_s + 1)
        if self.tick_s <= now_s:
            due_s = self.tick_s + every_s * ((now_s - self.tick_s) // every_s)
            self.tick(self.controller, due_s, now_s)
            self.tick_s = due_s + self.controller.every_s
            self.count_s += self.controller.every_s - every_s

    def tick(self, controller: GroupController, due_s: float, now_s: float) -> None:
        self.tell_ended()
        until_s = due_s - controller.late_s + 1e-9 * due_s  # rounding
        seen = [counts for counts in self.counts if counts.at_s <= until_s]
        ended = [request for request in self.unseen if request.at_s <= until_s]
        self.counts, self.unseen = self.counts[len(seen) :], self.unseen[len(ended) :]
        sources = sum((counts.asked for counts in seen), np.zeros_like(self.state.asked))
        change = controller.tick(due_s, GroupLoads(sources, sum(counts.steps for counts in seen), ended))
        if change is None:
            return
        check(self.moving is None, "a controller may change the placement only after the change before has landed")
        check_group(self.model, change.placement)
        check(sorted(change.moved_s) == list(change.moved_s), "moved_s must not fall: layers move one after another")
        new, old = change.placement.slot_experts, self.placement.slot_experts
        others = np.setdiff1d(np.arange(len(new)), change.layers)
        check(new.shape != old.shape or (new[others] == old[others]).all(), "a layer changes that does not move")
        self.moving = _Moving(change, now_s)
        capacity = self.state.lanes[CAPACITY]
        capacity[:] = np.minimum(capacity, self.settings.kv_of(change.placement))

    def start_moving(self, moving: _Moving) -> None:
        """Begin to move weights: the engine stops until all have arrived, or layers switch between its steps."""
        change, clock = moving.change, self.state.clock
        moving.start_s = float(clock[0])
        if change.exposed >= 1.0 or not len(change.layers):
            clock[0] = moving.end_s
            self.land(moving, moving.end_s)
            return
        # Until all layers have switched, all have as many slots as the larger of both placements.
        wide = max(self.placement.slots_per_rank, change.placement.slots_per_rank)
        self.use(self.placement.widened(wide))
        moving.tables = slot_tables(change.placement.widened(wide))

    def switch_layers(self, moving: _Moving, now_s: float) -> None:
        while moving.next_s <= now_s:
            layer = moving.change.layers[moving.switched]
            assert moving.tables is not None
            for mine, new in zip(self.slots, moving.tables, strict=True):
                mine[layer] = new[layer]
            self.state.turns[layer] %= self.slots.copies[layer]
            moving.switched += 1
            if moving.switched == len(moving.change.layers):
                self.land(moving, now_s)
                return

    def land(self, moving: _Moving, now_s: float) -> None:
        change, start_s = moving.change, moving.start_s
        assert start_s is not None
        assert self.controller is not None
        self.placement, self.moving = change.placement, None
        self.use(change.placement)
        self.state.lanes[CAPACITY] = self.settings.kv_of(change.placement)
        self.changes.append(
            Landed(moving.asked_s, start_s, now_s, change.moved_bytes, len(set(change.layers)), change.reason)
        )
        self.controller.landed(now_s, change.placement)

    def result(self) -> GroupServedRun:
        state, log = self.state, self.log[: self.state.counts[STEPS]]
        dropped = np.zeros(len(self.requests), np.bool_)
        dropped[state.ended[: state.counts[ENDED]]] = True
        return GroupServedRun(
            arrival_s=self.work.arrival_s,
            first_s=state.first_s,
            finish_s=state.finish_s,
            decoded=state.decoded,
            rank=state.lane_of,
            dropped=dropped & np.isnan(state.finish_s),
            steps=ServedSteps(
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
                distinct=log[:, ACTIVE],
                balancedness=np.ones(len(log)) if self.even else log[:, BALANCE],
                in_use=np.searchsorted([landed.end_s for landed in self.changes], log[:, START], side="right"),
            ),
            changes=self.changes,
            end_s=float(state.clock[0]),
            queued=int(state.lanes[QUEUED].sum()),
            running=int(state.lanes[RUNNING].sum()),
            kv_held=state.lanes[KV_USED],
            kv_most=state.lanes[KV_MOST],
        )


class _Counts(NamedTuple):
    """Counts that were set aside until they become visible."""

    at_s: float
    asked: NDArray[np.float64]
    steps: int


@dataclass(slots=True)
class _Moving:
    """A change of placement in flight."""

    change: Rebalance
    asked_s: float
    start_s: float | None = None
    """When weights began to move; None while KV memory is not free yet."""
    switched: int = 0
    """Number of layers that have switched."""
    tables: SlotTables | None = None
    """Slots of the new placement, as wide as both."""

    @property
    def next_s(self) -> float:
        """When the next layer's weights have arrived."""
        return np.inf if self.start_s is None else self.start_s + self.change.moved_s[self.switched]

    @property
    def end_s(self) -> float:
        return 0.0 if self.start_s is None else self.start_s + max(self.change.moved_s, default=0.0)


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
