"""Jobs for vllm_steps.py: the decode steps that routers formed in a simulated fleet on recorded requests.

COTERIE_DATA=… python lab/benchmarks/gpu/step_jobs.py MODEL DTYPE OUT.npz
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.bench import REQUESTS, MeasuredSpan, bench_of, split, steady
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.sim import FleetRequests, FleetRun
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr.fleets import recorded_source

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


def main() -> None:
    name, dtype, out = sys.argv[1:] if len(sys.argv) == 4 else sys.exit(__doc__)
    source = recorded_source(Path(os.environ["COTERIE_DATA"]), name)
    model, halves = step_model(get_model(name), "h200", dtype), split(source, 0)  # type: ignore[arg-type]
    recordings = split_recordings(source.trace, halves.test)
    ids: list[Ids] = []  # the tokens of all loads, one after the other
    jobs: list[dict[str, Any]] = []
    arrays: dict[str, Ids] = {}
    for decoders, per_decoder in LOADS:
        bench = bench_of(source, halves, recordings, decoders, per_decoder, 0, REQUESTS, model)
        runs = {router: bench.serve(bench.router(router)) for router in ROUTERS}
        first = sum(map(len, ids))
        ids.append(bench.requests.recordings.expert_ids)
        for decoder in range(decoders):
            for router, run in runs.items():
                window = steady(run, decoders * per_decoder)
                who, at, contexts = decoder_steps(run, bench.requests, decoder, window, STEPS)
                arrays[f"at_{len(jobs)}"] = np.where(at < 0, 0, first + at).astype(np.int32)
                arrays[f"who_{len(jobs)}"] = who.astype(np.int32)
                jobs.append({"load": per_decoder, "router": router, "decoder": decoder, "contexts": contexts})
    whole = np.concatenate(ids).astype(np.uint8)
    np.savez_compressed(out, ids=whole, jobs=np.array(json.dumps(jobs)), **arrays)  # type: ignore[arg-type]
    print(f"{out}: {len(jobs)} jobs, {Path(out).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
