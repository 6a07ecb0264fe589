"""Fit what CAPS leaves open: how requests arrive and use experts, the base time, the sensitivity.

    python lab/benchmarks/fit_caps.py --seconds 600

Only figures published for 150 and 300 requests a second are used; 200 and 250 are left to predict. A random walk from
the shipped setting, or from --start, that keeps what fits better; the best setting found is printed as it improves.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from coterie.answers.batches.drawn import DRAWN, DrawnWorkload
from coterie_lab.suites.caps.published import BURSTY, EXAMPLE, REQUESTS, SEEDS
from coterie_lab.suites.caps.suite import Cell, run_cell
from coterie_lab.suites.running import in_parallel

NAMES = ("fcfs", *(name for name in BURSTY if name != "best_fit"))
CELLS = [Cell(pattern, rate, seed) for pattern in ("bursty", "poisson") for rate in (150.0, 300.0) for seed in SEEDS]
TARGETS: list[tuple[str, float, str, str, float, float]] = [
    *(("bursty", 150.0, name, "p99", 46.9, 2.0) for name in ("greedy_variance", "greedy_dot_product", "lpt_balanced")),
    ("bursty", 150.0, "power_of_d", "p99", 47.0, 3.0),
    ("bursty", 150.0, "greedy_variance", "throughput", EXAMPLE["throughput"], 1.0),
    ("bursty", 150.0, "greedy_variance", "imbalance", EXAMPLE["imbalance"], 0.01),
    ("bursty", 150.0, "greedy_variance", "p99_ms", EXAMPLE["p99_ms"], 200.0),
    ("bursty", 300.0, "greedy_variance", "p99", 18.6, 1.0),
    ("bursty", 300.0, "greedy_variance", "imbalance_cut", 11.35, 0.3),
    ("bursty", 300.0, "power_of_d", "imbalance_cut", 11.15, 0.3),
    ("bursty", 300.0, "lpt_balanced", "imbalance_cut", 11.2, 0.3),
    ("bursty", 300.0, "random", "imbalance_cut", 9.5, 1.0),
    ("bursty", 300.0, "karmarkar_karp", "imbalance_cut", 6.75, 1.0),
    ("bursty", 300.0, "lpt", "imbalance_cut", 4.95, 1.0),
    *(("poisson", 300.0, name, "p99", 12.7, 0.7) for name in ("greedy_variance", "greedy_dot_product")),
    ("poisson", 300.0, "power_of_d", "p99", 8.5, 3.0),
    *(("poisson", 150.0, name, "p99", -17.5, 8.0) for name in ("greedy_variance", "greedy_dot_product")),
]
"""Pattern, rate, strategy, what, its published value, and a difference that matters as much as others."""
WALK: dict[str, tuple[float, float, float]] = {
    "domains": (4, 40, 2.0),
    "hot": (3, 12, 0.7),
    "strength": (0.5, 1.0, 0.04),
    "likeness": (20, 600, 25.0),
    "tokens_sigma": (0.02, 0.4, 0.03),
    "burst_size": (16, 100, 4.0),
    "burst_rate": (1.05, 4.0, 0.2),
    "base_s": (0.034, 0.042, 0.0003),
    "sensitivity": (0.1, 0.8, 0.006),
}
"""From, to, and the size of a step."""


def as_numbers(setting: DrawnWorkload) -> dict[str, float]:
    return {key: getattr(setting.loads if hasattr(setting.loads, key) else setting, key) for key in WALK}


def as_setting(numbers: dict[str, float]) -> DrawnWorkload:
    whole: dict[str, Any] = {
        key: round(value) if key in ("domains", "hot", "burst_size") else value for key, value in numbers.items()
    }
    of_loads = {key: whole.pop(key) for key in list(whole) if hasattr(DRAWN.loads, key)}
    return replace(DRAWN, loads=replace(DRAWN.loads, **of_loads), **whole)


def misfit(setting: DrawnWorkload) -> tuple[float, dict[str, float]]:
    found = dict(in_parallel(partial(run_cell, names=NAMES, requests=REQUESTS, setting=setting), CELLS))
    total, seen = 0.0, {}
    for pattern, rate, name, what, wanted, matters in TARGETS:
        runs = [found[Cell(pattern, rate, seed)] for seed in SEEDS]

        def mean(of: str, field: str, runs: list[Any] = runs) -> float:
            return float(np.mean([getattr(run[of], field) for run in runs]))

        if what in ("throughput", "imbalance", "p99_ms"):
            value = mean(name, what)
        else:
            field = "p99_ms" if what == "p99" else "imbalance"
            value = 100.0 * (1.0 - mean(name, field) / mean("fcfs", field))
        seen[f"{pattern} {rate:g} {name} {what}"] = round(value, 3)
        total += abs(value - wanted) / matters
    return total, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", help="JSON object of settings to start from")
    options = parser.parse_args()
    rng, until = np.random.default_rng(options.seed), time.monotonic() + options.seconds
    best = as_numbers(DRAWN) | (json.loads(options.start) if options.start else {})
    least, seen = misfit(as_setting(best))
    print(f"{least:.2f} {json.dumps(best)} {json.dumps(seen)}", flush=True)
    while time.monotonic() < until:
        tried = dict(best)
        for key, (low, high, step) in WALK.items():
            if rng.random() < 0.35:
                tried[key] = float(np.clip(tried[key] + step * rng.normal(), low, high))
        total, seen = misfit(as_setting(tried))
        if total < least:
            best, least = tried, total
            print(f"{least:.2f} {json.dumps(best)} {json.dumps(seen)}", flush=True)


if __name__ == "__main__":
    main()
