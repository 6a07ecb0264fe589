"""Jobs for vllm_steps.py: cells of whole steps, and the decode steps that routers formed in a simulated fleet.

    COTERIE_DATA=… python lab/benchmarks/gpu/step_jobs.py MODEL OUT.npz [--replay]

Cells: decode and prefill with even routing (every expert of a chosen number gets as many tokens) and with recorded
tokens; for models without recordings, tokens of a synthetic trace. Padding: batches between two graph sizes, whose
padding rows take the experts of the first row, or experts of their own.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.bench import REQUESTS, MeasuredSpan, steady
from coterie.models import get_model
from coterie.sim import FleetRequests, FleetRun
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.types import ModelSpec
from coterie_lab.suites.eldr.fleets import TRACES, closed_bench, recorded_source

Ids = NDArray[np.integer]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (128, 512, 2048, 8192)
EVEN_CONTEXT = 512
DRAWS, VARIANTS, REPEATS = 16, 2, 2
"""Recorded batches of a cell, even batches of a level, and times that each runs."""
PADDED = (3, 5, 9, 13, 17, 20, 27, 33, 37, 41, 57)
PROMPTS = (256, 512, 1024, 2048, 4096, 8192)
LOADS = ((8, 8), (8, 16), (6, 32))
"""Decoders, and requests in flight on each."""
ROUTERS = ("round_robin", "join_shortest_queue", "locality_band", "latency_aware")
STEPS = 250
"""Steps of a decoder that are replayed, from the middle of the steady part."""


class Jobs:
    """The tokens of all jobs in one array, and their rows in it."""

    def __init__(self, ids: Ids) -> None:
        self.parts, self.size = [ids], len(ids)
        self.jobs: list[dict[str, Any]] = []
        self.arrays: dict[str, Any] = {}

    def keep(self, ids: Ids) -> NDArray[np.int64]:
        """Append tokens; return their rows."""
        self.parts.append(ids)
        self.size += len(ids)
        return np.arange(self.size - len(ids), self.size)

    def add(self, at: NDArray[np.int64], job: dict[str, Any], **arrays: Any) -> None:
        for name, array in {"at": at, **arrays}.items():
            self.arrays[f"{name}_{len(self.jobs)}"] = np.asarray(array, np.int32)
        self.jobs.append(job)

    def save(self, path: Path) -> None:
        ids = np.concatenate([part.astype(np.uint8) for part in self.parts])
        np.savez_compressed(path, ids=ids, jobs=np.array(json.dumps(self.jobs)), **self.arrays)
        print(f"{path}: {len(self.jobs)} jobs, {path.stat().st_size / 1e6:.1f} MB")


def even(spec: ModelSpec, rows: int, distinct: int, rng: Generator) -> Ids:
    """Return [row, layer, k] experts of which `distinct` get tokens, in turn."""
    ids = np.empty((rows, spec.num_moe_layers, spec.top_k), np.int64)
    turn = (np.arange(rows * spec.top_k) % distinct).reshape(rows, spec.top_k)
    for layer in range(spec.num_moe_layers):
        ids[:, layer] = rng.permutation(spec.num_experts)[:distinct][turn]
    return ids


def levels(spec: ModelSpec, rows: int) -> list[int]:
    most = min(spec.num_experts, rows * spec.top_k)
    step = max(spec.top_k, spec.num_experts // 8)
    return sorted({spec.top_k, *range(step, most + 1, step), most})


def add_cells(jobs: Jobs, spec: ModelSpec, offsets: NDArray[np.int64], rng: Generator) -> None:
    requests = len(offsets) - 1

    def drawn(rows: int) -> NDArray[np.int64]:
        """Rows of tokens, each of another request; of neighbouring requests every second time, which are alike."""
        first = rng.integers(requests)
        chosen = rng.permutation(requests)[:rows] if rng.random() < 0.5 else (first + np.arange(rows)) % requests
        return np.array([rng.integers(offsets[one], offsets[one + 1]) for one in chosen])

    for rows in ROWS:
        for context in CONTEXTS:
            steps = [drawn(rows) for _ in range(DRAWS)]
            names = ["recorded"] * DRAWS
            if context == EVEN_CONTEXT:
                for distinct in levels(spec, rows):
                    steps += [jobs.keep(even(spec, rows, distinct, rng)) for _ in range(VARIANTS)]
                    names += [f"even {distinct}"] * VARIANTS
            order = np.concatenate([rng.permutation(len(steps)) for _ in range(REPEATS)])
            job = {"kind": "decode", "rows": rows, "context": context, "routing": [names[i] for i in order]}
            jobs.add(np.array(steps)[order], job)
    for rows in PADDED:
        batches = np.array([drawn(rows) for _ in range(DRAWS)])
        for padding in ("first row", "own experts"):
            job = {"kind": "decode", "rows": rows, "context": EVEN_CONTEXT, "padding": padding}
            jobs.add(batches, job, **({"padding": drawn(64)} if padding == "own experts" else {}))
    for tokens in PROMPTS:
        starts = rng.integers(offsets[-1] - tokens, size=4)
        jobs.add(starts[:, None] + np.arange(tokens), {"kind": "prefill", "tokens": tokens, "routing": "recorded"})
        spread = jobs.keep(even(spec, tokens, spec.num_experts, rng))
        jobs.add(np.array([spread] * 3), {"kind": "prefill", "tokens": tokens, "routing": "even"})


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


def add_replay(jobs: Jobs, data: Path, model: str) -> None:
    source = recorded_source(data, model)
    for decoders, per_decoder in LOADS:
        bench = closed_bench(source, decoders, per_decoder, 0, REQUESTS)
        runs = {name: bench.serve(bench.router(name)) for name in ROUTERS}
        rows = jobs.keep(bench.requests.recordings.expert_ids)
        for decoder in range(decoders):
            for name, run in runs.items():
                window = steady(run, decoders * per_decoder)
                who, at, contexts = decoder_steps(run, bench.requests, decoder, window, STEPS)
                job = {"kind": "replay", "load": per_decoder, "router": name, "decoder": decoder, "contexts": contexts}
                jobs.add(np.where(at < 0, 0, rows[at]), job, who=who)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--replay", action="store_true", help="Also the steps of a simulated fleet.")
    given = parser.parse_args()
    data, spec, rng = Path(os.environ["COTERIE_DATA"]), get_model(given.model), np.random.default_rng(27)
    if given.model in TRACES:
        trace = recorded_source(data, given.model).trace
    else:
        trace = generate(SyntheticSettings().shaped_like(spec), np.random.default_rng(27), requests=96)
    tokens, offsets = trace.arrays()
    jobs = Jobs(tokens.expert_ids)
    add_cells(jobs, spec, np.asarray(offsets), rng)
    if given.replay:
        add_replay(jobs, data, given.model)
    jobs.save(given.out)


if __name__ == "__main__":
    main()
