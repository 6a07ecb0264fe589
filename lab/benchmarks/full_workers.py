"""What deciding together is worth when every worker is full: gpt-oss-20b in simulated decoders, a closed loop.

    COTERIE_DATA=… python lab/benchmarks/full_workers.py [SEEDS] [routers|waiting]

`routers`: more requests in flight than places. `latency_aware` is compared with the shortest queue, and with itself in
a fleet that states no places, so that it prices a worker as if all its requests ran in one step.

`waiting`: who decides where a request waits, and which one starts? At the worker, in order of arrival or as
`latency_aware`, the strategy, chooses; the router may price the batch that the strategy would choose. Or in front of
the fleet: requests are held back while all workers are full, and each free place gets the oldest request, or the
free places and the waiting requests are assigned at once by the least sum of predicted times. A place that is filled
from the gateway may stay empty for some steps, until the request is there.
"""

from __future__ import annotations

import heapq
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.answers.fleet.bench import Bench, bench_of, split
from coterie.answers.runs import interval
from coterie.batching import LatencyAware as Strategy
from coterie.batching import Window
from coterie.batching.base import passed_over
from coterie.batching.latency_aware import STEP_TRUST
from coterie.costs.lines import StepCost
from coterie.costs.step import Batch, PlacedStepModel
from coterie.routing import Decision, Fleet, Request, Router
from coterie.sim import summarise_fleet
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr.fleets import recorded_source
from coterie_lab.suites.running import with_half

LOADS = ((8, 16, 24), (8, 8, 16), (8, 8, 24), (4, 16, 40))
"""Decoders, places of each, requests in flight per decoder."""
FEW_LOADS = ((8, 16, 24), (4, 16, 40))
"""The same for `waiting`, whose runs take 10 to 30 s each."""
REQUESTS = 2000
WINDOW, SELECTED, MAX_SKIPS = 32, 8, 64
"""Requests that may be chosen from, oldest first; requests that a worker's strategy selects at a time, to start one by
one; times that a held request may be passed over."""
UNLIMITED = 1 << 30
OURS, SHORTEST, UNAWARE = "latency_aware", "join_shortest_queue", "latency_aware, places not known"


def bench(decoders: int, places: int, in_flight: int, seed: int) -> Bench:
    source = recorded_source(Path(os.environ["COTERIE_DATA"]), "gpt-oss-20b")
    halves = split(source, seed)
    made = bench_of(source, halves, split_recordings(source.trace, halves.test), decoders, places, seed, REQUESTS)
    return replace(made, config=replace(made.config, places=places), in_flight=decoders * in_flight)


class Measured(NamedTuple):
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    tokens_per_s: float


@dataclass
class Unaware:
    """The router in a fleet that states no places, so that it prices all requests of a worker as one step."""

    inner: Router
    fleet: Fleet | None = None

    def route(self, request: Request, fleet: Fleet) -> Decision:
        if self.fleet is None:
            self.fleet = fleet
            fleet.places = np.full_like(fleet.places, UNLIMITED)
        return self.inner.route(request, fleet)


def routers_at(load: tuple[int, int, int], seed: int) -> dict[str, Measured]:
    made, rows = bench(*load, seed), {}
    chosen = {SHORTEST: made.router(SHORTEST), OURS: made.router(OURS), UNAWARE: Unaware(made.router(OURS))}
    for name, run, window in made.runs(chosen):
        if name not in chosen:
            continue
        summary = summarise_fleet(run, since_s=window.since_s, until_s=window.until_s)
        rows[name] = Measured(
            summary.ttft.mean, summary.ttft.p99, summary.tpot.mean, summary.tpot.p99, summary.tokens_per_s
        )
    return rows


# Who decides where a request waits, and which one starts.


@dataclass
class Worker:
    """A decoder: its running requests as [request, tokens decoded], and those that wait for it, oldest first."""

    running: list[list[int]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)
    """Requests sent from the gateway that are not there yet, with the time when they are."""
    selected: list[int] = field(default_factory=list)
    stepping: bool = False


@dataclass
class Loop:
    """A closed loop of decoders, one Python event at a time."""

    bench: Bench
    hold: str = ""
    """Requests held back while all workers are full: "oldest" first, or "assigned" together; "" holds none."""
    trust: float | None = None
    """Workers choose who starts by `latency_aware`, the strategy, with this trust; None: in order of arrival."""
    priced_batch: bool = False
    """Whether the router prices the batch that such a worker would choose."""
    delay_steps: float = 0.0
    """Time from the end of a request to the arrival of a held one at its worker, in mean steps."""

    def __post_init__(self) -> None:
        made = self.bench
        self.places, self.fleet = made.config.places, made.fitted.fleet(made.config.places)
        self.router, self.records = made.router(OURS), made.requests.recordings
        assert self.records.footprint is not None
        assert made.in_flight is not None
        self.footprints, self.in_flight = self.records.footprint, made.in_flight
        self.workers = [Worker() for _ in range(made.config.decode_workers)]
        self.placed = PlacedStepModel(made.model)
        batch = Batch(decode_requests=self.places, decode_context=self.places * 512)
        self.step_cost = StepCost.of(made.model, batch)
        shape = made.model.spec.num_moe_layers, made.model.spec.num_experts
        self.profiles = {record: made.fitted.profile(self.footprints[record]) for record in range(len(self.records))}
        self.loads = {record: profile.astype(float).reshape(shape) for record, profile in self.profiles.items()}
        self.skipped: Counter[int] = Counter()
        self.clock, self.serial, self.full_until = 0.0, 0, np.inf
        self.events: list[tuple[float, int, int]] = []
        self.line: list[int] = []
        self.arrival: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.finish: dict[int, float] = {}
        self.resident: dict[int, set[int]] = {}
        self.left = list(range(len(made.requests)))
        self.busy: set[int] = set()
        self.tokens: list[tuple[float, int]] = []
        self.mean_step = made.prices.fixed_us * 1e-6

    def serve(self) -> Measured:
        for _ in range(self.in_flight):
            self.arrive()
        self.start_all()
        while self.events:
            self.clock, _, worker = heapq.heappop(self.events)
            if worker >= 0:
                self.end_step(worker)
            self.start_all()
        arrivals = np.array(sorted(self.arrival.values()))
        since, until = arrivals[2 * self.in_flight], self.full_until
        inside = [r for r, at in self.arrival.items() if since <= at <= until]
        ttft = np.array([self.first[r] - self.arrival[r] for r in inside]) * 1e3
        out = self.bench.requests.output_tokens
        tpot = np.array([(self.finish[r] - self.first[r]) / (out[r] - 1) for r in inside if out[r] > 1]) * 1e3
        made = sum(count for at, count in self.tokens if since <= at <= until)
        return Measured(
            ttft.mean(), np.quantile(ttft, 0.99), tpot.mean(), np.quantile(tpot, 0.99), made / (until - since)
        )

    def record(self, request: int) -> int:
        return int(self.bench.requests.recorded[request])

    def asked(self, request: int) -> Request:
        record = self.record(request)
        prompt = int(self.bench.requests.prompt_tokens[request])
        return Request(str(request), prompt, self.footprints[record], prefilled=True)

    def arrive(self) -> None:
        """The next request in order whose recording is not in flight."""
        at = next((at for at, request in enumerate(self.left) if self.record(request) not in self.busy), None)
        if at is None:
            self.full_until = min(self.full_until, self.clock)
            return
        request = self.left.pop(at)
        self.busy.add(self.record(request))
        self.arrival[request] = self.clock
        if self.hold and (self.line or (self.fleet.running >= self.places).all()):
            self.line.append(request)
        else:
            self.send(request, self.route(request), 0.0)

    def route(self, request: int) -> int:
        decision = self.router.route(self.asked(request), self.fleet)
        if not self.priced_batch or (self.fleet.running < self.places).any():
            return decision.worker
        return int(np.argmin([self.batch_cost(request, worker) for worker in range(len(self.workers))]))

    def batch_cost(self, request: int, worker: int) -> float:
        """As `latency_aware`, but in a step with those of the worker's requests that share most experts with it."""
        mine = self.profiles[self.record(request)]
        rows = np.array([self.profiles[self.record(other)] for other in self.resident.get(worker, ())])
        best = rows[np.argsort(-(rows @ mine))[: self.places - 1]]
        cold = np.prod(1.0 - np.minimum(best, 0.999), axis=0)
        added, prices, all_running = float(cold @ mine), self.bench.prices, len(rows)
        step = prices.fixed_us + prices.expert_us * float((1.0 - cold).sum()) + prices.request_us * len(best)
        more = prices.expert_us * added + prices.request_us
        half_way = (all_running + self.fleet.running.mean()) / 2
        return float(step + (half_way + 1) * more + (all_running - self.places + 1) * (step + more) / self.places)

    def send(self, request: int, worker: int, delay_s: float) -> None:
        self.fleet.admit(str(request), worker, self.asked(request).prompt_tokens, self.profiles[self.record(request)])
        self.resident.setdefault(worker, set()).add(request)
        if delay_s:
            self.workers[worker].coming.append((self.clock + delay_s, request))
            self.serial += 1
            heapq.heappush(self.events, (self.clock + delay_s, self.serial, -1))
        else:
            self.workers[worker].waiting.append(request)

    def let_go(self) -> None:
        """Send held requests to the places that are free."""
        delay = self.delay_steps * self.mean_step
        while self.line and (self.fleet.running < self.places).any():
            if self.hold == "oldest":
                request = self.line.pop(0)
                self.send(request, self.route(request), delay)
                continue
            window = self.line[:WINDOW]
            scores = np.array([self.router.route(self.asked(request), self.fleet).scores for request in window])
            free = np.repeat(np.arange(len(self.workers)), np.maximum(self.places - self.fleet.running, 0))
            due = [self.skipped[request] >= MAX_SKIPS for request in window]
            # What a request costs here beyond its mean over the workers: otherwise cheap requests would always go.
            cost = scores[:, free] - self.typical(window)[:, None]
            cost[due] -= 1e9
            taken = dict(zip(*linear_sum_assignment(cost), strict=True))
            for request in passed_over(window, set(taken)):
                self.skipped[request] += 1
            for at, place in taken.items():
                self.send(window[at], int(free[place]), delay)
            self.line = [r for at, r in enumerate(window) if at not in taken] + self.line[WINDOW:]

    def typical(self, window: list[int]) -> NDArray[np.float64]:
        """[request] its mean score over all workers, were they open."""
        running, self.fleet.running = self.fleet.running, np.minimum(self.fleet.running, self.places - 1)
        scores = np.array([self.router.route(self.asked(request), self.fleet).scores.mean() for request in window])
        self.fleet.running = running
        return scores

    def start_all(self) -> None:
        if self.line:
            self.let_go()
        for number, worker in enumerate(self.workers):
            here = [request for at, request in worker.coming if at <= self.clock]
            if here:
                worker.coming = [(at, request) for at, request in worker.coming if at > self.clock]
                worker.waiting += here
            if not worker.stepping:
                self.start(number, worker)

    def start(self, number: int, worker: Worker) -> None:
        free = self.places - len(worker.running)
        if worker.waiting and free > 0:
            for _ in range(min(free, len(worker.waiting))):
                request = self.next_of(worker)
                worker.waiting.remove(request)
                worker.running.append([request, 0])
        if not worker.running:
            return
        records, ids = self.records, self.records.expert_ids
        rows, context = [], 0
        for request, decoded in worker.running:
            record = self.record(request)
            rows.append(records.decode_row[record] + decoded % records.decode_rows[record])
            context += int(self.bench.requests.prompt_tokens[request]) + decoded
        chosen = ids[np.array(rows)].astype(np.int64)  # [row, layer, k]
        layers, experts = chosen.shape[1], self.bench.model.spec.num_experts
        flat = (np.arange(layers)[None, :, None] * experts + chosen).ravel()
        load = np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
        seconds = self.placed.step(load, Batch(decode_requests=len(rows), decode_context=context)).total_s
        worker.stepping = True
        self.serial += 1
        heapq.heappush(self.events, (self.clock + seconds, self.serial, number))

    def next_of(self, worker: Worker) -> int:
        """The oldest, or the next of a selection of `SELECTED` requests by the strategy."""
        if self.trust is None:
            return worker.waiting[0]
        if not worker.selected:
            window = worker.waiting[:WINDOW]
            loads = np.array([self.loads[self.record(request)] for request in window])
            running = np.zeros(loads.shape[1:])
            for request, _ in worker.running:
                running += self.loads[self.record(request)]
            skips = np.array([self.skipped[request] for request in window], np.int64)
            strategy = Strategy(cost=self.step_cost, trust=self.trust)
            shown = Window(loads, skips, len(worker.waiting))
            order = strategy.select(shown, running, SELECTED, np.random.default_rng(0)).order.tolist()
            for request in passed_over(window, set(order)):
                self.skipped[request] += 1
            worker.selected = [window[at] for at in order]
        return worker.selected.pop(0)

    def end_step(self, number: int) -> None:
        worker, gone = self.workers[number], []
        worker.stepping = False
        self.tokens.append((self.clock, len(worker.running)))
        for entry in worker.running:
            entry[1] += 1
            request = entry[0]
            self.first.setdefault(request, self.clock)
            if entry[1] >= self.bench.requests.output_tokens[request]:
                self.finish[request] = self.clock
                gone.append(request)
        worker.running = [entry for entry in worker.running if entry[0] not in gone]
        for request in gone:
            self.fleet.finish(str(request))
            self.resident[number].discard(request)
            self.busy.discard(self.record(request))
        for _ in gone:
            self.arrive()


WAYS: dict[str, dict[str, Any]] = {
    "at the worker, in order of arrival": {},
    "at the worker, by experts": {"trust": STEP_TRUST},
    "at the worker, by experts, trust 1": {"trust": 1.0},
    "at the worker, by experts, trust 1, and the router prices that batch": {"trust": 1.0, "priced_batch": True},
    "held back, oldest first": {"hold": "oldest"},
    "held back, assigned together": {"hold": "assigned"},
    "held back, assigned together, one step late": {"hold": "assigned", "delay_steps": 1.0},
}


def waiting_at(load: tuple[int, int, int], seed: int) -> dict[str, Measured]:
    return {name: Loop(bench(*load, seed), **settings).serve() for name, settings in WAYS.items()}


# Changes are against the first row of a load, paired by split, with 95% intervals by Student's t.


def show(
    title: str,
    measure: Callable[[tuple[int, int, int], int], dict[str, Measured]],
    loads: Sequence[tuple[int, int, int]],
    seeds: int,
) -> None:
    print(title, *(f"{name} | change, %" for name in Measured._fields), sep=" | ")
    for load in loads:
        runs = [measure(load, seed) for seed in range(seeds)]
        for name in runs[0]:
            values, base = (np.array([run[key] for run in runs]) for key in (name, next(iter(runs[0]))))
            columns = zip(values.mean(axis=0), (100 * (values / base - 1)).T, strict=True)
            row = (f"{value:.2f} | {with_half(interval(changes))}" for value, changes in columns)
            print("{} x {}, {} in flight".format(*load), name, *row, sep=" | ", flush=True)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    parts = sys.argv[2:] or ["routers", "waiting"]
    for part, measure, loads in (("routers", routers_at, LOADS), ("waiting", waiting_at, FEW_LOADS)):
        if part in parts:
            show(part, measure, loads, count)
