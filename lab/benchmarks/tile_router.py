"""Does a router that prices tiles save more than one that counts experts? gpt-oss-20b in simulated decoders.

    COTERIE_DATA=… python lab/benchmarks/tile_router.py [SEEDS]

Requests held out of the fit, step times as vLLM was measured to take. `latency_aware` counts the experts that a request
adds; the others price a layer by its expected number of experts on the staircase of the kernel's tiles, as it is or
averaged over a spread of that number. Prints the mean step of a token and what it saves against round robin.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.bench import bench_of, split
from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.models import get_model
from coterie.routing import Decision, Fleet, Request, Router
from coterie.routing.forecast import turn_to_forecast
from coterie.routing.latency_aware import LatencyAware
from coterie.routing.learned import SCALE, products
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr.fleets import recorded_source

LOADS = ((8, 8), (8, 16), (6, 32))
"""Decoders, and requests in flight on each."""
PARTS = 8
"""Points of a staircase per expert."""


def staircase(model: StepModel, requests: int, spread: float) -> NDArray[np.float64]:
    """Return [experts of a layer x PARTS] microseconds of all layers, averaged over a normal spread of the experts."""
    experts, us = model.spec.num_experts, [0.0]
    for distinct in range(1, experts + 1):
        rows = np.bincount(np.arange(requests * model.spec.top_k) % distinct, minlength=experts)
        us.append(model.experts_us(rows.astype(float), requests))
    at = np.linspace(0, experts, experts * PARTS + 1)
    weight = np.exp(-0.5 * ((at[:, None] - at) / max(spread, 1e-9)) ** 2)
    fine = np.interp(at, np.arange(experts + 1), us)
    return np.asarray(model.spec.num_moe_layers * (weight @ fine) / weight.sum(axis=1))


@dataclass
class TilesPriced:
    """`latency_aware` with a staircase in place of the price of an expert."""

    inner: LatencyAware
    table: NDArray[np.float64]
    layers: int

    def us(self, touched: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(PARTS * touched / self.layers, np.arange(len(self.table)), self.table)

    def route(self, request: Request, fleet: Fleet) -> Decision:
        decided = self.inner.route(request, fleet)
        assert request.footprint is not None
        learned = self.inner.fitted.for_fleet(request.footprint, fleet)
        forecast, (profile, tokens) = learned.forecast.map, learned.read(request.footprint)
        turn_to_forecast(profile, tokens, forecast.own, forecast.noise, forecast.rows, forecast.prior)
        added = np.empty(len(fleet.places), np.float32)
        products(fleet.missed, profile, added)
        _, _, per_request, per_token, _ = self.inner.cost.line
        held = (fleet.context_tokens + fleet.context_tokens[fleet.alive].mean()) / 2
        step = self.us(fleet.distinct) + per_request * fleet.expected + per_token * held
        more = self.us(fleet.distinct + added / SCALE) - self.us(fleet.distinct)
        cost = step + (fleet.expected + 1) * (more + per_request + per_token * request.prompt_tokens)
        cost[~fleet.alive | (fleet.running >= fleet.places)] = np.inf
        return decided._replace(worker=int(cost.argmin()))


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    source, spec = recorded_source(Path(os.environ["COTERIE_DATA"]), "gpt-oss-20b"), get_model("gpt-oss-20b")
    for dtype in ("mxfp4", "bf16"):
        model = step_model(spec, "h200", dtype)
        for decoders, load in LOADS:
            steps: dict[str, list[float]] = {}
            for seed in range(seeds):
                halves = split(source, seed)
                recordings = split_recordings(source.trace, halves.test)
                bench = bench_of(source, halves, recordings, decoders, load, seed, 1200, model)
                chosen: dict[str, Router] = {"latency_aware": bench.router("latency_aware")}
                inner = LatencyAware(fitted=bench.fitted, cost=bench.prices)
                for spread in (0.0, 1.0, 2.5):
                    chosen[f"tiles ±{spread}"] = TilesPriced(inner, staircase(model, load, spread), spec.num_moe_layers)
                for router, run, window in bench.runs(chosen):
                    inside = (run.step_start_s >= window.since_s) & (run.step_start_s < window.until_s)
                    steps.setdefault(router, []).append(
                        1e3 * np.average(run.step_s[inside], weights=run.step_decoding[inside])
                    )
            for router, times in steps.items():
                saved = 100 * (1 - np.array(times) / np.array(steps["round_robin"]))
                half = 2.1 * saved.std(ddof=1) / np.sqrt(seeds)
                print(
                    f"{dtype} {load:2} {router:14} {np.mean(times):.3f} ms, saves {saved.mean():.2f}% ± {half:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
