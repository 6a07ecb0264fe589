"""Simulation of a fleet of workers that prefill, decode, or do both, with any router; steps replay recorded experts.

    arrival → prefill worker (policy by name) → chunks → router → KV sent → place on the decoder → tokens → end

Prefill workers compute prompts in chunks of a step's token budget and skip tokens in their prefix cache. When a prompt
is computed, the router chooses its decoder. The KV transfer starts once the decoder has memory for the whole request
(prompt and output, so nothing is ever preempted), leaves out what the decoder's prefix cache holds, and uses memory at
both ends until it has finished. A decoder produces all of a request's tokens, as in vLLM. A worker of both roles
schedules like vLLM: running requests first, then waiting ones in order, within the step's token budget; a prompt's last
chunk gives the first token. With such workers the router decides at arrival.

Every step is timed by the calibrated model from the exact rows of every expert. Wrong if an engine preempts, runs
prompts and decode of one worker in separate batches, or if several senders compete for a receiver's link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import StepModel
from coterie.errors import ConfigError, check, check_at_least, check_not_negative, check_one_of
from coterie.routing import Decision, Fleet, Request, Router
from coterie.sim.fleet import _state as state
from coterie.sim.fleet._loop import advance
from coterie.sim.fleet._steps import MOST_DECODING, WORD, fill_bits, step_counts
from coterie.sim.fleet.batching import Batching, WorkerQueues
from coterie.sim.fleet.front_ends import ONE, FrontEnds, SeenFleets
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import (
    EndedRequests,
    FinishedRequest,
    FleetController,
    FleetRequests,
    check_fleet_requests,
)
from coterie.types import Link, Placement, narrowest_uint

PrefillPolicy = Literal["soonest", "least_queued", "round_robin"]
Duplicates = Literal["refuse", "postpone", "allow"]
UNBOUNDED = 1 << 40
FIRST_STEPS = 1 << 14


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Number of workers, and their settings."""

    decode_workers: int = 1
    prefill_workers: int = 0
    """Number of prefill workers. With 0 and `both` off, prefill is skipped: requests go to a decoder on arrival."""
    both: bool = False
    """Whether decode workers also compute prompts; there are then no prefill workers."""
    places: int = 256
    """Requests that a decode worker runs at once."""
    prefill_places: int = 256
    chunk_tokens: int = 8192
    """Token budget of a step with prompt tokens, decoded tokens included."""
    kv_tokens: int | None = None
    """KV memory of a decode worker in tokens; None is unbounded."""
    prefill_kv_tokens: int | None = None
    """KV memory of a prefill worker in tokens, cached prefixes included; None is unbounded."""
    link: Link | None = None
    """Link from a prefill worker to any decoder, used by one request at a time; None transfers in no time."""
    prefill_policy: PrefillPolicy = "soonest"
    """Choice of the prefill worker. "soonest": fewest tokens to compute including this prompt, without cached ones.
    "least_queued": fewest queued tokens before this prompt. "round_robin": each worker in turn."""
    step_overhead_s: float = 0.0
    """Host time of the engine between two steps, added to every step."""
    schedule_ahead: bool = False
    """Choose the requests of a step when the previous step starts, like vLLM's asynchronous scheduling: a request that
    arrives during a step joins the step after the next."""
    speeds: tuple[float, ...] | None = None
    """[decode worker] speed relative to the step model; 2 halves the step times."""
    front_ends: FrontEnds = ONE
    """Front ends that route to the fleet, each with a router. Several need decoders that compute no prompts and have
    unbounded memory: how old a router's view of prompts and memory would be is not simulated."""

    def __post_init__(self) -> None:
        check_at_least(
            1,
            decode_workers=self.decode_workers,
            places=self.places,
            prefill_places=self.prefill_places,
            chunk_tokens=self.chunk_tokens,
            kv_tokens=self.kv_tokens,
            prefill_kv_tokens=self.prefill_kv_tokens,
        )
        check_at_least(0, prefill_workers=self.prefill_workers)
        check(
            not (self.both and self.prefill_workers),
            f"prefill_workers={self.prefill_workers} must be 0 where workers do both",
        )
        check(
            not self.both or self.chunk_tokens >= self.places,
            f"chunk_tokens={self.chunk_tokens} must be at least places={self.places}: all decode",
        )
        check_one_of(get_args(PrefillPolicy), prefill_policy=self.prefill_policy)
        check_not_negative(step_overhead_s=self.step_overhead_s)
        check(
            self.front_ends.count == 1 or not (self.both or self.kv_tokens),
            f"front_ends.count={self.front_ends.count} must be 1 where workers do both, or with kv_tokens",
        )
        if self.speeds is not None and len(self.speeds) != self.decode_workers:
            raise ConfigError(f"speeds has {len(self.speeds)} workers; there are {self.decode_workers} that decode")


def run_fleet(
    requests: FleetRequests,
    model: StepModel,
    router: Router,
    config: FleetConfig,
    *,
    in_flight: int | None = None,
    duplicates: Duplicates = "refuse",
    placement: Placement | None = None,
    fleet: Fleet | None = None,
    until_s: float = np.inf,
    controller: FleetController | None = None,
    batching: Batching | None = None,
) -> FleetRun:
    """Serve all requests, or as many as `until_s` allows.

    Open run: requests arrive at their `arrival_s`. Closed run: `in_flight` requests always run; when one ends, the next
    in order starts, and requests whose recording is in flight are passed over meanwhile. In an open run `duplicates`
    says what happens to a request whose recording is in flight: an error, a postponed arrival, or nothing. `placement`
    spreads every worker over the ranks of the model's topology. `fleet`, empty at first, is passed to the router and
    kept up to date; the default tracks no experts, and routers that need them refuse it. Before each decision
    `controller` gets the requests that ended, and may replace the router, and `fleet` with it. With
    `batching`, a strategy chooses from the queues of the workers that decode; without it requests are served in order.
    """
    check_fleet_requests(requests, model.spec, in_flight)
    check_one_of(get_args(Duplicates), duplicates=duplicates)
    if fleet is None:
        speeds = None if config.speeds is None else list(config.speeds)
        fleet = Fleet([config.places] * config.decode_workers, speeds=speeds)
    check(
        len(fleet) == config.decode_workers and (not fleet.running.any()),
        f"fleet has {len(fleet)} workers and {fleet.running.sum()} requests; expected "
        f"{config.decode_workers} without any",
    )
    check(
        controller is None or config.front_ends.count == 1,
        f"front_ends.count={config.front_ends.count} must be 1 with a controller, which swaps one router",
    )
    world = _world(requests, model, config, in_flight or 0, duplicates, until_s)
    queues = None if batching is None else WorkerQueues(batching, requests, world)
    return _Driver(requests, model, router, config, placement, fleet, controller, queues, world).serve()


class _Driver:
    """Calls the router, keeps the fleet up to date, and runs the compiled loop in between."""

    def __init__(
        self,
        requests: FleetRequests,
        model: StepModel,
        router: Router,
        config: FleetConfig,
        placement: Placement | None,
        fleet: Fleet,
        controller: FleetController | None,
        queues: WorkerQueues | None,
        world: state.World,
    ) -> None:
        self.requests, self.router, self.config = requests, router, config
        self.seen = SeenFleets(config.front_ends, fleet, len(requests.recorded))
        self.controller, self.queues, self.world = controller, queues, world
        world.loop["batching"] = queues is not None
        most = max(config.places, config.chunk_tokens if config.both or config.prefill_workers else 0)
        self.tables = *model.tables(max(most, MOST_DECODING)), *step_counts(model, placement)
        self.log = np.zeros(FIRST_STEPS, state.STEP)
        self.recorded: list[int] = requests.recorded.tolist()
        self.prompt_tokens: list[int] = requests.prompt_tokens.tolist()
        self.footprints, self.domains = requests.recordings.footprint, requests.recordings.domains
        self.reported = 0
        self.ended = EndedRequests(requests)
        self.unseen: list[FinishedRequest] = []

    def serve(self) -> FleetRun:
        arrays, loop = (*self.world, *self.tables), self.world.loop
        decisions, answer = self.world.requests["decision"], -1
        while True:
            why = advance(*arrays, self.log, answer)
            answer = -1
            if why == state.GROW:
                self.log = np.concatenate([self.log, np.zeros_like(self.log)])
                continue
            if why in (state.CHOOSE_WAITING, state.CHOOSE_HANDED) and self.queues is not None:
                self.queues.choose("waiting" if why == state.CHOOSE_WAITING else "handed")
                continue
            self.tell_finished()
            if why == state.DECIDE:
                if self.controller is not None:
                    self.control(self.controller)
                answer = self.decide(int(decisions[loop["decided"]]))
            elif why == state.DUPLICATE:
                row = int(loop["subject"])
                raise ConfigError(
                    f"request {row} replays recording {self.requests.recorded[row]}, which is in flight already, with "
                    f"{loop['in_flight'] - 1} others: use more recordings, a lower rate, or duplicates='postpone'"
                )
            else:
                return self.result()

    def tell_finished(self) -> None:
        ended, requests = int(self.world.loop["finished"]), self.world.requests
        if ended == self.reported:
            return
        for request in requests["ending"][self.reported : ended].tolist():
            self.seen.of(request, float(requests["finish_s"][request])).finish(str(request))
            if self.controller is not None and requests["phase"][request] == state.DONE:
                at_s, worker = float(requests["finish_s"][request]), int(requests["decoder"][request])
                self.unseen.append(self.ended.finished(request, at_s, worker))
        self.reported = ended

    def control(self, controller: FleetController) -> None:
        """Pass the ended requests to the controller, and swap the router if it returns one."""
        ended, self.unseen = self.unseen, []
        swap = controller.tick(float(self.world.loop["clock_s"]), ended)
        if swap is not None:
            self.router = swap.router
        if swap is not None and swap.fleet is not None:
            swap.fleet.take_over(self.seen.fleets[0])
            self.seen.fleets[0] = swap.fleet

    def decide(self, request: int) -> int:
        fleet, config = self.seen.of(request, float(self.world.loop["clock_s"])), self.config
        if config.both or config.kv_tokens is not None:
            self.show_memory(fleet)
        recorded, prompt_tokens = self.recorded[request], self.prompt_tokens[request]
        known = Request(
            str(request),
            prompt_tokens,
            None if self.footprints is None else self.footprints[recorded],
            None if self.domains is None else self.domains[recorded],
            self.cached(request),
            not config.both,
        )
        decision: Decision = self.router.route(known, fleet)
        worker = int(decision.worker)
        check(
            0 <= worker < config.decode_workers, f"the router chose worker {worker}; it must be in 0 … {len(fleet) - 1}"
        )
        fleet.admit(known.id, worker, prompt_tokens, decision.profile)
        return worker

    def show_memory(self, fleet: Fleet) -> None:
        """Update a fleet's waiting prompt tokens and share of KV memory in use, per worker."""
        workers = self.world.workers[self.config.prefill_workers :]
        fleet.prefill_tokens[:] = workers["queued_tokens"]
        if self.config.kv_tokens is not None:
            fleet.kv_used[:] = workers["kv_used"] / workers["capacity"]

    def cached(self, request: int) -> NDArray[np.int64] | None:
        """Return [decode worker] the prompt tokens in its cache; None if prompts share nothing."""
        tables = self.requests.block_tokens, self.world.requests, self.world.cache, self.world.blocks
        workers = range(self.config.prefill_workers, len(self.world.workers))
        if not len(self.world.blocks):
            return None
        return np.array([state.hit_tokens(*tables, worker, request) for worker in workers], np.int64)

    def result(self) -> FleetRun:
        loop, workers, requests = self.world[:3]
        phase, until_s = requests["phase"], float(loop["until_s"])
        on_worker = (phase == state.PREFILLING) | (phase == state.DECODING)
        done = (phase == state.DONE) | (phase == state.DROPPED)
        waiting = (requests["arrival_s"] <= until_s) & ~on_worker & ~done
        log = self.log[: loop["steps"]]
        columns = {name: requests[name].copy() for name in state.REQUEST.names or () if name in FleetRun._fields}
        columns |= {f"step_{name}": log[name].copy() for name in state.STEP.names or ()}
        return FleetRun(
            **columns,
            cached_tokens=requests["computes"]["cached"].copy(),
            kept_tokens=requests["gets"]["cached"].copy(),
            dropped=phase == state.DROPPED,
            running=int(on_worker.sum()),
            queued=int(waiting.sum()),
            postponed=int(loop["postponed"]),
            most_in_flight=int(loop["most_in_flight"]),
            end_s=float(loop["clock_s"]) if done.all() or until_s == np.inf else until_s,
            prefill_workers=self.config.prefill_workers,
            decode_workers=self.config.decode_workers,
            kv_most=workers["kv_most"].copy(),
            kv_held=workers["kv_used"] - workers["evictable"],
        )


def _world(
    requests: FleetRequests,
    model: StepModel,
    config: FleetConfig,
    in_flight: int,
    duplicates: Duplicates,
    until_s: float,
) -> state.World:
    prefill, decode, recordings, spec = config.prefill_workers, config.decode_workers, requests.recordings, model.spec
    link, loop = config.link, np.zeros((), state.LOOP)
    for name, value in {
        "prefill_workers": prefill,
        "step_tokens": config.chunk_tokens,
        "block_tokens": requests.block_tokens,
        "policy": get_args(PrefillPolicy).index(config.prefill_policy),
        "closed": in_flight,
        "duplicates": get_args(Duplicates).index(duplicates),
        "ahead": config.schedule_ahead,
        "overhead_s": config.step_overhead_s,
        "latency_s": 0.0 if link is None else link.latency_s,
        "token_s": 0.0 if link is None else spec.kv_bytes_per_token / link.bytes_per_s,
        "until_s": until_s,
    }.items():
        loop[name] = value

    workers = np.zeros(prefill + decode, state.WORKER)
    for queue in ("waiting", "handed", "sending"):
        workers[queue] = -1
    decode_role = state.BOTH if config.both else state.DECODE
    for part, role, places, tokens in (
        (workers[:prefill], state.PREFILL, config.prefill_places, config.prefill_kv_tokens),
        (workers[prefill:], decode_role, config.places, config.kv_tokens),
    ):
        part["role"], part["places"] = role, places
        part["capacity"] = UNBOUNDED if tokens is None else tokens // requests.block_tokens
    workers["step_end_s"], workers["speed"], workers["chosen_s"] = np.inf, 1.0, -1.0
    if config.speeds is not None:
        workers["speed"][prefill:] = config.speeds

    records = np.zeros(len(requests), state.REQUEST)
    for name, column in {
        "next": -1,
        "prefiller": -1,
        "decoder": -1,
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "recorded": requests.recorded,
        "prompt_row": recordings.prompt_row[requests.recorded],
        "prompt_rows": recordings.prompt_rows[requests.recorded],
        "decode_row": recordings.decode_row[requests.recorded],
        "decode_rows": recordings.decode_rows[requests.recorded],
        **dict.fromkeys((name for name in state.REQUEST.names or () if name.endswith("_s")), np.nan),
    }.items():
        records[name] = column
    blocks = np.zeros(0, np.int64)
    if requests.blocks is not None and requests.block_offsets is not None:
        blocks = np.ascontiguousarray(requests.blocks, np.int64)
        records["block_first"], records["block_end"] = requests.block_offsets[:-1], requests.block_offsets[1:]
    if requests.arrival_s is not None:
        records["arrival_s"] = requests.arrival_s

    numbers = int(blocks.max(initial=-1)) + 1
    cache = np.full((len(workers), numbers + 1), np.array((-1, numbers, numbers), state.BLOCK))
    run = np.zeros((len(workers), int(workers["places"].max())), np.int64)
    layers, experts = spec.num_moe_layers, spec.num_experts
    narrow = narrowest_uint(max(layers * experts - 1, 1 << 8))  # at least 16 bits: fewer compiled variants
    expert_indices = np.add(
        recordings.expert_ids, (np.arange(layers) * experts).astype(narrow)[None, :, None], dtype=narrow
    )
    expert_indices = expert_indices.reshape(len(expert_indices), -1)
    bits = np.zeros((len(expert_indices) + 1, -(-layers * experts // WORD)), np.uint64)
    fill_bits(expert_indices, bits)
    return state.World(
        loop=loop,
        workers=workers,
        requests=records,
        run=run,
        cache=cache,
        blocks=blocks,
        recordings=np.full(len(recordings), np.array((False, (-1, -1)), state.RECORDING)),
        expert_indices=expert_indices,
        counts=np.zeros((layers, experts), np.uint32),
        bits=bits,
        rows=np.zeros(run.shape[1] + 8, np.uint64),
    )
