"""What pricing full workers is worth: gpt-oss-20b in simulated decoders, a closed loop.

    COTERIE_DATA=… python lab/benchmarks/full_workers.py [SEEDS]

More requests are in flight than places. `latency_aware` is compared with the shortest queue, and with itself in a fleet
that states no places, so that it prices a worker as if all its requests ran in one step.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coterie.answers.fleet.bench import Bench, bench_of, split
from coterie.answers.runs import interval
from coterie.routing import Decision, Fleet, Request, Router
from coterie.sim import summarise_fleet
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr.fleets import recorded_source
from coterie_lab.suites.running import with_half

LOADS = ((8, 16, 24), (8, 8, 16), (8, 8, 24), (4, 16, 40))
"""Decoders, places of each, requests in flight per decoder."""
REQUESTS = 2000
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


def show(load: tuple[int, int, int], seeds: int) -> None:
    """Print changes against the shortest queue, paired by split, with 95% intervals by Student's t."""
    runs = [routers_at(load, seed) for seed in range(seeds)]
    for name in runs[0]:
        values, base = (np.array([run[key] for run in runs]) for key in (name, SHORTEST))
        columns = zip(values.mean(axis=0), (100 * (values / base - 1)).T, strict=True)
        row = (f"{value:.2f} | {with_half(interval(changes))}" for value, changes in columns)
        print("{} x {}, {} in flight".format(*load), name, *row, sep=" | ", flush=True)


if __name__ == "__main__":
    print("load", "router", *(f"{name} | change, %" for name in Measured._fields), sep=" | ")
    for load in LOADS:
        show(load, int(sys.argv[1]) if len(sys.argv) > 1 else 5)
