"""Distinct experts of a decode step at equal rows: Coterie's router against Serve's own, on the same kind of app.

    python examples/ray/compare.py [RUNS]

Two apps run side by side, one by power of two choices. Both serve the demo's requests (`coterie demo`), in turns, in
another order in every run. A saving is at equal batch sizes, with its 95% interval: by the steps of a run, and by the
spread of all runs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
from app import EXPERT_ROUTER, make_app  # type: ignore[import-not-found]
from ray import serve
from scipy import stats

from coterie.answers.demo.run import DOMAINS, IN_FLIGHT, MAX_TOKENS, RoutedLoop
from coterie.answers.demo.runs import LoopResult, RouterRun
from coterie.engines.worker.embedded import EmbeddedWorker
from coterie.gateway.embedded import EmbeddedFleet, tiny_fit_path
from coterie.net.access import FleetAccess
from coterie.net.processes import ServerProcess
from coterie.prompts import load_prompts, take_in_turn
from coterie.routing import RouterFit

URL = "http://127.0.0.1:8000"
APPS = {"power_of_two": None, "latency_aware": EXPERT_ROUTER}
REQUESTS = 132


def start_apps() -> None:
    for name, router in APPS.items():
        serve.run(make_app(router), name=name, route_prefix=f"/{name}")


def decoders(app: str) -> EmbeddedFleet:
    """Return the decode workers of an app, as the demo sees a fleet."""
    replicas: list[dict[str, Any]] = serve.get_deployment_handle("Decode", app).broadcast("describe").results()
    processes = [ServerProcess([], replica["url"], Path()) for replica in replicas]
    events = [replica["expert_events"] for replica in replicas]
    workers = [
        EmbeddedWorker(process, "decode", endpoint, "", "", FleetAccess())
        for process, endpoint in zip(processes, events, strict=True)
    ]
    return EmbeddedFleet(workers, Path())


def serve_under(app: str, seed: int, requests: int = REQUESTS) -> RouterRun:
    prompts = take_in_turn([prompt for prompt in load_prompts() if prompt.domain in DOMAINS], requests)
    loop = RoutedLoop(f"{URL}/{app}", decoders(app), IN_FLIGHT, MAX_TOKENS)
    return asyncio.run(loop.run_as_it_is(prompts, app, seed))


def compare(seed: int, requests: int = REQUESTS) -> LoopResult:
    apps = list(APPS)[:: 1 if seed % 2 else -1]  # neither is always the first
    by_app = {app: serve_under(app, seed, requests) for app in apps}
    runs = [by_app[app] for app in APPS]
    return LoopResult(runs, 0, runs[0], RouterFit.load(tiny_fit_path()))


def main() -> None:
    start_apps()
    savings = []
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        result = compare(seed)
        first, ours = result.runs
        saving, low, high = result.like_with_like(ours, np.random.default_rng(seed))
        savings.append(saving)
        experts = f"{first.distinct_by_token:.2f} -> {ours.distinct_by_token:.2f} experts a layer"
        rows = f"{first.rows_by_token:.1f} and {ours.rows_by_token:.1f} rows"
        print(
            f"run {seed}: {saving:.1f}% fewer at equal rows (95%: {low:.1f} to {high:.1f}); {experts} at {rows}; "
            f"{result.differing()} of {ours.requests} answers differ; {first.wall_s:.0f} and {ours.wall_s:.0f} s",
            flush=True,
        )
    if len(savings) > 1:
        half = stats.t.ppf(0.975, len(savings) - 1) * np.std(savings, ddof=1) / np.sqrt(len(savings))
        print(f"{len(savings)} runs: {np.mean(savings):.1f}% fewer, 95%: ± {half:.1f}")
    serve.shutdown()


if __name__ == "__main__":
    main()
