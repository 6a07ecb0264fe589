"""Co-clustering: how long at a real size, and how far the alternating algorithm is from the optimum on small cases.

Items are drawn: token ids with Zipf frequencies, each of a theme that prefers some experts of every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np
from numpy.random import Generator, default_rng

from coterie.answers.suites import Report
from coterie.placement import DEEPSEEK_V3_PREFILL, Items, Load, planners
from coterie.placement.co_clustering import cost, median_imbalance
from coterie.placement.co_clustering.alternating import alternate
from coterie.types import Placement, Topology
from coterie_lab.benches.timing import Row
from coterie_lab.suites.sem_moe.exact import solve_exactly

ITEMS, LAYERS, EXPERTS, TOP_K, RANKS = 20_000, 26, 64, 6, 8
"""DeepSeek-V2-Lite, with as many distinct token ids as a few million tokens of text have."""
THEMES = 40
SMALL_EXPERTS, SMALL_ITEMS, SMALL_CASES = 8, 12, 30
SMALL_RANKS = (2, 4)
SECONDS = 60.0
"""Time limit of the exact program per case."""
THETA = 0.5


def bench_co_clustering(report: Report) -> list[Row]:
    """Planners that co-cluster, at DeepSeek-V2-Lite's size; then the alternating algorithm against the optimum."""
    return [*_timed_rows(report), *_small_rows(report)]


def themed_items(rng: Generator, count: int, layers: int, experts: int, top_k: int, themes: int) -> Items:
    """Draw token ids with Zipf frequencies; with no themes, every item has preferences of its own."""
    tokens = np.ceil(100.0 * count / np.arange(1, count + 1))
    kept = min(2 * top_k, experts)
    ids, weights = np.empty((count, layers, kept), np.int32), np.empty((count, layers, kept))
    theme = rng.integers(0, max(themes, 1), count)
    for layer in range(layers):
        score = rng.gumbel(size=(count, experts))
        if themes:
            score += 1.5 * rng.gumbel(size=(themes, experts))[theme]
        ids[:, layer] = np.argsort(-score, axis=1)[:, :kept]
        share = np.exp(np.take_along_axis(score, ids[:, layer].astype(np.int64), axis=1))
        weights[:, layer] = np.minimum(top_k * share / share.sum(axis=1, keepdims=True), 1.0)
    return Items(tokens, ids, weights)


def _timed_rows(report: Report) -> Iterator[Row]:
    sizes = (LAYERS, EXPERTS, TOP_K, THEMES)
    warm, items = themed_items(default_rng(0), 100, *sizes), themed_items(default_rng(1), ITEMS, *sizes)
    load, current, topology = Load(items.load(EXPERTS)), Placement.linear(LAYERS, EXPERTS, RANKS), Topology(RANKS)
    for done, name in enumerate(("sem_moe", "co_cluster")):
        report(f"{name}, {ITEMS:,} items", done, 2)
        offers = {"objective": DEEPSEEK_V3_PREFILL}
        planners.make(name, offers, items=warm).plan(load, topology, current)  # compile, or load the machine code
        started = perf_counter()
        plan = planners.make(name, offers, items=items).plan(load, topology, current)
        spent, imbalance = perf_counter() - started, median_imbalance(plan.placement.rank_load(load.tokens))
        row = {"name": f"{name} plan", "items": ITEMS, "layers": LAYERS, "experts": EXPERTS, "ranks": RANKS}
        yield row | {"median_ms": round(1e3 * spent, 1), "imbalance": round(float(imbalance.mean()), 3)}


def _small_rows(report: Report) -> Iterator[Row]:
    for ranks in SMALL_RANKS:
        over, closed = [], 0
        for case in range(SMALL_CASES):
            report(f"exact, {ranks} ranks", case, SMALL_CASES)
            items = themed_items(default_rng(case), SMALL_ITEMS, 1, SMALL_EXPERTS, 2, ranks * (case % 2))
            exact = solve_exactly(items, SMALL_EXPERTS, ranks, THETA, time_limit_s=SECONDS, gap=1e-4)
            ours = cost(items, *alternate(items, SMALL_EXPERTS, ranks, default_rng(case)), ranks, THETA)
            over.append(100 * float(ours[0] / exact.cost[0] - 1))
            closed += bool(exact.cost[0] - exact.bound[0] <= 1e-3 * exact.cost[0])
        row = {"name": "alternating against the optimum", "items": SMALL_ITEMS, "layers": 1, "experts": SMALL_EXPERTS}
        row |= {"ranks": ranks, "cases": SMALL_CASES, "closed": closed}
        yield row | {"mean_excess_pct": round(float(np.mean(over)), 2), "worst_excess_pct": round(max(over), 2)}
