"""Jobs for vllm_steps.py: the decode steps that routers formed in a simulated fleet on recorded requests.

    COTERIE_DATA=… python lab/benchmarks/gpu/step_jobs.py MODEL DTYPE OUT.npz
    COTERIE_DATA=… python lab/benchmarks/gpu/step_jobs.py together OUT.npz

The second form takes fleet A of suite together near saturation, with steady traffic: the baseline, and the whole.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.bench import REQUESTS, STEADY_ARRIVALS, MeasuredSpan, bench_of, split, steady
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.sim import FleetRequests, FleetRun
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr.fleets import recorded_source
from coterie_lab.suites.together.decoders import AWARE, BASELINE, LATENCY_AWARE, PLACES, DecoderBench
from coterie_lab.suites.together.notes import LOADS as LOADS_TOGETHER
from coterie_lab.suites.together.suite import REQUESTS as TOGETHER_REQUESTS
from coterie_lab.suites.together.traffic import STEADY

Ids = NDArray[np.integer]

LOADS = ((8, 8), (8, 16), (6, 32))
"""Decoders, and requests in flight on each."""
ROUTERS = ("round_robin", "join_shortest_queue", "locality_band", "latency_aware")
STEPS = 250
"""Steps of a decoder that are replayed, from the middle of the steady part."""


def decoder_steps(
    run: FleetRun, requests: FleetRequests, decoder: int, window: MeasuredSpan, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Return who [step, row] and rows of the recordings [step, row], -1 for none, and the contexts of who joins."""
    mine = np.flatnonzero(run.step_worker == run.prefill_workers + decoder)
    starts = run.step_start_s[mine]
    middle = (window.since_s + window.until_s) / 2
    first = int(np.searchsorted(starts, middle))
    inside = range(first, min(first + most, int(np.searchsorted(starts, window.until_s))))
    members = np.flatnonzero((run.decoder == decoder) & np.isfinite(run.decode_start_s))
    joins = np.searchsorted(starts, run.decode_start_s[members])
    leaves = np.searchsorted(starts, np.where(np.isfinite(run.finish_s), run.finish_s, np.inf)[members])
    widest = int(run.step_decoding[mine[inside.start : inside.stop]].max())
    who, at = np.full((len(inside), widest), -1), np.full((len(inside), widest), -1)
    contexts: dict[str, int] = {}
    recordings = requests.recordings
    for row, step in enumerate(inside):
        here = np.flatnonzero((joins <= step) & (step < leaves))
        if len(here) != run.step_decoding[mine[step]]:
            raise ValueError(f"step {step}: {len(here)} requests, and {run.step_decoding[mine[step]]} were decoded")
        position = step - joins[here]
        recorded = requests.recorded[members[here]]
        who[row, : len(here)] = members[here]
        at[row, : len(here)] = recordings.decode_row[recorded] + position % recordings.decode_rows[recorded]
        for name, done in zip(members[here], position, strict=True):
            contexts.setdefault(str(name), int(requests.prompt_tokens[name] + done))
    return who, at, contexts


class Served(NamedTuple):
    """A fleet's run under a router, and its part that is measured."""

    load: int
    router: str
    requests: FleetRequests
    run: FleetRun
    window: MeasuredSpan


def closed_loops(name: str, dtype: str, data: Path) -> Iterator[Served]:
    """Serve every load under every router."""
    source = recorded_source(data, name)
    model, halves = step_model(get_model(name), "h200", dtype), split(source, 0)  # type: ignore[arg-type]
    recordings = split_recordings(source.trace, halves.test)
    for decoders, per_decoder in LOADS:
        bench = bench_of(source, halves, recordings, decoders, per_decoder, 0, REQUESTS, model)
        for router in ROUTERS:
            run = bench.serve(bench.router(router))
            yield Served(per_decoder, router, bench.requests, run, steady(run, decoders * per_decoder))


def together(data: Path) -> Iterator[Served]:
    """Serve suite together's decoders under the baseline and as a whole."""
    bench = DecoderBench.of(STEADY, 0, TOGETHER_REQUESTS["A"], data)
    offered = bench.traffic.at_rate(LOADS_TOGETHER[0] * bench.capacity())
    for name, config in (("join_shortest_queue", BASELINE), ("latency_aware", (AWARE, LATENCY_AWARE))):
        run = bench.serve(offered, config)
        window = MeasuredSpan(*map(float, np.quantile(run.arrival_s, STEADY_ARRIVALS)))
        yield Served(PLACES, name, bench.traffic.requests, run, window)


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    data, name, out = Path(os.environ["COTERIE_DATA"]), sys.argv[1], sys.argv[-1]
    runs = together(data) if name == "together" else closed_loops(name, sys.argv[2], data)
    ids: list[Ids] = []  # the tokens of all requests, one after the other
    firsts: dict[int, int] = {}
    jobs: list[dict[str, Any]] = []
    arrays: dict[str, Ids] = {}
    for served in runs:
        if served.load not in firsts:
            firsts[served.load] = sum(map(len, ids))
            ids.append(served.requests.recordings.expert_ids)
        for decoder in range(served.run.decode_workers):
            who, at, contexts = decoder_steps(served.run, served.requests, decoder, served.window, STEPS)
            arrays[f"at_{len(jobs)}"] = np.where(at < 0, 0, firsts[served.load] + at).astype(np.int32)
            arrays[f"who_{len(jobs)}"] = who.astype(np.int32)
            jobs.append({"load": served.load, "router": served.router, "decoder": decoder, "contexts": contexts})
    whole = np.concatenate(ids).astype(np.uint8)
    np.savez_compressed(out, ids=whole, jobs=np.array(json.dumps(jobs)), **arrays)  # type: ignore[arg-type]
    print(f"{out}: {len(jobs)} jobs, {Path(out).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
