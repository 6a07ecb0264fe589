"""What is left of expert-aware routing when several gateways share a pool, by what they tell each other and how often.

    COTERIE_DATA=… python lab/benchmarks/several_routers.py [SEEDS] [OUT.json]

Two fleets of eight simulated decoders with gpt-oss-20b's recorded routing: `short`, a closed loop of the recorded
answers, 16 in flight on each, as `coterie fleet` has it; `long`, Mooncake's arrivals and lengths with prefill workers
before the decoders at 0.7 of what the fleet can serve, as `coterie evaluate together` has it, with unbounded KV memory.
Routers are fitted on requests that are not served. A saving is against the shortest queue with one gateway; `kept` is
the saving ÷ that of the same router with one gateway, losses paired by seed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from coterie.answers.fleet.bench import MeasuredSpan, steady
from coterie.answers.runs import interval, with_ends
from coterie.sim.fleet.front_ends import ONE, FrontEnds, Told
from coterie.sim.fleet.metrics import FleetRun
from coterie_lab.suites.eldr.fleets import closed_bench, experts_by_rows, outcome, recorded_source
from coterie_lab.suites.running import in_parallel
from coterie_lab.suites.shared import one_thread
from coterie_lab.suites.together.decoders import DecoderBench

SHORTEST = "join_shortest_queue"
NAMES = {SHORTEST: "shortest queue", "latency_aware": "latency_aware", "locality_band": "locality band"}
COUNTS, INTERVALS_S = (2, 4, 8), (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
TOLD: tuple[Told, ...] = ("profiles", "counts", "reports")
EVERY = [FrontEnds(count, every_s, told) for count, told, every_s in product(COUNTS, TOLD, INTERVALS_S)]
BY_LOAD = [one for one in EVERY if one.told != "profiles" and one.every_s in (0.1, 1.0, 5.0)]
"""For routers that do not look at other requests' profiles."""
GATEWAYS = {SHORTEST: BY_LOAD, "latency_aware": EVERY, "locality_band": BY_LOAD}
CASES = [
    (router, gateways)
    for router, some in GATEWAYS.items()
    for gateways in (ONE, *(FrontEnds(count, 0.0, "nothing") for count in COUNTS), *some)
]
REQUESTS, LOAD, WARM_UP = 1500, 0.7, (0.1, 0.9)
OVERLAP = {"short": 1.0, "long": 0.0}
Serve = Callable[[str, FrontEnds], tuple[FleetRun, MeasuredSpan]]


def short(seed: int, data: Path) -> Serve:
    bench = closed_bench(recorded_source(data, "gpt-oss-20b"), 8, 16, seed)

    def serve(router: str, gateways: FrontEnds) -> tuple[FleetRun, MeasuredSpan]:
        run = replace(bench, config=replace(bench.config, front_ends=gateways)).serve(bench.router(router))
        return run, steady(run, 8 * 16)

    return serve


def long(seed: int, data: Path) -> Serve:
    bench = DecoderBench.of("steady", seed, REQUESTS, data)
    offered = bench.traffic.at_rate(LOAD * bench.capacity())

    def serve(router: str, gateways: FrontEnds) -> tuple[FleetRun, MeasuredSpan]:
        config = replace(bench.config, kv_tokens=None, front_ends=gateways)
        run = replace(bench, config=config).serve(offered, (NAMES[router], "fcfs"))
        return run, MeasuredSpan(*map(float, np.quantile(run.arrival_s, WARM_UP)))

    return serve


@one_thread
def measure(job: tuple[str, int], data: Path) -> dict[str, list[float]]:
    """Return experts at equal rows, mean and p99 TPOT, unevenness and a request's decode time, by configuration."""
    fleet, seed = job
    serve, rows = {"short": short, "long": long}[fleet](seed, data), dict[str, list[float]]()
    run, window = serve(SHORTEST, ONE)
    mixed, lasted_s = experts_by_rows(run, window), float(np.nanmean(run.finish_s - run.ready_s))
    for router, gateways in CASES:
        run, window = serve(router, gateways)
        result = outcome(run, window, mixed)
        values = [result.experts_at_rows, result.tpot_mean_ms, result.tpot_p99_ms, result.uneven, lasted_s]
        rows[name_of(router, gateways)] = values
    return rows


def name_of(router: str, gateways: FrontEnds) -> str:
    return f"{router}, {gateways.count}, {gateways.every_s:g} s, {gateways.told}"


def show(fleet: str, runs: list[dict[str, list[float]]]) -> None:
    base = np.array([run[name_of(SHORTEST, ONE)] for run in runs])
    print(f"## {fleet}: a request decodes for {base[:, 4].mean():.2f} s; TPOT {base[:, 1].mean():.2f} ms")
    print("case", "kept of experts, %", "kept of TPOT, %", "lost: experts, % of the base", "TPOT", "p99", sep=" | ")
    for router, gateways in CASES:
        values, alone = (np.array([run[name_of(router, one)] for run in runs]) for one in (gateways, ONE))
        lost, saved = 100 * (values - alone) / base, 100 * (1 - alone / base)
        kept = 100 - 100 * lost[:, :2] / saved[:, :2].mean(axis=0) if router != SHORTEST else np.zeros((len(runs), 0))
        columns = [with_ends(interval(column, OVERLAP[fleet]), sign="") for column in (*kept.T, *lost[:, :3].T)]
        print(name_of(router, gateways), *columns, sep=" | ", flush=True)


if __name__ == "__main__":
    seeds, data = int(sys.argv[1]) if len(sys.argv) > 1 else 10, Path(os.environ["COTERIE_DATA"])
    jobs = [(fleet, seed) for fleet in OVERLAP for seed in range(seeds)]
    results = dict(in_parallel(partial(measure, data=data), jobs))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps([[*job, rows] for job, rows in results.items()]))
    for fleet in OVERLAP:
        show(fleet, [results[fleet, seed] for seed in range(seeds)])
