"""The decode batches that routers really formed, for a GPU to run: which recorded tokens each step held.

A run tells when each step began and on which decoder, and when each request joined its decoder and ended. A request is
in every step of its decoder from then on, one token further each time; how many that makes is checked against the
step's own count.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.engines.replay_batches import write_batches
from coterie.errors import ConfigError
from coterie.evaluation.eldr_cells import MODEL
from coterie.evaluation.eldr_fleets import REQUESTS, Window, closed_bench, recorded_source, steady
from coterie.sim.fleet_metrics import FleetRun
from coterie.sim.fleet_requests import FleetRequests

DECODERS = 8
IN_FLIGHT = (8, 16, 24)
"""On a decoder: one group of batches each."""
ROUTERS = ("round_robin", "locality_band", "latency_aware")
"""The first is what `coterie replay` compares the others with."""
STEPS = 150


def replay_batches(
    data: Path, out: Path, *, steps: int = STEPS, seed: int = 0, requests: int = REQUESTS,
    in_flight: tuple[int, ...] = IN_FLIGHT,
) -> int:  # fmt: skip
    """Write batches of each router at each load, steps chosen at random from the steady part; how many of each."""
    source = recorded_source(data, MODEL)
    groups: dict[str, dict[str, list[NDArray[np.integer]]]] = {}
    for each in in_flight:
        bench = closed_bench(source, DECODERS, each, seed, requests)
        base = bench.serve(bench.router(ROUTERS[0]))
        window = steady(base, DECODERS * each)
        groups[f"in flight {each}"] = found = {}
        for name in ROUTERS:
            run = base if name == ROUTERS[0] else bench.serve(bench.router(name))
            own = steady(run, DECODERS * each)
            rng = np.random.default_rng([seed, 9, each])
            found[name] = formed_batches(run, bench.requests, Window(own.since_s, min(own.until_s, window.until_s)),
                                         steps, rng)  # fmt: skip
    write_batches(out, MODEL, groups)
    return min(len(one) for routers in groups.values() for one in routers.values())


def formed_batches(
    run: FleetRun, requests: FleetRequests, window: Window, steps: int, rng: Generator
) -> list[NDArray[np.integer]]:
    """Expert ids [token, layer, k] of some decode steps that began in the window, in order of time."""
    begun = run.step_start_s
    decoding = (run.step_decoding > 0) & (run.step_prefill == 0)
    inside = np.flatnonzero(decoding & (begun >= window.since_s) & (begun < window.until_s))
    if len(inside) < steps:
        raise ConfigError(f"steps={steps} must be at most the {len(inside)} that began in the window")
    chosen = np.sort(rng.choice(inside, steps, replace=False))
    return [_ids(run, requests, int(step)) for step in chosen]


def _ids(run: FleetRun, requests: FleetRequests, step: int) -> NDArray[np.integer]:
    worker, start = run.step_worker[step], run.step_start_s[step]
    here = np.flatnonzero(
        (run.decoder == worker - run.prefill_workers) & (run.decode_start_s <= start)
        & ~(run.finish_s <= start)  # not a number where it had not ended
    )  # fmt: skip
    if len(here) != run.step_decoding[step]:
        raise ConfigError(f"step {step} decoded {run.step_decoding[step]} tokens; {len(here)} requests were there")
    before = np.sort(run.step_start_s[(run.step_worker == worker) & (run.step_start_s < start)])
    position = len(before) - np.searchsorted(before, run.decode_start_s[here], side="left")
    recordings, recorded = requests.recordings, requests.recorded[here]
    rows = recordings.decode_row[recorded] + position % recordings.decode_rows[recorded]
    return np.asarray(recordings.expert_ids[rows])
