"""The decode batches that routers formed, for a GPU to run: the recorded tokens of each step.

A run holds the start and the decoder of each step, and when each request joined its decoder and finished. A request is
in every step of its decoder in between, one token further each time; the number of requests is checked against the
step's own count. Steps are drawn with probability proportional to their requests, so that a GPU measures the time of a
token's step. (A mean over steps flatters an uneven load: most steps are those of decoders with little to do. And steps
of one size come from different decoders under each router.)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.bench import REQUESTS, MeasuredSpan, steady
from coterie.engines.replay.batches import write_batches
from coterie.errors import ConfigError
from coterie.sim import FleetRequests, FleetRun
from coterie_lab.suites.eldr.cells import MODEL
from coterie_lab.suites.eldr.fleets import closed_bench, decode_steps, recorded_source

LOADS = ((8, 8), (8, 16), (8, 24), (6, 32))
"""Decoders and requests in flight on each; one group of batches per load."""
ROUTERS = ("round_robin", "locality_band", "latency_aware")
"""Routers; `coterie replay` compares the others with the first."""
STEPS = 100
"""Steps per router, load and split."""


def replay_batches(
    data: Path,
    out: Path,
    *,
    steps: int = STEPS,
    seeds: tuple[int, ...] = (0,),
    requests: int = REQUESTS,
    loads: tuple[tuple[int, int], ...] = LOADS,
) -> int:
    """Write batches of each router at each load, drawn from the steady part; return how many of each."""
    source = recorded_source(data, MODEL)
    groups: dict[str, dict[str, list[NDArray[np.integer]]]] = {}
    for decoders, per_decoder in loads:
        batches: dict[str, list[NDArray[np.integer]]] = {name: [] for name in ROUTERS}
        for seed in seeds:
            bench = closed_bench(source, decoders, per_decoder, seed, requests)
            base = bench.serve(bench.router(ROUTERS[0]))
            window = steady(base, decoders * per_decoder)
            for name in ROUTERS:
                run = base if name == ROUTERS[0] else bench.serve(bench.router(name))
                own = steady(run, decoders * per_decoder)
                inside = MeasuredSpan(own.since_s, min(own.until_s, window.until_s))
                rng = np.random.default_rng([seed, 9, per_decoder])
                batches[name] += formed_batches(run, bench.requests, inside, steps, rng)
        groups[f"{per_decoder} in flight"] = batches
    write_batches(out, MODEL, groups)
    return min(len(batches) for group in groups.values() for batches in group.values())


def formed_batches(
    run: FleetRun, requests: FleetRequests, window: MeasuredSpan, steps: int, rng: Generator
) -> list[NDArray[np.integer]]:
    """Draw steps of the window; return their expert ids [token, layer, k], in order of time."""
    inside = np.flatnonzero(decode_steps(run, window))
    rows = run.step_decoding[inside]
    chosen = np.sort(rng.choice(inside, steps, p=rows / rows.sum()))
    return [_ids(run, requests, int(step)) for step in chosen]


def _ids(run: FleetRun, requests: FleetRequests, step: int) -> NDArray[np.integer]:
    worker, start = run.step_worker[step], run.step_start_s[step]
    decoding = (run.decode_start_s <= start) & ~(run.finish_s <= start)  # NaN if a request has not finished
    running = np.flatnonzero((run.decoder == worker - run.prefill_workers) & decoding)
    if len(running) != run.step_decoding[step]:
        raise ConfigError(f"step {step} decoded {run.step_decoding[step]} tokens; {len(running)} requests were running")
    before = np.sort(run.step_start_s[(run.step_worker == worker) & (run.step_start_s < start)])
    position = len(before) - np.searchsorted(before, run.decode_start_s[running], side="left")
    recordings, recorded = requests.recordings, requests.recorded[running]
    rows = recordings.decode_row[recorded] + position % recordings.decode_rows[recorded]
    return np.asarray(recordings.expert_ids[rows])
