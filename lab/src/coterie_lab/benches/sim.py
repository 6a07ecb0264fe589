"""How many token-steps a second the fleet simulator replays, every step from the exact experts of its tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.suites import Report
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.routing import Fleet, routers
from coterie.sim import FleetConfig, FleetRun, run_fleet
from coterie.sim.fleet.requests import FleetRequests, Recordings, draw_requests, phase_recordings, split_recordings
from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.readers import read_as
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.types import INFINIBAND_400G
from coterie_lab.benches.timing import Row

DECODERS, PLACES, IN_FLIGHT = 16, 32, 384
RECORDED = "activations/gpt-oss-20b/routing.npz"
ARRIVALS = "requests/mooncake/conversation_trace.jsonl"
PROMPT_SHARE = 0.1
"""Share of a recorded request that stands for its prompt; the rest is decoded."""
SYNTHETIC_REQUESTS = 420
"""Recordings that are drawn where there are none of the model."""
USES, PAIR_REQUESTS = {"gpt-oss-20b": 16, "qwen3-30b-a3b": 8}, 1000
"""How often each recording is replayed, and requests of the run on production arrivals."""
REPEATS = 7


def bench_sim(report: Report) -> list[Row]:
    """Closed runs of 16 decoders, and prefill and decode workers on production arrivals.

    `token_steps_per_s` is of the fastest of 7 runs, by the processor time of one core: other programs only slow it.

    Without COTERIE_DATA, gpt-oss-20b's shape is synthetic too, and there are no production arrivals.
    """
    data = os.environ.get("COTERIE_DATA")
    recorded = Path(data) / RECORDED if data else None
    rows: list[Row] = []
    for done, (model, file) in enumerate((("gpt-oss-20b", recorded), ("qwen3-30b-a3b", None))):
        report(f"decode {model}", done, 3)
        recordings = _recordings(model, file)
        requests = draw_requests(recordings, USES[model] * len(recordings), np.random.default_rng(0))
        rows.append(_decode_row(model, "recorded" if file else "synthetic", requests))
    if data:
        report("prefill and decode", 2, 3)
        rows.append(_pair_row(Path(data), _recordings("gpt-oss-20b", recorded)))
    return rows


def _recordings(model: str, file: Path | None) -> Recordings:
    if file is not None:
        return split_recordings(read_as(ActivationTrace, file), share=PROMPT_SHARE)
    settings = SyntheticSettings(lengths=LognormalLengths(prompt_mean=32, output_mean=280, output_sigma=0.3))
    drawn = generate(settings.shaped_like(get_model(model)), np.random.default_rng(0), requests=SYNTHETIC_REQUESTS)
    return phase_recordings(drawn)


def _decode_row(model: str, routing: str, requests: FleetRequests) -> Row:
    config = FleetConfig(decode_workers=DECODERS, places=PLACES)
    cost = step_model(get_model(model), "h200", "bf16")

    def call() -> FleetRun:
        fleet = Fleet([PLACES] * DECODERS)
        # Recordings are too few to keep so many in flight if none may be there twice; only time is measured here.
        return run_fleet(
            requests, cost, routers.make("round_robin"), config, in_flight=IN_FLIGHT, fleet=fleet, duplicates="allow"
        )

    return {"name": "decode", "model": model, "routing": routing, "decoders": DECODERS, **_timed(call)}


def _pair_row(data: Path, recordings: Recordings) -> Row:
    arrivals = read_as(RequestTrace, data / ARRIVALS)
    requests = draw_requests(
        recordings, PAIR_REQUESTS, np.random.default_rng(0), arrivals.in_order(), rate=20.0, longest_prompt=16_384
    )
    memory: dict[str, Any] = {"prefill_kv_tokens": 400_000, "kv_tokens": 1_000_000}
    config = FleetConfig(decode_workers=8, prefill_workers=8, places=64, link=INFINIBAND_400G, **memory)
    cost = step_model(get_model("gpt-oss-20b"), "h200", "bf16")

    def call() -> FleetRun:
        fleet = Fleet([config.places] * config.decode_workers)
        return run_fleet(requests, cost, routers.make("round_robin"), config, duplicates="postpone", fleet=fleet)

    return {"name": "prefill and decode", "model": "gpt-oss-20b", "routing": "recorded", "decoders": 8, **_timed(call)}


def _timed(call: Callable[[], FleetRun]) -> Row:
    run = call()
    wall, core = [], []
    for _ in range(REPEATS):
        start, spent = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        core.append(time.process_time() - spent)
    return {
        "token_steps": run.token_steps,
        "requests": len(run.finish_s),
        "steps": len(run.step_s),
        "mean_batch": round(float(run.step_decoding[run.step_decoding > 0].mean()), 1),
        "median_ms": round(1e3 * float(np.median(wall)), 1),
        "token_steps_per_s": round(run.token_steps / min(core)),
    }
