"""A fleet simulated the plain way: objects, one event at a time, experts counted token by token.

It recomputes a run on purpose and shares no code with the simulator: a check, not a copy. How long a step takes is
asked of the caller, who is given its tokens and their load.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from coterie.batching.base import Loads
from coterie.batching.waiting import Chooser, RequestView, WaitingList, WaitingReport
from coterie.costs.step import Batch
from coterie.routing.base import Request, Router
from coterie.routing.fleet import Fleet
from coterie.sim.fleet.batching import Batching
from coterie.sim.fleet.requests import FleetRequests
from coterie.sim.fleet.run import FleetConfig
from coterie.types import ModelSpec

StepTime = Callable[[list[int], np.ndarray, Batch], float]
"""Microseconds of a step: the rows it decodes, the load of all its tokens, and its batch."""


@dataclass
class Holding:
    """What a request holds in a worker's memory: blocks found in its cache, and blocks of its own."""

    hits: int = 0
    cached: int = 0
    private: int = 0


@dataclass
class Asked:
    number: int
    arrival: float
    prompt: int
    output: int
    blocks: list[int]
    prefiller: int = -1
    decoder: int = -1
    computes: Holding = field(default_factory=Holding)
    gets: Holding = field(default_factory=Holding)
    computed: int = 0
    chunk: int = 0
    steps: int = 0
    decoding: bool = False
    dropped: bool = False
    times: dict[str, float] = field(default_factory=dict)


@dataclass
class Engine:
    role: str
    places: int
    capacity: float
    running: list[Asked] = field(default_factory=list)
    staged: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)
    wanting: list[Asked] = field(default_factory=list)
    sending: list[Asked] = field(default_factory=list)
    end: float = math.inf
    link_free: float = 0.0
    queued_tokens: int = 0
    private: int = 0
    pins: dict[int, int] = field(default_factory=dict)
    free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    choices: Choices | None = None

    @property
    def used(self) -> int:
        return self.private + len(self.pins) + len(self.free)


class Choices(RequestView[int]):
    """A strategy's order of an engine's two queues."""

    def __init__(self, engine: Engine, requests: FleetRequests, batching: Batching, rng: np.random.Generator) -> None:
        super().__init__(WaitingReport())
        self.engine, self.requests = engine, requests
        size, most = batching.batch_size, batching.window_size
        chooser = Chooser(batching.strategy, self, rng, window_size=most, batch_size=size, strict=True)
        self.lists: dict[str, WaitingList[int]] = {"waiting": WaitingList(chooser), "wanting": WaitingList(chooser)}
        self.present: list[Asked] = []
        self.free = 0

    def choose(self, name: str, present: list[Asked], free: int) -> None:
        queue: list[Asked] = getattr(self.engine, name)
        self.present, self.free = present, free
        for one in queue:
            if one.number not in self.lists[name]:
                self.lists[name].push(one.number)
        self.lists[name].refresh()
        place = {number: at for at, number in enumerate(self.lists[name].upcoming())}
        queue.sort(key=lambda one: place[one.number])

    def left(self, name: str, one: Asked) -> None:
        if one.number in self.lists[name]:
            self.lists[name].take(one.number)

    def share(self, request: int) -> Loads:
        footprint, top_k = self.requests.recordings.footprint, self.requests.recordings.expert_ids.shape[2]
        assert footprint is not None
        counts = footprint[self.requests.recorded[request]]
        return np.array([layer / (layer.sum() / top_k) for layer in counts])

    def tokens(self, request: int) -> float:  # noqa: ARG002  (the contract's)
        return 1.0

    def running(self) -> list[int]:
        return [one.number for one in self.present]

    def free_places(self) -> int:
        return self.free

    def name(self, request: int) -> str:
        return str(request)


class Reference:
    def __init__(
        self,
        requests: FleetRequests,
        spec: ModelSpec,
        step_us: StepTime,
        router: Router,
        config: FleetConfig,
        in_flight: int = 0,
        duplicates: str = "refuse",
        batching: Batching | None = None,
    ) -> None:
        self.requests, self.config, self.router, self.in_flight = requests, config, router, in_flight
        self.duplicates = duplicates
        self.step_us, self.spec = step_us, spec
        size = requests.block_tokens
        prefill_cap = math.inf if config.prefill_kv_tokens is None else config.prefill_kv_tokens // size
        decode_cap = math.inf if config.kv_tokens is None else config.kv_tokens // size
        role = "both" if config.both else "decode"
        self.engines = [Engine("prefill", config.prefill_places, prefill_cap) for _ in range(config.prefill_workers)]
        self.engines += [Engine(role, config.places, decode_cap) for _ in range(config.decode_workers)]
        rng = np.random.default_rng(0 if batching is None else batching.seed)
        for engine in self.engines[config.prefill_workers :]:
            engine.choices = None if batching is None else Choices(engine, requests, batching, rng)
        self.fleet = Fleet([config.places] * config.decode_workers)
        self.asked = [
            Asked(
                n,
                math.nan if requests.arrival_s is None else float(requests.arrival_s[n]),
                int(requests.prompt_tokens[n]),
                int(requests.output_tokens[n]),
                []
                if requests.blocks is None or requests.block_offsets is None
                else requests.blocks[requests.block_offsets[n] : requests.block_offsets[n + 1]].tolist(),
            )
            for n in range(len(requests))
        ]
        self.coming = list(self.asked)
        self.held: list[Asked] = []
        self.active: list[Asked] = []
        self.turn = 0
        self.steps: list[tuple[int, float, float, int, int, float]] = []
        self.now = 0.0

    def recorded(self, one: Asked) -> int:
        return int(self.requests.recorded[one.number])

    def busy(self, one: Asked) -> bool:
        return self.duplicates != "allow" and self.recorded(one) in {self.recorded(other) for other in self.active}

    def run(self) -> Reference:
        while True:
            times = [engine.end for engine in self.engines]
            times += [engine.sending[0].times["ready"] for engine in self.engines if engine.sending]
            if self.in_flight:
                if len(self.active) < self.in_flight and any(not self.busy(one) for one in self.coming):
                    times.append(self.now)
            elif self.coming:
                times.append(self.coming[0].arrival)
            when = min(times)
            if when > self.now:
                for number, engine in enumerate(self.engines):
                    if engine.end == math.inf:
                        self.start(number, engine)
                when = min([when, *(engine.end for engine in self.engines)])
                if when == math.inf:
                    return self
                self.now = when
            self.happen()

    def happen(self) -> None:
        to_decide: list[Asked] = []
        for engine in self.engines:
            if engine.end <= self.now:
                engine.end = math.inf
                self.finish_step(engine, to_decide)
        for engine in self.engines:
            while engine.sending and engine.sending[0].times["ready"] <= self.now:
                one = engine.sending.pop(0)
                self.release(engine, one, one.computes)
                decoder = self.engines[self.config.prefill_workers + one.decoder]
                self.commit(decoder, one, one.gets)
                decoder.waiting.append(one)
        if self.in_flight:
            while len(self.active) < self.in_flight:
                free = next((one for one in self.coming if not self.busy(one)), None)
                if free is None:
                    break
                self.coming.remove(free)
                self.arrive(free, to_decide)
        else:
            while self.coming and self.coming[0].arrival <= self.now:
                one = self.coming.pop(0)
                if self.busy(one) or self.recorded(one) in {self.recorded(h) for h in self.held}:
                    self.held.append(one)
                else:
                    self.arrive(one, to_decide)
        for one in to_decide:
            self.decide(one)

    def blocks(self, engine: Engine, one: Asked) -> int:
        tokens = one.prompt + (0 if engine.role == "prefill" else one.output)
        return -(-tokens // self.requests.block_tokens)

    def arrive(self, one: Asked, to_decide: list[Asked]) -> None:
        one.arrival = self.now
        if any(self.blocks(engine, one) > engine.capacity for engine in (self.engines[0], self.engines[-1])):
            one.dropped = True
            return
        self.active.append(one)
        if not self.config.prefill_workers:
            if not self.config.both:
                one.times.update(prefill_start=self.now, prefill_end=self.now)
            to_decide.append(one)
            return
        prefillers = range(self.config.prefill_workers)
        if self.config.prefill_policy == "round_robin":
            chosen, self.turn = self.turn, (self.turn + 1) % self.config.prefill_workers
        else:
            cached = self.config.prefill_policy == "soonest"
            hits = [self.hit_tokens(self.engines[n], one) if cached else 0 for n in prefillers]
            chosen = min(prefillers, key=lambda n: (self.engines[n].queued_tokens - hits[n], n))
        one.prefiller = chosen
        self.engines[chosen].queued_tokens += one.prompt
        self.engines[chosen].waiting.append(one)

    def hits(self, engine: Engine, one: Asked) -> int:
        count = 0
        for block in one.blocks:
            if block not in engine.pins and block not in engine.free:
                break
            count += 1
        return count

    def hit_tokens(self, engine: Engine, one: Asked) -> int:
        return min(self.hits(engine, one) * self.requests.block_tokens, one.prompt - 1)

    def decide(self, one: Asked) -> None:
        worker = self.router.route(Request(str(one.number), one.prompt), self.fleet).worker
        self.fleet.admit(str(one.number), worker, one.prompt)
        one.decoder = worker
        engine = self.engines[self.config.prefill_workers + worker]
        if engine.role == "both":
            one.prefiller = worker
            engine.queued_tokens += one.prompt
            engine.waiting.append(one)
        else:
            engine.wanting.append(one)
            self.drain(engine)

    def drain(self, engine: Engine) -> None:
        while engine.wanting and self.reserve(engine, engine.wanting[0], engine.wanting[0].gets):
            one = engine.wanting.pop(0)
            if engine.choices is not None:
                engine.choices.left("wanting", one)
            if one.prefiller < 0:
                self.commit(engine, one, one.gets)
                one.times["ready"] = self.now
                engine.waiting.append(one)
                continue
            sender, link = self.engines[one.prefiller], self.config.link
            token_s = 0.0 if link is None else self.spec.kv_bytes_per_token / link.bytes_per_s
            sender.link_free = max(self.now, sender.link_free) + token_s * (one.prompt - one.gets.cached)
            one.times["ready"] = sender.link_free + (0.0 if link is None else link.latency_s)
            sender.sending.append(one)

    def reserve(self, engine: Engine, one: Asked, held: Holding) -> bool:
        hits = self.hits(engine, one)
        need = self.blocks(engine, one) - hits
        kept = sum(block in engine.free for block in one.blocks[:hits])
        if need > engine.capacity - engine.used + len(engine.free) - kept:
            return False
        for block in one.blocks[:hits]:
            engine.free.pop(block, None)
            engine.pins[block] = engine.pins.get(block, 0) + 1
        while engine.used + need > engine.capacity:
            engine.free.popitem(last=False)
        engine.private += need
        held.private, held.hits, held.cached = need, hits, min(hits * self.requests.block_tokens, one.prompt - 1)
        return True

    def commit(self, engine: Engine, one: Asked, held: Holding) -> None:
        for block in one.blocks[held.hits :]:
            engine.private -= 1
            held.private -= 1
            engine.free.pop(block, None)
            engine.pins[block] = engine.pins.get(block, 0) + 1

    def release(self, engine: Engine, one: Asked, held: Holding) -> None:
        engine.private -= held.private
        for block in reversed(one.blocks):
            engine.pins[block] -= 1
            if not engine.pins[block]:
                del engine.pins[block]
                engine.free[block] = None

    def rows(self, one: Asked) -> list[int]:
        recordings, number = self.requests.recordings, self.recorded(one)
        if one.decoding:
            return [int(recordings.decode_row[number] + one.steps % recordings.decode_rows[number])]
        first, length = int(recordings.prompt_row[number]), int(recordings.prompt_rows[number])
        return [first + at % length for at in range(one.computed, one.computed + one.chunk)]

    def admit(self, engine: Engine) -> Asked | None:
        """Who waits longest, if there is room."""
        if not engine.waiting or len(engine.running) + len(engine.staged) == engine.places:
            return None
        one = engine.waiting[0]
        if engine.role != "decode":
            if not self.reserve(engine, one, one.computes):
                return None
            one.times["prefill_start"] = self.now
            one.computed = one.computes.cached
            engine.queued_tokens -= one.computes.cached
        if engine.choices is not None:
            engine.choices.left("waiting", one)
        return engine.waiting.pop(0)

    def start(self, number: int, engine: Engine) -> None:
        engine.running += engine.staged
        engine.staged = []
        free = engine.places - len(engine.running)
        if engine.choices is not None and free and len(engine.waiting) > (free if engine.role == "decode" else 1):
            engine.choices.choose("waiting", engine.running, free)
        settled = self.config.schedule_ahead and bool(engine.running)
        left = self.config.chunk_tokens if engine.role != "decode" else sys.maxsize
        for one in engine.running:
            one.chunk = 0 if one.decoding or engine.role == "decode" else min(one.prompt - one.computed, left)
            left -= 1 if one.decoding else one.chunk
        while not settled and left and (new := self.admit(engine)):
            engine.running.append(new)
            if engine.role != "decode":
                new.chunk = min(new.prompt - new.computed, left)
                left -= new.chunk
        if engine.role == "decode":
            for one in engine.running:
                one.decoding = True
                one.times.setdefault("join", self.now)
        while self.config.schedule_ahead and (new := self.admit(engine)):
            engine.staged.append(new)
        load = np.zeros((self.spec.num_moe_layers, self.spec.num_experts), np.int64)
        for one in engine.running:
            for row in self.rows(one):
                for layer, experts in enumerate(self.requests.recordings.expert_ids[row]):
                    for expert in experts:
                        load[layer, expert] += 1
        decoding = [one for one in engine.running if one.decoding]
        prompts = [one for one in engine.running if not one.decoding and one.chunk]
        if not decoding and not prompts:
            return
        batch = Batch(
            len(decoding),
            sum(one.prompt + one.steps for one in decoding),
            sum(one.chunk for one in prompts),
            sum(one.computed for one in prompts),
            max(1, len(prompts)),
        )
        us = self.step_us([self.rows(one)[0] for one in decoding], load, batch)
        speed = 1.0
        if self.config.speeds is not None and number >= self.config.prefill_workers:
            speed = self.config.speeds[number - self.config.prefill_workers]
        seconds = us * 1e-6 / speed + self.config.step_overhead_s
        engine.end = self.now + seconds
        distinct = (load > 0).sum() / len(load)
        self.steps.append((number, self.now, seconds, len(decoding), batch.prefill_tokens, distinct))
        ends = [one for one in engine.running if one.steps + 1 == one.output]
        if engine.choices is not None and ends and len(engine.wanting) > 1:
            after = [one for one in engine.running + engine.staged if one not in ends]
            engine.choices.choose("wanting", after, len(ends))

    def finish_step(self, engine: Engine, to_decide: list[Asked]) -> None:
        for one in list(engine.running):
            if one.decoding:
                one.steps += 1
                one.times.setdefault("first_token", self.now)
                if one.steps == one.output - (engine.role == "both"):
                    self.leave(engine, one, to_decide)
                continue
            one.computed += one.chunk
            engine.queued_tokens -= one.chunk
            if one.computed < one.prompt:
                continue
            one.times["prefill_end"] = self.now
            self.commit(engine, one, one.computes)
            if engine.role == "prefill":
                engine.running.remove(one)
                to_decide.append(one)
                continue
            one.times.update(first_token=self.now, ready=self.now, join=self.now)
            one.decoding = True
            if one.output == 1:
                self.leave(engine, one, to_decide)

    def leave(self, engine: Engine, one: Asked, to_decide: list[Asked]) -> None:
        engine.running.remove(one)
        one.times["finish"] = self.now
        self.active.remove(one)
        self.fleet.finish(str(one.number))
        self.release(engine, one, one.computes if engine.role == "both" else one.gets)
        if engine.role != "both":
            self.drain(engine)
        for held in [held for held in self.held if self.recorded(held) == self.recorded(one)]:
            if not self.busy(held):
                self.held.remove(held)
                self.arrive(held, to_decide)
